"""Contiguous order of the tokens over the ranks <-> zigzag order, in which causal attention is balanced.

Letters: P ranks. The sequence is 2P half-blocks in order. Contiguous: rank r holds half-blocks 2r and 2r+1. Zigzag: it
holds r and 2P-1-r, one of the first half of the sequence and its mirror image, so that every rank has as many
(query, key) pairs: (r + 1) + (2P - r) half-blocks of keys.

Half-blocks 2r of all ranks move with one ppermute and half-blocks 2r+1 with another: each is a bijection of the ranks
for every P, since of the half-blocks r and 2P-1-r exactly one is even. Its parity is the rank's.
"""

import jax
import jax.numpy as jnp
from jax import lax

AxisName = str | tuple[str, ...]


def to_zigzag(x: jax.Array, axis_name: AxisName, axis: int = 1) -> jax.Array:
    """This rank's part of `x` in zigzag order, from its contiguous part; `axis` is the dim that holds the tokens.

    Under shard_map. `axis_name`: a mesh axis, or several (the first is the major one). Any dtype, differentiable.
    Raises ValueError if the rank's tokens are not an even number.
    """
    size, rank_is_odd = lax.axis_size(axis_name), lax.axis_index(axis_name) % 2 == 1
    first, second = _halves(x, axis_name, axis)
    even = lax.ppermute(first, axis_name, [(r, zigzag_rank(2 * r, size)) for r in range(size)])
    odd = lax.ppermute(second, axis_name, [(r, zigzag_rank(2 * r + 1, size)) for r in range(size)])
    return _joined(even, odd, rank_is_odd, axis)


def from_zigzag(x: jax.Array, axis_name: AxisName, axis: int = 1) -> jax.Array:
    """The inverse of `to_zigzag`, bit for bit."""
    size, rank_is_odd = lax.axis_size(axis_name), lax.axis_index(axis_name) % 2 == 1
    low, high = _halves(x, axis_name, axis)
    even, odd = jnp.where(rank_is_odd, high, low), jnp.where(rank_is_odd, low, high)
    even = lax.ppermute(even, axis_name, [(zigzag_rank(2 * r, size), r) for r in range(size)])
    odd = lax.ppermute(odd, axis_name, [(zigzag_rank(2 * r + 1, size), r) for r in range(size)])
    return lax.concatenate([even, odd], axis)


def zigzag_rank(half_block: int, num_ranks: int) -> int:
    """The rank that holds a half-block in zigzag order."""
    return min(half_block, 2 * num_ranks - 1 - half_block)


def _halves(x: jax.Array, axis_name: AxisName, axis: int) -> tuple[jax.Array, jax.Array]:
    tokens, size = x.shape[axis], lax.axis_size(axis_name)
    if tokens % 2:
        raise ValueError(
            f"seq_len={tokens * size} over {size} sequence ranks is {tokens} tokens a rank, which cannot be halved: "
            f"zigzag attention needs seq_len % {2 * size} == 0 (2 x mesh.context x mesh.expert)"
        )
    low, high = jnp.split(x, 2, axis)
    return low, high


def _joined(even: jax.Array, odd: jax.Array, swap: jax.Array, axis: int) -> jax.Array:
    low, high = jnp.where(swap, odd, even), jnp.where(swap, even, odd)
    return lax.concatenate([low, high], axis)
