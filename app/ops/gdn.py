"""The gated delta rule, over time that may be sharded over ranks.

    state_t = e^{g_t} (I - beta_t k_t k_t^T) state_{t-1} + beta_t k_t v_t^T,      out_t = scale state_t^T q_t

Letters: B batch, T time (this rank's part), H value heads, G key heads, R = H / G, K key dim, V value dim, P ranks
along the sequence. Tokens are worked on in chunks, chunks in blocks. Ranks exchange one affine map per head, log2 P
times, whatever the length of the sequence. Derivation, costs and measurements: app/ops/README.md.
"""

import dataclasses
import functools
from typing import Literal, NamedTuple, cast, overload

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name

from app.ops.affine_scan import AffineMap, AxisName, SequenceAxis, apply, exclusive_scan, matmul, sequence_axis
from app.ops.gdn_block import backward_block, forward_block
from app.ops.gdn_chunk import dot
from app.ops.gdn_layout import (
    Blocks,
    Inputs,
    pad_tokens,
    plan_blocks,
    read_block,
    read_values,
    stack_at,
    stack_put,
    write_gates,
    write_keys,
    write_values,
)

# checkpoint_name's of what the backward reads besides the inputs. The first group is what only the exchange between
# ranks can give: with it kept, a rematerialised layer repeats no collective of this file. Bytes: app/ops/README.md.
STATE_NAMES = ("gdn_entry_state", "gdn_transition", "gdn_border")
FACTOR_NAMES = ("gdn_inverse", "gdn_query_map", "gdn_out")

# Policies for jax.checkpoint around a layer.
keep_states = jax.checkpoint_policies.save_only_these_names(*STATE_NAMES)
keep_all = jax.checkpoint_policies.save_only_these_names(*STATE_NAMES, *FACTOR_NAMES)


@overload
def gated_delta_rule(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    g: jax.Array,
    beta: jax.Array,
    *,
    segment_ids: jax.Array | None = ...,
    initial_state: jax.Array | None = ...,
    axis_name: AxisName = ...,
    chunk_size: int = ...,
    scale: float | None = ...,
    return_final_state: Literal[False] = ...,
) -> jax.Array: ...
@overload
def gated_delta_rule(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    g: jax.Array,
    beta: jax.Array,
    *,
    segment_ids: jax.Array | None = ...,
    initial_state: jax.Array | None = ...,
    axis_name: AxisName = ...,
    chunk_size: int = ...,
    scale: float | None = ...,
    return_final_state: Literal[True],
) -> tuple[jax.Array, jax.Array]: ...
def gated_delta_rule(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    g: jax.Array,
    beta: jax.Array,
    *,
    segment_ids: jax.Array | None = None,
    initial_state: jax.Array | None = None,
    axis_name: AxisName = None,
    chunk_size: int = 64,
    scale: float | None = None,
    return_final_state: bool = False,
) -> jax.Array | tuple[jax.Array, jax.Array]:
    """Outputs of the gated delta rule, and on request the state after the whole sequence.

    Args:
      q, k: [B,T,G,K], already l2-normalised; key head h // R serves value head h.
      v: [B,T,H,V].
      g: [B,T,H] log decay <= 0; beta: [B,T,H] write strength. Both are used in float32.
      segment_ids: [B,T] int32; the state is reset wherever the id changes, also at a rank border. An id has no other
        meaning: positions with id 0 are a document like any other. None: one document.
      initial_state: [B,H,K,V] float32 before the first token (which continues it), the same on every rank; None: zero.
      axis_name: mesh axis, tuple of axes (major first) or SequenceAxis that time is sharded over, under shard_map;
        rank order must be sequence order. None: not sharded.
      chunk_size: tokens per chunk, a power of two.
      scale: factor on q; None: K^-0.5.
      return_final_state: whether to return the state too.

    Returns:
      out [B,T,H,V] in v's dtype, or (out, state [B,H,K,V] float32; the same on every rank). States, decays and maps are
      float32; matrix products have bfloat16 operands if q, k and v are bfloat16, else float32 ones, and accumulate in
      float32. The backward returns this rank's partial cotangents: that of initial_state is zero on all ranks but the
      first.

    Raises:
      ValueError: shapes disagree, H is no multiple of G, or chunk_size is no power of two.
    """
    _check_shapes(q, k, v, g, beta, segment_ids, initial_state, chunk_size)
    batch, tokens, key_heads, key_dim = q.shape
    static = _Static(
        axis=sequence_axis(axis_name),
        blocks=plan_blocks(tokens, batch * key_heads, chunk_size),
        scale=key_dim**-0.5 if scale is None else float(scale),
        has_initial_state=initial_state is not None,
        return_final_state=return_final_state,
    )
    compute = q.dtype if q.dtype == k.dtype == v.dtype and q.dtype.itemsize == 2 else jnp.float32
    if initial_state is not None:
        initial_state = initial_state.astype(jnp.float32)
    out, final_state = _rule(
        static,
        *(x.astype(compute) for x in (q, k, v)),
        *(x.astype(jnp.float32) for x in (g, beta)),
        segment_ids,
        initial_state,
    )
    out = out.astype(v.dtype)
    return (out, final_state) if return_final_state else out


