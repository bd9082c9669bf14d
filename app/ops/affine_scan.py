"""Affine maps of a recurrent state, and their exclusive prefix composition over the ranks of a sequence axis.

What a rank's part of a linear recurrence does to the state is one affine map, state -> transition state + bias. The
state that enters a rank is therefore an exclusive prefix composition over the ranks before it; cotangents of states
travel the other way with the transposed transitions. Composition is associative, not commutative: order counts.

Letters: K key dim, V value dim, P ranks along the sequence. Maps and states are float32 and every product here has
HIGHEST precision: one bfloat16 pass would put an error of 1e-3 into everything after the first rank.
"""

import dataclasses
import math
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax


@dataclasses.dataclass(frozen=True)
class SequenceAxis:
    """The mesh axes that time is sharded over, inside `shard_map`. Rank order is sequence order.

    Attributes:
      names: mesh axes, major first; the rank is row-major over them.
      slices: how many equal groups of consecutive ranks have slow links (DCN) between them. The scan then runs within
        each slice first, and only one rank of a slice talks to the next slice.
      exchange: "ppermute" (log2 P rounds, memory independent of P) or "all_gather" (one round, P maps in memory: for
        few ranks, and as a cross-check).
    """

    names: tuple[str, ...]
    slices: int = 1
    exchange: Literal["ppermute", "all_gather"] = "ppermute"

    def __post_init__(self):
        if self.exchange not in ("ppermute", "all_gather"):
            raise ValueError(f"SequenceAxis: exchange must be 'ppermute' or 'all_gather', got {self.exchange!r}")
        if self.slices < 1:
            raise ValueError(f"SequenceAxis: slices must be at least 1, got {self.slices}")

    @property
    def size(self) -> int:
        """P, known while tracing."""
        return lax.axis_size(self.names)

    @property
    def rank(self) -> jax.Array:
        """This rank's place in the sequence, 0 .. P-1."""
        return lax.axis_index(self.names)

    def shift(self, x: jax.Array, distance: int) -> jax.Array:
        """What the rank `distance` places before this one holds (after it, if negative); zeros where there is none."""
        return self.send(x, [(r, r + distance) for r in range(self.size)])

    def send(self, x: jax.Array, pairs: list[tuple[int, int]]) -> jax.Array:
        """ppermute over (source, destination) pairs; those that leave the axis are dropped; no source means zeros."""
        size = self.size
        return lax.ppermute(x, self.names, [(s, d) for s, d in pairs if 0 <= s < size and 0 <= d < size])


AxisName = str | tuple[str, ...] | SequenceAxis | None


def sequence_axis(axis_name: AxisName) -> SequenceAxis | None:
    """The axis as a SequenceAxis; None where time is not sharded (no axis, or one of size 1).

    Raises:
      ValueError: the axis does not divide into its slices.
    """
    if axis_name is None:
        return None
    if not isinstance(axis_name, SequenceAxis):
        axis_name = SequenceAxis((axis_name,) if isinstance(axis_name, str) else tuple(axis_name))
    if axis_name.size % axis_name.slices:
        raise ValueError(f"SequenceAxis: {axis_name.size} ranks do not divide into slices={axis_name.slices}")
    return axis_name if axis_name.size > 1 else None


class AffineMap(NamedTuple):
    """state -> transition state + bias, with transition [..., K, K] and bias, state [..., K, V]."""

    transition: jax.Array
    bias: jax.Array


def matmul(a: jax.Array, b: jax.Array) -> jax.Array:
    """Batched float32 product with HIGHEST precision."""
    return jnp.matmul(a, b, precision=lax.Precision.HIGHEST, preferred_element_type=jnp.float32)


def apply(affine: AffineMap, state: jax.Array) -> jax.Array:
    """transition state + bias."""
    return matmul(affine.transition, state) + affine.bias


def compose(later: AffineMap, earlier: AffineMap) -> AffineMap:
    """The map that applies `earlier` first: (A2 A1, A2 B1 + B2)."""
    return AffineMap(matmul(later.transition, earlier.transition), apply(later, earlier.bias))


def exclusive_scan(
    local: AffineMap, axis: SequenceAxis, *, initial_state: jax.Array | None = None, reverse: bool = False
) -> jax.Array:
    """The state entering this rank: the maps of all ranks before it applied to the initial state, in sequence order.

    Args:
      local: this rank's map, float32.
      axis: the sequence axis.
      initial_state: [..., K, V], the same on every rank; None means zero, and then nothing is computed for it.
      reverse: the sequence runs from the last rank to the first ("before" is "after"). For the adjoint pass the
        transposed transitions and the cotangents' biases.

    Returns:
      [..., K, V] float32; on the first rank the initial state (zeros if None).
    """
    first = axis.rank == (axis.size - 1 if reverse else 0)
    if initial_state is not None:
        # The first rank swallows the initial state, so that the scan itself always starts from zero.
        local = local._replace(bias=jnp.where(first, apply(local, initial_state), local.bias))
    if axis.exchange == "all_gather":
        state = _gathered(local, axis, reverse)
    elif axis.slices > 1:
        state = _hierarchical(local, axis, reverse)
    else:
        line = _Line(axis, stride=1, length=axis.size, first=0, reverse=reverse)
        state = line.shift(_inclusive_bias(local, line))
    return state if initial_state is None else jnp.where(first, initial_state, state)


