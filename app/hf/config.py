"""config.json of the published models <-> ModelConfig."""

import dataclasses
from collections.abc import Mapping
from typing import Any

from app.config import ModelConfig
from app.hf.published import CheckpointError

DENSE, MOE, NEXT = "qwen3_5_text", "qwen3_5_moe_text", "qwen3_next"
ARCHITECTURES = {DENSE: "Qwen3_5ForCausalLM", MOE: "Qwen3_5MoeForCausalLM", NEXT: "Qwen3NextForCausalLM"}
# What our model computes; a checkpoint that says otherwise would be read wrongly.
FIXED = {"hidden_act": "silu", "attention_bias": False, "attn_output_gate": True}
# Fields that an architecture does not have in its config.json, with what its classes do.
IMPLIED: dict[str, dict[str, Any]] = {
    DENSE: {
        "num_experts": 0, "num_experts_per_tok": 0, "moe_intermediate_size": 0, "shared_expert_intermediate_size": 0,
        "norm_topk_prob": True, "decoder_sparse_step": 1, "mlp_only_layers": (), "router_aux_loss_coef": 0.0,
    },
    MOE: {"intermediate_size": 0, "norm_topk_prob": True, "decoder_sparse_step": 1, "mlp_only_layers": ()},
    NEXT: {},
}  # fmt: skip
_ACCEPTED: dict[Any, Any] = {int: int, float: (int, float), bool: bool}


def text_config(published: Mapping[str, Any]) -> dict[str, Any]:
    """The language model's part of a config.json; that of a multimodal model has it as text_config."""
    return dict(published.get("text_config", published))


def model_config(published: Mapping[str, Any]) -> ModelConfig:
    """The ModelConfig of a published config.json.

    Raises CheckpointError with every field that is missing or says something that the model does not compute.
    """
    text = text_config(published)
    kind = text.get("model_type")
    if kind not in ARCHITECTURES:
        raise CheckpointError("config.json", [f"model_type {kind!r} is none of {', '.join(map(repr, ARCHITECTURES))}"])
    problems = [
        f"{key}={text[key]!r} is not supported, only {value!r}"
        for key, value in FIXED.items()
        if text.get(key, value) != value
    ]
    rope = text.get("rope_parameters") or {**text, **(text.get("rope_scaling") or {})}
    rope_type = rope.get("rope_type", rope.get("type", "default"))
    if rope_type != "default":
        problems.append(f"rope_type {rope_type!r} is not supported, only 'default'")
    text |= {key: rope[key] for key in ("rope_theta", "partial_rotary_factor") if key in rope}
    # A multimodal config has it at the top, in text_config, or both.
    text["tie_word_embeddings"] = bool(text.get("tie_word_embeddings") or published.get("tie_word_embeddings"))
    text |= IMPLIED[kind]
    text["mlp_only_layers"] = tuple(text.get("mlp_only_layers") or ())
    if text.get("layer_types") is not None:
        text["full_attention_interval"] = _interval(text["layer_types"], text.get("num_hidden_layers"), problems)
    text.setdefault("full_attention_interval", 4)  # what the published classes assume
    fields = {field.name: field.type for field in dataclasses.fields(ModelConfig)}
    problems += [f"the field {name} is missing" for name in fields if text.get(name) is None]
    problems += [
        f"{name}={text[name]!r} has the wrong type"
        for name, kind in fields.items()
        if text.get(name) is not None and not isinstance(text[name], _ACCEPTED.get(kind, object))
    ]
    if problems:
        raise CheckpointError("config.json", problems)
    values: dict[str, Any] = {name: kind(text[name]) if kind is float else text[name] for name, kind in fields.items()}
    return ModelConfig(**values)


def _interval(layer_types: list[str], layers: int | None, problems: list[str]) -> int:
    """full_attention_interval of a list of layer types."""
    interval = layer_types.index("full_attention") + 1 if "full_attention" in layer_types else 0
    expected = [
        "full_attention" if interval and (i + 1) % interval == 0 else "linear_attention" for i in range(layers or 0)
    ]
    if not interval or list(layer_types) != expected:
        problems.append(f"layer_types {layer_types} is not one full_attention layer after every n-1 linear ones")
    return interval


def published_config(model: ModelConfig, dtype: str) -> dict[str, Any]:
    """A config.json for a model that did not come from published weights.

    Qwen3-Next's classes where some layers are dense or router weights are not normalised, which Qwen3.5's cannot be.
    """
    if not model.num_experts:
        kind = DENSE
    elif model.mlp_only_layers or model.decoder_sparse_step != 1 or not model.norm_topk_prob:
        kind = NEXT
    else:
        kind = MOE
    fields = dataclasses.asdict(model)
    rope = {key: fields.pop(key) for key in ("rope_theta", "partial_rotary_factor")}
    interval = fields.pop("full_attention_interval")
    fields = {name: value for name, value in fields.items() if name not in IMPLIED[kind]}
    if kind != NEXT:
        # The three axes of multimodal rope, which are equal for text, share the frequencies; their published shares.
        rope |= {"mrope_section": [11, 11, 10], "mrope_interleaved": True}
    kinds = [
        "full_attention" if (i + 1) % interval == 0 else "linear_attention" for i in range(model.num_hidden_layers)
    ]
    return {
        "architectures": [ARCHITECTURES[kind]],
        "model_type": kind,
        "dtype": dtype,
        **fields,
        "layer_types": kinds,
        "rope_parameters": {"rope_type": "default", **rope},
        **FIXED,
    }
