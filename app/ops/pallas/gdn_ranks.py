"""The two products of a rank's chunks with what other ranks send, as TPU kernels: no array changes its layout for them.

Letters and Shape: app/ops/pallas/gdn.py.
"""

import functools

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from app.ops.pallas.gdn import Forward, Shape, compiler_params
from app.ops.pallas.gdn_chunk import TN, dot


def _specs(shape: Shape) -> tuple:
    """Blocks of a grid step: tokens x heads of width V and K, states of a chunk of width V and K, one state a head."""
    C, S, K, V = shape.chunk, shape.heads, shape.key_dim, shape.value_dim
    tokens = [pl.BlockSpec((None, C, S * x), lambda b, s, n: (b, n, s)) for x in (V, K)]
    states = [pl.BlockSpec((None, None, S, K, x), lambda b, s, n: (b, n, s, 0, 0)) for x in (V, K)]
    return *tokens, *states, pl.BlockSpec((None, S, K, V), lambda b, s, n: (b, s, 0, 0))


def add_entering(shape: Shape, y: Forward, entry: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Outputs [B,T,H,V] and states entering the chunks [B,N,H,K,V] of a rank that `entry` [B,H,K,V] float32 enters."""
    assert y.query_map is not None and y.transitions is not None
    value, key, state, transition, constant = _specs(shape)
    flat_out, flat_map = (x.reshape(*x.shape[:2], -1) for x in (y.out, y.query_map))
    out, states = pl.pallas_call(
        functools.partial(_add_kernel, shape),
        grid=(shape.batch, shape.groups, shape.chunks),
        in_specs=[value, state, key, transition, constant],
        out_specs=[value, state],
        out_shape=[jax.ShapeDtypeStruct(x.shape, x.dtype) for x in (flat_out, y.states)],
        input_output_aliases={0: 0, 1: 1},
        compiler_params=compiler_params(shape),
        interpret=shape.interpret,
        name="gdn_add_entering",
    )(flat_out, y.states, flat_map, y.transitions, entry)
    return out.reshape(y.out.shape), states


def _add_kernel(shape: Shape, out_ref, states_ref, map_ref, transitions_ref, entry_ref, new_out_ref, new_states_ref):
    K, V, dtype = shape.key_dim, shape.value_dim, out_ref.dtype
    for h in range(shape.heads):
        value, entry = slice(h * V, (h + 1) * V), entry_ref[h]
        high = entry.astype(dtype)
        out = dot(map_ref[:, h * K : (h + 1) * K], high)
        state = dot(transitions_ref[h], high)
        if dtype != jnp.float32:  # the states are operands of the whole backward: the entering one in two halves
            state += dot(transitions_ref[h], (entry - high.astype(jnp.float32)).astype(dtype))
        new_out_ref[:, value] = (out_ref[:, value].astype(jnp.float32) + out).astype(dtype)
        new_states_ref[h] = (states_ref[h].astype(jnp.float32) + state).astype(dtype)


def entering_cotangent(shape: Shape, query_map: jax.Array, dout: jax.Array) -> jax.Array:
    """query_map^T dout [B,H,K,V] float32: what a rank's outputs send to the state entering it."""
    value, key, _, _, constant = _specs(shape)
    return pl.pallas_call(
        functools.partial(_cotangent_kernel, shape),
        grid=(shape.batch, shape.groups, shape.chunks),
        in_specs=[key, value],
        out_specs=constant,
        out_shape=jax.ShapeDtypeStruct(
            (shape.batch, shape.groups * shape.heads, shape.key_dim, shape.value_dim), jnp.float32
        ),
        compiler_params=compiler_params(shape),
        interpret=shape.interpret,
        name="gdn_entering_cotangent",
    )(*(x.reshape(*x.shape[:2], -1) for x in (query_map, dout)))


def _cotangent_kernel(shape: Shape, map_ref, dout_ref, sum_ref):
    K, V = shape.key_dim, shape.value_dim

    @pl.when(pl.program_id(2) == 0)
    def _():
        sum_ref[...] = jnp.zeros(sum_ref.shape, sum_ref.dtype)

    for h in range(shape.heads):
        sum_ref[h] += dot(map_ref[:, h * K : (h + 1) * K], dout_ref[:, h * V : (h + 1) * V], TN)
