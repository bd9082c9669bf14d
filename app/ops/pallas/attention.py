"""The block products of attention as TPU kernels; the interface and the formulas are those of app.ops.attention_xla.

Letters: B batch, C tokens of a part, H query heads, G key/value heads, K key head dim, V value head dim, N parts;
inside the kernels batch and heads are one dim.

Why kernels of our own. The libraries' block products return a normalised bf16 output that a ring would merge in HBM at
every step, the half-blocks that the zigzag picks would be copied, and their backward passes (jax 0.12, tokamax 0.0.17)
give the two cores of a v5p chip no dim to share. Here the running softmax and dq are inputs and outputs, in place and
in float32; the list of products is a scalar operand, so that picking a half-block is an index. Costs:
README_attention.md.

In place: a block of the running state or of dq is read before its first product and written after its last, and the
grid goes through all products of a block in consecutive steps: no block is read again after it has been written.
Exponentials are to base 2: scores, `Running.top` and `Cotangents.lse` carry a factor log2(e) here.
"""

import dataclasses
import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from app.ops.attention_xla import HIDDEN, Cotangents, Keys, Kind, Queries, Running, document_range

LANES = 128
# Tokens of the blocks that one grid step holds, and of the piece of keys that one matrix product takes.
QUERY_BLOCK, KEY_BLOCK, KEY_PIECE = 1024, 2048, 512
# At the causal diagonal smaller blocks of keys waste less.
DIAGONAL_KEY_BLOCK = 512
# float32 key and value gradients stay in VMEM while all queries pass; keys that need more take several passes.
KEY_GRADIENT_BYTES = 34 << 20
VMEM_BYTES = 60 << 20

_NT = (((1,), (1,)), ((), ()))  # x y^T
_NN = (((1,), (0,)), ((), ()))  # x y
_TN = (((0,), (0,)), ((), ()))  # x^T y


@dataclasses.dataclass(frozen=True)
class PallasKernel:
    """See XlaKernel. K, V and the tokens of a part must be multiples of 128. interpret: run on any platform, slowly."""

    length: int
    parts: int
    ratio: int  # H / G
    scale: float
    interpret: bool = False

    def __post_init__(self):
        if self.length % (self.parts * LANES):
            raise ValueError(
                f"the pallas attention kernel works on parts of a multiple of {LANES} tokens, but a rank has "
                f"{self.length} tokens in {self.parts} part(s): make seq_len a multiple of {self.parts * LANES} x "
                "sequence ranks, or choose the xla kernel"
            )

    @property
    def part(self) -> int:
        """Tokens of a part."""
        return self.length // self.parts

    # --- operands and results

    def queries(self, q_BHTK: jax.Array, segment_ids_BT: jax.Array | None) -> Queries:
        _check_head_dim("q and k", q_BHTK)
        if segment_ids_BT is None:
            return Queries(self._split(q_BHTK), None)
        # Padding sees nothing: -1 is no key's id.
        return Queries(self._split(q_BHTK), self._split_rows(jnp.where(segment_ids_BT == 0, -1, segment_ids_BT)))

    def keys(self, k_BGSK: jax.Array, v_BGSV: jax.Array, segment_ids_BS: jax.Array | None) -> Keys:
        _check_head_dim("v", v_BGSV)
        ids = None if segment_ids_BS is None else self._split_rows(segment_ids_BS)
        return Keys(self._split(jnp.concatenate([k_BGSK, v_BGSV], -1)), ids)

    def cotangents(self, out_BHTV: jax.Array, lse_BHT: jax.Array, d_out_BHTV: jax.Array) -> Cotangents:
        delta_BHT = jnp.einsum("bhtv,bhtv->bht", out_BHTV.astype(jnp.float32), d_out_BHTV.astype(jnp.float32))
        lse_BHT = jnp.maximum(lse_BHT * math.log2(math.e), 0.5 * HIDDEN)  # see XlaKernel.cotangents
        return Cotangents(self._split(d_out_BHTV), self._split_rows(lse_BHT), self._split_rows(delta_BHT))

    def start(self, queries: Queries, keys: Keys) -> Running:
        *rows, K = queries.q.shape
        stats = (*rows[:-1], 1, rows[-1])
        acc = jnp.zeros((*rows, keys.kv.shape[-1] - K), jnp.float32)
        return Running(acc, jnp.full(stats, HIDDEN, jnp.float32), jnp.zeros(stats, jnp.float32))

    def finish(self, running: Running) -> tuple[jax.Array, jax.Array]:
        some = jnp.where(running.sum > 0, running.sum, 1.0)
        lse = (running.top + jnp.log2(some)) * math.log(2)
        return self._join(running.acc / jnp.swapaxes(some, -1, -2)), self._join(jnp.swapaxes(lse, -1, -2))[..., 0]

    def start_query_gradient(self, queries: Queries) -> jax.Array:
        return jnp.zeros_like(queries.q, jnp.float32)

    def finish_query_gradient(self, dq: jax.Array) -> jax.Array:
        return self._join(dq) * self.scale

    def finish_key_gradients(self, dkv: jax.Array, K: int) -> jax.Array:
        X = dkv.shape[-1]
        return self._join(dkv) * jnp.where(jnp.arange(X) < K, self.scale, 1.0).reshape(1, 1, 1, X)

    def _split(self, x_BHTX: jax.Array) -> jax.Array:
        """[B,H,T,X] -> [N,B,H,C,X]"""
        B, H, _, X = x_BHTX.shape
        return jnp.moveaxis(x_BHTX.reshape(B, H, self.parts, self.part, X), 2, 0)

    def _join(self, x_NBHCX: jax.Array) -> jax.Array:
        """[N,B,H,C,X] -> [B,H,T,X]"""
        _, B, H, _, X = x_NBHCX.shape
        return jnp.moveaxis(x_NBHCX, 0, 2).reshape(B, H, self.length, X)

    def _split_rows(self, x: jax.Array) -> jax.Array:
        """[..., T] -> [N, ..., 1, C]: tokens along lanes."""
        return jnp.moveaxis(x.reshape(*x.shape[:-1], self.parts, 1, self.part), -3, 0)

    # --- products

    def accumulate(
        self, running: Running, queries: Queries, keys: Keys, products: jax.Array, kind: Kind, optional: bool = False
    ) -> Running:
        shape = _Shape.of(self, queries, keys, kind, optional)
        return _forward_call(shape, running, queries, keys, products)

    def accumulate_gradients(
        self,
        dq: jax.Array,
        queries: Queries,
        cotangents: Cotangents,
        keys: Keys,
        products: jax.Array,
        kind: Kind,
        optional: bool = False,
    ) -> tuple[jax.Array, jax.Array]:
        shape = _Shape.of(self, queries, keys, kind, optional)
        pieces = []
        for first in range(0, self.part, shape.resident):
            dq, piece = _backward_call(shape, first, dq, queries, cotangents, keys, products)
            pieces.append(piece)
        return dq, jnp.concatenate(pieces, -2)


