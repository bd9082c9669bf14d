"""The chunked gated delta rule as TPU kernels: forward in one pass over the chunks, and its whole adjoint in another.

Letters: B batch, T time, G key heads, R value heads per key head, H = G R, K key dim, V value dim, C chunk length, N
chunks, S heads of one grid step. A grid step works on a chunk of `key_heads` key heads with all their value heads; the
states stay in VMEM from chunk to chunk. Formulas and costs: app/ops/README.md.
"""

import dataclasses
import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from app.ops.pallas.gdn_chunk import NT, TN, dot, pair_decay, unit_lower_inverses

LANES = 128
GATES = 5  # kinds of rows of `pack_gates`
VMEM_BYTES = 60 << 20


@dataclasses.dataclass(frozen=True)
class Tuning:
    """Size of the work: tokens of a chunk, value heads of a grid step aimed at (forward, backward)."""

    chunk: int = 128
    forward_heads: int = 6
    backward_heads: int = 6


TUNING = Tuning()


@dataclasses.dataclass(frozen=True)
class Shape:
    """Everything static about a call."""

    batch: int
    chunks: int
    chunk: int
    key_heads: int  # of a grid step
    groups: int  # of key heads: G / key_heads
    repeats: int  # R
    key_dim: int
    value_dim: int
    mapped: int  # columns of the states after the first V: K where the transition is wanted too, else 0
    scale: float
    documents: bool
    interpret: bool

    @classmethod
    def of(
        cls, q, v, *, chunk: int, heads: int, mapped: bool, scale: float, documents: bool, interpret: bool
    ) -> "Shape":
        """For padded q [B,T,G,K], v [B,T,H,V]; heads: value heads of a grid step aimed at."""
        B, T, G, K = q.shape
        repeats = v.shape[2] // G
        key_heads = max(x for x in range(1, G + 1) if G % x == 0 and (x == 1 or x * repeats <= heads))
        return cls(
            B, T // chunk, chunk, key_heads, G // key_heads, repeats, K, v.shape[3],
            K if mapped else 0, scale, documents, interpret,
        )  # fmt: skip

    @property
    def heads(self) -> int:
        """S."""
        return self.key_heads * self.repeats

    @property
    def width(self) -> int:
        """Columns of a state."""
        return self.value_dim + self.mapped

    @property
    def rows(self) -> int:
        """Rows of the gates of a step: GATES a head and the document, in whole tiles."""
        return _tiles(GATES * self.heads + 1)

    @property
    def gradient_rows(self) -> int:
        """Rows of the gates' gradients of a step: three a head, in whole tiles."""
        return _tiles(3 * self.heads)