def _check_shapes(q, k, v, g, beta, segment_ids, initial_state, chunk_size: int) -> None:
    if q.ndim != 4 or k.shape != q.shape or v.ndim != 4 or v.shape[:2] != q.shape[:2]:
        shapes = f"{q.shape}, {k.shape}, {v.shape}"
        raise ValueError(f"gated_delta_rule: expected q, k [B,T,G,K] and v [B,T,H,V], got {shapes}")
    batch, tokens, heads, value_dim = v.shape
    key_heads, key_dim = q.shape[2:]
    if not tokens:
        raise ValueError("gated_delta_rule: T is 0; a rank needs at least one token")
    if heads % key_heads:
        raise ValueError(f"gated_delta_rule: {heads} value heads (v) are no multiple of {key_heads} key heads (q, k)")
    expected = {
        "g": (g, v.shape[:3]),
        "beta": (beta, v.shape[:3]),
        "segment_ids": (segment_ids, (batch, tokens)),
        "initial_state": (initial_state, (batch, heads, key_dim, value_dim)),
    }
    for name, (x, shape) in expected.items():
        if x is not None and x.shape != shape:
            raise ValueError(f"gated_delta_rule: {name} must have shape {shape}, got {x.shape}")
    if chunk_size < 1 or chunk_size & (chunk_size - 1):
        raise ValueError(f"gated_delta_rule: chunk_size must be a power of two, got {chunk_size}")


@dataclasses.dataclass(frozen=True)
class _Static:
    """What is known while tracing."""

    axis: SequenceAxis | None
    blocks: Blocks
    scale: float
    has_initial_state: bool
    return_final_state: bool


class _Exchange(NamedTuple):
    """This rank's transition [B,G,R,K,K] float32, and query_map [B,T,H,K]: the entering state's part in each output."""

    transition: jax.Array
    query_map: jax.Array


class _Residuals(NamedTuple):
    """Saved for the backward: padded inputs, float32 states entering the blocks [blocks,B,G,R,K,V], chunk inverses
    [blocks,R,C,C,Z]; where the sequence is sharded, what carries cotangents between ranks."""

    inputs: Inputs
    states: jax.Array
    inverses: jax.Array
    exchange: _Exchange | None


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _rule(static: _Static, q, k, v, g, beta, segment_ids, initial_state):
    """(out, final state or None); q, k, v in the compute dtype, g, beta, initial_state float32."""
    return _forward(static, q, k, v, g, beta, segment_ids, initial_state)[0]


