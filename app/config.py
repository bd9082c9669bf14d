"""The configuration as frozen dataclasses, made once from the ConfigDict of a file in configs/. No jax here.

What each key means, its default included, is written in configs/base.py and nowhere else. Beyond `from_config_dict` a
function takes the part of the config that it needs. `app.config_check` has the rules between keys, `app.config_flags`
the command line.
"""

import dataclasses
import difflib
import json
import math
import typing
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from ml_collections import config_dict

MESH_AXES = ("data", "fsdp", "expert", "context", "tensor")
Value = int | float | bool | str | tuple[int, ...]


LayerKind = tuple[str, str]  # ("linear_attention" | "full_attention", "dense" | "moe")


class ConfigError(ValueError):
    """What is wrong with a configuration or a command line, all of it. Commands print it and exit with status 2."""

    def __init__(self, *problems: str):
        self.problems = problems
        header = [f"{len(problems)} problems with the configuration:"] if len(problems) > 1 else []
        super().__init__("\n  - ".join([*header, *problems]))


@dataclasses.dataclass(frozen=True)
class ModelConfig:
    """Names and meanings of the published config.json."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    full_attention_interval: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    partial_rotary_factor: float
    rope_theta: float
    linear_num_key_heads: int
    linear_num_value_heads: int
    linear_key_head_dim: int
    linear_value_head_dim: int
    linear_conv_kernel_dim: int
    rms_norm_eps: float
    initializer_range: float
    tie_word_embeddings: bool
    max_position_embeddings: int
    # A dense model made in code does not name what it has none of. (Config files name every key.)
    num_experts: int = 0
    num_experts_per_tok: int = 0
    moe_intermediate_size: int = 0
    shared_expert_intermediate_size: int = 0
    norm_topk_prob: bool = True
    decoder_sparse_step: int = 1
    mlp_only_layers: tuple[int, ...] = ()
    router_aux_loss_coef: float = 0.0

    @property
    def layers(self) -> tuple[LayerKind, ...]:
        """The kinds of every layer: full attention ends each interval; experts in every decoder_sparse_step-th layer
        that is not one of mlp_only_layers."""
        step, interval = self.decoder_sparse_step, self.full_attention_interval
        return tuple(
            (
                "linear_attention" if (n + 1) % interval else "full_attention",
                "dense" if not self.num_experts or n in self.mlp_only_layers or (n + 1) % step else "moe",
            )
            for n in range(self.num_hidden_layers)
        )

    @property
    def layer_pattern(self) -> tuple[LayerKind, ...]:
        """The smallest period of `layers` that they consist of: (kind of mixer, kind of mlp) of each of its layers."""
        kinds = self.layers
        periods = (n for n in range(1, len(kinds)) if len(kinds) % n == 0 and kinds[:n] * (len(kinds) // n) == kinds)
        return kinds[: next(periods, len(kinds))]


@dataclasses.dataclass(frozen=True)
class DtypesConfig:
    compute: str
    params: str
    reduce: str


# A mesh made in code names only the axes it has: 1 is no axis. (Config files name every key: configs/base.py.)
@dataclasses.dataclass(frozen=True)
class DcnConfig:
    """Of each mesh axis, how many of its parts lie on different slices."""

    data: int = 1
    fsdp: int = 1
    expert: int = 1
    context: int = 1
    tensor: int = 1

    @property
    def sizes(self) -> dict[str, int]:
        return {axis: getattr(self, axis) for axis in MESH_AXES}

    @property
    def num_slices(self) -> int:
        return math.prod(self.sizes.values())


@dataclasses.dataclass(frozen=True)
class MeshConfig:
    """Sizes count all devices of an axis, over all slices; -1 is the rest (see `resolve_mesh`)."""

    data: int = 1
    fsdp: int = 1
    expert: int = 1
    context: int = 1
    tensor: int = 1
    cpu_devices: int = 0
    dcn: DcnConfig = DcnConfig()

    @property
    def sizes(self) -> dict[str, int]:
        return {axis: getattr(self, axis) for axis in MESH_AXES}

    @property
    def per_slice(self) -> dict[str, int]:
        """Of a resolved mesh: the size of each axis inside one slice (its ICI part)."""
        return {axis: size // self.dcn.sizes[axis] for axis, size in self.sizes.items()}


@dataclasses.dataclass(frozen=True)
class OpsConfig:
    gdn_chunk: int
    gdn_kernel: str
    attention_block: int
    attention_kernel: str


@dataclasses.dataclass(frozen=True)
class ExpertsConfig:
    capacity: float
    max_rounds: int


@dataclasses.dataclass(frozen=True)
class LossConfig:
    chunk: int
    z_weight: float
    router_z_weight: float
    layer_balance_weight: float
    mtp_weight: float


@dataclasses.dataclass(frozen=True)
class OptimizerConfig:
    learning_rate: float
    warmup_steps: int
    final_learning_rate: float
    b1: float
    b2: float
    eps: float
    weight_decay: float
    clip_norm: float
    moment_dtype: str


@dataclasses.dataclass(frozen=True)
class DataConfig:
    path: str
    source: str
    tokenizer: str
    documents: str
    weights: str
    whole_documents: bool
    holdout: float
    workers: int
    prefetch: int


@dataclasses.dataclass(frozen=True)
class EvalConfig:
    every_steps: int
    batches: int


@dataclasses.dataclass(frozen=True)
class CheckpointConfig:
    every_steps: int
    every_minutes: float
    keep_last: int
    keep_every: int
    directory: str = ""
    local_directory: str = ""
    local_every_steps: int = 50


@dataclasses.dataclass(frozen=True)
class ElasticConfig:
    min_slices: int
    max_losses: int


@dataclasses.dataclass(frozen=True)
class LimitsConfig:
    """Seconds."""

    join: float
    step: float
    slow: float
    peer: float


@dataclasses.dataclass(frozen=True)
class LogConfig:
    every_steps: int
    tensorboard: bool
    profile_step: int


@dataclasses.dataclass(frozen=True)
class Config:
    steps: int
    seq_len: int
    global_batch: int
    accumulation: int
    seed: int
    controller: str
    remat: str
    nonfinite_limit: int
    self_check: bool
    init_from: str
    compile_cache: str
    model: ModelConfig
    dtypes: DtypesConfig
    mesh: MeshConfig
    ops: OpsConfig
    experts: ExpertsConfig
    loss: LossConfig
    optimizer: OptimizerConfig
    data: DataConfig
    eval: EvalConfig
    checkpoint: CheckpointConfig
    limits: LimitsConfig
    elastic: ElasticConfig
    log: LogConfig

    def to_dict(self) -> dict[str, Any]:
        """The resolved config as nested dicts; `from_config_dict` reads it back."""
        return dataclasses.asdict(self)

    def to_json(self) -> str:
        return json.dumps(self.to_dict(), indent=2) + "\n"


def key_types() -> dict[str, type]:
    """Every key, dotted, in the order of the dataclasses, with its type: int, float, bool, str or tuple (of ints)."""
    return dict(_key_types(Config, ""))


def flatten(tree: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested dicts -> {"a.b": value}, in order."""
    flat = {}
    for name, value in tree.items():
        flat |= flatten(value, f"{prefix}{name}.") if isinstance(value, Mapping) else {prefix + name: value}
    return flat


