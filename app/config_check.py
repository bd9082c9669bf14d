"""The rules between the keys of a configuration, checked before any device is touched. No jax here.

Each rule is a line of a generator that yields one message: the field, the numbers, a remedy. `validate` runs them all.
"""

import math
from collections.abc import Callable, Iterator

from app.config import Config, ConfigError, did_you_mean, flatten, mesh_problems, resolve_mesh

CHOICES = {
    "controller": ("multi", "single"),
    "remat": ("full", "exchanges", "none"),
    "ops.attention_kernel": ("auto", "xla", "pallas"),
    "ops.gdn_kernel": ("auto", "xla", "pallas"),
    "data.documents": ("separate", "joined"),
    "dtypes.compute": ("float32", "bfloat16"),
    "dtypes.params": ("float32", "bfloat16"),
    "dtypes.reduce": ("float32", "bfloat16"),
    "optimizer.moment_dtype": ("float32", "bfloat16"),
}
MINIMUM = {
    "steps": 1, "seq_len": 1, "global_batch": 1, "accumulation": 1, "seed": 0, "nonfinite_limit": 1,
    "model.vocab_size": 1, "model.hidden_size": 1, "model.intermediate_size": 0, "model.num_hidden_layers": 1,
    "model.full_attention_interval": 1, "model.num_attention_heads": 1, "model.num_key_value_heads": 1,
    "model.head_dim": 1, "model.linear_num_key_heads": 1, "model.linear_num_value_heads": 1,
    "model.linear_key_head_dim": 1, "model.linear_value_head_dim": 1, "model.linear_conv_kernel_dim": 1,
    "model.max_position_embeddings": 1, "model.num_experts": 0, "model.num_experts_per_tok": 0,
    "model.moe_intermediate_size": 0, "model.shared_expert_intermediate_size": 0, "model.decoder_sparse_step": 1,
    "experts.max_rounds": 0,
    "mesh.cpu_devices": 0, "ops.gdn_chunk": 1, "ops.attention_block": 1, "loss.chunk": 1,
    "optimizer.warmup_steps": 0, "data.workers": 0, "data.prefetch": 0,
    "eval.every_steps": 0, "checkpoint.every_steps": 1, "checkpoint.keep_last": 1, "checkpoint.keep_every": 0,
    "checkpoint.local_every_steps": 1,
    "elastic.min_slices": 0, "elastic.max_losses": 1, "log.every_steps": 1, "log.profile_step": 0,
}  # fmt: skip
POSITIVE = (
    "model.rope_theta", "model.rms_norm_eps", "model.initializer_range", "model.partial_rotary_factor",
    "optimizer.learning_rate", "optimizer.eps", "optimizer.clip_norm", "experts.capacity",
    "limits.join", "limits.step", "limits.slow", "limits.peer",
)  # fmt: skip
NOT_NEGATIVE = (
    "loss.z_weight", "loss.router_z_weight", "loss.layer_balance_weight", "loss.mtp_weight",
    "model.router_aux_loss_coef", "optimizer.final_learning_rate", "optimizer.weight_decay", "checkpoint.every_minutes",
)  # fmt: skip
MAX_SEED = 2**32 - 1
# Positions are int32; rope multiplies them in float32, which holds every integer up to here.
MAX_SEQ_LEN = 2**24
# The tokens of a step are counted in int32.
MAX_STEP_TOKENS = 2**31 - 1
BYTES_VOCABULARY = 257  # 256 bytes and the end of a document (data.tokenizers)

Sizes = dict[str, int]
Problems = Iterator[str]


def validate(config: Config, num_devices: int | None = None, devices_per_slice: int | None = None) -> None:
    """Raises ConfigError with every rule that `config` breaks.

    num_devices: of all slices, where known; devices_per_slice: likewise, for a machine of several slices. Without them
    the axis that is -1 counts as the smallest size it can get, so no rule fails that some machine could meet.
    """
    problems = [*_values(config), *_mesh(config, num_devices, devices_per_slice)]
    sizes = _axis_sizes(config, num_devices)
    for rules in RULES:
        problems += rules(config, sizes)
    if problems:
        raise ConfigError(*problems)


