"""Which chip of a slice holds which rank of the mesh axes (numpy only).

Every mesh axis gets a sub-box of the grid of chips: each side of the grid is factored over the axes. Along its sub-box
an axis walks a Hamiltonian cycle (app.cluster.cycle). The sequence always gets the innermost, unstrided part of a side,
so that two neighbouring ranks are always one link apart; the factorisation is the one that closes the sequence into a
ring and keeps tensor, then fsdp, then data ranks as near to each other as possible.
"""

import dataclasses
import functools
import itertools
import math
from collections.abc import Iterator

import numpy as np

from app.cluster.cycle import hamiltonian

# A ring of four chips is a square: (inner, outer) -> place, one link apart whenever one of the two bits flips.
_SQUARE_TO_RING = np.array([[0, 3], [1, 2]])


@dataclasses.dataclass(frozen=True)
class Grid:
    """The devices of one slice: sides of the box, which of them are rings, and links a step along a side costs
    (1 between chips, 0 between the two devices of one chip)."""

    shape: tuple[int, ...]
    wrap: tuple[bool, ...]
    links: tuple[int, ...]

    def hops(self, here: np.ndarray, there: np.ndarray) -> np.ndarray:
        """Links between coordinates [..., dims] and [..., dims]: int array [...]."""
        apart = np.abs(here - there)
        sides = np.array(self.shape)
        return np.sum(np.where(self.wrap, np.minimum(apart, sides - apart), apart) * self.links, axis=-1)


@dataclasses.dataclass(frozen=True)
class _Side:
    """A side that is factored over the axes: a whole side of the grid, or one bit of a ring of four."""

    extent: int
    wrap: bool
    links: int
    dim: int  # of the grid

    def hops(self, apart: np.ndarray) -> np.ndarray:
        return self.links * (np.minimum(apart, self.extent - apart) if self.wrap else apart)


Factors = tuple[tuple[int, ...], ...]  # [side][axis]


def place(grid: Grid, sequence: int, tensor: int, fsdp: int, data: int) -> np.ndarray:
    """Coordinates [data, fsdp, sequence, tensor, dims] of every rank on `grid`.

    The four sizes must multiply to the number of devices (checked by the caller with the config's names).
    Deterministic: the same grid and sizes give the same answer on every host.
    """
    sizes = (sequence, tensor, fsdp, data)
    best_cost, best_sides, best_factors = None, (), ()
    for sides in _side_choices(grid):
        for factors in _factorisations(tuple(side.extent for side in sides), sizes):
            cost = _cost(sides, factors)
            if best_cost is None or cost < best_cost:
                best_cost, best_sides, best_factors = cost, sides, factors
    return _coordinates(grid, best_sides, best_factors).transpose(3, 2, 0, 1, 4)


def _side_choices(grid: Grid) -> Iterator[tuple[_Side, ...]]:
    """The grid's sides, with each subset of its rings of four cut into two sides of two chips. Uncut comes first: it
    wins ties, and its cycles need no wrap links (which a twisted torus lacks)."""
    rings = [dim for dim, extent in enumerate(grid.shape) if extent == 4 and grid.wrap[dim]]
    for cut in itertools.product((False, True), repeat=len(rings)):
        cut_dims = {dim for dim, yes in zip(rings, cut, strict=True) if yes}
        sides = []
        for dim, extent in enumerate(grid.shape):
            if dim in cut_dims:
                sides += [_Side(2, False, grid.links[dim], dim)] * 2
            else:
                sides.append(_Side(extent, grid.wrap[dim], grid.links[dim], dim))
        yield tuple(sides)


def _factorisations(extents: tuple[int, ...], sizes: tuple[int, ...]) -> Iterator[Factors]:
    """Every way to write each extent as a product over the axes so that each axis gets its size in all."""
    if not extents:
        if math.prod(sizes) == 1:
            yield ()
        return
    for split in _splits(extents[0], sizes):
        rest = tuple(size // part for size, part in zip(sizes, split, strict=True))
        for others in _factorisations(extents[1:], rest):
            yield (split, *others)


@functools.cache
def _splits(extent: int, sizes: tuple[int, ...]) -> tuple[tuple[int, ...], ...]:
    """Every way to write `extent` as a product of divisors of `sizes`, the largest part for the first axis first."""
    if not sizes:
        return ((),) if extent == 1 else ()
    parts = (part for part in range(min(extent, sizes[0]), 0, -1) if extent % part == 0 and sizes[0] % part == 0)
    return tuple((part, *rest) for part in parts for rest in _splits(extent // part, sizes[1:]))


def _axis_walk(sides: tuple[_Side, ...], factors: Factors, axis: int) -> tuple[np.ndarray, np.ndarray]:
    """An axis' ranks in order, as (place within its sub-box [ranks, sides], stride of each side [sides])."""
    strides = np.array([math.prod(split[:axis]) for split in factors])
    box = tuple(split[axis] for split in factors)
    rings = tuple(
        side.wrap and stride * extent == side.extent
        for side, stride, extent in zip(sides, strides.tolist(), box, strict=True)
    )
    return hamiltonian(box, rings)[0], strides


def _cost(sides: tuple[_Side, ...], factors: Factors) -> tuple[float, ...]:
    """What to minimise, most important first: the sequence's longest hop (closing hop included), then the mean hops
    of tensor, fsdp and data, then the sequence's mean hops."""
    hops = []
    for axis in range(4):
        walk, strides = _axis_walk(sides, factors, axis)
        apart = np.abs(walk - np.roll(walk, -1, axis=0)) * strides
        hops.append(np.sum([side.hops(apart[:, index]) for index, side in enumerate(sides)], axis=0))
    sequence, tensor, fsdp, data = hops
    return float(sequence.max()), float(tensor.mean()), float(fsdp.mean()), float(data.mean()), float(sequence.mean())


def _coordinates(grid: Grid, sides: tuple[_Side, ...], factors: Factors) -> np.ndarray:
    """Coordinates [sequence, tensor, fsdp, data, dims] of every rank."""
    places = np.zeros((1, 1, 1, 1, len(sides)), np.int64)
    for axis in range(4):
        walk, strides = _axis_walk(sides, factors, axis)
        shape = [1, 1, 1, 1, len(sides)]
        shape[axis] = len(walk)
        places = places + (walk * strides).reshape(shape)
    columns = []
    for dim in range(len(grid.shape)):
        own = [places[..., index] for index, side in enumerate(sides) if side.dim == dim]
        columns.append(own[0] if len(own) == 1 else _SQUARE_TO_RING[own[0], own[1]])
    return np.stack(columns, axis=-1)
