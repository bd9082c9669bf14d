"""One block of chunks of the gated delta rule: the walk over its chunks forward, and its analytic adjoint.

Letters and layouts: app/ops/gdn_layout.py; derivation: app/ops/README.md. States are float32 [B,G,R,K,V], matrix
operands have the dtype of q, k and v. A kernel would replace forward_block and backward_block.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from app.ops.gdn_chunk import (
    Operands,
    Scores,
    chunk_inverse,
    chunk_operands,
    chunk_scores,
    dot,
    separate,
    strictly_lower,
)
from app.ops.gdn_layout import BlockInputs, from_lanes, stack_at, stack_put, to_lanes


class BlockOutputs(NamedTuple):
    """Of one block, in the inputs' dtype: out [N,B,G,R,C,V], inverse [R,C,C,Z], and query_map [N,B,G,R,C,K] or None.

    query_map takes the state that entered where the transition columns were the identity to what it adds to out.
    """

    out: jax.Array
    inverse: jax.Array
    query_map: jax.Array | None


def forward_block(state: jax.Array, x: BlockInputs, scale: float) -> tuple[jax.Array, BlockOutputs]:
    """Walk over the block's chunks.

    Args:
      state: float32 [B,G,R,K,V] entering the block, or [B,G,R,K,V+K]: the columns beyond V follow the same recurrence
        without writes. Begun as the identity they become the transition of everything walked over.

    Returns:
      the state leaving the block, and its outputs.
    """
    dtype, (chunk, values), columns = x.v.dtype, x.v.shape[-2:], state.shape[-1]
    scores = chunk_scores(x)
    inverse = chunk_inverse(x, scores).astype(dtype)
    p = chunk_operands(x, scores, inverse.astype(jnp.float32), scale)
    w_q = jnp.concatenate([p.w, p.q_head], axis=-2)
    carry = _carry_rows(p, columns)
    u, w_q, k_tail, att, carry = separate((p.u, w_q, p.k_tail, p.att, carry))

    def step(n, walk):
        state, out = walk
        y = dot("bgrck,bgrkv->bgrcv", stack_at(w_q, n), state.astype(dtype))
        new = (_widen(stack_at(u, n), columns) - y[..., :chunk, :]).astype(dtype)
        out_n = y[..., chunk:, :] + dot("bgrij,bgrjv->bgriv", stack_at(att, n), new)
        state = stack_at(carry, n) * state + dot("bgrck,bgrcv->bgrkv", stack_at(k_tail, n), new)
        return state, stack_put(out, out_n.astype(dtype), n)

    out = lax.empty((*u.shape[:-1], columns), dtype)
    state, out = lax.fori_loop(0, u.shape[0], step, (state, out))
    query_map = out[..., values:] if columns > values else None
    return state, BlockOutputs(out[..., :values], inverse, query_map)


def _carry_rows(p: Operands, columns: int) -> jax.Array:
    """The decay over a chunk as whole rows: a scalar per head would cost a copy of its own in every step."""
    return jnp.broadcast_to(p.carry, (*p.carry.shape[:-1], columns))


def _widen(x: jax.Array, columns: int) -> jax.Array:
    """float32 [..., V] with zeros appended up to `columns`."""
    x = x.astype(jnp.float32)
    extra = columns - x.shape[-1]
    return jnp.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, extra)]) if extra else x


class BlockGradients(NamedTuple):
    """Cotangents in the layouts of BlockInputs; dq, dk, dv in their dtype, dg and dbeta float32."""

    dq: jax.Array
    dk: jax.Array
    dv: jax.Array
    dg: jax.Array
    dbeta: jax.Array


def backward_block(
    dstate: jax.Array, state: jax.Array, inverse: jax.Array, x: BlockInputs, dout: jax.Array, scale: float
) -> tuple[jax.Array, BlockGradients]:
    """Adjoint of `forward_block` (without extra columns).

    Args:
      dstate: float32 [B,G,R,K,V], cotangent of the state leaving the block.
      state: float32 [B,G,R,K,V], the state entering it; inverse [R,C,C,Z] as returned by the forward.
      dout: [N,B,G,R,C,V], cotangent of the outputs.

    Returns:
      cotangent of the entering state and of the block's inputs.
    """
    batch, dtype = x.k.shape[:3], x.k.dtype
    scores = chunk_scores(x)
    inverse = inverse.astype(jnp.float32)
    p = chunk_operands(x, scores, inverse, scale)
    dout_att = dot("nbgrij,nbgriv->nbgrjv", p.att, dout).astype(dtype)
    inverse_m = from_lanes(inverse, batch).astype(dtype)
    p, dout_att, inverse_m = separate((p, dout_att, inverse_m))

    states, new = _replay(state, p)
    dstates, dnew, dstate = _reverse_walk(dstate, p, dout, dout_att)
    states, new, dstates, dnew = separate((states, new, dstates, dnew))

    # e = -inv^T dnew: minus the cotangent of beta v; dw' = e state^T is the cotangent of beta head k, dL = e new^T.
    e = dot("nbgrij,nbgriv->nbgrjv", inverse_m, dnew)
    beta = from_lanes(x.beta, batch)
    dv = (-beta[..., None] * e).astype(dtype)
    v_e = jnp.sum(x.v.astype(jnp.float32) * e, axis=-1)
    e, dv, v_e = separate((e.astype(dtype), dv, v_e))

    # Products with the states, each used twice: scaled and summed over the value heads of a key head for dq and dk, and
    # dotted with q or k for the decays.
    head, tail = from_lanes(scores.decay.head, batch), from_lanes(scores.decay.tail, batch)
    dq, q_dq = separate(_through_state(dout, states, x.q, scale * head))
    dk_w, k_dw = separate(_through_state(e, states, x.k, beta * head))
    dk_tail, k_dtail = separate(_through_state(new, dstates, x.k, tail))
    datt = to_lanes(dot("nbgriv,nbgrjv->nbgrij", dout, new).astype(dtype))
    dlower = to_lanes(dot("nbgriv,nbgrjv->nbgrij", e, new).astype(dtype))
    datt, dlower = separate((datt, dlower))

    within = separate(_within_chunk(x, scores, scale * datt.astype(jnp.float32), dlower.astype(jnp.float32)))
    dcarry = to_lanes(jnp.sum(states.astype(jnp.float32) * dstates.astype(jnp.float32), axis=(-2, -1), keepdims=True))
    q_dq, k_dw, k_dtail, v_e = (to_lanes(rows[..., None])[..., 0, :] for rows in (q_dq, k_dw, k_dtail, v_e))
    # Cotangents of the logarithms of head and tail, which are sums of g up to and from after a token.
    dhead = scores.decay.head * (scale * q_dq + x.beta * k_dw)
    dhead = dhead.at[:, -1].add(scores.decay.head[:, -1] * dcarry[:, 0, 0])
    dg = _sum_from(within.row - within.column + dhead) + _sum_before(scores.decay.tail * k_dtail)
    dbeta = within.dbeta - v_e + scores.decay.head * k_dw

    dqk, dkk = from_lanes(within.dqk, batch).astype(dtype), from_lanes(within.dkk, batch).astype(dtype)
    dq = dq + dot("nbgij,nbgjk->nbgik", dqk, x.k)
    dk = dk_tail + dk_w + dot("nbgij,nbgik->nbgjk", dqk, x.q) + dot("nbgij,nbgjk->nbgik", dkk, x.k)
    return dstate, BlockGradients(dq.astype(dtype), dk.astype(dtype), dv, dg, dbeta)


def _replay(state: jax.Array, p: Operands) -> tuple[jax.Array, jax.Array]:
    """The states entering the chunks [N,B,G,R,K,V] and the new values [N,B,G,R,C,V], in the operands' dtype."""
    dtype, last = p.u.dtype, p.u.shape[0] - 1
    carry = _carry_rows(p, state.shape[-1])

    def new_values(n, state):
        new = stack_at(p.u, n).astype(jnp.float32) - dot("bgrck,bgrkv->bgrcv", stack_at(p.w, n), state.astype(dtype))
        return separate(new.astype(dtype))

    def step(n, walk):
        state, states, new = walk
        new_n = new_values(n, state)
        state = stack_at(carry, n) * state + dot("bgrck,bgrcv->bgrkv", stack_at(p.k_tail, n), new_n)
        return state, stack_put(states, state.astype(dtype), n + 1), stack_put(new, new_n, n)

    states = stack_put(lax.empty((last + 1, *state.shape), dtype), state.astype(dtype), 0)
    state, states, new = lax.fori_loop(0, last, step, (state, states, lax.empty(p.u.shape, dtype)))
    return states, stack_put(new, new_values(last, state), last)


