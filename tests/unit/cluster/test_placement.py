"""Which chip holds which rank, on grids of chips without any jax device."""

import numpy as np
import pytest

from app.cluster.placement import Grid, place

TORUS_884 = Grid((8, 8, 4), (True, True, True), (1, 1, 1))


def mean_and_max_hops(grid, ranks, axis):
    hops = grid.hops(ranks, np.roll(ranks, -1, axis=axis))
    return float(hops.mean()), int(hops.max())


@pytest.mark.parametrize(
    "grid, sizes",
    [
        (TORUS_884, {"sequence": 256, "tensor": 1, "fsdp": 1, "data": 1}),
        (TORUS_884, {"sequence": 64, "tensor": 1, "fsdp": 4, "data": 1}),
        (TORUS_884, {"sequence": 128, "tensor": 2, "fsdp": 1, "data": 1}),
        (TORUS_884, {"sequence": 8, "tensor": 8, "fsdp": 2, "data": 2}),
        (TORUS_884, {"sequence": 1, "tensor": 1, "fsdp": 256, "data": 1}),
        (Grid((16, 16, 24), (True,) * 3, (1, 1, 1)), {"sequence": 64, "tensor": 4, "fsdp": 12, "data": 2}),
        (Grid((4, 8), (False, False), (1, 1)), {"sequence": 8, "tensor": 2, "fsdp": 2, "data": 1}),
        (
            Grid((4, 4, 4, 2), (True, True, True, False), (1, 1, 1, 0)),
            {"sequence": 64, "tensor": 2, "fsdp": 1, "data": 1},
        ),
        (Grid((3, 5), (False, True), (1, 1)), {"sequence": 15, "tensor": 1, "fsdp": 1, "data": 1}),
    ],
)
def test_every_chip_has_one_rank_and_the_sequence_is_a_cycle_of_neighbours(grid, sizes):
    ranks = place(grid, **sizes)
    assert ranks.shape == (sizes["data"], sizes["fsdp"], sizes["sequence"], sizes["tensor"], len(grid.shape))
    assert len(np.unique(ranks.reshape(-1, len(grid.shape)), axis=0)) == np.prod(grid.shape)
    assert mean_and_max_hops(grid, ranks, 2)[1] <= 1


def test_other_axes_get_whole_rings_of_neighbours_where_they_fit():
    assert mean_and_max_hops(TORUS_884, place(TORUS_884, sequence=64, tensor=4, fsdp=1, data=1), 3) == (1.0, 1)
    ranks = place(TORUS_884, sequence=64, tensor=1, fsdp=4, data=1)
    assert mean_and_max_hops(TORUS_884, ranks, 1) == (1.0, 1)


def test_a_ring_of_four_serves_two_axes_at_one_hop_each():
    ranks = place(TORUS_884, sequence=128, tensor=2, fsdp=1, data=1)
    assert mean_and_max_hops(TORUS_884, ranks, 2) == (1.0, 1)
    assert mean_and_max_hops(TORUS_884, ranks, 3) == (1.0, 1)


def test_tensor_ranks_share_a_chip_where_it_has_two_devices():
    grid = Grid((2, 2, 4, 2), (False,) * 4, (1, 1, 1, 0))
    ranks = place(grid, sequence=16, tensor=2, fsdp=1, data=1)
    assert (ranks[..., 0, :3] == ranks[..., 1, :3]).all()


def test_a_line_without_wrap_is_a_path():
    grid = Grid((8, 1), (False, False), (1, 1))
    ranks = place(grid, sequence=8, tensor=1, fsdp=1, data=1)[0, 0, :, 0]
    assert (grid.hops(ranks[:-1], ranks[1:]) == 1).all()
    assert grid.hops(ranks[-1], ranks[0]) == 7


def test_hops_use_the_short_way_round_a_ring():
    assert TORUS_884.hops(np.array([0, 0, 0]), np.array([7, 4, 3])) == 1 + 4 + 1
    assert Grid((8, 8), (False, True), (1, 1)).hops(np.array([0, 0]), np.array([7, 7])) == 8
