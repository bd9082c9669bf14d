"""The gated delta rule by the TPU kernels of app.ops.pallas.gdn: how they are put together, over one rank or many.

Letters: B batch, T time (this rank's part), G key heads, H value heads, K key dim, V value dim, C chunk, N chunks.
The same scheme as app.ops.gdn (which says what is saved for the backward under which name), in two passes: one forward,
on many ranks with the columns [0 | I] beside the state; one backward.
"""

import dataclasses
import functools
import math
from typing import NamedTuple, cast

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from app.ops.affine_scan import AffineMap, SequenceAxis, apply
from app.ops.gdn_layout import Blocks, pad_tokens
from app.ops.gdn_ranks import (
    Exchange,
    arriving_cotangent,
    count_documents,
    entering_state,
    from_last_rank,
)
from app.ops.pallas import gdn as kernels
from app.ops.pallas import gdn_ranks as ranks


@dataclasses.dataclass(frozen=True)
class Fused:
    """What is known while tracing. interpret: run on any platform, slowly."""

    axis: SequenceAxis | None
    scale: float
    has_initial_state: bool
    return_final_state: bool
    tuning: kernels.Tuning
    interpret: bool

    def shape(self, q: jax.Array, v: jax.Array, heads: int, mapped: bool, documents: bool) -> kernels.Shape:
        return kernels.Shape.of(
            q,
            v,
            self.tuning,
            heads=heads,
            mapped=mapped,
            scale=self.scale,
            documents=documents,
            interpret=self.interpret,
        )


class _Residuals(NamedTuple):
    """Padded inputs; states entering the chunks [B,N,H,K,V] and inverses [B,N,H,C,C] in the inputs' dtype."""

    inputs: tuple
    document: jax.Array | None
    states: jax.Array
    inverses: jax.Array
    exchange: Exchange | None


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def fused_rule(static: Fused, q, k, v, g, beta, segment_ids, initial_state):
    """(out, final state or None); q, k, v in the compute dtype, g, beta, initial_state float32."""
    return _forward(static, q, k, v, g, beta, segment_ids, initial_state)[0]


def _forward(static: Fused, q, k, v, g, beta, segment_ids, initial_state):
    axis, (B, T, _, K), (H, V) = static.axis, q.shape, v.shape[2:]
    blocks = Blocks(math.ceil(T / static.tuning.chunk), 1, static.tuning.chunk)
    document = None if segment_ids is None else pad_tokens(count_documents(axis, segment_ids), blocks, "edge")
    inputs = tuple(pad_tokens(x, blocks) for x in (q, k, v, g, beta))
    q, k, v, g, beta = inputs
    mapped, tuning = axis is not None, static.tuning
    heads = tuning.mapped_heads if mapped else tuning.forward_heads
    shape = static.shape(q, v, heads, mapped, document is not None)
    gates = kernels.pack_gates(shape, g, beta, document)
    initial = jnp.zeros((B, H, K, V), jnp.float32) if initial_state is None else initial_state
    if axis is None:
        y = kernels.forward(shape, q, k, v, gates, initial)
        out, states, final, exchange = y.out, y.states, y.final, None
    else:
        # From a zero state, and from the identity beside it; what the entering state adds is linear in it.
        identity = jnp.broadcast_to(jnp.eye(K, dtype=jnp.float32), (B, H, K, K))
        y = kernels.forward(shape, q, k, v, gates, jnp.concatenate([jnp.zeros_like(initial), identity], -1))
        local = AffineMap(checkpoint_name(y.final[..., V:], "gdn_transition"), y.final[..., :V])
        exchange = Exchange(local.transition, checkpoint_name(cast(jax.Array, y.query_map), "gdn_query_map"))
        entry = entering_state(local, axis, initial_state)
        out, states = ranks.add_entering(shape, y._replace(query_map=exchange.query_map), entry)
        final = from_last_rank(axis, apply(local, entry)) if static.return_final_state else None
    states, inverses = checkpoint_name(states, "gdn_chunk_state"), checkpoint_name(y.inverses, "gdn_inverse")
    out = checkpoint_name(out[:, :T], "gdn_out")
    return (out, final if static.return_final_state else None), _Residuals(inputs, document, states, inverses, exchange)


def _backward(static: Fused, residuals: _Residuals, cotangents):
    (q, k, v, g, beta), document, states, inverses, exchange = residuals
    axis, T = static.axis, cotangents[0].shape[1]
    dout = jnp.pad(cotangents[0], [(0, 0), (0, q.shape[1] - T), (0, 0), (0, 0)])
    shape = static.shape(q, v, static.tuning.backward_heads, False, document is not None)
    dstate = cotangents[1] if static.return_final_state else None
    if axis is not None and exchange is not None:
        bias = ranks.entering_cotangent(shape, exchange.query_map, dout)
        dstate = arriving_cotangent(exchange.transition, bias, axis, dstate)
    if dstate is None:
        dstate = jnp.zeros((*states.shape[:1], *states.shape[2:]), jnp.float32)
    gates = kernels.pack_gates(shape, g, beta, document)
    *dx, dgates, dstate = kernels.backward(shape, q, k, v, gates, states, inverses, dout, dstate)
    dx += kernels.gate_gradients(shape, dgates)
    if not static.has_initial_state:
        dstate = None
    elif axis is not None:
        dstate = jnp.where(axis.rank == 0, dstate, 0.0)
    return (*(x[:, :T] for x in dx), None, dstate)


fused_rule.defvjp(_forward, _backward)
