"""Hugging Face checkpoints of the dense Qwen3.5 text models, read into the model's parameters.

One table says which published tensor holds which parameters and how they are laid out in it. Letters: D width, G key
heads (attention: key/value heads), H heads, K/V head dims, W conv window.
"""

import dataclasses
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import jax.numpy as jnp
import numpy as np
from safetensors import safe_open

from app.config import ModelConfig
from app.models import params as model_params
from app.models.layers import Precision, Runtime
from app.models.qwen import Qwen

Arrays = list[np.ndarray]


class CheckpointError(ValueError):
    """A published checkpoint that cannot be read as what it says it is; the message lists every problem found."""


@dataclasses.dataclass(frozen=True)
class Tensor:
    """One published tensor: its name (inside a layer, or of the model), the parameters in it, both directions."""

    name: str
    params: tuple[str, ...]
    split: Callable[[np.ndarray, ModelConfig], Arrays]
    join: Callable[[Arrays, ModelConfig], np.ndarray]


def _same(name: str, param: str) -> Tensor:
    return Tensor(name, (param,), lambda x, _: [x], lambda parts, _: parts[0])


def _transposed(name: str, param: str) -> Tensor:
    """torch Linear [out, in] <-> [in, out]."""
    return Tensor(name, (param,), lambda x, _: [x.T], lambda parts, _: parts[0].T)


def _heads_out(name: str, param: str, head_dim: Callable[[ModelConfig], int]) -> Tensor:
    """Projection to heads: [heads * K, D] <-> [D, heads, K]."""
    return Tensor(name, (param,), lambda x, c: [_to_heads(x, head_dim(c))], lambda parts, _: _from_heads(parts[0]))


def _heads_in(name: str, param: str, head_dim: Callable[[ModelConfig], int]) -> Tensor:
    """Projection from heads: [D, heads * K] <-> [heads, K, D]."""
    return Tensor(
        name,
        (param,),
        lambda x, c: [x.T.reshape(-1, head_dim(c), x.shape[0])],
        lambda parts, _: parts[0].reshape(-1, parts[0].shape[-1]).T,
    )


def _to_heads(x: np.ndarray, head_dim: int) -> np.ndarray:
    return x.reshape(-1, head_dim, x.shape[-1]).transpose(2, 0, 1)


def _from_heads(x: np.ndarray) -> np.ndarray:
    return x.transpose(1, 2, 0).reshape(-1, x.shape[0])


def _split_qkv(x: np.ndarray, c: ModelConfig) -> Arrays:
    """Rows [q: G K | k: G K | v: H V] of the recurrence's projection or convolution."""
    keys = c.linear_num_key_heads * c.linear_key_head_dim
    q, k, v = np.split(x, (keys, 2 * keys))
    return [
        _to_heads(q, c.linear_key_head_dim),
        _to_heads(k, c.linear_key_head_dim),
        _to_heads(v, c.linear_value_head_dim),
    ]


def _join_rows(parts: Arrays, _: ModelConfig) -> np.ndarray:
    return np.concatenate([_from_heads(part) for part in parts])


def _split_query_gate(x: np.ndarray, c: ModelConfig) -> Arrays:
    """Rows [q | gate] of each head in turn: [H * 2K, D] -> two [D, H, K]."""
    pairs = x.reshape(-1, 2, c.head_dim, x.shape[-1])
    return [pairs[:, half].transpose(2, 0, 1) for half in (0, 1)]


def _join_query_gate(parts: Arrays, _: ModelConfig) -> np.ndarray:
    return np.stack([part.transpose(1, 2, 0) for part in parts], axis=1).reshape(-1, parts[0].shape[0])


_BLOCK = (
    _same("input_layernorm.weight", "input_norm.weight"),
    _same("post_attention_layernorm.weight", "post_norm.weight"),
    _transposed("mlp.gate_proj.weight", "mlp.gate_proj"),
    _transposed("mlp.up_proj.weight", "mlp.up_proj"),
    _transposed("mlp.down_proj.weight", "mlp.down_proj"),
)

LAYER_TENSORS: dict[str, tuple[Tensor, ...]] = {
    "full_attention": (
        *_BLOCK,
        Tensor("self_attn.q_proj.weight", ("mixer.q_proj", "mixer.gate_proj"), _split_query_gate, _join_query_gate),
        _heads_out("self_attn.k_proj.weight", "mixer.k_proj", lambda c: c.head_dim),
        _heads_out("self_attn.v_proj.weight", "mixer.v_proj", lambda c: c.head_dim),
        _heads_in("self_attn.o_proj.weight", "mixer.o_proj", lambda c: c.head_dim),
        _same("self_attn.q_norm.weight", "mixer.q_norm.weight"),
        _same("self_attn.k_norm.weight", "mixer.k_norm.weight"),
    ),
    "linear_attention": (
        *_BLOCK,
        Tensor(
            "linear_attn.in_proj_qkv.weight", ("mixer.q_proj", "mixer.k_proj", "mixer.v_proj"), _split_qkv, _join_rows
        ),
        _heads_out("linear_attn.in_proj_z.weight", "mixer.z_proj", lambda c: c.linear_value_head_dim),
        _transposed("linear_attn.in_proj_b.weight", "mixer.b_proj"),
        _transposed("linear_attn.in_proj_a.weight", "mixer.a_proj"),
        Tensor(
            "linear_attn.conv1d.weight",
            ("mixer.q_conv", "mixer.k_conv", "mixer.v_conv"),
            lambda x, c: _split_qkv(x[:, 0], c),
            lambda parts, c: _join_rows(parts, c)[:, None],
        ),
        _same("linear_attn.A_log", "mixer.A_log"),
        _same("linear_attn.dt_bias", "mixer.dt_bias"),
        _same("linear_attn.norm.weight", "mixer.norm"),
        _heads_in("linear_attn.out_proj.weight", "mixer.out_proj", lambda c: c.linear_value_head_dim),
    ),
}

