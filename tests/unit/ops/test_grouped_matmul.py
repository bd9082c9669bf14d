"""Grouped products against a loop over tiles, by the XLA form and by the TPU kernels (interpreted on a CPU). The
experts' arithmetic between the products: test_experts.py."""

import jax.numpy as jnp
import numpy as np
import pytest

from app.ops.grouped_matmul import Tiles, grouped_matmul, grouped_matmul_transposed, grouped_outer, tile_rows

E, K, N, ROWS = 3, 256, 128, 8
GROUP, ACTIVE = np.array([0, 0, 1, 2, 2, 2], np.int32), 4  # two tiles at the end are free
TILES = Tiles(jnp.asarray(GROUP), jnp.int32(ACTIVE), ROWS)


def arrays():
    rng = np.random.default_rng(0)
    shapes = (len(GROUP), ROWS, K), (len(GROUP), ROWS, N), (len(GROUP), ROWS, N), (E, K, N), (E, K, N)
    x, *rest = (rng.normal(size=shape).astype(np.float32) for shape in shapes)
    x[ACTIVE:] = 0  # of the free tiles the outer product of the XLA form needs zeros on one side
    return x, *rest


def assert_close(got, want):
    np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize("kernel", ["xla", "interpret"])
def test_products_of_each_tile(kernel):
    x, y, z, w, v = arrays()
    flat_x, flat_y, flat_z = x.reshape(-1, K), y.reshape(-1, N), z.reshape(-1, N)
    forward = grouped_matmul(flat_x, jnp.asarray(w), TILES, kernel)
    back = grouped_matmul_transposed((flat_y, flat_z), (jnp.asarray(w), jnp.asarray(v)), TILES, kernel)
    for tile, group in enumerate(GROUP[:ACTIVE]):
        assert_close(np.asarray(forward).reshape(y.shape)[tile], x[tile] @ w[group])
        assert_close(np.asarray(back).reshape(x.shape)[tile], y[tile] @ w[group].T + z[tile] @ v[group].T)


@pytest.mark.parametrize("kernel", ["xla", "interpret"])
@pytest.mark.parametrize("is_first", [True, False])
def test_outer_products_add_up_in_place(kernel, is_first):
    """In the first round whatever lies in the memory of the sum is not looked at."""
    x, y, z, w, v = arrays()
    sums = [jnp.asarray(before) * (jnp.nan if is_first else 1) for before in (w, v)]
    flat_x, flat_ys = x.reshape(-1, K), (y.reshape(-1, N), z.reshape(-1, N))
    found = grouped_outer(flat_x, flat_ys, sums, jnp.bool_(is_first), TILES, kernel)
    for sum_, rows, before in zip(found, (y, z), (w, v), strict=True):
        for group in range(E):
            added = sum(x[tile].T @ rows[tile] for tile in range(ACTIVE) if GROUP[tile] == group)
            assert_close(sum_[group], added if is_first else before[group] + added)


def test_sides_that_are_no_multiples_of_128_are_refused():
    x, _, _, w, _ = arrays()
    with pytest.raises(ValueError, match=r"multiples of 128, not 256 x 64"):
        grouped_matmul(x.reshape(-1, K), w[:, :, :64], TILES, "interpret")


@pytest.mark.parametrize(
    "rows, groups, kernel, expected",
    [(81_920, 32, "pallas", 256), (20_480, 32, "pallas", 128), (64, 16, "pallas", 128), (64, 16, "xla", 8)],
)
def test_tiles_fit_the_groups(rows, groups, kernel, expected):
    assert tile_rows(rows, groups, kernel) == expected
