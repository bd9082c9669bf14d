"""From logical dims to mesh axes, and the four collectives that the sharded step is made of.

The loss and its gradient run inside ONE `shard_map(check_vma=False)` over the whole mesh, so every collective of the
program is written down here or in `app.ops`; nothing is left to a partitioner's guess. The gradient is taken inside
the body, of this rank's share of the loss. One convention makes that exact: a cotangent is this rank's *partial*
contribution over the batch and time axes (summed once at the end by `reduce_gradients`, or on the way by `gather`), and
*complete* over the tensor axis wherever the activation is replicated there (`enter_parallel` / `leave_parallel`).
"""

import dataclasses
import functools
import math
from collections.abc import Mapping, Sequence

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

MeshAxes = tuple[str, ...]


@dataclasses.dataclass(frozen=True)
class Rules:
    """The one table from logical dims to mesh axes. Sizes of one are no-ops, so every run uses the same table."""

    batch: MeshAxes = ("data", "fsdp")
    time: MeshAxes = ("context", "expert")  # context major: rank order along the pair is the sequence order
    width: MeshAxes = ("fsdp", "context", "expert")  # of parameters: at batch 1 the sequence ranks shard weights
    heads: MeshAxes = ("tensor",)
    mlp: MeshAxes = ("tensor",)
    experts: MeshAxes = ("expert",)  # whose ranks are neighbours in the sequence: one long row has them too
    expert_width: MeshAxes = ("fsdp", "context")
    vocab: MeshAxes = ("tensor",)
    layers: MeshAxes = ()

    def spec(self, logical: Sequence[str | None]) -> PartitionSpec:
        """PartitionSpec of an array whose dims are named `logical` (None: replicated).

        Raises ValueError if two dims would be split over the same mesh axis.
        """
        entries = [getattr(self, name) if name is not None else () for name in logical]
        used = [axis for entry in entries for axis in entry]
        twice = sorted({axis for axis in used if used.count(axis) > 1})
        if twice:
            raise ValueError(f"dims {tuple(logical)} use the mesh axes {twice} twice: change one row of sharding.Rules")
        return PartitionSpec(*[entry or None for entry in entries])


SHARDED = Rules()
UNSHARDED = Rules(batch=(), time=(), width=(), heads=(), mlp=(), experts=(), expert_width=(), vocab=())

BATCH_SPEC = SHARDED.spec(("batch", "time"))
# Gradients are partial over these axes and complete over `tensor`.
DATA_AXES: MeshAxes = ("data", "fsdp", "context", "expert")


def named(mesh: Mesh, specs):
    """The same tree with every PartitionSpec bound to `mesh`."""
    return jax.tree.map(
        lambda spec: NamedSharding(mesh, spec), specs, is_leaf=lambda leaf: isinstance(leaf, PartitionSpec)
    )


def axes_size(axes: MeshAxes) -> int:
    """Number of ranks along `axes`, inside shard_map."""
    return math.prod(lax.axis_size(axis) for axis in axes)


def spec_axes(spec: PartitionSpec) -> set[str]:
    """The mesh axes that `spec` splits over."""
    return {axis for entry in spec if entry is not None for axis in ((entry,) if isinstance(entry, str) else entry)}


@functools.partial(jax.custom_vjp, nondiff_argnums=(1, 2, 3, 4, 5))
def gather(
    shard: jax.Array, axes: MeshAxes, dim: int, compute_dtype: str, reduce_dtype: str, line: int = 1
) -> jax.Array:
    """A weight that is split along `dim` over `axes`, whole and in `compute_dtype`.

    The cast comes before the gather, so the wire carries the compute dtype; the gradient is reduce-scattered in
    `reduce_dtype` (float32 by default: a sum over hundreds of ranks is where bfloat16 would lose it). line: see
    `_phases`; it changes the way, not the result.
    """
    return whole(shard, axes, dim, compute_dtype, line)