def diff(a: Mapping[str, Any], b: Mapping[str, Any]) -> list[tuple[str, Any, Any]]:
    """(dotted key, value in a, value in b) of every key in which two resolved configs (`to_dict`) differ.

    None stands for a key that a side lacks (written by another version); no key has the value None. A list is the
    tuple that json made it of.
    """
    flat_a, flat_b = (
        {key: tuple(value) if isinstance(value, list) else value for key, value in flatten(tree).items()}
        for tree in (a, b)
    )
    keys = [*flat_a, *(key for key in flat_b if key not in flat_a)]
    return [(key, flat_a.get(key), flat_b.get(key)) for key in keys if flat_a.get(key) != flat_b.get(key)]


def from_config_dict(tree: config_dict.ConfigDict | Mapping[str, Any]) -> Config:
    """The Config of a ConfigDict, or of nested dicts as `to_dict` makes them. Rules between keys: `config_check`.

    Raises ConfigError naming every unknown key (with the nearest known one), missing key and value of another type.
    An int is taken where a float is expected.
    """
    problems: list[str] = []
    if isinstance(tree, config_dict.ConfigDict):
        tree = tree.to_dict()
    config = _build(Config, tree, "", problems)
    if problems:
        raise ConfigError(*problems)
    return config


def resolve_mesh(mesh: MeshConfig, num_devices: int) -> MeshConfig:
    """`mesh` with its -1, if it has one, replaced by what is left of `num_devices` (of all slices).

    Raises ConfigError, with the sizes and the number of devices, if they do not fit.
    """
    if problems := mesh_problems(mesh):
        raise ConfigError(*problems)
    sizes = mesh.sizes
    rest = [axis for axis in MESH_AXES if sizes[axis] == -1]
    fixed = math.prod(size for size in sizes.values() if size != -1)
    factors = " x ".join(f"mesh.{axis}={size}" for axis, size in sizes.items() if size != -1)
    if rest and num_devices % fixed:
        raise ConfigError(
            f"mesh.{rest[0]}=-1 has no size: {factors} makes {fixed}, which does not divide {num_devices} devices; "
            "change one of these sizes"
        )
    if not rest and fixed != num_devices:
        raise ConfigError(
            f"{factors} makes {fixed}, but there are {num_devices} devices; change one of these sizes, or set one of "
            "them to -1 (the rest)"
        )
    filled = {axis: num_devices // fixed if axis in rest else size for axis, size in sizes.items()}
    resolved = MeshConfig(**filled, cpu_devices=mesh.cpu_devices, dcn=mesh.dcn)
    if problems := mesh_problems(resolved):  # the filled axis against its part over DCN
        raise ConfigError(*problems)
    return resolved


def mesh_problems(mesh: MeshConfig) -> list[str]:
    """What is wrong with a mesh on any number of devices."""
    rest = [f"mesh.{axis}" for axis, size in mesh.sizes.items() if size == -1]
    problems = [
        f"mesh.{axis}={size}: must be at least 1, or -1 for what the other axes leave"
        for axis, size in mesh.sizes.items()
        if size < 1 and size != -1
    ]
    problems += [
        f"mesh.dcn.{axis}={slices}: must be at least 1 (1: the axis stays inside a slice)"
        for axis, slices in mesh.dcn.sizes.items()
        if slices < 1
    ]
    if len(rest) > 1:
        problems.append(f"{' and '.join(rest)} are -1: only one axis can be what the others leave; give each a size")
    problems += [
        f"mesh.{axis}={size} is not a multiple of mesh.dcn.{axis}={slices}: mesh.{axis} counts the whole axis, "
        f"mesh.dcn.{axis} how many slices it spans; use mesh.{axis}={-(-size // slices) * slices}"
        for axis, size in mesh.sizes.items()
        if size > 0 and (slices := mesh.dcn.sizes[axis]) > 0 and size % slices
    ]
    if not problems and mesh.dcn.expert > 1 and mesh.per_slice["context"] > 1:
        problems.append(
            f"mesh.dcn.expert={mesh.dcn.expert} with {mesh.per_slice['context']} context ranks in a slice: expert is "
            "the inner part of the sequence, which would change slices at every context rank; use mesh.dcn.context"
        )
    return problems


def did_you_mean(name: str, names: Iterable[str], prefix: str = "") -> str:
    """The end of a message, ", did you mean PREFIXNAME?", with the most similar of `names`; "" if none is similar.

    A dotted name is also found by its last part alone, wherever that stands.
    """
    names = list(names)
    last = name.rpartition(".")[2]
    found = difflib.get_close_matches(name, [known for known in names if known.rpartition(".")[2] == last], 1, cutoff=0)
    found = found or difflib.get_close_matches(name, names, 1)
    found = found or [known for known in names if difflib.get_close_matches(last, [known.rpartition(".")[2]], 1, 0.75)]
    return f", did you mean {prefix}{found[0]}?" if found else ""


def _key_types(cls: type, prefix: str) -> Iterator[tuple[str, type]]:
    for name, kind in typing.get_type_hints(cls).items():
        if dataclasses.is_dataclass(kind):
            yield from _key_types(typing.cast(type, kind), f"{prefix}{name}.")
        else:
            yield prefix + name, typing.get_origin(kind) or kind


def _build(cls: type, tree: Mapping[str, Any], prefix: str, problems: list[str]) -> Any:
    """An instance of the dataclass `cls`; None if problems were found and added."""
    hints, values, before = typing.get_type_hints(cls), {}, len(problems)
    problems += [
        f"{prefix}{name} is not a key of the config{did_you_mean(prefix + name, key_types())}"
        for name in tree
        if name not in hints
    ]
    for name, kind in hints.items():
        value, section = tree.get(name), dataclasses.is_dataclass(kind)
        if name not in tree or value is None:
            problems.append(f"{prefix}{name} is missing: every key needs a value (defaults: configs/base.py)")
        elif section and isinstance(value, Mapping):
            values[name] = _build(typing.cast(type, kind), value, f"{prefix}{name}.", problems)
        elif not section and (type(value) is kind or (kind is float and type(value) is int)):
            values[name] = kind(value)
        elif typing.get_origin(kind) is tuple and isinstance(value, list | tuple) and {type(x) for x in value} <= {int}:
            values[name] = tuple(value)
        else:
            expected = "a section of keys" if section else f"type {_type_name(kind)}"
            problems.append(f"{prefix}{name}={value!r} has type {type(value).__name__}, expected {expected}")
    return cls(**values) if len(problems) == before else None


def _type_name(kind: Any) -> str:
    return "tuple of integers" if typing.get_origin(kind) is tuple else kind.__name__
