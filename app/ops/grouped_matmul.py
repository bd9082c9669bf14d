"""Matrix products of rows with the matrix of their group, the rows lying in tiles of one group each.

Letters: R rows, E groups, K and N the dims of a group's matrix.
"""

import dataclasses
from typing import Literal

import jax
import jax.numpy as jnp
from jax import lax

from app.ops.pallas import grouped_matmul as pallas

KernelName = Literal["xla", "pallas", "interpret"]  # "interpret": the pallas kernel on any platform, slowly


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Tiles:
    """Of R rows in tiles of `rows` each: the group of every tile, int32, ascending, each group at least once; how many
    tiles at the front are `active` (int32). The rows of the others hold any finite numbers, and their products are
    not looked at."""

    group: jax.Array
    active: jax.Array
    rows: int = dataclasses.field(metadata={"static": True})


def resolve_kernel(platform: str) -> KernelName:
    """The kernel for a platform ("tpu", "cpu", "gpu")."""
    return "pallas" if platform == "tpu" else "xla"


def tile_rows(rows: int, groups: int, kernel: KernelName) -> int:
    """Rows of a tile, a power of two: padding each group to tiles costs at most a quarter more rows on average, and on
    TPUs a tile is at least as long as the matrix unit is wide."""
    fitting = max(rows // (4 * groups), 1)
    return min(max(1 << (fitting.bit_length() - 1), 8 if kernel == "xla" else 128), 512)


def grouped_matmul(x_RK: jax.Array, w_EKN: jax.Array, tiles: Tiles, kernel: KernelName) -> jax.Array:
    """x w of each row with its tile's matrix, [R,N] in x's dtype, accumulated in float32."""
    if kernel != "xla":
        return pallas.grouped_matmul(x_RK, w_EKN, tiles.group, tiles.active, False, kernel == "interpret")
    return _each_tile("tk,kn->tn", x_RK, w_EKN, tiles)


def grouped_matmul_transposed(x_RN: jax.Array, w_EKN: jax.Array, tiles: Tiles, kernel: KernelName) -> jax.Array:
    """x w^T of each row with its tile's matrix, [R,K] in x's dtype, accumulated in float32."""
    if kernel != "xla":
        return pallas.grouped_matmul(x_RN, w_EKN, tiles.group, tiles.active, True, kernel == "interpret")
    return _each_tile("tn,kn->tk", x_RN, w_EKN, tiles)


def grouped_outer(x_RK: jax.Array, y_RN: jax.Array, groups: int, tiles: Tiles, kernel: KernelName) -> jax.Array:
    """x^T y over the rows of each group, [E,K,N] float32."""
    if kernel != "xla":
        return pallas.grouped_outer(x_RK, y_RN, groups, tiles.group, tiles.active, kernel == "interpret")

    def add(total_EKN, tile):
        group, x, y = tile
        return total_EKN.at[group].add(jnp.einsum("tk,tn->kn", x, y, preferred_element_type=jnp.float32)), None

    start = jnp.zeros((groups, x_RK.shape[1], y_RN.shape[1]), jnp.float32)
    x, y = (z.reshape(-1, tiles.rows, z.shape[1]) for z in (x_RK, y_RN))
    return lax.scan(add, start, (tiles.group, x, y))[0]


def _each_tile(formula, x, w, tiles):
    def product(tile):
        group, rows = tile
        return jnp.einsum(formula, rows, w[group], preferred_element_type=jnp.float32).astype(x.dtype)

    out = lax.map(product, (tiles.group, x.reshape(-1, tiles.rows, x.shape[1])))
    return out.reshape(x.shape[0], -1)