def _values(config: Config) -> Problems:
    """Each value by itself: choices and ranges."""
    flat = flatten(config.to_dict())
    for key, value in flat.items():
        if isinstance(value, float) and not math.isfinite(value):
            yield f"{key}={value}: must be a finite number"
    for key, choices in CHOICES.items():
        if flat[key] == "float16":
            yield f"{key}='float16': its range is too small for gradients that are not scaled; use 'bfloat16'"
        elif flat[key] not in choices:
            hint = did_you_mean(flat[key], choices)
            yield f"{key}={flat[key]!r}: must be one of {', '.join(map(repr, choices))}{hint}"
    for key, least in MINIMUM.items():
        if flat[key] < least:
            yield f"{key}={flat[key]}: must be at least {least}"
    for key in POSITIVE:
        if flat[key] <= 0:
            yield f"{key}={flat[key]}: must be above 0"
    for key in NOT_NEGATIVE:
        if flat[key] < 0:
            yield f"{key}={flat[key]}: must be at least 0"
    for key in ("optimizer.b1", "optimizer.b2"):
        if not 0 <= flat[key] < 1:
            yield f"{key}={flat[key]}: a decay rate must be at least 0 and below 1"
    chunk = config.ops.gdn_chunk
    if chunk > 0 and chunk & (chunk - 1):
        yield f"ops.gdn_chunk={chunk}: must be a power of two (64 on TPUs), such as {1 << chunk.bit_length() - 1}"
    if config.seed > MAX_SEED:
        yield f"seed={config.seed}: must be at most {MAX_SEED} (32 bits)"


def _mesh(config: Config, num_devices: int | None, devices_per_slice: int | None) -> Problems:
    """The mesh by itself and against the devices."""
    mesh, slices = config.mesh, config.mesh.dcn.num_slices
    if num_devices is None:
        yield from mesh_problems(mesh)
        return
    try:
        resolve_mesh(mesh, num_devices)
    except ConfigError as error:
        yield from error.problems
    if devices_per_slice is not None and slices * devices_per_slice != num_devices:
        found = num_devices / devices_per_slice
        factors = " x ".join(f"mesh.dcn.{axis}={size}" for axis, size in mesh.dcn.sizes.items())
        yield (
            f"{factors} makes {slices} slices, but {num_devices} devices at {devices_per_slice} a slice are {found:g}: "
            f"make the product of mesh.dcn.* {found:g}, for example with mesh.dcn.data={found:g}"
        )


def _axis_sizes(config: Config, num_devices: int | None) -> Sizes:
    """Axis -> size. Where the mesh is wrong, or -1 without known devices, the least it can be: its part over DCN."""
    mesh = config.mesh
    if num_devices is not None:
        try:
            return resolve_mesh(mesh, num_devices).sizes
        except ConfigError:
            pass  # reported by _mesh
    return {axis: max(size, mesh.dcn.sizes[axis], 1) for axis, size in mesh.sizes.items()}


def _divides(part: int, whole: int) -> bool:
    """Whether `whole` is a multiple of `part`; True where one is not positive, which is reported by itself."""
    return part < 1 or whole < 1 or whole % part == 0


def _multiples(whole: int, part: int) -> str:
    """The multiples of `part` on both sides of `whole`: "4 or 8"."""
    below = whole // part * part
    return f"{below} or {below + part}" if below else f"{part}"


def _model(config: Config, sizes: Sizes) -> Problems:
    model = config.model
    multiples = (
        ("num_hidden_layers", "full_attention_interval", "an interval ends with a softmax layer"),
        ("linear_num_value_heads", "linear_num_key_heads", "each key head serves the same number of value heads"),
        ("num_attention_heads", "num_key_value_heads", "each key/value head serves the same number of query heads"),
    )
    for whole_name, part_name, reason in multiples:
        whole, part = getattr(model, whole_name), getattr(model, part_name)
        if not _divides(part, whole):
            yield (
                f"model.{whole_name}={whole} is not a multiple of model.{part_name}={part} ({reason}): "
                f"use {_multiples(whole, part)}"
            )
    rotary = int(model.head_dim * model.partial_rotary_factor) if math.isfinite(model.partial_rotary_factor) else 0
    if model.partial_rotary_factor > 1 or rotary < 2 or rotary % 2:
        yield (
            f"model.head_dim={model.head_dim} x model.partial_rotary_factor={model.partial_rotary_factor} makes "
            f"{rotary} rotary dims: must be an even number, at least 2 and at most head_dim; change one of them"
        )
    needed = _tokenizer_vocabulary(config.data.tokenizer)
    if needed is not None and 0 < model.vocab_size < needed:
        yield (
            f"model.vocab_size={model.vocab_size} is smaller than the {needed} ids of "
            f"data.tokenizer={config.data.tokenizer!r}: raise it, or name another tokenizer"
        )