def _tiles(rows: int) -> int:
    return -(-rows // 8) * 8


class Gates(NamedTuple):
    """The gates of one head in a chunk, each a (column [C, 1], row [1, C]); head, tail, carry as in README.md."""

    coarse: tuple
    fine: tuple
    beta: tuple
    head: tuple
    tail: tuple
    carry: jax.Array  # [1, 1]


def pack_gates(shape: Shape, g: jax.Array, beta: jax.Array, document: jax.Array | None) -> jax.Array:
    """g, beta [B,T,H], document [B,T] -> [B, groups, N, rows, C] float32.

    Rows: for each of coarse, fine, beta, head, tail those of the step's heads; the document, counted from the token
    before the chunk.
    """
    B, N, C = shape.batch, shape.chunks, shape.chunk
    g, beta = (x.reshape(B, N, C, shape.groups, shape.heads).transpose(0, 3, 1, 4, 2) for x in (g, beta))
    coarse, fine = split_sums(g)
    head = jnp.exp(coarse + fine)
    tail = jnp.exp((coarse[..., -1:] - coarse) + (fine[..., -1:] - fine))
    rows = [coarse, fine, beta, head, tail]
    if document is not None:
        count = document.reshape(B, N, C)
        before = jnp.concatenate([jnp.zeros_like(count[:, :1, -1]), count[:, :-1, -1]], 1)
        count = (count - before[..., None])[:, None, :, None]
        rows[3] = jnp.where(count == 0, head, 0.0)
        rows[4] = jnp.where(count == count[..., -1:], tail, 0.0)
        rows.append(jnp.broadcast_to(count.astype(jnp.float32), (B, shape.groups, N, 1, C)))
    rows = jnp.concatenate(rows, 3)
    return jnp.pad(rows, [(0, 0)] * 3 + [(0, shape.rows - rows.shape[3]), (0, 0)])


def split_sums(g: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Running sums of log decays [..., C] as coarse + fine.

    Log decays are cut at -256 (exp of less is zero in float32) and into multiples of 2^-8, whose sums and differences
    are exact in float32, and the rest, whose sums stay below 2^-9 C.
    """
    g = jnp.maximum(g, -256.0)
    coarse = jnp.round(g * 256.0) / 256.0
    return jnp.cumsum(coarse, -1), jnp.cumsum(g - coarse, -1)


def read_gates(shape: Shape, rows: jax.Array) -> tuple[list[Gates], tuple | None]:
    """The gates of all heads of a step, and its documents; rows [rows, C]."""
    columns = rows.T

    def both(at):
        return columns[:, at : at + 1], rows[at : at + 1]

    gates = []
    for h in range(shape.heads):
        values = [both(h + shape.heads * kind) for kind in range(GATES)]
        gates.append(Gates(*values, carry=values[3][0][-1:]))
    return gates, both(GATES * shape.heads) if shape.documents else None


def _forward_kernel(shape: Shape, q_ref, k_ref, v_ref, gates_ref, initial_ref, state_ref, inverse_ref, *parts_refs):
    """Grid: row, group of key heads, chunk. state_ref [S, K, W]: the running state, at last the final one.

    parts_refs: outputs and states entering the chunk; with mapped columns, those of these after them.
    """
    R, K, V, W = shape.repeats, shape.key_dim, shape.value_dim, shape.width
    C, S, dtype = shape.chunk, shape.heads, q_ref.dtype
    pieces = [slice(0, V), slice(V, W)][: len(parts_refs) // 2]
    parts = list(zip(pieces, zip(parts_refs[::2], parts_refs[1::2], strict=True), strict=True))

    @pl.when(pl.program_id(2) == 0)
    def _():
        state_ref[...] = initial_ref[...]

    gates, document = read_gates(shape, gates_ref[...])
    keys = [k_ref[:, g * K : (g + 1) * K] for g in range(shape.key_heads)]
    stacked = [jnp.concatenate([k, q_ref[:, g * K : (g + 1) * K]], 0) for g, k in enumerate(keys)]
    scores = [dot(x, k, NT) for x, k in zip(stacked, keys, strict=True)]
    pairs = [pair_decay(x.coarse, x.fine, document) for x in gates]
    strict = lax.broadcasted_iota(jnp.int32, (C, C), 0) > lax.broadcasted_iota(jnp.int32, (C, C), 1)
    lowers = [jnp.where(strict, gates[h].beta[0] * (scores[h // R][:C] * pairs[h]), 0.0) for h in range(S)]
    attention = [(scores[h // R][C:] * pairs[h]).astype(dtype) for h in range(S)]
    inverses = [x.astype(dtype) for x in unit_lower_inverses(lowers, dtype)]
    states = [state_ref[h] for h in range(S)]
    narrow = [x.astype(dtype) for x in states]
    for h in range(S):
        inverse_ref[h] = inverses[h]
        for at, (_, states_ref) in parts:
            states_ref[h] = narrow[h][:, at]
    seen = [dot(stacked[h // R], narrow[h]) for h in range(S)]
    values = [_with_zeros(v_ref[:, h * V : (h + 1) * V].astype(jnp.float32), W) for h in range(S)]
    wanted = [gates[h].beta[0] * (values[h] - gates[h].head[0] * seen[h][:C]) for h in range(S)]
    new = [dot(inverses[h], wanted[h].astype(dtype)) for h in range(S)]
    tails = [(gates[h].tail[0] * new[h]).astype(dtype) for h in range(S)]
    for g in range(shape.key_heads):
        writes = dot(keys[g], jnp.concatenate(tails[g * R : (g + 1) * R], 1), TN)
        for r in range(R):
            h = g * R + r
            state_ref[h] = gates[h].carry * states[h] + writes[:, r * W : (r + 1) * W]
    for h in range(S):
        out = shape.scale * (gates[h].head[0] * seen[h][C:] + dot(attention[h], new[h].astype(dtype)))
        for at, (out_ref, _) in parts:
            width = at.stop - at.start
            out_ref[:, h * width : (h + 1) * width] = out[:, at].astype(out_ref.dtype)


def _with_zeros(x: jax.Array, width: int) -> jax.Array:
    extra = width - x.shape[1]
    return jnp.concatenate([x, jnp.zeros((len(x), extra), x.dtype)], 1) if extra else x


class Forward(NamedTuple):
    """final [B,H,K,W] float32, the rest in the inputs' dtype: inverses [B,N,H,C,C], out [B,T,H,V], the states entering
    the chunks [B,N,H,K,V], and the mapped columns of both, [B,T,H,K] and [B,N,H,K,K], or None."""

    final: jax.Array
    inverses: jax.Array
    out: jax.Array
    states: jax.Array
    query_map: jax.Array | None = None
    transitions: jax.Array | None = None


def forward(shape: Shape, q, k, v, gates, initial) -> Forward:
    """q, k [B,T,G,K], v [B,T,H,V], gates of `pack_gates`, initial [B,H,K,W] float32."""
    B, T = q.shape[:2]
    N, C, S, K, W = shape.chunks, shape.chunk, shape.heads, shape.key_dim, shape.width
    H = S * shape.groups

    def tokens(width):
        return pl.BlockSpec((None, C, width), lambda b, s, n: (b, n, s))

    def per_chunk(*block):
        return pl.BlockSpec((None, None, S, *block), lambda b, s, n: (b, n, s, 0, 0))

    state = pl.BlockSpec((None, S, K, W), lambda b, s, n: (b, s, 0, 0))
    widths = [shape.value_dim, shape.mapped] if shape.mapped else [shape.value_dim]
    final, inverses, *parts = pl.pallas_call(
        functools.partial(_forward_kernel, shape),
        grid=(B, shape.groups, N),
        in_specs=[
            tokens(shape.key_heads * K),
            tokens(shape.key_heads * K),
            tokens(S * shape.value_dim),
            pl.BlockSpec((None, None, None, shape.rows, C), lambda b, s, n: (b, s, n, 0, 0)),
            state,
        ],
        out_specs=[state, per_chunk(C, C), *(y for x in widths for y in (tokens(S * x), per_chunk(K, x)))],
        out_shape=[
            jax.ShapeDtypeStruct((B, H, K, W), jnp.float32),
            jax.ShapeDtypeStruct((B, N, H, C, C), q.dtype),
            *(jax.ShapeDtypeStruct(y, q.dtype) for x in widths for y in ((B, T, H * x), (B, N, H, K, x))),
        ],
        compiler_params=compiler_params(),
        interpret=shape.interpret,
        name="gdn_forward",
    )(*(x.reshape(B, T, -1) for x in (q, k, v)), gates, initial)
    parts[::2] = [x.reshape(B, T, H, -1) for x in parts[::2]]
    return Forward(final, inverses, *parts)


def _backward_kernel(
    shape: Shape, q_ref, k_ref, v_ref, gates_ref, states_ref, inverse_ref, dout_ref, dfinal_ref,
    dq_ref, dk_ref, dv_ref, dgates_ref, dstate_ref,
):  # fmt: skip
    """Grid: row, group of key heads, chunk from the last to the first. dstate_ref [S, K, V]: the running cotangent."""
    R, K, V, C, S = shape.repeats, shape.key_dim, shape.value_dim, shape.chunk, shape.heads
    dtype, scale, heads = q_ref.dtype, shape.scale, range(shape.heads)

    @pl.when(pl.program_id(2) == 0)
    def _():
        dstate_ref[...] = dfinal_ref[...]

    gates, document = read_gates(shape, gates_ref[...])
    keys = [k_ref[:, g * K : (g + 1) * K] for g in range(shape.key_heads)]
    stacked = [jnp.concatenate([k, q_ref[:, g * K : (g + 1) * K]], 0) for g, k in enumerate(keys)]
    scores = [dot(x, k, NT) for x, k in zip(stacked, keys, strict=True)]
    strict = lax.broadcasted_iota(jnp.int32, (C, C), 0) > lax.broadcasted_iota(jnp.int32, (C, C), 1)
    pairs = [pair_decay(x.coarse, x.fine, document) for x in gates]
    states, inverses = [states_ref[h] for h in heads], [inverse_ref[h] for h in heads]
    values, douts = ([x[:, h * V : (h + 1) * V] for h in heads] for x in (v_ref, dout_ref))

    # The forward's new, again.
    wanted = [values[h].astype(jnp.float32) - gates[h].head[0] * dot(keys[h // R], states[h]) for h in heads]
    new = [dot(inverses[h], (gates[h].beta[0] * wanted[h]).astype(dtype)).astype(dtype) for h in heads]

    dstates = [dstate_ref[h] for h in heads]
    narrow = [x.astype(dtype) for x in dstates]
    attention = [(scores[h // R][C:] * pairs[h]).astype(dtype) for h in heads]
    dnew = [
        scale * dot(attention[h], douts[h], TN) + gates[h].tail[0] * dot(keys[h // R], narrow[h]) for h in heads
    ]
    dright = [dot(inverses[h], dnew[h].astype(dtype), TN) for h in heads]  # cotangent of beta (v - head k state)
    dwanted = [gates[h].beta[0] * dright[h] for h in heads]
    for h in heads:
        dv_ref[:, h * V : (h + 1) * V] = dwanted[h].astype(dv_ref.dtype)
    for g in range(shape.key_heads):
        group = range(g * R, (g + 1) * R)
        written = [(-gates[h].head[0] * dwanted[h]).astype(dtype) for h in group]
        read = [(gates[h].head[0] * scale * douts[h].astype(jnp.float32)).astype(dtype) for h in group]
        arriving = dot(stacked[g], jnp.concatenate([jnp.concatenate(x, 1) for x in (written, read)], 0), TN)
        for r, h in enumerate(group):
            dstate_ref[h] = gates[h].carry * dstates[h] + arriving[:, r * V : (r + 1) * V]

    both = [jnp.concatenate([dright[h].astype(dtype), douts[h]], 0) for h in heads]
    dscores = [dot(both[h], new[h], NT) for h in heads]
    dheads = [dot(both[h], states[h], NT) for h in heads]
    dtails = [dot(new[h], narrow[h], NT) for h in heads]
    lane = lax.broadcasted_iota(jnp.int32, (C, LANES), 1)
    columns, sums = jnp.zeros((C, LANES), jnp.float32), []
    for g in range(shape.key_heads):
        k, q = stacked[g][:C].astype(jnp.float32), stacked[g][C:].astype(jnp.float32)
        dk, dq = jnp.zeros((C, K), jnp.float32), jnp.zeros((C, K), jnp.float32)
        dlower, dattention = jnp.zeros((C, C), jnp.float32), jnp.zeros((C, C), jnp.float32)
        for h in range(g * R, (g + 1) * R):
            beta, head, tail = gates[h].beta[0], gates[h].head[0], gates[h].tail[0]
            by_lower = jnp.where(strict, dscores[h][:C] * pairs[h], 0.0)
            by_attention = scale * dscores[h][C:] * pairs[h]
            dlower -= beta * by_lower
            dattention += by_attention
            from_head, from_query, from_tail = head * dheads[h][:C], (head * scale) * dheads[h][C:], tail * dtails[h]
            dk += from_tail - beta * from_head
            dq += from_query
            by_lower *= scores[g][:C]
            by_pair = jnp.where(strict, by_attention * scores[g][C:], 0.0) - beta * by_lower
            by_key = _row_sum(k * from_head)
            carried = gates[h].carry * jnp.sum(dstates[h] * states[h].astype(jnp.float32))
            dlog = _row_sum(by_pair) + _row_sum(q * from_query) - beta * by_key
            dlog += jnp.where(lax.broadcasted_iota(jnp.int32, (C, 1), 0) == C - 1, carried, 0.0)
            dbeta = _row_sum(dright[h] * values[h].astype(jnp.float32)) - _row_sum(by_lower) - by_key
            for kind, column in enumerate((dlog, _row_sum(k * from_tail), dbeta)):
                columns = jnp.where(lane == h + S * kind, column, columns)
            sums.append(jnp.sum(by_pair, axis=0, keepdims=True))
        weights = jnp.concatenate([dlower, dattention], 0).astype(dtype)
        straight = dot(weights, keys[g])
        dk += straight[:C] + dot(weights, stacked[g], TN)
        dq += straight[C:]
        dq_ref[:, g * K : (g + 1) * K] = dq.astype(dq_ref.dtype)
        dk_ref[:, g * K : (g + 1) * K] = dk.astype(dk_ref.dtype)
    dgates_ref[...] = columns.T[: shape.gradient_rows]
    dgates_ref[:S] -= jnp.concatenate(sums, 0)


def _row_sum(x: jax.Array) -> jax.Array:
    return jnp.sum(x, axis=1, keepdims=True)


def backward(shape: Shape, q, k, v, gates, states, inverses, dout, dfinal):
    """The adjoint of `forward` without mapped columns; states are those that really entered the chunks.

    dout [B,T,H,V] in the inputs' dtype, dfinal [B,H,K,V] float32. Returns dq, dk, dv, the rows of `gate_gradients`, and
    the cotangent of the initial state.
    """
    B, T = q.shape[:2]
    N, C, S, K, V = shape.chunks, shape.chunk, shape.heads, shape.key_dim, shape.value_dim
    H = S * shape.groups

    def tokens(width):
        return pl.BlockSpec((None, C, width), lambda b, s, n: (b, N - 1 - n, s))

    def per_chunk(*block):
        return pl.BlockSpec((None, None, S, *block), lambda b, s, n: (b, N - 1 - n, s, 0, 0))

    def rows(count):
        return pl.BlockSpec((None, None, None, count, C), lambda b, s, n: (b, s, N - 1 - n, 0, 0))

    state = pl.BlockSpec((None, S, K, V), lambda b, s, n: (b, s, 0, 0))
    key, value = tokens(shape.key_heads * K), tokens(S * V)
    flat = [x.reshape(B, T, -1) for x in (q, k, v, dout)]
    dq, dk, dv, dgates, dinitial = pl.pallas_call(
        functools.partial(_backward_kernel, shape),
        grid=(B, shape.groups, N),
        in_specs=[key, key, value, rows(shape.rows), per_chunk(K, V), per_chunk(C, C), value, state],
        out_specs=[key, key, value, rows(shape.gradient_rows), state],
        out_shape=[
            *(jax.ShapeDtypeStruct(x.shape, x.dtype) for x in flat[:3]),
            jax.ShapeDtypeStruct((*gates.shape[:3], shape.gradient_rows, C), jnp.float32),
            jax.ShapeDtypeStruct((B, H, K, V), jnp.float32),
        ],
        compiler_params=compiler_params(),
        interpret=shape.interpret,
        name="gdn_backward",
    )(*flat[:3], gates, states, inverses, flat[3], dfinal)
    return dq.reshape(q.shape), dk.reshape(k.shape), dv.reshape(v.shape), dgates, dinitial


def gate_gradients(shape: Shape, dgates: jax.Array) -> tuple[jax.Array, jax.Array]:
    """dg and dbeta [B,T,H] from the rows of `backward`: cotangents of the running sum of g, of log tail, of beta.

    A token's g counts in the running sums from it on, and in the tails of the tokens before it.
    """
    S = shape.heads
    running, tail, dbeta = (dgates[..., at * S : (at + 1) * S, :] for at in range(3))
    before = jnp.pad(tail[..., :-1], [(0, 0)] * 4 + [(1, 0)])
    dg = jnp.cumsum(running[..., ::-1], -1)[..., ::-1] + jnp.cumsum(before, -1)
    dg, dbeta = (x.transpose(0, 2, 4, 1, 3).reshape(shape.batch, -1, S * shape.groups) for x in (dg, dbeta))
    return dg, dbeta


def compiler_params() -> pltpu.CompilerParams:
    return pltpu.CompilerParams(
        dimension_semantics=("parallel", "parallel", "arbitrary"), vmem_limit_bytes=VMEM_BYTES
    )