def _reverse_walk(
    dstate: jax.Array, p: Operands, dout: jax.Array, dout_att: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Cotangents of the states leaving the chunks, minus those of the new values, and that of the block's state."""
    dtype, last = p.u.dtype, p.u.shape[0] - 1
    carry = _carry_rows(p, dstate.shape[-1])
    w_q = separate(jnp.concatenate([p.w, p.q_head], axis=-2))

    def adjoint(n, dstate, dnew):
        # Minus the cotangent of the new values: q_head^T dout - w^T dnew is then one product.
        through_state = dot("bgrck,bgrkv->bgrcv", stack_at(p.k_tail, n), dstate.astype(dtype))
        dnew_n = separate((-through_state - stack_at(dout_att, n).astype(jnp.float32)).astype(dtype))
        pair = jnp.concatenate([dnew_n, stack_at(dout, n)], axis=-2)
        dstate = stack_at(carry, n) * dstate + dot("bgrck,bgrcv->bgrkv", stack_at(w_q, n), pair)
        return dstate, stack_put(dnew, dnew_n, n)

    def step(j, walk):
        dstate, dstates, dnew = walk
        n = last - j
        dstate, dnew = adjoint(n, dstate, dnew)
        return dstate, stack_put(dstates, dstate.astype(dtype), n - 1), dnew

    dstates = stack_put(lax.empty((last + 1, *dstate.shape), dtype), dstate.astype(dtype), last)
    dstate, dstates, dnew = lax.fori_loop(0, last, step, (dstate, dstates, lax.empty(p.u.shape, dtype)))
    dstate, dnew = adjoint(0, dstate, dnew)
    return dstates, dnew, dstate


def _through_state(a: jax.Array, states: jax.Array, x: jax.Array, rows: jax.Array) -> tuple[jax.Array, jax.Array]:
    """y = a states^T [N,B,G,R,C,K]: (sum over R of rows y, [N,B,G,C,K]; x . y, [N,B,G,R,C]), float32."""
    y = dot("nbgrcv,nbgrkv->nbgrck", a, states)
    return jnp.sum(rows[..., None] * y, axis=3), jnp.sum(x.astype(jnp.float32)[:, :, :, None] * y, axis=-1)


class _WithinChunk(NamedTuple):
    """Cotangents through L and att, lane layout: dqk, dkk [C,C,Z] (dkk symmetric), row, column, dbeta [R,C,Z]."""

    dqk: jax.Array
    dkk: jax.Array
    row: jax.Array
    column: jax.Array
    dbeta: jax.Array


def _within_chunk(x: BlockInputs, scores: Scores, datt: jax.Array, dlower: jax.Array) -> _WithinChunk:
    """datt, dlower [R,C,C,Z]: cotangents of att / scale (times scale) and of L. row and column are the sums of the
    cotangent of log pair_ij over j and over i."""
    beta = x.beta[:, :, None]
    dqk = datt * scores.decay.pair
    dlower = strictly_lower(dlower * scores.decay.pair)
    dbeta = dlower * scores.kk[None]
    dlog_pair = strictly_lower(dqk * scores.qk[None]) + beta * dbeta
    dkk = jnp.sum(beta * dlower, axis=0)
    return _WithinChunk(
        dqk=jnp.sum(dqk, axis=0),
        dkk=dkk + jnp.swapaxes(dkk, 0, 1),
        row=jnp.sum(dlog_pair, axis=2),
        column=jnp.sum(dlog_pair, axis=1),
        dbeta=jnp.sum(dbeta, axis=2),
    )


def _sum_from(x: jax.Array) -> jax.Array:
    """Sum over the tokens at and after each token, x [R,C,Z]."""
    return dot("tc,rcz->rtz", jnp.triu(jnp.ones((x.shape[1],) * 2, jnp.float32)), x)


def _sum_before(x: jax.Array) -> jax.Array:
    """Sum over the tokens before each token, x [R,C,Z]."""
    return dot("tc,rcz->rtz", jnp.tril(jnp.ones((x.shape[1],) * 2, jnp.float32), -1), x)