def _check_head_dim(name: str, x: jax.Array) -> None:
    if x.shape[-1] % LANES:
        raise ValueError(
            f"the pallas attention kernel takes head dims that are multiples of {LANES}; {name} has {x.shape[-1]} "
            "(model.head_dim): choose the xla kernel"
        )


def _block(tokens: int, limit: int) -> int:
    """The largest multiple of 128 that divides `tokens` and is at most `limit`."""
    return next(size for size in range(min(limit, tokens) // LANES * LANES, 0, -LANES) if tokens % size == 0)


@dataclasses.dataclass(frozen=True)
class _Shape:
    """Everything static about a call."""

    heads: int  # query heads of a batch row
    ratio: int
    part: int  # tokens of a part
    query: int  # tokens of a block of queries
    key: int  # of a block of keys
    piece: int  # keys of one matrix product
    resident: int  # keys of a part whose gradients one backward call holds
    log2_scale: float  # scale log2(e)
    kind: Kind
    optional: bool
    documents: bool
    interpret: bool

    @classmethod
    def of(cls, kernel: PallasKernel, queries: Queries, keys: Keys, kind: Kind, optional: bool) -> "_Shape":
        N, _, H, C, _ = queries.q.shape
        key = _block(C, KEY_BLOCK if kind == "full" else DIAGONAL_KEY_BLOCK)
        most = KEY_GRADIENT_BYTES // (4 * N * keys.kv.shape[-1])
        resident = key * _largest_divisor(C // key, max(1, most // key))
        return cls(
            H, kernel.ratio, C, _block(C, QUERY_BLOCK), key, _block(key, KEY_PIECE), resident,
            kernel.scale * math.log2(math.e), kind, optional, keys.ids is not None, kernel.interpret,
        )  # fmt: skip

    @property
    def always(self) -> bool:
        """Whether every pair of blocks has something to see."""
        return self.kind == "full" and not self.optional and not self.documents

    def sees(self, products, ranges, u, batch, i, j):
        """Whether any query of block i of product u sees any key of block j: bool []."""
        tests = []
        if self.optional:
            tests.append(products[u, 1] >= 0)
        if self.kind == "diagonal":
            tests.append(j * self.key < (i + 1) * self.query)
        if self.documents:
            query_ranges, key_ranges = ranges
            a, b = products[u, 0], jnp.maximum(products[u, 1], 0)
            tests.append(query_ranges[0, a, batch, i] <= key_ranges[1, b, batch, j])
            tests.append(key_ranges[0, b, batch, j] <= query_ranges[1, a, batch, i])
        return functools.reduce(jnp.logical_and, tests)

    def hide(self, scores, query_ids, key_ids, i, first_key, keys_dim: int):
        """Scores of block i of queries against the piece of keys that starts at `first_key`, HIDDEN where not seen.

        Ids are [1, tokens]; keys_dim: the dim of `scores` that runs over the keys.
        """
        seen = []
        if self.kind == "diagonal":
            key = first_key + lax.broadcasted_iota(jnp.int32, scores.shape, keys_dim)
            seen.append(key <= i * self.query + lax.broadcasted_iota(jnp.int32, scores.shape, 1 - keys_dim))
        if self.documents:
            row, column = (query_ids, key_ids) if keys_dim == 0 else (key_ids, query_ids)
            seen.append(row == jnp.expand_dims(column[0], -1))
        return jnp.where(functools.reduce(jnp.logical_and, seen), scores, HIDDEN) if seen else scores


def _largest_divisor(number: int, limit: int) -> int:
    return next(d for d in range(min(number, limit), 0, -1) if number % d == 0)


def _ranges(shape: _Shape, queries: Queries, keys: Keys) -> tuple[jax.Array, ...]:
    """Scalar operands: smallest and largest document id of every block, [2,N,B,I] and [2,N,B,J]; () without ids."""
    if queries.ids is None or keys.ids is None:
        return ()
    blocks = ((queries.ids, shape.query), (keys.ids, shape.key))
    return tuple(jnp.stack(document_range(ids.reshape(*ids.shape[:2], -1, size))) for ids, size in blocks)


def _flat(x: jax.Array) -> jax.Array:
    """[N,B,H,...] -> [N,BH,...]"""
    return x.reshape(x.shape[0], -1, *x.shape[3:])


# --- forward


def _forward_call(shape: _Shape, running: Running, queries: Queries, keys: Keys, products: jax.Array) -> Running:
    _, B, H, C, K = queries.q.shape
    X = keys.kv.shape[-1]
    scalars = (products, *_ranges(shape, queries, keys))

    def key_part(u, products):
        return jnp.maximum(products[u, 1], 0)

    def spec(block, index):
        return pl.BlockSpec((None, None, *block), lambda h, i, u, j, products, *_: index(h, i, u, j, products))

    def row_spec(block):
        return spec(block, lambda h, i, u, j, p: (p[u, 0], h, i, 0))

    stat = spec((1, shape.query), lambda h, i, u, j, p: (p[u, 0], h, 0, i))
    state = [row_spec((shape.query, X - K)), stat, stat]
    in_specs = [
        row_spec((shape.query, K)),
        spec((shape.key, X), lambda h, i, u, j, p: (key_part(u, p), lax.div(h, shape.ratio), j, 0)),
    ]
    operands = [_flat(queries.q), _flat(keys.kv)]
    if queries.ids is not None and keys.ids is not None:
        in_specs += [
            spec((1, shape.query), lambda h, i, u, j, p: (p[u, 0], lax.div(h, H), 0, i)),
            spec((1, shape.key), lambda h, i, u, j, p: (key_part(u, p), lax.div(h, H), 0, j)),
        ]
        operands += [queries.ids, keys.ids]
    out = pl.pallas_call(
        functools.partial(_forward_kernel, shape, len(products)),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=len(scalars),
            grid=(B * H, C // shape.query, len(products), C // shape.key),
            in_specs=[*in_specs, *state],
            out_specs=state,
            scratch_shapes=[pltpu.VMEM((shape.query, LANES), jnp.float32)] * 2,
        ),
        out_shape=[jax.ShapeDtypeStruct.like(_flat(x)) for x in running],
        input_output_aliases={len(scalars) + len(operands) + x: x for x in range(3)},
        compiler_params=_compiler_params(4),
        interpret=shape.interpret,
        name="attention_forward",
    )(*scalars, *operands, *(_flat(x) for x in running))
    return Running(*(new.reshape(old.shape) for new, old in zip(out, running, strict=True)))


def _forward_kernel(shape: _Shape, count: int, products, *refs):
    """Grid: head, query block, product, key block."""
    ranges, refs = (refs[:2], refs[2:]) if shape.documents else ((), refs)
    (q, kv), refs = refs[:2], refs[2:]
    (query_ids, key_ids), refs = (refs[:2], refs[2:]) if shape.documents else ((None, None), refs)
    acc_in, top_in, sum_in, acc, top, total, top_lanes, sum_lanes = refs
    h, i, u, j = (pl.program_id(dim) for dim in range(4))
    K = q.shape[1]

    @pl.when((j == 0) & _starts_run(products, u))
    def _():
        acc[...] = acc_in[...]
        top_lanes[...] = jnp.broadcast_to(jnp.expand_dims(top_in[0], -1), top_lanes.shape)
        sum_lanes[...] = jnp.broadcast_to(jnp.expand_dims(sum_in[0], -1), sum_lanes.shape)

    def compute():
        for first in range(0, shape.key, shape.piece):
            piece = pl.ds(first, shape.piece)
            scores = _dot(q[...], kv[piece, :K], _NT) * shape.log2_scale
            ids = (None, None) if query_ids is None or key_ids is None else (query_ids[...], key_ids[:, piece])
            scores = shape.hide(scores, *ids, i, j * shape.key + first, keys_dim=1)
            new_top = jnp.maximum(top_lanes[...], jnp.max(scores, axis=1, keepdims=True))
            # While a query has seen no key its maximum is HIDDEN, and 2^0 would count every hidden key.
            floor = new_top if shape.always else jnp.maximum(new_top, 0.5 * HIDDEN)
            p = jnp.exp2(scores - jnp.tile(floor, (1, shape.piece // LANES)))
            keep = jnp.exp2(top_lanes[...] - new_top)
            sum_lanes[...] = sum_lanes[...] * keep + jnp.sum(p, axis=1, keepdims=True)
            top_lanes[...] = new_top
            product = _dot(p.astype(kv.dtype), kv[piece, K:], _NN)
            acc[...] = acc[...] * jnp.tile(keep, (1, acc.shape[1] // LANES)) + product

    _when_seen(shape, products, ranges, u, lax.div(h, shape.heads), i, j, compute)

    @pl.when((j == pl.num_programs(3) - 1) & _ends_run(products, u, count))
    def _():
        top[...] = top_lanes[:, :1].reshape(top.shape)
        total[...] = sum_lanes[:, :1].reshape(total.shape)


# --- backward


def _backward_call(
    shape: _Shape,
    first_key: int,
    dq: jax.Array,
    queries: Queries,
    cotangents: Cotangents,
    keys: Keys,
    products: jax.Array,
) -> tuple[jax.Array, jax.Array]:
    """dq after all products with keys first_key .. first_key + resident - 1 of the parts, and those keys' gradients."""
    _, B, H, C, K = queries.q.shape
    N, _, G, _, X = keys.kv.shape
    scalars = (products, *_ranges(shape, queries, keys))
    skipped = first_key // shape.key

    def spec(block, index):
        def of_heads(g, r, i, u, j, products, *_):
            return index(g, g * shape.ratio + r, i, u, j, products)

        return pl.BlockSpec((None, None, *block), of_heads)

    def key_part(u, p):
        return jnp.maximum(p[u, 1], 0)

    def row_spec(dim):
        return spec((shape.query, dim), lambda g, h, i, u, j, p: (p[u, 0], h, i, 0))

    stat = spec((1, shape.query), lambda g, h, i, u, j, p: (p[u, 0], h, 0, i))
    kv_spec = spec((shape.key, X), lambda g, h, i, u, j, p: (key_part(u, p), g, skipped + j, 0))
    in_specs = [row_spec(K), row_spec(X - K), stat, stat, kv_spec]
    operands = [_flat(x) for x in (queries.q, *cotangents, keys.kv)]
    if queries.ids is not None and keys.ids is not None:
        in_specs += [
            spec((1, shape.query), lambda g, h, i, u, j, p: (p[u, 0], lax.div(h, H), 0, i)),
            spec((1, shape.key), lambda g, h, i, u, j, p: (key_part(u, p), lax.div(h, H), 0, skipped + j)),
        ]
        operands += [queries.ids, keys.ids]
    new_dq, dkv = pl.pallas_call(
        functools.partial(_backward_kernel, shape, skipped),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=len(scalars),
            grid=(B * G, shape.ratio, C // shape.query, len(products), shape.resident // shape.key),
            in_specs=[*in_specs, row_spec(K)],
            out_specs=[row_spec(K), pl.BlockSpec(memory_space=pl.ANY)],
            scratch_shapes=[pltpu.VMEM((N, shape.resident, X), jnp.float32), pltpu.SemaphoreType.DMA],
        ),
        out_shape=[
            jax.ShapeDtypeStruct.like(_flat(dq)),
            jax.ShapeDtypeStruct((N, B * G, shape.resident, X), jnp.float32),
        ],
        input_output_aliases={len(scalars) + len(operands): 0},
        compiler_params=_compiler_params(5),
        interpret=shape.interpret,
        name="attention_backward",
    )(*scalars, *operands, _flat(dq))
    return new_dq.reshape(dq.shape), dkv.reshape(N, B, G, *dkv.shape[2:])


def _backward_kernel(shape: _Shape, skipped: int, products, *refs):
    """Grid: key head, query head of it, query block, product, key block. Scores are keys by queries."""
    ranges, refs = (refs[:2], refs[2:]) if shape.documents else ((), refs)
    (q, d_out, lse, delta, kv), refs = refs[:5], refs[5:]
    (query_ids, key_ids), refs = (refs[:2], refs[2:]) if shape.documents else ((None, None), refs)
    dq_in, dq, dkv_out, dkv, semaphore = refs
    dims, K = range(5), q.shape[1]
    g, r, i, u, j = (pl.program_id(dim) for dim in dims)
    last_step = functools.reduce(jnp.logical_and, [pl.program_id(dim) == pl.num_programs(dim) - 1 for dim in dims[1:]])

    @pl.when((r == 0) & (i == 0) & (u == 0) & (j == 0))
    def _():
        dkv[...] = jnp.zeros_like(dkv)

    @pl.when((j == 0) & _starts_run(products, u))
    def _():
        dq[...] = dq_in[...]

    def compute():
        part = jnp.maximum(products[u, 1], 0)
        for first in range(0, shape.key, shape.piece):
            piece = pl.ds(first, shape.piece)
            held = pl.ds(j * shape.key + first, shape.piece)
            scores = _dot(kv[piece, :K], q[...], _NT) * shape.log2_scale
            ids = (None, None) if query_ids is None or key_ids is None else (query_ids[...], key_ids[:, piece])
            scores = shape.hide(scores, *ids, i, (skipped + j) * shape.key + first, keys_dim=0)
            p = jnp.exp2(scores - lse[...])
            dp = _dot(kv[piece, K:], d_out[...], _NT)
            ds = (p * (dp - delta[...])).astype(kv.dtype)
            dkv[part, held, K:] += _dot(p.astype(d_out.dtype), d_out[...], _NN)
            dkv[part, held, :K] += _dot(ds, q[...], _NN)
            dq[...] += _dot(ds, kv[piece, :K], _TN)

    batch = lax.div(g * shape.ratio + r, shape.heads)
    _when_seen(shape, products, ranges, u, batch, i, skipped + j, compute)

    @pl.when(last_step)
    def _():
        parts = range(dkv.shape[0])
        copies = [pltpu.make_async_copy(dkv.at[part], dkv_out.at[part, g], semaphore) for part in parts]
        for copy in copies:
            copy.start()
        for copy in copies:
            copy.wait()


# --- shared


def _starts_run(products, u):
    """Whether product u is the first of consecutive ones with the same queries."""
    return (u == 0) | (products[u, 0] != products[jnp.maximum(u - 1, 0), 0])


def _ends_run(products, u, count: int):
    return (u == count - 1) | (products[u, 0] != products[jnp.minimum(u + 1, count - 1), 0])


def _when_seen(shape: _Shape, products, ranges, u, batch, i, j, compute) -> None:
    if shape.always:
        compute()
    else:
        pl.when(shape.sees(products, ranges, u, batch, i, j))(compute)


def _dot(x: jax.Array, y: jax.Array, dims: Any) -> jax.Array:
    precision = lax.Precision.HIGHEST if x.dtype == jnp.float32 else lax.Precision.DEFAULT
    return lax.dot_general(x, y, dims, precision=precision, preferred_element_type=jnp.float32)


def _compiler_params(dims: int) -> pltpu.CompilerParams:
    # The cores of a chip share the heads; everything else adds up, in order.
    return pltpu.CompilerParams(
        dimension_semantics=("parallel", *("arbitrary",) * (dims - 1)), vmem_limit_bytes=VMEM_BYTES
    )
