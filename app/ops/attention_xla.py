"""Products of blocks of queries and keys in plain XLA: what causal and ring attention are made of.

Letters: B batch, T query time, S key time, H query heads, G key/value heads (each serves H/G neighbouring query heads),
K key head dim, V value head dim. Tiles: N tiles of a sequence, C tokens of a tile, M rows of a tile of queries (H/G
heads x C tokens).

    scores_st = scale k_s.q_t where query t sees key s;  top_t = max_s scores_st;  sum_t = sum_s e^(scores_st - top_t)
    out_t = sum_s e^(scores_st - top_t) v_s / sum_t;     lse_t = top_t + log sum_t
    p_st = e^(scores_st - lse_t),  delta_t = d_out_t.out_t,  d_scores_st = p_st (v_s.d_out_t - delta_t)
    dv_s = sum_t p_st d_out_t,  dk_s = scale sum_t d_scores_st q_t,  dq_t = scale sum_s d_scores_st k_s

Blocks are combined with a running maximum and sum (Milakov and Gimelshein, arXiv:1805.02867; Dao et al.,
arXiv:2205.14135); the backward pass recomputes p from q, k and lse. Nothing of size T x S exists. Scores are kept keys
by queries: their statistics then are sums over the major dim and lie along the minor one, where they are used.
Operands keep their dtype in matrix products; scores, statistics and accumulators are float32, indices int32.
"""

import dataclasses
from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

# "diagonal": queries and keys are the same tokens and a key after its query is hidden. "full": every key is seen.
Kind = Literal["full", "diagonal"]
# A score that no visible one comes near; finite, because the difference of two of them must be 0.
HIDDEN = -1e30


class Queries(NamedTuple):
    """Tiled query side."""

    q: jax.Array  # [N,B,G,M,K]
    ids: jax.Array | None  # segment ids [N,B,M], padding is -1; None: one document and no padding


class Cotangents(NamedTuple):
    """What the backward pass needs of the queries besides, tiled alike."""

    d_out: jax.Array  # [N,B,G,M,V]
    lse: jax.Array  # [N,B,G,M] over ALL keys of the query
    delta: jax.Array  # [N,B,G,M]


class Keys(NamedTuple):
    """Tiled key side. Keys and values are one array, because together they are one message of a ring."""

    kv: jax.Array  # [N,B,G,C,K+V]
    ids: jax.Array | None  # segment ids [N,B,C], padding is 0, which no query has


class Running(NamedTuple):
    """Softmax of the keys seen so far, unnormalised, float32."""

    acc: jax.Array  # [N,B,G,V,M]
    top: jax.Array  # [N,B,G,M]
    sum: jax.Array  # [N,B,G,M]