def _experts(config: Config, sizes: Sizes) -> Problems:
    """Which layers have experts, how many work on a token, and how they are shared out."""
    model, ranks = config.model, sizes["expert"]
    if outside := [n for n in model.mlp_only_layers if not 0 <= n < model.num_hidden_layers]:
        yield (
            f"model.mlp_only_layers={model.mlp_only_layers}: there are no layers {outside}; use numbers from 0 to "
            f"model.num_hidden_layers - 1 = {model.num_hidden_layers - 1}"
        )
    if model.num_experts < 1:
        if ranks > 1:
            yield f"mesh.expert={ranks}: the model has no experts to shard (it is dense); use mesh.expert=1"
    else:
        if not 0 < model.num_experts_per_tok <= model.num_experts:
            yield (
                f"model.num_experts_per_tok={model.num_experts_per_tok} of model.num_experts={model.num_experts}: must "
                "be at least 1 and at most all of them"
            )
        for name in ("moe_intermediate_size", "shared_expert_intermediate_size"):
            if getattr(model, name) == 0:
                yield f"model.{name}=0 with model.num_experts={model.num_experts}: give the experts a size"
        if not _divides(ranks, model.num_experts):
            yield (
                f"model.num_experts={model.num_experts} does not divide over mesh.expert={ranks}: use a mesh.expert "
                f"that divides {model.num_experts}, and mesh.context for the other devices"
            )
    periods = min(model.decoder_sparse_step, model.full_attention_interval)
    if model.intermediate_size == 0 and periods > 0 and any(mlp == "dense" for _, mlp in model.layers):
        yield "model.intermediate_size=0, but there are layers with an MLP (see model.num_experts): give it a size"


def _tokenizer_vocabulary(spec: str) -> int | None:
    """The number of ids where the tokenizer's name tells it."""
    if spec == "bytes":
        return BYTES_VOCABULARY
    count = spec.removeprefix("ids:")
    return int(count) if spec.startswith("ids:") and count.isdecimal() else None


def _sharding(config: Config, sizes: Sizes) -> Problems:
    """Whole parts of every weight, batch and sequence on every rank."""
    model = config.model
    for name in (
        "num_attention_heads", "num_key_value_heads", "linear_num_key_heads", "linear_num_value_heads",
        "intermediate_size", "moe_intermediate_size", "shared_expert_intermediate_size", "vocab_size",
    ):  # fmt: skip
        size = getattr(model, name)
        if not _divides(sizes["tensor"], size):
            yield (
                f"model.{name}={size} does not divide over mesh.tensor={sizes['tensor']}: "
                f"use a mesh.tensor that divides {size}"
            )
    shards = sizes["fsdp"] * sizes["context"] * sizes["expert"]
    if not _divides(shards, model.hidden_size):
        yield (
            f"model.hidden_size={model.hidden_size} does not divide over mesh.fsdp={sizes['fsdp']} x "
            f"mesh.context={sizes['context']} x mesh.expert={sizes['expert']} = {shards} (weights are cut along it): "
            f"use sizes whose product divides {model.hidden_size}, and mesh.data for the other devices"
        )
    cuts = sizes["data"] * sizes["fsdp"] * config.accumulation
    if not _divides(cuts, config.global_batch):
        yield (
            f"global_batch={config.global_batch} does not divide over mesh.data={sizes['data']} x "
            f"mesh.fsdp={sizes['fsdp']} x accumulation={config.accumulation} = {cuts}: use a global_batch of "
            f"{_multiples(config.global_batch, cuts)}, or put devices on mesh.context"
        )


