"""Chunk factors of the gated delta rule: everything inside a chunk that does not depend on the state entering it.

Letters and layouts: app/ops/gdn_layout.py. Decays, masks and the triangular inverse are worked out in the lane layout:
elementwise over many chunks at once, dense, and exact in float32. Formulas: app/ops/README.md.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from app.ops.gdn_layout import BlockDocuments, BlockInputs, from_lanes, to_lanes

# Keeps XLA from fusing unrelated products and their many reductions into one fusion whose operands no longer fit the
# vector memory (on v5p the whole rule costs a fifth more without).
separate = lax.optimization_barrier


class Decay(NamedTuple):
    """Decays inside a chunk, lane layout, float32; zero wherever a document starts in between.

    pair [R,C,C,Z]: from after token j to token i, for i >= j (zero above the diagonal);
    head [R,C,Z]: from the chunk's start to token i; tail [R,C,Z]: from after token j to the chunk's end.
    """

    pair: jax.Array
    head: jax.Array
    tail: jax.Array


class Scores(NamedTuple):
    """Lane layout, float32: k k^T and q k^T [C,C,Z] (not scaled), and the decays."""

    kk: jax.Array
    qk: jax.Array
    decay: Decay


class Operands(NamedTuple):
    """What meets the state, matrix layout: u [N,B,G,R,C,V], w, q_head, k_tail [..,C,K], att [..,C,C], carry [..,1,1].

    u = inverse (beta v), w = inverse (beta head k), q_head = scale head q, k_tail = tail k, att = scale q k^T pair;
    carry (float32, the others in the inputs' dtype) is the decay over the whole chunk.
    """

    u: jax.Array
    w: jax.Array
    q_head: jax.Array
    k_tail: jax.Array
    att: jax.Array
    carry: jax.Array


def dot(equation: str, a: jax.Array, b: jax.Array) -> jax.Array:
    """einsum with float32 accumulation: full precision for float32 operands, one pass for bfloat16 ones."""
    precision = lax.Precision.HIGHEST if a.dtype == jnp.float32 else None
    return jnp.einsum(equation, a, b, precision=precision, preferred_element_type=jnp.float32)


def chunk_scores(x: BlockInputs) -> Scores:
    """Products of keys and queries, and decays, of a block's chunks."""
    decay = pairwise_decay(x.g)
    if x.documents is not None:
        decay = mask_documents(decay, x.documents)
    kk = to_lanes(dot("nbgik,nbgjk->nbgij", x.k, x.k))
    qk = to_lanes(dot("nbgik,nbgjk->nbgij", x.q, x.k))
    return separate(Scores(kk, qk, decay))


def chunk_inverse(x: BlockInputs, scores: Scores) -> jax.Array:
    """(I + L)^-1 [R,C,C,Z] float32, L_ij = beta_i (k_i . k_j) pair_ij for i > j."""
    return unit_lower_inverse(strictly_lower(x.beta[:, :, None] * scores.kk[None] * scores.decay.pair))


def chunk_operands(x: BlockInputs, scores: Scores, inverse: jax.Array, scale: float) -> Operands:
    """The operands of the walk; inverse [R,C,C,Z] float32."""
    batch, dtype, decay = x.k.shape[:3], x.k.dtype, scores.decay
    head, tail = from_lanes(decay.head, batch), from_lanes(decay.tail, batch)
    # Scaling the columns of the inverse instead of v and k: no scaled copy of either exists, and k stays per key head.
    inverse_u = from_lanes(inverse * x.beta[:, None], batch).astype(dtype)
    inverse_w = from_lanes(inverse * (x.beta * decay.head)[:, None], batch).astype(dtype)
    return Operands(
        u=dot("nbgrij,nbgrjv->nbgriv", inverse_u, x.v).astype(dtype),
        w=dot("nbgrij,nbgjk->nbgrik", inverse_w, x.k).astype(dtype),
        q_head=_scale_rows(x.q, head * scale).astype(dtype),
        k_tail=_scale_rows(x.k, tail).astype(dtype),
        att=from_lanes(scores.qk[None] * decay.pair * scale, batch).astype(dtype),
        carry=head[..., -1:, None],
    )


def _scale_rows(x: jax.Array, rows: jax.Array) -> jax.Array:
    """x [N,B,G,C,K] times rows [N,B,G,R,C] -> float32 [N,B,G,R,C,K]."""
    return x.astype(jnp.float32)[:, :, :, None] * rows[..., None]


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
        pair = pair.reshape(*halves, size, lanes)
        head, tail = head.reshape(*halves, lanes), tail.reshape(*halves, lanes)
        across = jnp.exp(head[:, :, 1])[:, :, :, None] * jnp.exp(tail[:, :, 0])[:, :, None]
        pair = _block_lower(pair[:, :, 0], across, pair[:, :, 1])
        left, right = head[:, :, 0, -1:], head[:, :, 1, -1:]
        head = jnp.concatenate([head[:, :, 0], head[:, :, 1] + left], axis=2)
        tail = jnp.concatenate([tail[:, :, 0] + right, tail[:, :, 1]], axis=2)
        size *= 2
    return Decay(pair[:, 0], jnp.exp(head[:, 0]), jnp.exp(tail[:, 0]))


def mask_documents(decay: Decay, documents: BlockDocuments) -> Decay:
    """A decay across a document start is zero (a mask: never g = -inf)."""
    count = documents.count
    same = count[:, None] == count[None]
    from_entry = count == documents.entry[None]
    to_end = count == count[-1:]
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
