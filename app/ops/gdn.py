"""The gated delta rule, over time that may be sharded over ranks.

    state_t = e^{g_t} (I - beta_t k_t k_t^T) state_{t-1} + beta_t k_t v_t^T,      out_t = scale state_t^T q_t

Letters: B batch, T time (this rank's part), H value heads, G key heads, R = H / G, K key dim, V value dim, P ranks
along the sequence. Tokens are worked on in chunks, chunks in blocks. Ranks exchange one affine map per head, log2 P
times, whatever the length of the sequence. Derivation, costs and measurements: app/ops/README.md.
"""

import dataclasses
import functools
from typing import Any, NamedTuple, cast, get_args

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name

from app.ops.affine_scan import AffineMap, AxisName, SequenceAxis, apply, matmul, sequence_axis
from app.ops.gdn_block import backward_block, forward_block
from app.ops.gdn_chunk import dot
from app.ops.gdn_fused import Fused, fused_rule
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
from app.ops.gdn_ranks import (
    Exchange,
    add_entering,
    arriving_cotangent,
    count_documents,
    entering_state,
    from_last_rank,
)
from app.ops.kernels import KernelName
from app.ops.pallas.gdn import tuning

# checkpoint_name's of what the backward reads besides the inputs. The first group is what only the exchange between
# ranks can give: with it kept, a rematerialised layer repeats no collective of this file. Bytes: app/ops/README.md.
STATE_NAMES = ("gdn_entry_state", "gdn_transition", "gdn_border")
FACTOR_NAMES = ("gdn_inverse", "gdn_query_map", "gdn_chunk_state", "gdn_out")

# Policies for jax.checkpoint around a layer.
keep_states = jax.checkpoint_policies.save_only_these_names(*STATE_NAMES)
keep_all = jax.checkpoint_policies.save_only_these_names(*STATE_NAMES, *FACTOR_NAMES)


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
    kernel: KernelName = "xla",
    scale: float | None = None,
    return_final_state: bool = False,
) -> Any:
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
      chunk_size: tokens per chunk of the "xla" kernel, a power of two; the pallas one has its own.
      kernel: "xla" (any platform), "pallas" (TPU) or "interpret" (the TPU kernel anywhere, slowly: tests).
      scale: factor on q; None: K^-0.5.
      return_final_state: whether to return the state too.

    Returns:
      out [B,T,H,V] in v's dtype, or (out, state [B,H,K,V] float32; the same on every rank). States, decays and maps are
      float32; matrix products have bfloat16 operands if q, k and v are bfloat16, else float32 ones, and accumulate in
      float32. The backward returns this rank's partial cotangents: that of initial_state is zero on all ranks but the
      first.

    Raises:
      ValueError: shapes disagree, H is no multiple of G, chunk_size is no power of two, or the kernel does not exist or
        does not take the head dims.
    """
    _check_shapes(q, k, v, g, beta, segment_ids, initial_state, chunk_size)
    _check_kernel(kernel, q.shape[-1], v.shape[-1])
    batch, tokens, key_heads, key_dim = q.shape
    axis, scale = sequence_axis(axis_name), key_dim**-0.5 if scale is None else float(scale)
    states = (initial_state is not None, return_final_state)
    compute = q.dtype if q.dtype == k.dtype == v.dtype and q.dtype.itemsize == 2 else jnp.float32
    if initial_state is not None:
        initial_state = initial_state.astype(jnp.float32)
    narrow = [x.astype(compute) for x in (q, k, v)]
    gates = [x.astype(jnp.float32) for x in (g, beta)]
    if kernel == "xla":
        blocks = plan_blocks(tokens, batch * key_heads, chunk_size)
        rule = functools.partial(_rule, _Static(axis, blocks, scale, *states))
    else:
        rule = functools.partial(fused_rule, Fused(axis, scale, *states, tuning(), kernel == "interpret"))
    out, final_state = rule(*narrow, *gates, segment_ids, initial_state)
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


def _check_kernel(kernel: str, key_dim: int, value_dim: int) -> None:
    if kernel not in get_args(KernelName):
        raise ValueError(f"gated_delta_rule: kernel must be one of {get_args(KernelName)}, got {kernel!r}")
    if kernel == "pallas" and (key_dim % 128 or value_dim % 128):
        raise ValueError(
            f"the pallas gated delta rule takes head dims that are multiples of 128, not {key_dim} and {value_dim} "
            "(model.linear_key_head_dim, model.linear_value_head_dim): choose the xla kernel (ops.gdn_kernel)"
        )


@dataclasses.dataclass(frozen=True)
class _Static:
    """What is known while tracing."""

    axis: SequenceAxis | None
    blocks: Blocks
    scale: float
    has_initial_state: bool
    return_final_state: bool


class _Residuals(NamedTuple):
    """Saved for the backward: padded inputs, float32 states entering the blocks [blocks,B,G,R,K,V], chunk inverses
    [blocks,R,C,C,Z]; where the sequence is sharded, what carries cotangents between ranks."""

    inputs: Inputs
    states: jax.Array
    inverses: jax.Array
    exchange: Exchange | None


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _rule(static: _Static, q, k, v, g, beta, segment_ids, initial_state):
    """(out, final state or None); q, k, v in the compute dtype, g, beta, initial_state float32."""
    return _forward(static, q, k, v, g, beta, segment_ids, initial_state)[0]


def _forward(static: _Static, q, k, v, g, beta, segment_ids, initial_state):
    tokens = q.shape[1]
    document = None if segment_ids is None else count_documents(static.axis, segment_ids)
    document = None if document is None else pad_tokens(document, static.blocks, "edge")
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

    entry = entering_state(local, axis, initial)
    out = add_entering(local_out, query_map, _merge_heads(entry))
    entries = jnp.broadcast_to(entry, (blocks.blocks, *shape))
    states = checkpoint_name(matmul(states[..., value_dim:], entries) + states[..., :value_dim], "gdn_entry_state")
    final_state = from_last_rank(axis, apply(local, entry)) if static.return_final_state else None
    return out, final_state, _Residuals(x, states, inverses, Exchange(_merge_heads(local.transition), query_map))


def _backward(static: _Static, residuals: _Residuals, cotangents):
    x, states, blocks, axis = residuals.inputs, residuals.states, static.blocks, static.axis
    tokens = cotangents[0].shape[1]
    dout = pad_tokens(cotangents[0], blocks)
    dstate = cotangents[1] if static.return_final_state else None
    if axis is not None and residuals.exchange is not None:
        bias = dot("bthk,bthv->bhkv", residuals.exchange.query_map, dout)
        dstate = arriving_cotangent(residuals.exchange.transition, bias, axis, dstate)
    dstate = jnp.zeros(states.shape[1:], jnp.float32) if dstate is None else dstate.reshape(states.shape[1:])

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


def _stack_empty(blocks: Blocks, state: jax.Array) -> jax.Array:
    return lax.empty((blocks.blocks, *state.shape), state.dtype)


def _empty_inverses(static: _Static, x: Inputs) -> jax.Array:
    blocks = static.blocks
    problems = blocks.chunks * x.q.shape[0] * x.q.shape[2]
    return lax.empty((blocks.blocks, x.repeats, blocks.chunk, blocks.chunk, problems), x.v.dtype)


def _merge_heads(state: jax.Array) -> jax.Array:
    """[B,G,R,K,V] -> [B,H,K,V]."""
    return state.reshape(state.shape[0], -1, *state.shape[3:])
