"""The model's parameters as one flat dict from dotted names to arrays, and their description.

The description comes from tracing the constructor, so there is nothing beside it to keep in step.
"""

import dataclasses
import functools
import math
import zlib
from collections.abc import Mapping

import jax
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from app.cluster import sharding
from app.config import ModelConfig
from app.models.layers import Initializer, Runtime
from app.models.qwen import Qwen


@dataclasses.dataclass(frozen=True)
class ParamSpec:
    """One parameter: global shape, dtype name, logical name of every dim (None: never split), first values."""

    shape: tuple[int, ...]
    dtype: str
    logical: tuple[str | None, ...]
    initializer: Initializer

    @property
    def partition(self) -> PartitionSpec:
        return sharding.SHARDED.spec(self.logical)

    @property
    def is_matrix(self) -> bool:
        """True for what weight decay is meant for: not norms, biases or per-head scalars."""
        return len([name for name in self.logical if name != "layers"]) >= 2


@functools.lru_cache
def _abstract(config: ModelConfig, runtime: Runtime):
    return nnx.split(nnx.eval_shape(lambda: Qwen(config, runtime)))


def _name(path: tuple) -> str:
    return ".".join(str(part) for part in path)


def describe(config: ModelConfig, runtime: Runtime = Runtime()) -> dict[str, ParamSpec]:
    """Every parameter of the model, by name, in a fixed order. Traces shapes only; nothing is allocated."""
    _, state = _abstract(config, runtime)
    return {
        _name(path): ParamSpec(variable.shape, str(variable.dtype), variable.out_sharding, variable.initializer)
        for path, variable in nnx.to_flat_state(state)
    }


def count(specs: Mapping[str, ParamSpec]) -> int:
    return sum(math.prod(spec.shape) for spec in specs.values())


def table(specs: Mapping[str, ParamSpec]) -> str:
    """The parameters as text: name, shape, dtype, logical dims, and the total."""
    lines = [f"{name}  {list(spec.shape)}  {spec.dtype}  {list(spec.logical)}" for name, spec in specs.items()]
    return "\n".join([*lines, f"total {count(specs):,}"]) + "\n"


def init(specs: Mapping[str, ParamSpec], seed: int, mesh: Mesh) -> dict[str, jax.Array]:
    """Fresh parameters, each born with its sharding.

    A parameter's values are a function of (seed, its name, its shape) only: the same on every mesh, whatever other
    parameters there are. Parameters of one shape share one compiled draw, which keeps the start short.
    """
    root = jax.random.key(seed)
    return {
        name: _draw(spec.initializer, spec.shape, spec.dtype, NamedSharding(mesh, spec.partition))(
            jax.random.fold_in(root, zlib.crc32(name.encode()))
        )
        for name, spec in specs.items()
    }


@functools.lru_cache(maxsize=256)
def _draw(initializer, shape, dtype, where):
    return jax.jit(lambda key: initializer(key, shape, dtype), out_shardings=where)


def build(config: ModelConfig, runtime: Runtime, params: Mapping[str, jax.Array]) -> Qwen:
    """The module around the given arrays (inside shard_map: around this rank's parts).

    Raises ValueError naming the parameters that are missing or unknown.
    """
    graphdef, state = _abstract(config, runtime)
    flat = nnx.to_flat_state(state)
    names = {_name(path) for path, _ in flat}
    if names != set(params):
        raise ValueError(f"parameters missing: {sorted(names - set(params))}; unknown: {sorted(set(params) - names)}")
    filled = [(path, variable.replace(params[_name(path)])) for path, variable in flat]
    return nnx.merge(graphdef, nnx.from_flat_state(filled))