def exchange_rounds(ranks: int) -> tuple[int, int]:
    """How many times the flat scan sends a bias and a transition, with d = ceil(log2(ranks - 1)): (d + 1, d - 1)."""
    depth = math.ceil(math.log2(ranks - 1)) if ranks > 2 else 0
    return depth + 1, max(depth - 1, 0)


@dataclasses.dataclass(frozen=True)
class _Line:
    """Ranks first, first + stride, ... (`length` of them), once or repeated in groups, walked in either direction."""

    axis: SequenceAxis
    stride: int
    length: int
    first: int
    reverse: bool
    groups: int = 1

    def pairs(self, distance: int) -> list[tuple[int, int]]:
        """(source, destination) of a move by `distance` places along the line, inside each group."""
        moves = []
        for group in range(self.groups):
            ranks = [group * self.length + self.first + self.stride * i for i in range(self.length)]
            if self.reverse:
                ranks.reverse()
            moves += list(zip(ranks[:-distance], ranks[distance:], strict=True))
        return moves

    def shift(self, x: jax.Array, distance: int = 1) -> jax.Array:
        return self.axis.send(x, self.pairs(distance))


def _inclusive_bias(local: AffineMap, line: _Line) -> jax.Array:
    """Bias of the composition of all maps up to and including this rank's; not valid on the last rank of the line.

    Hillis-Steele: after the round of distance d a rank's map covers the 2 d ranks ending at it. A rank without a source
    receives zeros, which makes its transition zero. That is the truth for a scan from a zero state: its map already
    covers the whole beginning, and whatever came before is zero. The last rank's sum is needed by nobody and the
    transition not after the last but one round, so that neither is worked out nor sent.
    """
    transition, bias = local
    distance = 1
    while distance < line.length - 1:
        arriving = AffineMap(transition, line.shift(bias, distance))
        bias = matmul(arriving.transition, arriving.bias) + bias
        if 2 * distance < line.length - 1:
            transition = matmul(transition, line.shift(transition, distance))
        distance *= 2
    return bias


def _inclusive_map(local: AffineMap, line: _Line, position: jax.Array) -> AffineMap:
    """Composition of all maps of the line up to and including this rank's, transitions included."""
    distance = 1
    while distance < line.length:
        arriving = AffineMap(*(line.shift(x, distance) for x in local))
        joined = compose(local, arriving)
        inside = position >= distance
        local = AffineMap(*(jnp.where(inside, new, old) for new, old in zip(joined, local, strict=True)))
        distance *= 2
    return local


def _hierarchical(local: AffineMap, axis: SequenceAxis, reverse: bool) -> jax.Array:
    """Scan within each slice, then over the slices' totals, held by the last rank of each (in walking order).

    Between slices only those ranks talk: log2(slices) rounds and one hop, whose payload is one state.
    """
    width = axis.size // axis.slices
    within = _Line(axis, 1, width, 0, reverse, groups=axis.slices)
    position = axis.rank % width
    position = width - 1 - position if reverse else position
    inclusive = _inclusive_map(local, within, position)
    last, head = (0, width - 1) if reverse else (width - 1, 0)
    leaving = _inclusive_bias(inclusive, _Line(axis, width, axis.slices, last, reverse))
    step = -1 if reverse else 1
    entering = axis.send(leaving, [(s * width + last, (s + step) * width + head) for s in range(axis.slices)])
    # The slice's first rank hands the state on, to twice as many ranks every round.
    reached = 1
    while reached < width:
        wave = [(s, d) for s, d in within.pairs(reached) if _place(s, width, reverse) < reached]
        entering = entering + axis.send(entering, wave)
        reached *= 2
    before = AffineMap(*(within.shift(x) for x in inclusive))
    return jnp.where(position == 0, entering, apply(before, entering))


def _place(rank: int, width: int, reverse: bool) -> int:
    """A rank's place in its slice, in walking order."""
    return width - 1 - rank % width if reverse else rank % width


def _gathered(local: AffineMap, axis: SequenceAxis, reverse: bool) -> jax.Array:
    """All maps on every rank, folded one after the other."""
    maps = AffineMap(*(lax.all_gather(x, axis.names) for x in local))
    size, rank = axis.size, axis.rank

    def fold(i, state):
        source = size - 1 - i if reverse else i
        before = source > rank if reverse else source < rank
        return jnp.where(before, apply(AffineMap(maps.transition[source], maps.bias[source]), state), state)

    return lax.fori_loop(0, size, fold, jnp.zeros_like(local.bias))
