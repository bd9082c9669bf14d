"""Grouped products against a loop over tiles, by the XLA form and by the TPU kernels (interpreted on a CPU)."""

import jax.numpy as jnp
import numpy as np
import pytest

from app.ops.grouped_matmul import Tiles, grouped_matmul, grouped_matmul_transposed, grouped_outer, tile_rows

E, K, N, ROWS = 3, 256, 128, 8
GROUP, ACTIVE = np.array([0, 0, 1, 2, 2, 2], np.int32), 4  # two tiles at the end are free
TILES = Tiles(jnp.asarray(GROUP), jnp.int32(ACTIVE), ROWS)


def arrays():
    rng = np.random.default_rng(0)
    shapes = (len(GROUP), ROWS, K), (len(GROUP), ROWS, N), (E, K, N)
    x, y, w = (rng.normal(size=shape).astype(np.float32) for shape in shapes)
    x[ACTIVE:] = 0  # of the free tiles the outer product of the XLA form needs zeros on one side
    return x, y, w


@pytest.mark.parametrize("kernel", ["xla", "interpret"])
def test_products_of_each_tile(kernel):
    x, y, w = arrays()
    flat_x, flat_y = x.reshape(-1, K), y.reshape(-1, N)
    w_EKN = jnp.asarray(w)
    forward = np.asarray(grouped_matmul(flat_x, w_EKN, TILES, kernel)).reshape(y.shape)
    back = np.asarray(grouped_matmul_transposed(flat_y, w_EKN, TILES, kernel)).reshape(x.shape)
    for tile in range(ACTIVE):
        np.testing.assert_allclose(forward[tile], x[tile] @ w[GROUP[tile]], rtol=1e-4, atol=1e-3)
        np.testing.assert_allclose(back[tile], y[tile] @ w[GROUP[tile]].T, rtol=1e-4, atol=1e-3)
    outer = np.asarray(grouped_outer(flat_x, flat_y, E, TILES, kernel))
    for group in range(E):
        wanted = sum(x[tile].T @ y[tile] for tile in range(ACTIVE) if GROUP[tile] == group)
        np.testing.assert_allclose(outer[group], wanted, rtol=1e-4, atol=1e-3)


def test_sides_that_are_no_multiples_of_128_are_refused():
    x, _, w = arrays()
    with pytest.raises(ValueError, match=r"multiples of 128, not 256 x 64"):
        grouped_matmul(x.reshape(-1, K), w[:, :, :64], TILES, "interpret")


@pytest.mark.parametrize(
    "rows, groups, kernel, expected",
    [(81_920, 32, "pallas", 512), (20_480, 32, "pallas", 128), (64, 16, "pallas", 128), (64, 16, "xla", 8)],
)
def test_tiles_fit_the_groups(rows, groups, kernel, expected):
    assert tile_rows(rows, groups, kernel) == expected
