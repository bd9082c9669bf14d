"""Parameters described once, and the small layers that every block uses.

Letters: B batch, T time, D width, F MLP hidden, V vocabulary, K head dim.
"""

import dataclasses
import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
from flax import nnx

from app.cluster import sharding
from app.ops.affine_scan import SequenceAxis
from app.ops.experts import Exchange
from app.ops.kernels import KernelName

Initializer = Callable[[jax.Array, tuple[int, ...], jnp.dtype], jax.Array]


@dataclasses.dataclass(frozen=True)
class Precision:
    """Dtype names: of parameters, of matmul operands and activations, of gradient sums over ranks."""

    params: str = "float32"
    compute: str = "float32"
    reduce: str = "float32"


@dataclasses.dataclass(frozen=True)
class Runtime:
    """What a layer has to know about the run, not about the model. Static: part of the module's graph definition."""

    rules: sharding.Rules = sharding.UNSHARDED
    sequence_slices: int = 1  # slices that the sequence spans: between them its links are slow
    line: int = 1  # chips of a straight line of the axis that fills a slice (app.cluster.mesh.line_length)
    precision: Precision = Precision()
    remat: str = "none"
    gdn_chunk: int = 64
    gdn_kernel: KernelName = "xla"
    attention_block: int = 512
    attention_kernel: KernelName = "xla"
    expert_kernel: KernelName = "xla"
    expert_capacity: float = 1.25
    expert_rounds: int = 0
    mtp: bool = False  # whether the model has the layer of multi-token prediction

    @property
    def time_axis(self) -> SequenceAxis | None:
        """The sequence axis of the recurrence and the convolution; None where time is not sharded."""
        return SequenceAxis(self.rules.time, slices=self.sequence_slices) if self.rules.time else None

    @property
    def expert_exchange(self) -> Exchange:
        """How tokens get to their experts; without an axis where the experts are not sharded."""
        if not self.rules.experts:
            return Exchange()
        together = self.rules.batch + self.rules.time
        return Exchange(self.rules.experts[0], together, self.expert_capacity, self.expert_rounds)


@functools.cache
def normal(stddev: float) -> Initializer:
    """N(0, stddev), the published initialisation of every matrix, convolution and embedding."""
    return jax.nn.initializers.normal(stddev)


def make_param(shape: tuple[int, ...], logical: tuple[str | None, ...], init: Initializer, dtype: str) -> nnx.Param:
    """A parameter with its shape, dtype, logical dims and initialiser in one place.

    Everything else (first values, shardings, decay mask, tables, checkpoints) is derived from this description. The
    value made here is a placeholder: `app.models.params` draws the real ones, sharded from birth.
    """
    if len(shape) != len(logical):
        raise ValueError(f"{len(shape)} dims in shape {shape} but {len(logical)} logical names {logical}")
    return nnx.Param(jnp.zeros(shape, dtype), out_sharding=logical, eager_sharding=False, initializer=init)


def gathered(param: nnx.Param, runtime: Runtime) -> jax.Array:
    """The parameter with its whole width, in the compute dtype (see `sharding.gather`)."""
    logical = param.out_sharding[-param.ndim :]  # inside the scan over layers the leading dim is gone
    return gathered_part(param[...], logical.index("width"), runtime)


def gathered_part(part: jax.Array, dim: int, runtime: Runtime) -> jax.Array:
    """The same of any array that is cut along `dim` like a parameter's width."""
    precision = runtime.precision
    axes, line = runtime.rules.width, runtime.line
    return sharding.gather(part, axes, dim, precision.compute, precision.reduce, line)


def rms_normalise(x: jax.Array, eps: float) -> jax.Array:
    """x / rms(x) over the last dim, float32."""
    x = x.astype(jnp.float32)
    return x * jax.lax.rsqrt(jnp.mean(jnp.square(x), axis=-1, keepdims=True) + jnp.float32(eps))


def scale_last(x: jax.Array, weight: jax.Array) -> jax.Array:
    """x * weight with weight [K] along the last dim of x."""
    return x * jnp.expand_dims(weight, tuple(range(x.ndim - 1)))


class RMSNorm(nnx.Module):
    """Zero-centred RMSNorm: x / rms(x) * (1 + weight), computed in float32, returned in x's dtype.

    `parallel_axes`: mesh axes over which the input is split (per-head norms), where the weight's gradient is summed.
    """

    def __init__(self, size: int, eps: float, runtime: Runtime, parallel_axes: sharding.MeshAxes = ()):
        self.eps = eps
        self.parallel_axes = parallel_axes
        self.weight = make_param((size,), (None,), nnx.initializers.zeros, runtime.precision.params)

    def __call__(self, x: jax.Array) -> jax.Array:
        weight = sharding.enter_parallel(self.weight[...], self.parallel_axes).astype(jnp.float32)
        return scale_last(rms_normalise(x, self.eps), 1.0 + weight).astype(x.dtype)


class MLP(nnx.Module):
    """down(silu(gate x) * up x): [B,T,D] -> [B,T,D]."""

    def __init__(self, width: int, hidden: int, init: Initializer, runtime: Runtime):
        self.runtime = runtime
        dtype = runtime.precision.params
        self.gate_proj = make_param((width, hidden), ("width", "mlp"), init, dtype)
        self.up_proj = make_param((width, hidden), ("width", "mlp"), init, dtype)
        self.down_proj = make_param((hidden, width), ("mlp", "width"), init, dtype)

    def __call__(self, x_BTD: jax.Array) -> jax.Array:
        axes = self.runtime.rules.mlp
        x_BTD = sharding.enter_parallel(x_BTD, axes)
        gate_BTF = jnp.einsum("btd,df->btf", x_BTD, gathered(self.gate_proj, self.runtime))
        up_BTF = jnp.einsum("btd,df->btf", x_BTD, gathered(self.up_proj, self.runtime))
        out_BTD = jnp.einsum("btf,fd->btd", jax.nn.silu(gate_BTF) * up_BTF, gathered(self.down_proj, self.runtime))
        return sharding.leave_parallel(out_BTD, axes)


def rotate(x_BTHK: jax.Array, cos_BTR: jax.Array, sin_BTR: jax.Array) -> jax.Array:
    """Partial rotary embedding of the first 2R dims of each head (rotate-half inside them), float32 arithmetic."""
    half = cos_BTR.shape[-1]
    cos, sin = cos_BTR[:, :, None], sin_BTR[:, :, None]
    first, second, rest = jnp.split(x_BTHK, (half, 2 * half), axis=-1)
    first, second = first.astype(jnp.float32), second.astype(jnp.float32)
    rotated = jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)
    return jnp.concatenate([rotated.astype(x_BTHK.dtype), rest], axis=-1)


def rotary_tables(positions_BT: jax.Array, rotary_dim: int, theta: float) -> tuple[jax.Array, jax.Array]:
    """cos and sin [B,T,rotary_dim / 2], float32, of positions (int32) x theta^(-2i / rotary_dim).

    The exponent uses the rotary dim, not the head dim. At position 1,048,575 a float32 angle is off by up to 0.03 rad
    against float64 (the cosine by 0.012): a property of float32, shared with the published implementations.
    """
    exponent = jnp.arange(0, rotary_dim, 2, dtype=jnp.float32) / rotary_dim
    inverse_frequency = 1.0 / (jnp.float32(theta) ** exponent)
    angle = positions_BT.astype(jnp.float32)[:, :, None] * inverse_frequency[None, None, :]
    return jnp.cos(angle), jnp.sin(angle)