def _sequence(config: Config, sizes: Sizes) -> Problems:
    """One row over the sequence ranks. seq_len may be larger than max_position_embeddings: rope has a value there."""
    seq_len, ranks = config.seq_len, sizes["context"] * sizes["expert"]
    where = f"mesh.context={sizes['context']} x mesh.expert={sizes['expert']} = {ranks} sequence ranks"
    # Over several ranks softmax attention works on two half-blocks a rank (zigzag).
    parts = 2 * ranks if ranks > 1 else 1
    if not _divides(parts, seq_len):
        yield (
            f"seq_len={seq_len} is not a multiple of {parts}, two blocks for each of {where}: "
            f"use {_multiples(seq_len, parts)}"
        )
    tail = config.model.linear_conv_kernel_dim - 1
    if ranks > 1 and seq_len // ranks < tail:
        yield (
            f"seq_len={seq_len} over {where} leaves {seq_len // ranks} tokens a rank, fewer than the {tail} that "
            f"model.linear_conv_kernel_dim={tail + 1} needs from the rank before: use fewer ranks or at least "
            f"seq_len={tail * ranks}"
        )
    if seq_len > MAX_SEQ_LEN:
        yield f"seq_len={seq_len}: positions are exact up to {MAX_SEQ_LEN} only (float32 in rope); use a shorter one"
    if config.global_batch * seq_len > MAX_STEP_TOKENS:
        yield (
            f"global_batch={config.global_batch} x seq_len={seq_len} makes {config.global_batch * seq_len} tokens a "
            f"step: they are counted in int32, up to {MAX_STEP_TOKENS}; use a smaller global_batch"
        )


def _run(config: Config, sizes: Sizes) -> Problems:
    """Schedule, data, and what happens every so many steps."""
    optimizer, checkpoint = config.optimizer, config.checkpoint
    if optimizer.final_learning_rate > optimizer.learning_rate:
        yield (
            f"optimizer.final_learning_rate={optimizer.final_learning_rate} is above "
            f"optimizer.learning_rate={optimizer.learning_rate}, the peak that it decays from: lower it"
        )
    if not 0 <= config.data.holdout < 1:
        yield f"data.holdout={config.data.holdout}: a share of documents, must be at least 0 and below 1"
    if config.data.workers > 0 and config.data.prefetch == 0:
        yield (
            f"data.prefetch=0 with data.workers={config.data.workers}: a reading process holds at least one batch; use "
            "data.prefetch=1, or data.workers=0"
        )
    if not config.data.tokenizer:
        yield "data.tokenizer is empty: use 'bytes', 'ids:N' or the path of a tokenizer.json"
    if config.eval.batches != -1 and config.eval.batches < 1:
        yield f"eval.batches={config.eval.batches}: must be at least 1, or -1 for all of the held-out documents"
    if not _divides(checkpoint.every_steps, checkpoint.keep_every):
        yield (
            f"checkpoint.keep_every={checkpoint.keep_every} is not a multiple of "
            f"checkpoint.every_steps={checkpoint.every_steps}, so most of its steps are never saved: "
            f"use {_multiples(checkpoint.keep_every, checkpoint.every_steps)}, or 0 to keep the last ones only"
        )
    if checkpoint.local_directory and checkpoint.local_every_steps >= checkpoint.every_steps:
        yield (
            f"checkpoint.local_every_steps={checkpoint.local_every_steps} is not below "
            f"checkpoint.every_steps={checkpoint.every_steps}, so checkpoint.local_directory gains nothing: lower it"
        )
    if checkpoint.local_directory and config.controller == "single":
        yield (
            "checkpoint.local_directory with controller='single', whose one process has no part of the arrays: "
            "use '', or controller='multi'"
        )


def _elastic(config: Config, sizes: Sizes) -> Problems:
    """One controller, and going on with fewer slices: the rows of the lost ones go to the others."""
    least, dcn = config.elastic.min_slices, config.mesh.dcn
    if config.mesh.cpu_devices and config.controller == "single":
        yield (
            f"mesh.cpu_devices={config.mesh.cpu_devices} with controller='single', which takes the devices of the "
            "Pathways proxy: use mesh.cpu_devices=0, or controller='multi'"
        )
    if least and config.controller != "single":
        yield (
            f"elastic.min_slices={least} with controller={config.controller!r}: only a single controller outlives "
            "a lost slice; use controller='single', or elastic.min_slices=0 (the launcher starts the job again)"
        )
    if least > dcn.num_slices:
        yield f"elastic.min_slices={least} is more than the {dcn.num_slices} slices of mesh.dcn.*: use at most as many"
    if least and dcn.data != dcn.num_slices:
        yield (
            f"elastic.min_slices={least} with mesh.dcn.data={dcn.data} of {dcn.num_slices} slices: a lost slice "
            "must take copies along, not parts; lay all slices along mesh.dcn.data"
        )


RULES: tuple[Callable[[Config, Sizes], Problems], ...] = (_model, _experts, _sharding, _sequence, _run, _elastic)