def _forward(static: _Static, q, k, v, g, beta, segment_ids, initial_state):
    tokens = q.shape[1]
    document = None if segment_ids is None else pad_tokens(_documents(static.axis, segment_ids), static.blocks, "edge")
    q, k, v, g, beta = (pad_tokens(y, static.blocks) for y in (q, k, v, g, beta))
    x = Inputs(q, k, v, g, beta, document)
    batch, _, key_heads, key_dim = q.shape
    shape = (batch, key_heads, x.repeats, key_dim, v.shape[-1])
    initial = None if initial_state is None else initial_state.reshape(shape)
    if static.axis is None:
        out, final_state, residuals = _run_whole(static, x, shape, initial)
    else:
        out, final_state, residuals = _run_part(static, static.axis, x, shape, initial)
    out = checkpoint_name(out[:, :tokens], "gdn_out")
    return (out, None if final_state is None else _merge_heads(final_state)), residuals


def _documents(axis: SequenceAxis | None, segment_ids: jax.Array) -> jax.Array:
    """[B,T]: document starts at or before a token of this rank. The very first token continues the initial state."""
    before = segment_ids[:, :1]
    if axis is not None:
        arriving = checkpoint_name(axis.shift(segment_ids[:, -1:], 1), "gdn_border")
        before = jnp.where(axis.rank == 0, before, arriving)
    starts = segment_ids != jnp.concatenate([before, segment_ids[:, :-1]], axis=1)
    return jnp.cumsum(starts.astype(jnp.int32), axis=1)


def _run_whole(static: _Static, x: Inputs, shape: tuple[int, ...], initial: jax.Array | None):
    """The whole sequence on one rank: (out [B,T,H,V], state after it if wanted, residuals)."""
    blocks = static.blocks

    def body(i, walk):
        state, states, inverses, out = walk
        states = stack_put(states, state, i)
        state, y = forward_block(state, read_block(x, i, blocks), static.scale)
        return state, states, stack_put(inverses, y.inverse, i), write_values(out, y.out, i, blocks)

    state = jnp.zeros(shape, jnp.float32) if initial is None else initial
    buffers = _stack_empty(blocks, state), _empty_inverses(static, x), lax.empty(x.v.shape, x.v.dtype)
    state, states, inverses, out = lax.fori_loop(0, blocks.blocks, body, (state, *buffers))
    states, inverses = checkpoint_name(states, "gdn_entry_state"), checkpoint_name(inverses, "gdn_inverse")
    return out, state if static.return_final_state else None, _Residuals(x, states, inverses, None)


def _run_part(static: _Static, axis: SequenceAxis, x: Inputs, shape: tuple[int, ...], initial: jax.Array | None):
    """This rank's part of a sequence, in three phases; returns as `_run_whole`.

    1. Walk from a zero state, and from the identity beside it: that gives this rank's affine map, the outputs that its
       own tokens cause, and query_map, through which the still unknown entering state will add to each output.
    2. Exclusive prefix scan of the maps over the ranks: the state entering this one.
    3. Add its part to the outputs and to the blocks' entry states. Both are linear in it: no second walk.
    """
    blocks, dtype = static.blocks, x.v.dtype
    *batch, key_dim, value_dim = shape

    def body(i, walk):
        state, states, inverses, local_out, query_map = walk
        states = stack_put(states, state, i)
        state, y = forward_block(state, read_block(x, i, blocks), static.scale)
        local_out = write_values(local_out, y.out, i, blocks)
        query_map = write_values(query_map, cast(jax.Array, y.query_map), i, blocks)
        return state, states, stack_put(inverses, y.inverse, i), local_out, query_map

    identity = jnp.broadcast_to(jnp.eye(key_dim, dtype=jnp.float32), (*batch, key_dim, key_dim))
    state = jnp.concatenate([jnp.zeros(shape, jnp.float32), identity], axis=-1)
    buffers = lax.empty(x.v.shape, dtype), lax.empty((*x.v.shape[:3], key_dim), dtype)
    walk = state, _stack_empty(blocks, state), _empty_inverses(static, x), *buffers
    state, states, inverses, local_out, query_map = lax.fori_loop(0, blocks.blocks, body, walk)
    inverses = checkpoint_name(inverses, "gdn_inverse")
    query_map = checkpoint_name(query_map, "gdn_query_map")
    local = AffineMap(checkpoint_name(state[..., value_dim:], "gdn_transition"), state[..., :value_dim])

    entry = checkpoint_name(exclusive_scan(local, axis, initial_state=initial), "gdn_entry_state")

    added = dot("bthk,bhkv->bthv", query_map, _merge_heads(entry).astype(dtype))
    out = (local_out.astype(jnp.float32) + added).astype(dtype)
    entries = jnp.broadcast_to(entry, (blocks.blocks, *shape))
    states = checkpoint_name(matmul(states[..., value_dim:], entries) + states[..., :value_dim], "gdn_entry_state")
    final_state = _from_last_rank(axis, apply(local, entry)) if static.return_final_state else None
    return out, final_state, _Residuals(x, states, inverses, _Exchange(local.transition, query_map))


