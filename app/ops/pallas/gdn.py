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
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from app.cluster.hardware import find_generation
from app.ops.pallas.gdn_chunk import NT, TN, dot, halves, iota, pair_decay, unit_lower_inverses, visibility

LANES = 128
GATES = 6  # kinds of rows of `pack_gates`: coarse, fine, head, written, beta, tail


@dataclasses.dataclass(frozen=True)
class Tuning:
    """Size of the work: tokens of a chunk; value heads of a grid step aimed at; vector memory a kernel may fill."""

    chunk: int
    forward_heads: int
    mapped_heads: int  # of the forward with mapped columns
    backward_heads: int
    vmem_bytes: int


# Chosen by `python -m tests.benchmark.gdn_tune`; what it saw: app/ops/README.md.
TUNINGS = {
    "v4": Tuning(128, 12, 6, 6, 60 << 20),
    "v5e": Tuning(128, 24, 24, 24, 100 << 20),
    "v5p": Tuning(128, 12, 12, 12, 60 << 20),
    "v6e": Tuning(128, 12, 12, 12, 100 << 20),
    "tpu7x": Tuning(128, 24, 24, 24, 60 << 20),
}


def tuning() -> Tuning:
    """Of the devices that are traced for: those of the mesh, else jax's; v5p's where they are no TPUs."""
    device = jax.sharding.get_abstract_mesh().abstract_device or jax.devices()[0]
    generation = find_generation(device.device_kind)
    return TUNINGS[generation.name if generation else "v5p"]


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
    vmem_bytes: int
    interpret: bool

    @classmethod
    def of(
        cls, q, v, tuning: Tuning, *, heads: int, mapped: bool, scale: float, documents: bool, interpret: bool
    ) -> "Shape":
        """For padded q [B,T,G,K], v [B,T,H,V]; heads: value heads of a grid step aimed at."""
        B, T, G, K = q.shape
        repeats = v.shape[2] // G
        # Two groups or rows at least: where two cores work as one device, they share these out.
        sizes = [x for x in range(2, G + 1) if G % x == 0 and x * repeats <= heads and x < B * G]
        key_heads = max([1, *sizes])
        return cls(
            B, T // tuning.chunk, tuning.chunk, key_heads, G // key_heads, repeats, K, v.shape[3],
            K if mapped else 0, scale, documents, tuning.vmem_bytes, interpret,
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
    """The gates of one head in a chunk, each a (column [C, 1], row [1, C]); head, tail as in README.md, written = tail
    beta."""

    coarse: tuple
    fine: tuple
    head: tuple
    written: tuple
    beta: tuple
    tail: tuple

    @property
    def carry(self) -> jax.Array:
        """[1, 1]."""
        return self.head[1][:, -1:]


def pack_gates(shape: Shape, g: jax.Array, beta: jax.Array, document: jax.Array | None) -> jax.Array:
    """g, beta [B,T,H], document [B,T] -> [B, groups, N, rows, C] float32.

    Rows: for each kind of Gates those of the step's heads; the document, counted from the token before the chunk.
    """
    B, N, C = shape.batch, shape.chunks, shape.chunk
    g, beta = (x.reshape(B, N, C, shape.groups, shape.heads).transpose(0, 3, 1, 4, 2) for x in (g, beta))
    coarse, fine = split_sums(g)
    head = jnp.exp(coarse + fine)
    tail = jnp.exp((coarse[..., -1:] - coarse) + (fine[..., -1:] - fine))
    rows = []
    if document is not None:
        count = document.reshape(B, N, C)
        before = jnp.concatenate([jnp.zeros_like(count[:, :1, -1]), count[:, :-1, -1]], 1)
        count = (count - before[..., None])[:, None, :, None]
        head = jnp.where(count == 0, head, 0.0)
        tail = jnp.where(count == count[..., -1:], tail, 0.0)
        rows = [jnp.broadcast_to(count.astype(jnp.float32), (B, shape.groups, N, 1, C))]
    rows = jnp.concatenate([coarse, fine, head, tail * beta, beta, tail, *rows], 3)
    return jnp.pad(rows, [(0, 0)] * 3 + [(0, shape.rows - rows.shape[3]), (0, 0)])


def split_sums(g: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Running sums of log decays [..., C] as coarse + fine.

    Log decays are cut at -256 (exp of less is zero in float32) and into multiples of 2^-8, whose sums and differences
    are exact in float32, and the rest, whose sums stay below 2^-9 C.
    """
    g = jnp.maximum(g, -256.0)
    coarse = jnp.round(g * 256.0) / 256.0
    return jnp.cumsum(coarse, -1), jnp.cumsum(g - coarse, -1)


def read_gates(shape: Shape, rows: jax.Array) -> tuple[list[Gates], jax.Array]:
    """The gates of all heads of a step, and the `visibility` of its tokens; rows [rows, C]."""
    columns, heads = rows.T, shape.heads

    def both(at):
        return columns[:, at : at + 1], rows[at : at + 1]

    gates = [Gates(*(both(h + heads * kind) for kind in range(GATES))) for h in range(heads)]
    return gates, visibility(shape.chunk, both(GATES * heads) if shape.documents else None)


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

    gates, visible = read_gates(shape, gates_ref[...])
    keys = [k_ref[:, g * K : (g + 1) * K] for g in range(shape.key_heads)]
    stacked = [jnp.concatenate([k, q_ref[:, g * K : (g + 1) * K]], 0) for g, k in enumerate(keys)]
    turned = [k.T for k in keys]
    scores = [dot(x, k) for x, k in zip(stacked, turned, strict=True)]
    pairs = [pair_decay(x.coarse, x.fine, visible) for x in gates]
    inverses = unit_lower_inverses([scores[h // R][:C] * pairs[h] * gates[h].beta[1] for h in range(S)], dtype)
    inverses = [x.astype(dtype) for x in inverses]
    states = [state_ref[h] for h in range(S)]
    narrow = [x.astype(dtype) for x in states]
    for h in range(S):
        inverse_ref[h] = inverses[h]
        for at, (_, states_ref) in parts:
            states_ref[h] = narrow[h][:, at]
    seen = [dot(stacked[h // R], narrow[h]) for h in range(S)]
    values = [_with_zeros(v_ref[:, h * V : (h + 1) * V].astype(jnp.float32), W) for h in range(S)]
    wanted = [values[h] - gates[h].head[0] * seen[h][:C] for h in range(S)]
    new = [(gates[h].beta[0] * dot(inverses[h], wanted[h].astype(dtype))).astype(dtype) for h in range(S)]
    for h in range(S):
        attention = (scores[h // R][C:] * pairs[h]).astype(dtype)
        writing = (turned[h // R].astype(jnp.float32) * gates[h].tail[1]).astype(dtype)
        sent = dot(jnp.concatenate([attention, writing], 0), new[h])
        state_ref[h] = gates[h].carry * states[h] + sent[C:]
        out = shape.scale * (gates[h].head[0] * seen[h][C:] + sent[:C])
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
        compiler_params=compiler_params(shape),
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

    gates, visible = read_gates(shape, gates_ref[...])
    keys = [k_ref[:, g * K : (g + 1) * K] for g in range(shape.key_heads)]
    queries = [q_ref[:, g * K : (g + 1) * K] for g in range(shape.key_heads)]
    stacked = [jnp.concatenate(x, 0) for x in zip(keys, queries, strict=True)]
    turned = [(k.T, q.T) for k, q in zip(keys, queries, strict=True)]
    scores = [dot(x, k) for x, (k, _) in zip(stacked, turned, strict=True)]
    strict, same = iota((C, C), 0) > iota((C, C), 1), iota((C, C), 0) == iota((C, C), 1)
    pairs = [pair_decay(x.coarse, x.fine, visible) for x in gates]
    writing = [gates[h].beta[1] * pairs[h] for h in heads]
    states, inverses = [states_ref[h] for h in heads], [inverse_ref[h] for h in heads]
    values, douts = ([x[:, h * V : (h + 1) * V] for h in heads] for x in (v_ref, dout_ref))

    # The forward's new, before beta, again.
    wanted = [values[h].astype(jnp.float32) - gates[h].head[0] * dot(keys[h // R], states[h]) for h in heads]
    new = [dot(inverses[h], wanted[h].astype(dtype)) for h in heads]

    dstates = [dstate_ref[h] for h in heads]
    narrow = [x.astype(dtype) for x in dstates]
    attention = [(scores[h // R][C:] * writing[h]).astype(dtype) for h in heads]
    dnew = [scale * dot(attention[h], douts[h], TN) + gates[h].written[0] * dot(keys[h // R], narrow[h]) for h in heads]
    # Both halves of this operand: rounded, it would leave dv and the state's cotangent less exact than chunks of 64 do.
    dwanted = [_twice(inverses[h], dnew[h], TN) for h in heads]
    gains = [_row_sum(new[h] * dwanted[h]) for h in heads]
    new, dwanted = [x.astype(dtype) for x in new], [x.astype(dtype) for x in dwanted]
    both = [jnp.concatenate(x, 0) for x in zip(dwanted, douts, strict=True)]
    for h in heads:
        dv_ref[:, h * V : (h + 1) * V] = dwanted[h]
        k, q = (x.astype(jnp.float32) for x in turned[h // R])
        seeing = jnp.concatenate([-gates[h].head[1] * k, (scale * gates[h].head[1]) * q], 1).astype(dtype)
        dstate_ref[h] = gates[h].carry * dstates[h] + dot(seeing, both[h])

    dscores = [dot(both[h], new[h], NT) for h in heads]
    dheads = [dot(both[h], states[h], NT) for h in heads]
    dtails = [dot(new[h], narrow[h], NT) for h in heads]
    lane = iota((C, -(-3 * S // LANES) * LANES), 1)
    columns, sums, owns, carried = jnp.zeros(lane.shape, jnp.float32), [], [], []
    for g in range(shape.key_heads):
        k, q = keys[g].astype(jnp.float32), scale * queries[g].astype(jnp.float32)
        kk, qk = jnp.where(strict, scores[g][:C], 0.0), scale * jnp.where(strict, scores[g][C:], 0.0)
        own = scale * jnp.where(same, scores[g][C:], 0.0)
        dk, dq = jnp.zeros((C, K), jnp.float32), jnp.zeros((C, K), jnp.float32)
        dlower, dattention = jnp.zeros((C, C), jnp.float32), jnp.zeros((C, C), jnp.float32)
        for h in range(g * R, (g + 1) * R):
            from_head, from_query = gates[h].head[0] * dheads[h][:C], gates[h].head[0] * dheads[h][C:]
            dk += gates[h].written[0] * dtails[h] - from_head
            dq += from_query
            dlower -= dscores[h][:C] * writing[h]
            dattention += dscores[h][C:] * writing[h]
            by_pair = (dscores[h][C:] * qk - dscores[h][:C] * kk) * pairs[h]
            by_log = _row_sum(gates[h].beta[1] * by_pair, q * from_query - k * from_head)
            for kind, column in enumerate((by_log, _row_sum(k * dtails[h]), gains[h])):
                columns = jnp.where(lane == h + S * kind, column, columns)
            sums.append(jnp.sum(by_pair, axis=0, keepdims=True))
            owns.append(jnp.sum(dscores[h][C:] * own, axis=0, keepdims=True))
            carried.append(gates[h].carry * jnp.sum(dstates[h] * states[h].astype(jnp.float32)))
        weights = jnp.concatenate([jnp.where(strict, dlower, 0.0), scale * dattention], 0).astype(dtype)
        straight = dot(weights, keys[g])
        dk += straight[:C] + dot(weights, stacked[g], TN)
        dq_ref[:, g * K : (g + 1) * K] = (scale * dq + straight[C:]).astype(dq_ref.dtype)
        dk_ref[:, g * K : (g + 1) * K] = dk.astype(dk_ref.dtype)
    written, beta, tail = (gates_ref[S * kind : S * (kind + 1)] for kind in (3, 4, 5))
    by_log, by_tail, gain = (columns.T[S * kind : S * (kind + 1)] for kind in range(3))
    by_column, own = (jnp.concatenate(x, 0) for x in (sums, owns))
    last = jnp.where(iota((1, C), 1) == C - 1, jnp.concatenate(carried, 0), 0.0)
    dgates_ref[:S] = by_log - beta * by_column + last
    dgates_ref[S : 2 * S] = written * by_tail
    # The quotient is the exact one by far where keys are alike: the sum is a small difference of large terms there.
    at_zero = by_column + own + tail * by_tail
    dgates_ref[2 * S : 3 * S] = jnp.where(beta == 0, at_zero, gain / jnp.where(beta == 0, 1.0, beta))


def _twice(x: jax.Array, y: jax.Array, dims) -> jax.Array:
    """A product with y float32, for a bfloat16 x of both its halves."""
    if x.dtype == jnp.float32:
        return dot(x, y, dims)
    high, low = (dot(x, part.astype(x.dtype), dims) for part in halves(y))
    return high + low


def _row_sum(*parts: jax.Array) -> jax.Array:
    """Sums over the rows of all [C, ..] together: [C, 1]. Those of one width are added first: reductions are dear."""
    whole: dict[int, jax.Array] = {}
    for x in parts:
        width = x.shape[1]
        whole[width] = whole[width] + x if width in whole else x
    return functools.reduce(jnp.add, (jnp.sum(x, axis=1, keepdims=True) for x in whole.values()))


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
        compiler_params=compiler_params(shape),
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


def compiler_params(shape: Shape) -> pltpu.CompilerParams:
    return pltpu.CompilerParams(
        dimension_semantics=("parallel", "parallel", "arbitrary"), vmem_limit_bytes=shape.vmem_bytes
    )
