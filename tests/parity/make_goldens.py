"""Small reference models made with the real transformers classes: python -m tests.parity.make_goldens [DIR]

Needs torch (2.13) and transformers (5.24) beside numpy and safetensors, in an environment of their own; the tests read
what it wrote, and make the same anew where both can be imported. Each folder of DIR (default: goldens/ here) is a
checkpoint in the published style (bfloat16, A_log and the gated norm float32) with golden.npz and meta.json. A case
`sN` has 2 rows of N tokens: input_ids; logits and grad/NAME of the mean next-token cross entropy, both from float64
throughout (stored in float32); loss; of some hidden, the residual stream after the embedding and every layer. One model
has mtp.* and mtp/logits of the shortest case. meta.json has the errors of the real classes against these numbers, in
float32 and in bfloat16.
"""

import contextlib
import json
import sys
from pathlib import Path

import numpy as np
import torch
import transformers
from safetensors.torch import save_file
from torch import nn
from transformers.models.qwen3_5_moe import modeling_qwen3_5_moe

LENGTHS = (77, 130, 300)
COMMON = {
    "vocab_size": 48, "hidden_size": 24, "intermediate_size": 32, "num_hidden_layers": 4, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "linear_num_key_heads": 2, "linear_num_value_heads": 4,
    "linear_key_head_dim": 8, "linear_value_head_dim": 8, "layer_types": ["linear_attention", "full_attention"] * 2,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10_000_000.0, "partial_rotary_factor": 0.5},
    "use_cache": False,
}  # fmt: skip
SPARSE = {
    "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 8, "shared_expert_intermediate_size": 16,
}  # fmt: skip
# Folder: (config class, model class, fields, prefix of the text model's tensors)
MODELS = {
    "dense_tied": ("Qwen3_5TextConfig", "Qwen3_5ForCausalLM", {"tie_word_embeddings": True}, "model.language_model."),
    "dense_untied": ("Qwen3_5TextConfig", "Qwen3_5ForCausalLM", {"tie_word_embeddings": False}, "model."),
    "moe": ("Qwen3_5MoeTextConfig", "Qwen3_5MoeForCausalLM", SPARSE, "model."),
    "next_moe": (
        "Qwen3NextConfig",
        "Qwen3NextForCausalLM",
        {**SPARSE, "decoder_sparse_step": 2, "norm_topk_prob": False},
        "model.",
    ),
}  # fmt: skip


@contextlib.contextmanager
def float64_throughout():
    """Turn every float32 that the model classes ask for into float64."""
    saved = torch.float32, torch.Tensor.float
    torch.set_default_dtype(torch.float64)
    torch.float32 = torch.float = torch.float64
    torch.Tensor.float = torch.Tensor.double
    try:
        yield
    finally:
        torch.float32, torch.Tensor.float = saved
        torch.float = saved[0]
        torch.set_default_dtype(torch.float32)


def random_weights(shapes: dict[str, torch.Size], generator: torch.Generator) -> dict[str, torch.Tensor]:
    """Random values, none near its initialisation, that bfloat16 holds exactly (A_log and the gated norm: float32)."""
    made = {}
    for name, shape in shapes.items():
        noise = torch.randn(shape, generator=generator)
        if name.endswith("A_log"):
            made[name] = torch.log(1.0 + noise.abs() * 4.0)
        elif name.endswith("linear_attn.norm.weight"):
            made[name] = 1.0 + 0.3 * noise
        elif name.endswith("dt_bias"):
            made[name] = (0.5 * noise - 1.0).bfloat16().float()
        elif len(shape) == 1:
            made[name] = (0.3 * noise).bfloat16().float()
        else:
            scale = 1.0 if "embed_tokens" in name else 0.5 if "conv1d" in name else shape[-1] ** -0.5
            made[name] = (scale * noise).bfloat16().float()
    return made


def published(tensors: dict[str, torch.Tensor], prefix: str, apart: bool) -> dict[str, torch.Tensor]:
    """The tensors by published names and in published dtypes; apart: a tensor for each expert."""
    files = {}
    for name, x in tensors.items():
        name = name.replace("model.", prefix, 1) if name.startswith("model.") else name
        if apart and ".experts." in name:
            base = name.rsplit(".", 1)[0]
            parts = {"gate_proj": 0, "up_proj": 1} if name.endswith("gate_up_proj") else {"down_proj": 0}
            for expert, matrix in enumerate(x):
                for part, half in zip(parts, matrix.chunk(len(parts)), strict=True):
                    files[f"{base}.{expert}.{part}.weight"] = half.contiguous()
        else:
            files[name] = x
    keep = ("A_log", "linear_attn.norm.weight")
    return {name: x if name.endswith(keep) else x.bfloat16() for name, x in files.items()}


def run(model: nn.Module, tokens: torch.Tensor, gradients: bool) -> dict[str, np.ndarray]:
    """logits, loss, hidden and grad/NAME of one batch, in the model's own precision."""
    states = []
    layers = model.model.layers
    hooks = [layers[0].register_forward_pre_hook(lambda _, args: states.append(args[0]))]
    hooks += [layer.register_forward_hook(lambda *a: states.append(a[-1])) for layer in layers]
    with torch.set_grad_enabled(gradients):
        logits = model(input_ids=tokens).logits
    for hook in hooks:
        hook.remove()
    flat, targets = logits[:, :-1].reshape(-1, logits.shape[-1]), tokens[:, 1:].reshape(-1)
    loss = nn.functional.cross_entropy(flat.double(), targets)
    found = {
        "logits": logits,
        "loss": loss,
        "hidden": torch.stack([s[0] if isinstance(s, tuple) else s for s in states]),
    }
    if gradients:
        loss.backward()
        found |= {f"grad/{name}": p.grad for name, p in model.named_parameters()}
    return {key: x.detach().double().numpy() for key, x in found.items()}