def whole(shard: jax.Array, axes: MeshAxes, dim: int, compute_dtype: str, line: int = 1) -> jax.Array:
    """`gather` for those who have a rule of their own for the gradient: it must end in `reduce_scatter`."""
    gathered = shard.astype(compute_dtype)
    for axis, groups in reversed(_phases(axes, line)):  # the minor axis first
        gathered = lax.all_gather(gathered, axis, axis=dim, tiled=True, axis_index_groups=groups)
    return gathered


def reduce_scatter(grad: jax.Array, axes: MeshAxes, dim: int, reduce_dtype: str, line: int = 1) -> jax.Array:
    """This rank's part, along `dim`, of the sum over `axes` of a whole weight's gradients, in `reduce_dtype`."""
    grad = grad.astype(reduce_dtype)
    for axis, groups in _phases(axes, line):
        grad = lax.psum_scatter(grad, axis, scatter_dimension=dim, tiled=True, axis_index_groups=groups)
    return grad


def _phases(axes: MeshAxes, line: int) -> list[tuple[str, list[list[int]] | None]]:
    """The steps of a reduction over `axes`: mesh axis and groups of its ranks (None: all), those of most bytes first.

    Axis by axis; and an axis that fills a slice with lines of `line` chips (app.cluster.mesh.line_length) over the
    planes across these lines, then along the lines. libtpu turns a gather or reduction over all chips of a 3D torus
    into an all-reduce of the whole array, with zeros filled in before, but not one over a plane or a line.
    """
    phases: list[tuple[str, list[list[int]] | None]] = []
    for axis in axes:
        size = lax.axis_size(axis)
        phases += [(axis, groups) for groups in planes_and_lines(size, line)] if 1 < line < size else [(axis, None)]
    return phases


def planes_and_lines(size: int, line: int) -> tuple[list[list[int]], list[list[int]]]:
    """`size` ranks, `line` after `line` of them up and down a straight line: those of a plane across the lines, and
    those of a line."""
    lines = [list(range(start, start + line)) for start in range(0, size, line)]
    planes = [[ranks[at if k % 2 == 0 else -1 - at] for k, ranks in enumerate(lines)] for at in range(line)]
    return planes, lines


def _gather_fwd(shard, axes, dim, compute_dtype, reduce_dtype, line):
    return whole(shard, axes, dim, compute_dtype, line), jnp.zeros((), shard.dtype)


def _gather_bwd(axes, dim, compute_dtype, reduce_dtype, line, like, grad):
    return (reduce_scatter(grad, axes, dim, reduce_dtype, line).astype(like.dtype),)


gather.defvjp(_gather_fwd, _gather_bwd)


@functools.partial(jax.custom_vjp, nondiff_argnums=(1,))
def enter_parallel(x: jax.Array, axes: MeshAxes) -> jax.Array:
    """Hand a value that is replicated over `axes` to per-rank work: identity forward, sum of cotangents backward."""
    return x


enter_parallel.defvjp(lambda x, axes: (x, None), lambda axes, _, grad: ((lax.psum(grad, axes) if axes else grad),))


@functools.partial(jax.custom_vjp, nondiff_argnums=(1,))
def leave_parallel(x: jax.Array, axes: MeshAxes) -> jax.Array:
    """Sum the ranks' partial results over `axes`: sum forward, identity backward (the cotangent is complete)."""
    return lax.psum(x, axes) if axes else x


leave_parallel.defvjp(lambda x, axes: ((lax.psum(x, axes) if axes else x), None), lambda axes, _, grad: (grad,))


def reduce_gradients(grads: Mapping[str, jax.Array], specs: Mapping[str, PartitionSpec]) -> dict[str, jax.Array]:
    """Sum each gradient over the data axes that its parameter is not split over (`gather` has done the others)."""

    def reduce(grad, spec):
        missing = tuple(axis for axis in DATA_AXES if axis not in spec_axes(spec))
        return lax.psum(grad, missing) if missing else grad

    return {name: reduce(grads[name], specs[name]) for name in grads}
