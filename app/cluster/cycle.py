"""Hamiltonian cycles and paths on boxes of chips, by construction (numpy only; no search).

A box is a product of lines, some of which are rings (`wrap`). Both functions return the chips in visiting order; two
consecutive chips are always one link apart.
"""

import functools
import math

import numpy as np


def snake(shape: tuple[int, ...]) -> np.ndarray:
    """Boustrophedon path through a box: coordinates [prod(shape), len(shape)], the last dim fastest.

    A dim turns round every time a slower dim moves (reflected mixed-radix Gray code), so that each step changes one
    coordinate by one.
    """
    index = np.arange(math.prod(shape))
    columns = []
    stride = index.size
    for extent in shape:
        block, stride = stride, stride // extent
        forward = (index % block) // stride
        columns.append(np.where((index // block) % 2 == 0, forward, extent - 1 - forward))
    return np.stack(columns, axis=1) if columns else np.zeros((1, 0), np.int64)


@functools.lru_cache(maxsize=1024)
def hamiltonian(shape: tuple[int, ...], wrap: tuple[bool, ...]) -> tuple[np.ndarray, bool]:
    """A Hamiltonian cycle of the box, or a Hamiltonian path where there is none.

    Returns (coordinates [prod(shape), len(shape)], closed); `closed` says that the last chip is a neighbour of the
    first one too. A box of three long dims is a bundle of lines along its shortest dim, taken up and down in turn, in
    the order of a cycle of the other two: ranks far apart in the walk are few links apart, and a rank's number says its
    place on its line (`app.cluster.mesh.line_length`). Other boxes: the cycle keeps one column of one dim, snakes over
    the rest of the box and comes back along that column:

    - an even number of rows: the snake ends beside the column, no wrap link is used. One even dim and any second dim
      are enough, which every multi-dimensional TPU slice has;
    - an odd number of chips: the snake ends at the far side and needs the wrap link of the column's dim. Without one
      there is no cycle (a grid is bipartite and an odd cycle is not): the plain snake is returned;
    - a line closes only if it is a ring, or has at most two chips.
    """
    long = [dim for dim, extent in enumerate(shape) if extent > 1]
    even = [dim for dim in long if shape[dim] % 2 == 0]
    rings = [dim for dim in long if wrap[dim]]
    if len(long) < 2:
        return _frozen(snake(shape)), not long or bool(rings) or shape[long[0]] == 2
    if even:
        column = next(dim for dim in reversed(long) if dim != even[0])
    elif rings:
        column = rings[0]
    else:
        return _frozen(snake(shape)), False

    line = min(long, key=lambda dim: shape[dim])
    others = tuple(extent for dim, extent in enumerate(shape) if dim != line)
    if len(long) == 3 and math.prod(others) % 2 == 0:
        columns, _ = hamiltonian(others, (False,) * len(others))
        up = np.arange(shape[line])
        along = np.where(np.arange(len(columns))[:, None] % 2 == 0, up, up[::-1]).ravel()
        return _frozen(np.insert(np.repeat(columns, len(up), axis=0), line, along, axis=1)), True

    rest = snake(tuple(extent for dim, extent in enumerate(shape) if dim != column))
    out = snake((len(rest), shape[column] - 1)) + np.array([0, 1])  # (row, place along the column's dim)
    back = np.stack([np.arange(len(rest) - 1, 0, -1), np.zeros(len(rest) - 1, np.int64)], axis=1)
    rows_columns = np.concatenate([[[0, 0]], out, back])
    return _frozen(np.insert(rest[rows_columns[:, 0]], column, rows_columns[:, 1], axis=1)), True


def _frozen(array: np.ndarray) -> np.ndarray:
    """The array made read-only, since the cache hands the same one to every caller."""
    array.setflags(write=False)
    return array