class Mtp(nn.Module):
    """The layer of multi-token prediction, under its published names, in the order in which vLLM evaluates it.

    transformers has no class for it; its decoder layer and norm are the real ones.
    """

    def __init__(self, config: transformers.PretrainedConfig):
        super().__init__()
        D, norm = config.hidden_size, modeling_qwen3_5_moe.Qwen3_5MoeRMSNorm
        self.fc = nn.Linear(2 * D, D, bias=False)
        self.pre_fc_norm_embedding, self.pre_fc_norm_hidden, self.norm = (
            norm(D, config.rms_norm_eps) for _ in range(3)
        )
        softmax = config.layer_types.index("full_attention")
        self.layers = nn.ModuleList([modeling_qwen3_5_moe.Qwen3_5MoeDecoderLayer(config, softmax)])

    def forward(self, model: nn.Module, tokens: torch.Tensor) -> torch.Tensor:
        """Logits for the token after the next, of all positions but the last."""
        hidden = model.model(input_ids=tokens).last_hidden_state[:, :-1]
        further = model.model.embed_tokens(tokens[:, 1:])
        both = torch.cat([self.pre_fc_norm_embedding(further), self.pre_fc_norm_hidden(hidden)], dim=-1)
        length = hidden.shape[1]
        positions = torch.arange(length)[None]
        future = torch.full((length, length), -torch.inf, dtype=hidden.dtype).triu(1)[None, None]
        rotary = model.model.rotary_emb(hidden, positions)
        out = self.layers[0](self.fc(both), rotary, attention_mask=future, position_ids=positions)
        return model.lm_head(self.norm(out))


def relative(got: np.ndarray, want: np.ndarray) -> float:
    return float(f"{np.linalg.norm(got - want) / max(np.linalg.norm(want), 1e-30):.3g}")


def make(directory: Path, name: str, seed: int) -> None:
    """One reference model in directory/name."""
    config_class, model_class, fields, prefix = MODELS[name]
    config = getattr(transformers, config_class)(**{**COMMON, **fields})
    config._attn_implementation = config._experts_implementation = "eager"
    generator = torch.Generator().manual_seed(seed)
    made = getattr(transformers, model_class)
    # A tied head is no parameter of its own.
    tensors = random_weights({key: p.shape for key, p in made(config).named_parameters()}, generator)

    def model(dtype: torch.dtype) -> nn.Module:
        built = made(config)
        built.load_state_dict(tensors, strict=False)
        return built.to(dtype)

    arrays, cases, extra = {}, {}, {}
    for length in LENGTHS:
        tokens = torch.randint(0, config.vocab_size, (2, length), generator=generator)
        with float64_throughout():
            truth = run(model(torch.float64), tokens, gradients=True)
        single, half = run(model(torch.float32), tokens, gradients=True), run(model(torch.bfloat16), tokens, False)
        case = f"s{length}"
        shown = name in ("dense_tied", "moe") and length == LENGTHS[0]  # they may be 3 MB in all
        kept = {key: x for key, x in truth.items() if key != "hidden" or shown}
        arrays |= {f"{case}/{key}": x.astype(np.float32) for key, x in kept.items()}
        arrays |= {f"{case}/input_ids": tokens.numpy().astype(np.int32), f"{case}/loss": truth["loss"]}
        cases[case] = {
            "logits_vs_f64": relative(single["logits"], truth["logits"]),
            "logits_bf16_vs_f64": relative(half["logits"], truth["logits"]),
            "loss_vs_f64": relative(single["loss"], truth["loss"]),
            "grad_vs_f64": {
                key.removeprefix("grad/"): relative(single[key], truth[key]) for key in truth if key.startswith("grad/")
            },
        }
    if name == "moe":
        tokens = torch.from_numpy(arrays[f"s{LENGTHS[0]}/input_ids"]).long()
        mtp = random_weights({key: p.shape for key, p in Mtp(config).named_parameters()}, generator)
        extra = {f"mtp.{key}": x for key, x in mtp.items()}
        with float64_throughout(), torch.no_grad():
            layer = Mtp(config)
            layer.load_state_dict(mtp)
            arrays["mtp/logits"] = layer.double()(model(torch.float64), tokens).numpy()
    folder = directory / name
    folder.mkdir(parents=True, exist_ok=True)
    apart = name == "next_moe"
    save_file(published(tensors | extra, prefix, apart), folder / "model.safetensors", metadata={"format": "pt"})
    config.architectures = [model_class]
    (folder / "config.json").write_text(
        json.dumps(config.to_diff_dict() | {"dtype": "bfloat16"}, indent=1, default=str)
    )
    np.savez_compressed(folder / "golden.npz", **arrays)
    meta = {"seed": seed, "torch": torch.__version__, "transformers": transformers.__version__, "cases": cases}
    (folder / "meta.json").write_text(json.dumps(meta, indent=1) + "\n")


def main(directory: Path, seed: int = 20) -> None:
    torch.use_deterministic_algorithms(True)
    for number, name in enumerate(MODELS):
        make(directory, name, seed + number)


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).parent / "goldens")