@dataclasses.dataclass(frozen=True)
class XlaKernel:
    """Products of the parts of a local sequence of `length` tokens, cut into `parts` equal parts of equal tiles.

    A product (a, b) is: the queries of part a against the keys of part b. `products` [n,2] int32, traced or not, lists
    those to be done in turn; with `optional` a row whose b is negative is skipped.
    """

    length: int
    parts: int
    ratio: int  # H / G
    scale: float
    block_size: int

    def __post_init__(self):
        if self.block_size < 1:
            raise ValueError(f"block_size={self.block_size} must be at least 1")

    @property
    def part(self) -> int:
        """Tokens of a part."""
        return self.length // self.parts

    @property
    def tiles(self) -> int:
        """Tiles of a part: as few as hold it."""
        return -(-self.part // self.block_size)

    @property
    def tile(self) -> int:
        """Tokens of a tile; a part's last tile is padded if they do not divide it."""
        return -(-self.part // self.tiles)

    # --- operands and results

    def queries(self, q_BHTK: jax.Array, segment_ids_BT: jax.Array | None) -> Queries:
        if segment_ids_BT is None:
            return Queries(self._tile_rows(q_BHTK), None)
        # Padding sees nothing: -1 is no key's id, not even that of a padded key.
        ids_BT = jnp.where(segment_ids_BT == 0, -1, segment_ids_BT)
        ids_NBC = self._tile(ids_BT[:, None, :, None], fill=-1)[:, :, 0, :, 0]
        return Queries(self._tile_rows(q_BHTK), jnp.tile(ids_NBC, (1, 1, self.ratio)))

    def keys(self, k_BGSK: jax.Array, v_BGSV: jax.Array, segment_ids_BS: jax.Array | None) -> Keys:
        ids_NBC = None if segment_ids_BS is None else self._tile(segment_ids_BS[:, None, :, None])[:, :, 0, :, 0]
        return Keys(self._tile(jnp.concatenate([k_BGSK, v_BGSV], -1)), ids_NBC)

    def cotangents(self, out_BHTV: jax.Array, lse_BHT: jax.Array, d_out_BHTV: jax.Array) -> Cotangents:
        delta_BHT = jnp.einsum("bhtv,bhtv->bht", out_BHTV.astype(jnp.float32), d_out_BHTV.astype(jnp.float32))
        # A query that saw no key has lse = HIDDEN; against half of it its hidden scores give p = 0, not e^0.
        lse_BHT = jnp.maximum(lse_BHT, 0.5 * HIDDEN)
        lse_NBGM, delta_NBGM = (self._tile_rows(x[..., None])[..., 0] for x in (lse_BHT, delta_BHT))
        return Cotangents(self._tile_rows(d_out_BHTV), lse_NBGM, delta_NBGM)

    def start(self, queries: Queries, keys: Keys) -> Running:
        """No key seen yet."""
        *rows, K = queries.q.shape
        V = keys.kv.shape[-1] - K
        acc = jnp.zeros((*rows[:-1], V, rows[-1]), jnp.float32)
        return Running(acc, jnp.full(rows, HIDDEN, jnp.float32), jnp.zeros(rows, jnp.float32))

    def finish(self, running: Running) -> tuple[jax.Array, jax.Array]:
        """(out [B,H,T,V], lse [B,H,T]), float32; 0 and HIDDEN for a query that saw no key."""
        some = jnp.where(running.sum > 0, running.sum, 1.0)
        out_BHTV = self._untile_rows(jnp.swapaxes(running.acc / some[..., None, :], -1, -2))
        return out_BHTV, self._untile_rows((running.top + jnp.log(some))[..., None])[..., 0]

    def start_query_gradient(self, queries: Queries) -> jax.Array:
        """Zeros [N,B,G,K,M]."""
        return jnp.zeros_like(jnp.swapaxes(queries.q, -1, -2), jnp.float32)

    def finish_query_gradient(self, dq_NBGKM: jax.Array) -> jax.Array:
        """[B,H,T,K] float32"""
        return self._untile_rows(jnp.swapaxes(dq_NBGKM, -1, -2))

    def finish_key_gradients(self, dkv_NBGCX: jax.Array, K: int) -> jax.Array:
        """dk and dv [B,G,S,K+V] float32"""
        return self._untile(dkv_NBGCX)

    # --- products

    def accumulate(
        self, running: Running, queries: Queries, keys: Keys, products: jax.Array, kind: Kind, optional: bool = False
    ) -> Running:
        """`running` after its queries have seen the keys of `products` too."""

        def product(query, key, block: Running) -> Running:
            scores_BGCM = self._scores(queries, keys, query, key, kind)
            top = jnp.maximum(block.top, jnp.max(scores_BGCM, axis=-2))
            # While a query has seen no key its maximum is HIDDEN, and e^0 would count every hidden key.
            p_BGCM = jnp.exp(scores_BGCM - jnp.maximum(top, 0.5 * HIDDEN)[..., None, :])
            keep_BGM = jnp.exp(block.top - top)
            v_BGCV = keys.kv[key.tile][..., queries.q.shape[-1] :]
            acc = block.acc * keep_BGM[..., None, :] + _dot("bgcv,bgcm->bgvm", v_BGCV, p_BGCM.astype(v_BGCV.dtype))
            return Running(acc, top, block.sum * keep_BGM + jnp.sum(p_BGCM, axis=-2))

        def step(running: Running, query, key) -> Running:
            block = Running(*(x[query.tile] for x in running))
            block = self._if_seen(queries, keys, query, key, optional, product, block)
            return Running(*(_put(x, y, query.tile) for x, y in zip(running, block, strict=True)))

        return self._scan(step, running, products, kind)

    def accumulate_gradients(
        self,
        dq_NBGKM: jax.Array,
        queries: Queries,
        cotangents: Cotangents,
        keys: Keys,
        products: jax.Array,
        kind: Kind,
        optional: bool = False,
    ) -> tuple[jax.Array, jax.Array]:
        """(dq plus what `products` contribute to it, what they contribute to dk and dv [N,B,G,C,K+V] float32)."""
        K = queries.q.shape[-1]

        def product(query, key, block):
            dq_BGKM, dkv_BGCX = block
            q_BGMK, d_out_BGMV = queries.q[query.tile], cotangents.d_out[query.tile]
            k_BGCK, v_BGCV = keys.kv[key.tile][..., :K], keys.kv[key.tile][..., K:]
            scores_BGCM = self._scores(queries, keys, query, key, kind)
            p_BGCM = jnp.exp(scores_BGCM - cotangents.lse[query.tile][..., None, :])
            dp_BGCM = _dot("bgcv,bgmv->bgcm", v_BGCV, d_out_BGMV)
            ds_BGCM = p_BGCM * (dp_BGCM - cotangents.delta[query.tile][..., None, :]) * self.scale
            ds_BGCM = ds_BGCM.astype(q_BGMK.dtype)
            dk_BGCK = _dot("bgcm,bgmk->bgck", ds_BGCM, q_BGMK)
            dv_BGCV = _dot("bgcm,bgmv->bgcv", p_BGCM.astype(d_out_BGMV.dtype), d_out_BGMV)
            dq_BGKM = dq_BGKM + _dot("bgck,bgcm->bgkm", k_BGCK, ds_BGCM)
            return dq_BGKM, dkv_BGCX + jnp.concatenate([dk_BGCK, dv_BGCV], -1)

        def step(gradients, query, key):
            dq, dkv = gradients
            block = dq[query.tile], dkv[key.tile]
            new_dq, new_dkv = self._if_seen(queries, keys, query, key, optional, product, block)
            return _put(dq, new_dq, query.tile), _put(dkv, new_dkv, key.tile)

        return self._scan(step, (dq_NBGKM, jnp.zeros_like(keys.kv, jnp.float32)), products, kind)

    def _scores(self, queries: Queries, keys: Keys, query: "_Place", key: "_Place", kind: Kind) -> jax.Array:
        """scale k.q [B,G,C,M], HIDDEN where the query may not see the key."""
        k_BGCK = keys.kv[key.tile][..., : queries.q.shape[-1]]
        scores_BGCM = _dot("bgck,bgmk->bgcm", k_BGCK, queries.q[query.tile]) * self.scale
        tokens_C = jnp.arange(self.tile, dtype=jnp.int32)
        key_C1 = (key.start + tokens_C)[:, None]
        seen_BCM = None
        if kind == "diagonal":
            seen_BCM = (key_C1 <= jnp.tile(query.start + tokens_C, self.ratio)[None])[None]
        elif keys.ids is None and self.part % self.tile:
            seen_BCM = (key_C1 < self.part)[None]
        if keys.ids is not None and queries.ids is not None:
            same_BCM = keys.ids[key.tile][:, :, None] == queries.ids[query.tile][:, None, :]
            seen_BCM = same_BCM if seen_BCM is None else same_BCM & seen_BCM
        return scores_BGCM if seen_BCM is None else jnp.where(seen_BCM[:, None], scores_BGCM, HIDDEN)

    def _if_seen(self, queries, keys, query, key, optional: bool, product: Callable, block: Any) -> Any:
        """product(query, key, block), or the block as it is if no query of the one tile sees any key of the other."""
        tests = [key.part >= 0] if optional else []
        if keys.ids is not None:
            tests.append(share_documents(queries.ids[query.tile], keys.ids[key.tile]))
        if not tests:
            return product(query, key, block)
        seen = tests[0] if len(tests) == 1 else tests[0] & tests[1]
        return lax.cond(seen, lambda block: product(query, key, block), lambda block: block, block)

    def _scan(self, step: Callable, start: Any, products: jax.Array, kind: Kind) -> Any:
        """step(carry, query place, key place) over the pairs of tiles of every product that have something to see."""
        pairs = self.tiles * (self.tiles + 1) // 2 if kind == "diagonal" else self.tiles**2

        def body(carry, _):
            (n, i, j), blocks = carry
            a, b = products[n, 0], products[n, 1]
            blocks = step(blocks, self._place(a, i), self._place(b, j))
            row_ends = j == (i if kind == "diagonal" else self.tiles - 1)
            product_ends = row_ends & (i == self.tiles - 1)
            n = jnp.where(product_ends, n + 1, n)
            i = jnp.where(row_ends, jnp.where(product_ends, 0, i + 1), i)
            return ((n, i, jnp.where(row_ends, 0, j + 1)), blocks), None

        zero = jnp.zeros((), jnp.int32)
        (_, blocks), _ = lax.scan(body, ((zero, zero, zero), start), length=pairs * len(products))
        return blocks

    def _place(self, part: jax.Array, i: jax.Array) -> "_Place":
        return _Place(part, jnp.maximum(part, 0) * self.tiles + i, i * self.tile)

    # --- layout

    def _tile(self, x_BHTX: jax.Array, fill: int = 0) -> jax.Array:
        """[B,H,T,X] -> [N,B,H,C,X], every part padded to whole tiles"""
        B, H, _, X = x_BHTX.shape
        x = x_BHTX.reshape(B, H, self.parts, self.part, X)
        padding = self.tiles * self.tile - self.part
        x = jnp.pad(x, ((0, 0), (0, 0), (0, 0), (0, padding), (0, 0)), constant_values=fill)
        return jnp.moveaxis(x.reshape(B, H, self.parts * self.tiles, self.tile, X), 2, 0)

    def _untile(self, x_NBHCX: jax.Array) -> jax.Array:
        """[N,B,H,C,X] -> [B,H,T,X]"""
        _, B, H, _, X = x_NBHCX.shape
        x = jnp.moveaxis(x_NBHCX, 0, 2).reshape(B, H, self.parts, self.tiles * self.tile, X)
        return x[:, :, :, : self.part].reshape(B, H, self.length, X)

    def _tile_rows(self, x_BHTX: jax.Array) -> jax.Array:
        """[B,H,T,X] -> [N,B,G,M,X]"""
        x = self._tile(x_BHTX)
        N, B, H, C, X = x.shape
        return x.reshape(N, B, H // self.ratio, self.ratio * C, X)

    def _untile_rows(self, x_NBGMX: jax.Array) -> jax.Array:
        """[N,B,G,M,X] -> [B,H,T,X]"""
        N, B, G, M, X = x_NBGMX.shape
        return self._untile(x_NBGMX.reshape(N, B, G * self.ratio, M // self.ratio, X))


class _Place(NamedTuple):
    """A tile: its part, its place among all tiles and the place of its first token in the part; int32 []."""

    part: jax.Array
    tile: jax.Array
    start: jax.Array


def share_documents(query_ids_BM: jax.Array, key_ids_BC: jax.Array) -> jax.Array:
    """bool []: False if in no row of the batch the ranges of document ids meet, so that no query sees any key."""
    (first_query, last_query), (first_key, last_key) = document_range(query_ids_BM), document_range(key_ids_BC)
    return jnp.any((first_query <= last_key) & (first_key <= last_query))


def document_range(ids: jax.Array) -> tuple[jax.Array, jax.Array]:
    """(smallest, largest) document id over the last dim; padding alone gives an empty range."""
    document, limits = ids > 0, jnp.iinfo(ids.dtype)
    smallest = jnp.min(jnp.where(document, ids, limits.max), axis=-1)
    return smallest, jnp.max(jnp.where(document, ids, limits.min), axis=-1)


def _dot(spec: str, x: jax.Array, y: jax.Array) -> jax.Array:
    """A matrix product with float32 accumulation; float32 operands are multiplied as float32 on every platform."""
    return jnp.einsum(spec, x, y, preferred_element_type=jnp.float32, precision=lax.Precision.HIGHEST)


def _put(x: jax.Array, tile: jax.Array, at: jax.Array) -> jax.Array:
    return lax.dynamic_update_index_in_dim(x, tile, at, 0)
