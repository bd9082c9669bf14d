"""The gated delta rule over a time axis that may be sharded over ranks.

Letters: B batch, T time (this rank's part), H value heads, G key heads (H = G R), K key dim, V value dim, C chunk length,
N chunks of a block, P ranks along the sequence.

    state_t = e^{g_t} (I - beta_t k_t k_t^T) state_{t-1} + beta_t k_t v_t^T,      out_t = scale state_t^T q_t

Chunks are worked on in matrix form, blocks of chunks one after the other, and ranks exchange one affine map per head
(64 KB and a state), whatever the length of the sequence. Mathematics, costs and measurements: app/ops/README.md.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.ad_checkpoint import checkpoint_name

from app.ops.affine_scan import AffineMap, AxisName, axis_size, exclusive_scan, matmul, neighbour_permute
from app.ops.gdn_block import BlockGradients, backward_block, forward_block
from app.ops.gdn_chunk import BlockInputs, Blocks, dot, plan_blocks


@dataclasses.dataclass(frozen=True)
class _Static:
    axis: AxisName
    blocks: Blocks
    repeats: int
    scale: float
    final: bool
    ranks: int


def gated_delta_rule(q, k, v, g, beta, *, segment_ids=None, initial_state=None, axis_name=None, chunk_size=64, scale=None, return_final_state=False):
    B, T, G, K = q.shape
    H, V = v.shape[2:]
    st = _Static(axis_name, plan_blocks(T, B * G, chunk_size), H // G, K**-0.5 if scale is None else scale, return_final_state, axis_size(axis_name))
    out, final = _rule(st, q, k, v, g, beta, segment_ids, initial_state)
    return (out, final) if return_final_state else out


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _rule(st, q, k, v, g, beta, segment_ids, initial_state):
    return _fwd(st, q, k, v, g, beta, segment_ids, initial_state)[0]


def _block(st: _Static, x: jax.Array, i) -> jax.Array:
    """[B, padded T, ...] -> block i, [N, B, C, ...]."""
    b = st.blocks
    x = lax.dynamic_slice_in_dim(x, i * b.tokens, b.tokens, axis=1)
    return jnp.moveaxis(x.reshape(x.shape[0], b.chunks, b.chunk, *x.shape[2:]), 0, 1)


def _value_block(st, x, i):
    """[B, T, H, V] -> [N,B,G,R,C,V]"""
    x = _block(st, x, i)
    x = x.reshape(*x.shape[:3], x.shape[3] // st.repeats, st.repeats, x.shape[4])
    return jnp.moveaxis(x, 2, 4)


def _gate_block(st, x, i):
    """[B,T,H] -> [R,C,Z]"""
    x = _block(st, x, i).astype(jnp.float32)
    n, b, c, h = x.shape
    x = x.reshape(n, b, c, h // st.repeats, st.repeats).transpose(4, 2, 0, 1, 3)
    return x.reshape(st.repeats, c, -1)


def _inputs(st, q, k, v, g, beta, document, i):
    doc = entry = None
    if document is not None:
        d = _block(st, document, i)  # [N,B,C]
        G = q.shape[2]
        first = jnp.where(i == 0, 0, lax.dynamic_slice_in_dim(document, jnp.maximum(i * st.blocks.tokens - 1, 0), 1, axis=1))
        e = jnp.concatenate([first.T, d[:-1, :, -1]], 0)
        doc = jnp.broadcast_to(jnp.moveaxis(d, 2, 0)[..., None], (d.shape[2], *d.shape[:2], G)).reshape(d.shape[2], -1)
        entry = jnp.broadcast_to(e[..., None], (*e.shape, G)).reshape(-1)
    return BlockInputs(
        jnp.moveaxis(_block(st, q, i), 2, 3), jnp.moveaxis(_block(st, k, i), 2, 3), _value_block(st, v, i),
        _gate_block(st, g, i), _gate_block(st, beta, i), doc, entry,
    )


def _pad(st, x, mode="constant"):
    extra = st.blocks.padded - x.shape[1]
    return jnp.pad(x, [(0, 0), (0, extra)] + [(0, 0)] * (x.ndim - 2), mode=mode) if extra else x


def _documents(st, segment_ids):
    if segment_ids is None:
        return None
    prev = segment_ids[:, :1]
    if st.ranks > 1:
        before = neighbour_permute(segment_ids[:, -1:], st.axis, 1)
        prev = jnp.where(lax.axis_index(st.axis) == 0, prev, before)
    starts = segment_ids != jnp.concatenate([prev, segment_ids[:, :-1]], axis=1)
    return _pad(st, jnp.cumsum(starts.astype(jnp.int32), axis=1), "edge")


def _fwd(st, q, k, v, g, beta, segment_ids, initial_state):
    B, T, G, K = q.shape
    V, R = v.shape[3], st.repeats
    document = _documents(st, segment_ids)
    padded = [_pad(st, x) for x in (q, k, v, g, beta)]
    nb, shape = st.blocks.blocks, (B, G, R, K, V)
    initial = jnp.zeros(shape, jnp.float32) if initial_state is None else initial_state.reshape(shape)
    state = initial
    if st.ranks > 1:
        state = jnp.concatenate([jnp.zeros(shape, jnp.float32), jnp.broadcast_to(jnp.eye(K, dtype=jnp.float32), (B, G, R, K, K))], -1)

    def body(i, s):
        state, states, out, inv = s
        states = lax.dynamic_update_index_in_dim(states, state, i, 0)
        state, o, x = forward_block(state, _inputs(st, *padded, document, i), st.scale)
        return state, states, lax.dynamic_update_index_in_dim(out, o, i, 0), lax.dynamic_update_index_in_dim(inv, x, i, 0)

    b = st.blocks
    Z = b.chunks * B * G
    bufs = (
        lax.empty((nb, *state.shape), jnp.float32),
        lax.empty((nb, b.chunks, B, G, R, b.chunk, state.shape[-1]), v.dtype),
        lax.empty((nb, R, b.chunk, b.chunk, Z), v.dtype),
    )
    state, states, out, inv = lax.fori_loop(0, nb, body, (state, *bufs))
    transition = query_map = None
    if st.ranks > 1:
        local = AffineMap(state[..., V:], state[..., :V])
        entry = exclusive_scan(local, st.axis, None if initial_state is None else initial)
        query_map = out[..., V:]
        out = (out[..., :V].astype(jnp.float32) + dot("anbgrck,bgrkv->anbgrcv", query_map, entry.astype(v.dtype))).astype(v.dtype)
        states = states[..., :V] + matmul(states[..., V:], jnp.broadcast_to(entry, (nb, *entry.shape)))
        transition = local.transition
        state = matmul(transition, entry) + local.bias
    out = jnp.moveaxis(out, (2, 0, 1, 5), (0, 1, 2, 3)).reshape(B, b.padded, G * R, V)[:, :T]
    final = None
    if st.final:
        final = state
        if st.ranks > 1:
            final = lax.psum(jnp.where(lax.axis_index(st.axis) == st.ranks - 1, state, 0.0), st.axis)
        final = final.reshape(B, G * R, K, V)
    return (out, final), (q, k, v, g, beta, document, states, inv, transition, query_map, initial_state is not None)


def _bwd(st, res, cts):
    q, k, v, g, beta, document, states, inv, transition, query_map, has_initial = res
    dout, dfinal = cts
    B, T, G, K = q.shape
    V, R, b = v.shape[3], st.repeats, st.blocks
    padded = [_pad(st, x) for x in (q, k, v, g, beta)]
    dout = _pad(st, dout)
    shape = (B, G, R, K, V)
    dfinal = jnp.zeros(shape, jnp.float32) if dfinal is None else dfinal.reshape(shape)
    if st.ranks > 1:
        if st.final:
            dfinal = lax.psum(dfinal, st.axis)
        d = dout.reshape(B, b.blocks, b.chunks, b.chunk, G, R, V)
        bias = dot("anbgrck,bancgrv->bgrkv", query_map, d)
        dstate = exclusive_scan(AffineMap(jnp.swapaxes(transition, -1, -2), bias), st.axis, dfinal if st.final else None, reverse=True)
    else:
        dstate = dfinal

    def body(j, s):
        dstate, grads = s
        i = b.blocks - 1 - j
        dstate, gr = backward_block(dstate, states[i], inv[i], _inputs(st, *padded, document, i), _value_block(st, dout, i), st.scale)
        dq, dk = (jnp.moveaxis(x, (1, 0, 3), (0, 1, 2)).reshape(B, b.tokens, G, K) for x in (gr.dq, gr.dk))
        dv = jnp.moveaxis(gr.dv, (1, 0, 4), (0, 1, 2)).reshape(B, b.tokens, G * R, V)
        dg, db = (x.reshape(R, b.chunk, b.chunks, B, G).transpose(3, 2, 1, 4, 0).reshape(B, b.tokens, G * R) for x in (gr.dg, gr.dbeta))
        return dstate, tuple(lax.dynamic_update_slice_in_dim(a, x.astype(a.dtype), i * b.tokens, 1) for a, x in zip(grads, (dq, dk, dv, dg, db)))

    dstate, grads = lax.fori_loop(0, b.blocks, body, (dstate, tuple(lax.empty(x.shape, x.dtype) for x in padded)))
    grads = tuple(x[:, :T] for x in grads)
    dseg = None if document is None else np.zeros((B, T), jax.dtypes.float0)
    dinit = None
    if has_initial:
        if st.ranks > 1:
            dstate = jnp.where(lax.axis_index(st.axis) == 0, dstate, 0.0)
        dinit = dstate.reshape(B, G * R, K, V)
    return (*grads, dseg, dinit)


_rule.defvjp(_fwd, _bwd)
