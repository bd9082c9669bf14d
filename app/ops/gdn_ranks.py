"""What the ranks of a sequence exchange for the gated delta rule, whatever works out their part of it.

Letters: B batch, T time (this rank's part), H value heads, K key dim, V value dim.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name

from app.ops.affine_scan import AffineMap, SequenceAxis, exclusive_scan
from app.ops.gdn_chunk import dot


class Exchange(NamedTuple):
    """This rank's transition [B,H,K,K] float32, and query_map [B,T,H,K]: the entering state's part in each output."""

    transition: jax.Array
    query_map: jax.Array


def count_documents(axis: SequenceAxis | None, segment_ids: jax.Array) -> jax.Array:
    """[B,T]: document starts at or before a token of this rank. The very first token continues the initial state."""
    before = segment_ids[:, :1]
    if axis is not None:
        arriving = checkpoint_name(axis.shift(segment_ids[:, -1:], 1), "gdn_border")
        before = jnp.where(axis.rank == 0, before, arriving)
    starts = segment_ids != jnp.concatenate([before, segment_ids[:, :-1]], axis=1)
    return jnp.cumsum(starts.astype(jnp.int32), axis=1)


def entering_state(local: AffineMap, axis: SequenceAxis, initial: jax.Array | None) -> jax.Array:
    """The state [B,H,K,V] float32 entering this rank, from the maps of the ranks before it."""
    return checkpoint_name(exclusive_scan(local, axis, initial_state=initial), "gdn_entry_state")


def add_entering(local_out: jax.Array, query_map: jax.Array, entry: jax.Array) -> jax.Array:
    """Outputs [B,T,H,V] of a rank from those its own tokens cause and the state entering it."""
    added = dot("bthk,bhkv->bthv", query_map, entry.astype(query_map.dtype))
    return (local_out.astype(jnp.float32) + added).astype(local_out.dtype)


def arriving_cotangent(
    transition: jax.Array, bias: jax.Array, axis: SequenceAxis, dfinal: jax.Array | None
) -> jax.Array:
    """Cotangent of the state leaving this rank [B,H,K,V], from the ranks after it.

    The map of cotangents through a rank has the transposed transition, and as its bias what the rank's own outputs
    send to the state entering it: query_map^T dout, since query_map is that state's part in each output. transition
    [B,H,K,K], bias [B,H,K,V]. dfinal is this
    rank's cotangent of the final state: every rank returned the last rank's, their cotangents add up there.
    """
    dfinal = None if dfinal is None else lax.psum(dfinal, axis.names)
    adjoint = AffineMap(jnp.swapaxes(transition, -1, -2), bias)
    return exclusive_scan(adjoint, axis, initial_state=dfinal, reverse=True)


def from_last_rank(axis: SequenceAxis, state: jax.Array) -> jax.Array:
    """The last rank's state, on every rank."""
    return lax.psum(jnp.where(axis.rank == axis.size - 1, state, 0.0), axis.names)