ROOT_TENSORS = (_same("model.embed_tokens.weight", "embed"), _same("model.norm.weight", "final_norm.weight"))
HEAD_TENSOR = _transposed("lm_head.weight", "lm_head")


def model_config(published: Mapping) -> ModelConfig:
    """The ModelConfig of a published config.json (text-only, or the text_config of a multimodal one).

    Raises CheckpointError for an architecture that is not a dense Qwen3.5 text model, and for missing fields.
    """
    text = dict(published.get("text_config", published))
    if text.get("model_type") != "qwen3_5_text":
        raise CheckpointError(f"model_type {text.get('model_type')!r} is not supported: expected 'qwen3_5_text'")
    rope = text.get("rope_parameters") or text
    text |= {key: rope[key] for key in ("rope_theta", "partial_rotary_factor") if key in rope}
    if "layer_types" in text:
        text["full_attention_interval"] = _interval(text["layer_types"])
    fields = {field.name for field in dataclasses.fields(ModelConfig)}
    missing = sorted(fields - set(text))
    if missing:
        raise CheckpointError(f"config.json lacks the fields {missing}")
    return ModelConfig(**{name: text[name] for name in fields})


def _interval(layer_types: Sequence[str]) -> int:
    """full_attention_interval of a list of layer types; raises CheckpointError if it is no such pattern."""
    interval = layer_types.index("full_attention") + 1 if "full_attention" in layer_types else 0
    expected = (
        ["full_attention" if (i + 1) % interval == 0 else "linear_attention" for i in range(len(layer_types))]
        if interval
        else None
    )
    if list(layer_types) != expected:
        raise CheckpointError(f"layer_types {layer_types} is not one full_attention layer after every n-1 linear ones")
    return interval


def read_tensors(checkpoint: Path) -> dict[str, np.ndarray]:
    """Every tensor of the directory's safetensors files by published name; multimodal prefixes removed."""
    tensors = {}
    for file in sorted(checkpoint.glob("*.safetensors")):
        with safe_open(file, framework="numpy") as reader:
            for name in reader.keys():  # noqa: SIM118 (the reader is no mapping)
                if not name.startswith(("mtp.", "model.visual.")):
                    tensors[name.replace("model.language_model.", "model.", 1)] = reader.get_tensor(name)
    return tensors


def to_params(config: ModelConfig, tensors: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Published tensors -> parameters, layers of one place in the pattern stacked.

    Raises CheckpointError that lists every missing and unexpected tensor.
    """
    left, pattern = dict(tensors), config.layer_pattern
    missing, params = [], {}

    def take(tensor: Tensor, prefix: str) -> Arrays | None:
        array = left.pop(prefix + tensor.name, None)
        if array is None:
            missing.append(prefix + tensor.name)
            return None
        return tensor.split(array, config)

    root = ROOT_TENSORS if config.tie_word_embeddings else (*ROOT_TENSORS, HEAD_TENSOR)
    for tensor in root:
        params.update(zip(tensor.params, take(tensor, "") or (), strict=False))
    for place, kind in enumerate(pattern):
        for tensor in LAYER_TENSORS[kind]:
            layers = [take(tensor, f"model.layers.{n}.") for n in range(place, config.num_hidden_layers, len(pattern))]
            if all(layer is not None for layer in layers):
                stacked = [np.stack(parts) for parts in zip(*layers, strict=True)]
                names = [f"groups.blocks.{place}.{name}" for name in tensor.params]
                params.update(zip(names, stacked, strict=True))
    if missing or left:
        raise CheckpointError(f"tensors missing: {missing}; unexpected: {sorted(left)}")
    return params


def load_model(checkpoint_dir: str | Path, dtype: str = "float32") -> Qwen:
    """A ready module for one device: module(tokens [B,T], positions=None, segment_ids=None) -> logits [B,T,V]."""
    checkpoint = Path(checkpoint_dir)
    config = model_config(json.loads((checkpoint / "config.json").read_text()))
    runtime = Runtime(precision=Precision(params=dtype, compute=dtype))
    arrays = to_params(config, read_tensors(checkpoint))
    return model_params.build(config, runtime, {name: jnp.asarray(array, dtype) for name, array in arrays.items()})
