"""What a chunk of the gated delta rule is made of, inside the TPU kernels: decays, the triangular inverse, products.

Letters: C chunk length (tokens i, j), K key dim, V value dim. Everything here is one head's [C, C] or [C, X] matrix in
VMEM; formulas: app/ops/README.md. Where many heads are worked on, callers go through them stage by stage: the chain of
one head's small products is latency, other heads fill it.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import tpu as pltpu

# The inverse starts from blocks of so many tokens, each solved by forward substitution in the vector unit.
LEAF = 8

NT = (((1,), (1,)), ((), ()))  # x y^T
NN = (((1,), (0,)), ((), ()))  # x y
TN = (((0,), (0,)), ((), ()))  # x^T y


def dot(x: jax.Array, y: jax.Array, dims: Any = NN) -> jax.Array:
    """A product with float32 accumulation: full precision for float32 operands, one pass for bfloat16 ones."""
    precision = lax.Precision.HIGHEST if x.dtype == jnp.float32 else lax.Precision.DEFAULT
    return lax.dot_general(x, y, dims, precision=precision, preferred_element_type=jnp.float32)


def halves(x: jax.Array) -> tuple[jax.Array, jax.Array]:
    """float32 x as a part that bfloat16 holds and the rest, both float32.

    Rounded by arithmetic on the bits: a conversion there and back is more instructions.
    """
    bits = lax.bitcast_convert_type(x, jnp.int32)
    high = lax.bitcast_convert_type((bits + 0x8000) & -0x10000, jnp.float32)
    return high, x - high


def iota(shape: tuple[int, ...], dim: int) -> jax.Array:
    return lax.broadcasted_iota(jnp.int32, shape, dim)


def visibility(length: int, document: tuple[jax.Array, jax.Array] | None) -> jax.Array:
    """[C, C]: 0 where token i sees token j (j <= i and no document starts in between), else what takes exp to zero.

    Numbers, not a mask: a mask of this size is spilled and unpacked again for every head.
    """
    seen = iota((length, length), 0) >= iota((length, length), 1)
    if document is not None:
        seen &= document[0] == document[1]
    return jnp.where(seen, 0.0, -1e30)


def pair_decay(coarse: Any, fine: Any, visible: jax.Array) -> jax.Array:
    """[C, C]: decay from after token j to token i, zero where `visibility` says so.

    coarse, fine: the values of a chunk's tokens as a (column [C, 1], row [1, C]). coarse + fine is the running sum of
    the log decays; differences of coarse are exact and fine is small (`split_sums`), so that nothing small is lost next
    to something large.
    """
    return jnp.exp((coarse[0] - coarse[1]) + (fine[0] - fine[1]) + visible)


def unit_lower_inverses(lowers: list[jax.Array], dtype: jax.typing.DTypeLike) -> list[jax.Array]:
    """(I + L)^-1 of strictly lower triangular L [C, C] float32, of which only what is below the diagonal is read.

    Diagonal blocks of LEAF tokens by forward substitution, then the ladder X21 = -X22 L21 X11 over b = LEAF, 2 LEAF,
    ..: no power of L is ever formed. The blocks of a level stand side by side, [b, C], so that a product takes b rows
    of the matrix unit for all blocks, not C. All matrices advance together; products are as precise as `dtype` asks.
    """
    blocks = _leaf_inverses([_diagonal(x) for x in lowers])
    size, length = LEAF, len(lowers[0])
    while size < length:
        even = lax.rem(_block((size, length), size), 2) == 0
        corners = [_corner(x, size) for x in lowers]
        corners = [_block_dot(x, y, 0, dtype) for x, y in zip(corners, blocks, strict=True)]
        corners = [_block_dot(x, y, 1, dtype) for x, y in zip(blocks, corners, strict=True)]
        blocks = [
            jnp.concatenate([jnp.where(even, x, 0.0), jnp.where(even, -corner, x)], 0)
            for x, corner in zip(blocks, corners, strict=True)
        ]
        size *= 2
    return blocks


def _block(shape: tuple[int, ...], size: int) -> jax.Array:
    """The number of the block of `size` columns that a column is in."""
    return lax.div(iota(shape, 1), size)


def _diagonal(x: jax.Array) -> jax.Array:
    """The diagonal blocks of [C, C] without their diagonals, side by side: [LEAF, C]."""
    shape = LEAF, len(x)
    block = _block(shape, LEAF)
    out = x[:LEAF]
    for at in range(1, len(x) // LEAF):
        out = jnp.where(block == at, x[at * LEAF : (at + 1) * LEAF], out)
    return jnp.where(iota(shape, 0) > lax.rem(iota(shape, 1), LEAF), out, 0.0)


def _corner(x: jax.Array, size: int) -> jax.Array:
    """Of every pair of diagonal blocks of [C, C] the block below the first: [size, C], zero under the second."""
    block = _block((size, len(x)), size)
    out = jnp.zeros((size, len(x)), x.dtype)
    for at in range(1, len(x) // size, 2):
        out = jnp.where(block == at - 1, x[at * size : (at + 1) * size], out)
    return out


def _block_dot(x: jax.Array, y: jax.Array, odd: int, dtype: jax.typing.DTypeLike) -> jax.Array:
    """Products of blocks side by side [b, C]: x_m+odd y_m under the even m, zero under the others.

    For bfloat16 inputs of high and low halves (error about 2^-17): the low one of x takes the place of x's blocks that
    have no part in it.
    """
    length, size = x.shape[1], len(x)
    block = _block(x.shape, size)
    used = lax.rem(block, 2) == odd
    if dtype == jnp.float32:
        return dot(jnp.where(used, x, 0.0), _spread(y, block))
    (high, low), halves_y = halves(x), halves(y)
    x = jnp.where(used, high, pltpu.roll(low, length - size if odd else size, 1)).astype(dtype)
    y_high, y_low = (dot(x, _spread(half, block).astype(dtype)) for half in halves_y)
    return y_high + y_low


def _spread(x: jax.Array, block: jax.Array) -> jax.Array:
    """[C, C]: the even ones m of blocks side by side [b, C] in their columns, in the rows of m and of m + 1."""
    rows = [jnp.where(block == at, x, 0.0) for at in range(0, x.shape[1] // len(x), 2)]
    return jnp.concatenate([y for row in rows for y in (row, row)], 0)


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
