"""The experts' products: rows with the matrices of their group, the rows lying in tiles of one group each.

Letters: R rows in tiles of T, E groups, K and N the dims of a group's matrix, D width, F hidden.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
from jax import lax

from app.ops.kernels import KernelName
from app.ops.pallas import grouped_matmul as pallas


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Tiles:
    """Of R rows in tiles of `rows` each: the group of every tile, int32, ascending, each group at least once; how many
    tiles at the front are `active` (int32). The rows of the others hold any numbers, and their products are not looked
    at."""

    group: jax.Array
    active: jax.Array
    rows: int = dataclasses.field(metadata={"static": True})


def tile_rows(rows: int, groups: int, kernel: KernelName) -> int:
    """Rows of a tile, a power of two: padding each group to tiles costs at most an eighth more rows on average, and on
    TPUs a tile is at least as long as the matrix unit is wide."""
    fitting = max(rows // (8 * groups), 1)
    return min(max(1 << (fitting.bit_length() - 1), 8 if kernel == "xla" else 128), 512)


def expert_hidden(
    x_RD: jax.Array, gate_EDF: jax.Array, up_EDF: jax.Array, tiles: Tiles, kernel: KernelName
) -> jax.Array:
    """silu(x gate) * (x up) of each row with its tile's matrices, [R,F] in x's dtype, float32 arithmetic."""
    if kernel != "xla":
        return pallas.expert_hidden(x_RD, gate_EDF, up_EDF, tiles.group, tiles.active, kernel == "interpret")

    def hidden(group, x_TD):
        return (jax.nn.silu(_product(x_TD, gate_EDF[group])) * _product(x_TD, up_EDF[group])).astype(x_TD.dtype)

    return _each_tile(hidden, tiles, x_RD)


def expert_hidden_backward(
    x_RD: jax.Array,
    grad_RD: jax.Array,
    weight_R: jax.Array,
    gate_EDF: jax.Array,
    up_EDF: jax.Array,
    down_EFD: jax.Array,
    tiles: Tiles,
    kernel: KernelName,
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
    """Of weight * (hidden down), weight [R] float32: gradients of x gate and of x up, weight * hidden, all [R,F] in x's
    dtype, and the gradient of the weight [R] float32, which is <hidden, down grad>: no result of `down` is needed."""
    if kernel != "xla":
        return pallas.expert_hidden_backward(
            x_RD, grad_RD, weight_R, gate_EDF, up_EDF, down_EFD, tiles.group, tiles.active, kernel == "interpret"
        )

    def backward(group, x_TD, grad_TD, weight_T):
        def hidden(gate_TF, up_TF):
            return jax.nn.silu(gate_TF) * up_TF

        hidden_TF, pull = jax.vjp(hidden, _product(x_TD, gate_EDF[group]), _product(x_TD, up_EDF[group]))
        back_TF, weight_T1 = _product(grad_TD, down_EFD[group].T), weight_T[:, None]
        found = (*pull(back_TF * weight_T1), hidden_TF * weight_T1)
        return *(z.astype(x_TD.dtype) for z in found), jnp.sum(hidden_TF * back_TF, axis=1)

    return _each_tile(backward, tiles, x_RD, grad_RD, weight_R)


def grouped_matmul(x_RK: jax.Array, w_EKN: jax.Array, tiles: Tiles, kernel: KernelName) -> jax.Array:
    """x w of each row with its tile's matrix, [R,N] in x's dtype, accumulated in float32."""
    if kernel != "xla":
        return pallas.grouped_matmul([x_RK], [w_EKN], tiles.group, tiles.active, False, kernel == "interpret")
    return _each_tile(lambda group, x_TK: _product(x_TK, w_EKN[group]).astype(x_TK.dtype), tiles, x_RK)


def grouped_matmul_transposed(
    xs: Sequence[jax.Array], matrices: Sequence[jax.Array], tiles: Tiles, kernel: KernelName
) -> jax.Array:
    """Sum of x w^T over pairs of x [R,N] and w [E,K,N], each row with its tile's matrix: [R,K] in x's dtype, a sum in
    float32."""
    if kernel != "xla":
        return pallas.grouped_matmul(xs, matrices, tiles.group, tiles.active, True, kernel == "interpret")

    def product(group, *xs_TN):
        products = [_product(x, w[group].T) for x, w in zip(xs_TN, matrices, strict=True)]
        return functools.reduce(jnp.add, products).astype(xs[0].dtype)

    return _each_tile(product, tiles, *xs)


def grouped_outer(
    x_RK: jax.Array,
    ys: Sequence[jax.Array],
    sums: Sequence[jax.Array],
    is_first: jax.Array,
    tiles: Tiles,
    kernel: KernelName,
) -> list[jax.Array]:
    """Of each y [R,N]: sum (float32; anything where `is_first`) + x^T y over the rows of each group, [E,K,N]."""
    if kernel != "xla":
        group, active = tiles.group, tiles.active
        return pallas.grouped_outer(x_RK, ys, sums, is_first, group, active, kernel == "interpret")

    def add(totals, tile):
        group, x, *ys = tile
        return [total.at[group].add(_product(x.T, y)) for total, y in zip(totals, ys, strict=True)], None

    start = [jnp.where(is_first, 0.0, before) for before in sums]
    return lax.scan(add, start, (tiles.group, *(_tiled(z, tiles) for z in (x_RK, *ys))))[0]


def _product(x: jax.Array, w: jax.Array) -> jax.Array:
    return jnp.einsum("tk,kn->tn", x, w, preferred_element_type=jnp.float32)


def _tiled(z: jax.Array, tiles: Tiles) -> jax.Array:
    return z.reshape(-1, tiles.rows, *z.shape[1:])


def _each_tile(function: Callable, tiles: Tiles, *rows: jax.Array):
    """function(group, tile of each of `rows`), the tiles of each result put together."""
    out = lax.map(lambda tile: function(*tile), (tiles.group, *(_tiled(z, tiles) for z in rows)))
    return jax.tree.map(lambda z: z.reshape(-1, *z.shape[2:]), out)