def _backward(static: _Static, residuals: _Residuals, cotangents):
    x, states, blocks, axis = residuals.inputs, residuals.states, static.blocks, static.axis
    tokens = cotangents[0].shape[1]
    dout = pad_tokens(cotangents[0], blocks)
    dfinal = cotangents[1].reshape(states.shape[1:]) if static.return_final_state else None
    if axis is None or residuals.exchange is None:
        dstate = jnp.zeros(states.shape[1:], jnp.float32) if dfinal is None else dfinal
    else:
        # Every rank returned the last rank's state: their cotangents add up there.
        dfinal = None if dfinal is None else lax.psum(dfinal, axis.names)
        dstate = _arriving_cotangent(residuals.exchange, dout, axis, dfinal, states.shape[1:])

    def body(j, walk):
        dstate, dx = walk
        i = blocks.blocks - 1 - j
        dout_i = read_values(dout, i, blocks, x.repeats)
        block = read_block(x, i, blocks)
        dstate, y = backward_block(
            dstate, stack_at(states, i), stack_at(residuals.inverses, i), block, dout_i, static.scale
        )
        writers = (write_keys, write_keys, write_values, write_gates, write_gates)
        return dstate, tuple(write(whole, part, i, blocks) for write, whole, part in zip(writers, dx, y, strict=True))

    dx = tuple(lax.empty(y.shape, y.dtype) for y in x[:5])
    dstate, dx = lax.fori_loop(0, blocks.blocks, body, (dstate, dx))
    dinitial = None
    if static.has_initial_state:
        dinitial = dstate if axis is None else jnp.where(axis.rank == 0, dstate, 0.0)
        dinitial = _merge_heads(dinitial)
    return (*(y[:, :tokens] for y in dx), None, dinitial)


_rule.defvjp(_forward, _backward)


def _arriving_cotangent(
    exchange: _Exchange, dout: jax.Array, axis: SequenceAxis, dfinal: jax.Array | None, shape: tuple[int, ...]
) -> jax.Array:
    """Cotangent of the state leaving this rank [B,G,R,K,V] = shape, from the ranks after it.

    The map of cotangents through a rank has the transposed transition, and as its bias what the rank's own outputs
    send to the state entering it: query_map^T dout, since query_map is that state's part in each output.
    """
    bias = dot("bthk,bthv->bhkv", exchange.query_map, dout).reshape(shape)
    adjoint = AffineMap(jnp.swapaxes(exchange.transition, -1, -2), bias)
    return exclusive_scan(adjoint, axis, initial_state=dfinal, reverse=True)


def _from_last_rank(axis: SequenceAxis, state: jax.Array) -> jax.Array:
    return lax.psum(jnp.where(axis.rank == axis.size - 1, state, 0.0), axis.names)


def _stack_empty(blocks: Blocks, state: jax.Array) -> jax.Array:
    return lax.empty((blocks.blocks, *state.shape), state.dtype)


def _empty_inverses(static: _Static, x: Inputs) -> jax.Array:
    blocks = static.blocks
    problems = blocks.chunks * x.q.shape[0] * x.q.shape[2]
    return lax.empty((blocks.blocks, x.repeats, blocks.chunk, blocks.chunk, problems), x.v.dtype)


def _merge_heads(state: jax.Array) -> jax.Array:
    """[B,G,R,K,V] -> [B,H,K,V]."""
    return state.reshape(state.shape[0], -1, *state.shape[3:])
