"""What a chunk of the gated delta rule is made of, inside the TPU kernels: decays, the triangular inverse, products.

Letters: C chunk length (tokens i, j), K key dim, V value dim. Everything here is one head's [C, C] or [C, X] matrix in
VMEM; formulas: app/ops/README.md. Where many heads are worked on, callers go through them stage by stage: the chain of
one head's small products is latency, other heads fill it.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

# The inverse starts from blocks of so many tokens, each solved by forward substitution in the vector unit.
LEAF = 16

NT = (((1,), (1,)), ((), ()))  # x y^T
NN = (((1,), (0,)), ((), ()))  # x y
TN = (((0,), (0,)), ((), ()))  # x^T y


def dot(x: jax.Array, y: jax.Array, dims: Any = NN) -> jax.Array:
    """A product with float32 accumulation: full precision for float32 operands, one pass for bfloat16 ones."""
    precision = lax.Precision.HIGHEST if x.dtype == jnp.float32 else lax.Precision.DEFAULT
    return lax.dot_general(x, y, dims, precision=precision, preferred_element_type=jnp.float32)


def split_dot(x: jax.Array, y: jax.Array, dtype: jax.typing.DTypeLike) -> jax.Array:
    """x y of float32 matrices; for bfloat16 inputs in three passes over high and low halves (error about 2^-16)."""
    if dtype == jnp.float32:
        return dot(x, y)
    x_high, y_high = x.astype(jnp.bfloat16), y.astype(jnp.bfloat16)
    x_low = (x - x_high.astype(jnp.float32)).astype(jnp.bfloat16)
    y_low = (y - y_high.astype(jnp.float32)).astype(jnp.bfloat16)
    both = dot(jnp.concatenate([x_high, x_low], 0), y_high)
    return both[: len(x)] + (both[len(x) :] + dot(x_high, y_low))


def iota(shape: tuple[int, ...], dim: int) -> jax.Array:
    return lax.broadcasted_iota(jnp.int32, shape, dim)


def pair_decay(coarse: Any, fine: Any, document: Any | None) -> jax.Array:
    """[C, C]: decay from after token j to token i, zero for j > i and across a document start.

    Each argument: the values of a chunk's tokens as a (column [C, 1], row [1, C]). coarse + fine is the running sum of
    the log decays; differences of coarse are exact and fine is small (`split_sums`), so that nothing small is lost next
    to something large.
    """
    length = coarse[1].shape[1]
    seen = iota((length, length), 0) >= iota((length, length), 1)
    if document is not None:
        seen &= document[0] == document[1]
    exponent = (coarse[0] - coarse[1]) + (fine[0] - fine[1])
    return jnp.exp(jnp.where(seen, exponent, -1e30))


def unit_lower_inverses(lowers: list[jax.Array], dtype: jax.typing.DTypeLike) -> list[jax.Array]:
    """(I + L)^-1 of strictly lower triangular L [C, C] float32; products as precise as `dtype` asks.

    Diagonal blocks of LEAF tokens by forward substitution, then the ladder X21 = -X22 L21 X11 over b = LEAF, 2 LEAF,
    ..: no power of L is ever formed. All matrices advance together.
    """
    length = len(lowers[0])
    inverses = [_expand(x) for x in _leaf_inverses([_compress(x) for x in lowers])]
    size = LEAF
    while size < length:
        block, other = (lax.div(iota((length, length), dim), size) for dim in (0, 1))
        corner = (other == block - 1) & (lax.rem(block, 2) == 1)
        corners = [_odd(jnp.where(corner, x, 0.0), size) for x in lowers]
        corners = [split_dot(x, inverse, dtype) for x, inverse in zip(corners, inverses, strict=True)]
        corners = [
            split_dot(_odd(inverse, size), _at_odd(x, size), dtype)
            for x, inverse in zip(corners, inverses, strict=True)
        ]
        inverses = [inverse - _at_odd(x, size) for x, inverse in zip(corners, inverses, strict=True)]
        size *= 2
    return inverses


def _odd(x: jax.Array, size: int) -> jax.Array:
    """The rows of every second block of `size` rows."""
    return jnp.concatenate([x[at : at + size] for at in range(size, len(x), 2 * size)], 0)


def _at_odd(x: jax.Array, size: int) -> jax.Array:
    """Rows put back where `_odd` took them, zeros in between."""
    zeros = jnp.zeros((size, x.shape[1]), x.dtype)
    return jnp.concatenate([y for at in range(0, len(x), size) for y in (zeros, x[at : at + size])], 0)


def _compress(x: jax.Array) -> jax.Array:
    """Diagonal blocks of [C, C], side by side: [LEAF, C]."""
    lane = lax.div(iota((LEAF, x.shape[1]), 1), LEAF)
    out = x[:LEAF]
    for block in range(1, len(x) // LEAF):
        out = jnp.where(lane == block, x[block * LEAF : (block + 1) * LEAF], out)
    return out


def _expand(x: jax.Array) -> jax.Array:
    """The inverse of `_compress`, zero outside the blocks."""
    length = x.shape[1]
    inside = lax.div(iota((length, length), 0), LEAF) == lax.div(iota((length, length), 1), LEAF)
    return jnp.where(inside, jnp.concatenate([x] * (length // LEAF), 0), 0.0)


def _leaf_inverses(lowers: list[jax.Array]) -> list[jax.Array]:
    """Forward substitution in all blocks at once: row j is final after j steps and leaves the rows below it."""
    shape = lowers[0].shape
    lane, row = iota(shape, 1), iota(shape, 0)
    place = lax.rem(lane, LEAF)
    inverses = [jnp.where(row == place, 1.0, 0.0)] * len(lowers)
    for j in range(LEAF - 1):
        columns = [jnp.take_along_axis(x, lane - place + j, axis=1) for x in lowers]
        inverses = [x - column * x[j : j + 1] for x, column in zip(inverses, columns, strict=True)]
    return inverses
