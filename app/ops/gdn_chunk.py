"""Chunk factors of the gated delta rule: everything inside a chunk that does not depend on the state entering it.

Letters: B batch, T time, G key heads, R value heads per key head (H = G R, head h = g R + r), K key dim, V value dim,
C chunk length, N chunks of one block, Z = N B G independent (chunk, row, key head) problems.

Two layouts are used, because a TPU has two kinds of arithmetic:
  matrix layout  [N, B, G, (R,) C, X]: operands of the matrix unit. Key heads carry no R: they are never repeated, the
                 products k k^T and q k^T are formed once per key head.
  lane layout    [(R,) C, C, Z]: the problems lie side by side in the vector lanes and a chunk's matrix is spread over
                 whole registers. Decays, masks and the triangular inverse are elementwise here, dense and exact in
                 float32, whereas products of 64 x 64 matrices leave the matrix unit mostly idle.

Formulas: app/ops/README.md (and section 3 of the design).
"""

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

# Problems a block aims at: enough to fill the vector lanes several times over, few enough that the factors of one
# block stay small against the inputs. A block has at least _MIN_BLOCK_TOKENS, which bounds the saved entry states.
_BLOCK_PROBLEMS = 256
_MIN_BLOCK_TOKENS = 256


class Blocks(NamedTuple):
    """How a rank's tokens are cut: `blocks` blocks of N chunks of C tokens, padded at the end with exact no-ops."""

    blocks: int
    chunks: int
    chunk: int

    @property
    def tokens(self) -> int:
        """Tokens of one block."""
        return self.chunks * self.chunk

    @property
    def padded(self) -> int:
        """Tokens of all blocks."""
        return self.blocks * self.tokens


def plan_blocks(tokens: int, problems_per_chunk: int, chunk: int) -> Blocks:
    """Cut `tokens` (of a rank) into equal blocks; problems_per_chunk = B G."""
    chunks = max(1, math.ceil(tokens / chunk))
    wanted = max(math.ceil(_BLOCK_PROBLEMS / problems_per_chunk), math.ceil(_MIN_BLOCK_TOKENS / chunk))
    blocks = math.ceil(chunks / wanted)
    return Blocks(blocks, math.ceil(chunks / blocks), chunk)


class BlockInputs(NamedTuple):
    """Inputs of one block. Matrix layout: q, k [N,B,G,C,K], v [N,B,G,R,C,V]. Lane layout, float32: g, beta [R,C,Z].

    document: [C, Z] int32, how many document starts lie at or before a token, and entry_document [Z] the same for
    the token before the chunk; None without documents.
    """

    q: jax.Array
    k: jax.Array
    v: jax.Array
    g: jax.Array
    beta: jax.Array
    document: jax.Array | None
    entry_document: jax.Array | None


class Decay(NamedTuple):
    """Decays inside a chunk, lane layout, float32; zero wherever a document starts in between.

    pair [R,C,C,Z]: from after token j to token i, for i >= j (zero above the diagonal);
    head [R,C,Z]: from the chunk's start to token i; tail [R,C,Z]: from after token j to the chunk's end.
    """

    pair: jax.Array
    head: jax.Array
    tail: jax.Array


def dot(equation: str, a: jax.Array, b: jax.Array) -> jax.Array:
    """einsum with float32 accumulation: full precision for float32 operands, one pass for bfloat16 ones."""
    precision = lax.Precision.HIGHEST if a.dtype == jnp.float32 else None
    return jnp.einsum(equation, a, b, precision=precision, preferred_element_type=jnp.float32)


def to_lanes(x: jax.Array) -> jax.Array:
    """Matrix layout [N,B,G,X,Y] -> [X,Y,Z], or [N,B,G,R,X,Y] -> [R,X,Y,Z]."""
    return jnp.moveaxis(x, (0, 1, 2), (-3, -2, -1)).reshape(*x.shape[3:], math.prod(x.shape[:3]))


def from_lanes(x: jax.Array, batch: tuple[int, int, int]) -> jax.Array:
    """Lane layout [X, ..., Z] -> [N,B,G,X, ...] with batch = (N, B, G)."""
    return jnp.moveaxis(x.reshape(*x.shape[:-1], *batch), (-3, -2, -1), (0, 1, 2))


