"""Hamiltonian cycles and paths on boxes, with and without rings."""

import itertools
import math

import numpy as np
import pytest

from app.cluster.cycle import hamiltonian, snake


def neighbours(here, there, shape, wrap):
    """Whether two places of a box are one link apart (written out, not shared with the code under test)."""
    moved = [dim for dim in range(len(shape)) if here[dim] != there[dim]]
    if len(moved) != 1:
        return False
    dim = moved[0]
    apart = abs(int(here[dim]) - int(there[dim]))
    return apart == 1 or (wrap[dim] and apart == shape[dim] - 1)


BOXES = [
    (shape, wrap)
    for dims in (1, 2, 3)
    for shape in itertools.product((1, 2, 3, 4, 5), repeat=dims)
    for wrap in itertools.product((False, True), repeat=dims)
]


def test_every_box_is_visited_once_from_neighbour_to_neighbour():
    for shape, wrap in BOXES:
        walk, closed = hamiltonian(shape, wrap)
        assert sorted(map(tuple, walk.tolist())) == list(np.ndindex(shape)), (shape, wrap)
        steps = list(itertools.pairwise(walk.tolist()))
        if closed and len(walk) > 1:
            steps.append((walk[-1].tolist(), walk[0].tolist()))
        assert all(neighbours(here, there, shape, wrap) for here, there in steps), (shape, wrap)


def test_a_path_is_given_only_where_no_cycle_exists():
    """An odd grid is bipartite with unequal halves; a line has two ends. Everything else must close."""
    for shape, wrap in BOXES:
        long = [dim for dim, extent in enumerate(shape) if extent > 1]
        ringed = any(wrap[dim] for dim in long)
        odd = math.prod(shape) % 2 == 1
        none = not ringed and (odd if len(long) > 1 else math.prod(shape) > 2)
        assert hamiltonian(shape, wrap)[1] is not none, (shape, wrap)


@pytest.mark.parametrize("shape", [(2, 2, 4), (8, 8, 4), (16, 16), (4, 8), (16, 16, 24)])
def test_slices_of_chips_close_without_wrap_links(shape):
    walk, closed = hamiltonian(shape, (False,) * len(shape))
    assert closed
    assert (np.abs(walk - np.roll(walk, -1, axis=0)).sum(axis=1) == 1).all()


def test_snake_changes_the_last_dim_fastest():
    assert snake((2, 3)).tolist() == [[0, 0], [0, 1], [0, 2], [1, 2], [1, 1], [1, 0]]
    assert snake(()).shape == (1, 0)


def test_the_cached_walk_cannot_be_changed():
    with pytest.raises(ValueError, match="read-only"):
        hamiltonian((2, 2), (False, False))[0][0] = 1