def pairwise_decay(g: jax.Array) -> Decay:
    """exp of the sums of g [R,C,Z] between every two tokens, each sum taken over its own tokens only.

    Differences of one long cumulative sum would lose the small sums next to a large one. Here a pair (i, j) is split
    where the two fall into different halves of a block of 2b tokens: its decay is the product of two factors <= 1, from
    j to the end of the left half and from the start of the right half to i.
    """
    repeats, length, lanes = g.shape
    pair = jnp.ones((repeats, length, 1, 1, lanes), jnp.float32)
    head, tail = g[:, :, None], jnp.zeros((repeats, length, 1, lanes), jnp.float32)  # sums within blocks of 1 token
    size = 1
    while size < length:
        halves = (repeats, length // (2 * size), 2, size)
        pair, head, tail = pair.reshape(*halves, size, lanes), head.reshape(*halves, lanes), tail.reshape(*halves, lanes)
        across = jnp.exp(head[:, :, 1])[:, :, :, None] * jnp.exp(tail[:, :, 0])[:, :, None]
        pair = _block_lower(pair[:, :, 0], across, pair[:, :, 1])
        left, right = head[:, :, 0, -1:], head[:, :, 1, -1:]
        head = jnp.concatenate([head[:, :, 0], head[:, :, 1] + left], axis=2)
        tail = jnp.concatenate([tail[:, :, 0] + right, tail[:, :, 1]], axis=2)
        size *= 2
    return Decay(pair[:, 0], jnp.exp(head[:, 0]), jnp.exp(tail[:, 0]))


def mask_documents(decay: Decay, document: jax.Array, entry_document: jax.Array) -> Decay:
    """A decay across a document start is zero (a mask: never g = -inf)."""
    same = document[:, None] == document[None]
    from_entry = document == entry_document[None]
    to_end = document == document[-1:]
    return Decay(
        jnp.where(same[None], decay.pair, 0.0),
        jnp.where(from_entry[None], decay.head, 0.0),
        jnp.where(to_end[None], decay.tail, 0.0),
    )


def strictly_lower(x: jax.Array) -> jax.Array:
    """Zero on and above the diagonal, lane layout [..., C, C, Z]."""
    length = x.shape[-2]
    mask = np.tril(np.ones((length, length), np.float32), -1)
    return x * mask.reshape((1,) * (x.ndim - 3) + (length, length, 1))


def unit_lower_inverse(lower: jax.Array) -> jax.Array:
    """(I + L)^-1 of strictly lower triangular L [R,C,C,Z], float32, C a power of two.

    Block ladder: the inverse of a block of 2b tokens from those of its halves, X21 = -X22 L21 X11, for b = 1, 2, 4, ...
    No power of L is ever formed (repeated squaring overflows on trained layers, whose L has norms near 40).
    """
    repeats, length, _, lanes = lower.shape
    inverse = jnp.ones((repeats, length, 1, 1, lanes), jnp.float32)
    size = 1
    while size < length:
        count = length // (2 * size)
        inverse = inverse.reshape(repeats, count, 2, size, size, lanes)
        first, second = inverse[:, :, 0], inverse[:, :, 1]
        corner = jnp.stack(
            [lower[:, b + size : b + 2 * size, b : b + size] for b in range(0, length, 2 * size)], axis=1
        )
        if size > 1:
            corner = _lane_matmul(second, _lane_matmul(corner, first))
        inverse = _block_lower(first, -corner, second)
        size *= 2
    return inverse[:, 0]


def _lane_matmul(a: jax.Array, b: jax.Array) -> jax.Array:
    """[..., I, J, Z] x [..., J, K, Z] -> [..., I, K, Z], elementwise over the lanes."""
    return jnp.sum(a[..., :, :, None, :] * b[..., None, :, :, :], axis=-3)


def _block_lower(top_left: jax.Array, bottom_left: jax.Array, bottom_right: jax.Array) -> jax.Array:
    """[[A, 0], [B, D]] over dims -3 and -2."""
    top = jnp.concatenate([top_left, jnp.zeros_like(bottom_left)], axis=-2)
    bottom = jnp.concatenate([bottom_left, bottom_right], axis=-2)
    return jnp.concatenate([top, bottom], axis=-3)
