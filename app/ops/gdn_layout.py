"""How the arrays of the gated delta rule are cut into blocks of chunks, and the two layouts a block is worked on in.

Letters: B batch, T time, G key heads, R value heads per key head (H = G R, head h = g R + r), K key dim, V value dim,
C chunk length, N chunks of one block, Z = N B G independent (chunk, row, key head) problems.

  matrix layout  [N, B, G, (R,) C, X]: operands of the matrix unit. Key heads carry no R: they are never repeated, the
                 products k k^T and q k^T are formed once per key head.
  lane layout    [(R,) C, C, Z] or [(R,) C, Z]: the problems lie side by side in the vector lanes, so that elementwise
                 work on [C, C] matrices is dense; 64 x 64 products leave a matrix unit of 128 x 128 mostly idle.
"""

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

# Problems a block aims at: they fill the vector lanes, and the factors of one block stay small against the inputs (v5p:
# half as many costs 9% more estimated cycles, twice as many does not fit the vector memory and costs 9% more as well).
# A block has at least _MIN_BLOCK_TOKENS, which bounds the saved entry states.
_BLOCK_PROBLEMS = 256
_MIN_BLOCK_TOKENS = 256


class Blocks(NamedTuple):
    """How a rank's tokens are cut: `blocks` blocks of `chunks` chunks of `chunk` tokens, the end padded with no-ops."""

    blocks: int
    chunks: int
    chunk: int

    @property
    def tokens(self) -> int:
        """Tokens of one block."""
        return self.chunks * self.chunk

    @property
    def padded(self) -> int:
        """Tokens of all blocks."""
        return self.blocks * self.tokens


def plan_blocks(tokens: int, problems_per_chunk: int, chunk: int) -> Blocks:
    """Cut the `tokens` of a rank into equal blocks; problems_per_chunk = B G."""
    chunks = math.ceil(tokens / chunk)
    wanted = max(math.ceil(_BLOCK_PROBLEMS / problems_per_chunk), math.ceil(_MIN_BLOCK_TOKENS / chunk))
    blocks = math.ceil(chunks / wanted)
    return Blocks(blocks, math.ceil(chunks / blocks), chunk)


class Inputs(NamedTuple):
    """Inputs of a whole rank: q, k [B,T,G,K], v [B,T,H,V], float32 g, beta [B,T,H], document [B,T] int32 or None.

    document counts the document starts at or before a token of this rank (0: still that of the rank before).
    """

    q: jax.Array
    k: jax.Array
    v: jax.Array
    g: jax.Array
    beta: jax.Array
    document: jax.Array | None

    @property
    def repeats(self) -> int:
        """R."""
        return self.v.shape[2] // self.q.shape[2]


class BlockDocuments(NamedTuple):
    """Inputs.document in lane layout: count [C,Z] at a token, entry [Z] at the token before the chunk."""

    count: jax.Array
    entry: jax.Array


class BlockInputs(NamedTuple):
    """Inputs of one block. Matrix layout: q, k [N,B,G,C,K], v [N,B,G,R,C,V]. Lane layout, float32: g, beta [R,C,Z]."""

    q: jax.Array
    k: jax.Array
    v: jax.Array
    g: jax.Array
    beta: jax.Array
    documents: BlockDocuments | None


Index = jax.Array | int


def pad_tokens(x: jax.Array, blocks: Blocks, mode: str = "constant") -> jax.Array:
    """[B,T,...] -> [B, blocks.padded, ...]. Zero inputs make a token an exact no-op; documents want mode "edge"."""
    extra = blocks.padded - x.shape[1]
    return jnp.pad(x, [(0, 0), (0, extra)] + [(0, 0)] * (x.ndim - 2), mode=mode) if extra else x


def read_block(x: Inputs, i: Index, blocks: Blocks) -> BlockInputs:
    """Block i of padded inputs."""
    return BlockInputs(
        q=jnp.moveaxis(_cut(x.q, i, blocks), 2, 3),
        k=jnp.moveaxis(_cut(x.k, i, blocks), 2, 3),
        v=read_values(x.v, i, blocks, x.repeats),
        g=_read_gates(x.g, i, blocks, x.repeats),
        beta=_read_gates(x.beta, i, blocks, x.repeats),
        documents=None if x.document is None else _read_documents(x.document, i, blocks, x.q.shape[2]),
    )


def _read_documents(document: jax.Array, i: Index, blocks: Blocks, key_heads: int) -> BlockDocuments:
    count_NBC = _cut(document, i, blocks)
    before = lax.dynamic_slice_in_dim(document, jnp.maximum(i * blocks.tokens - 1, 0), 1, axis=1)
    entry_NB = jnp.concatenate([jnp.where(i == 0, 0, before).T, count_NBC[:-1, :, -1]], axis=0)
    return BlockDocuments(_per_key_head(jnp.moveaxis(count_NBC, 2, 0), key_heads), _per_key_head(entry_NB, key_heads))


def read_values(x: jax.Array, i: Index, blocks: Blocks, repeats: int) -> jax.Array:
    """Block i of [B,T,H,V] -> [N,B,G,R,C,V]."""
    x = _cut(x, i, blocks)
    x = x.reshape(*x.shape[:3], x.shape[3] // repeats, repeats, x.shape[4])
    return jnp.moveaxis(x, 2, 4)


def write_values(whole: jax.Array, x: jax.Array, i: Index, blocks: Blocks) -> jax.Array:
    """Put [N,B,G,R,C,V] into [B,T,H,V] as block i."""
    x = jnp.moveaxis(x, (1, 0, 4), (0, 1, 2))
    return _paste(whole, x.reshape(x.shape[0], blocks.tokens, -1, x.shape[-1]), i, blocks)


def write_keys(whole: jax.Array, x: jax.Array, i: Index, blocks: Blocks) -> jax.Array:
    """Put [N,B,G,C,K] into [B,T,G,K] as block i."""
    x = jnp.moveaxis(x, (1, 0, 3), (0, 1, 2))
    return _paste(whole, x.reshape(x.shape[0], blocks.tokens, *x.shape[3:]), i, blocks)


def write_gates(whole: jax.Array, x: jax.Array, i: Index, blocks: Blocks) -> jax.Array:
    """Put [R,C,Z] into [B,T,H] as block i."""
    repeats, chunk, _ = x.shape
    batch = whole.shape[0]
    x = x.reshape(repeats, chunk, blocks.chunks, batch, -1).transpose(3, 2, 1, 4, 0)
    return _paste(whole, x.reshape(batch, blocks.tokens, -1), i, blocks)


def _cut(x: jax.Array, i: Index, blocks: Blocks) -> jax.Array:
    """Block i of [B,T,...] -> [N,B,C,...]."""
    x = lax.dynamic_slice_in_dim(x, i * blocks.tokens, blocks.tokens, axis=1)
    return jnp.moveaxis(x.reshape(x.shape[0], blocks.chunks, blocks.chunk, *x.shape[2:]), 0, 1)


def _paste(whole: jax.Array, x: jax.Array, i: Index, blocks: Blocks) -> jax.Array:
    return lax.dynamic_update_slice_in_dim(whole, x, i * blocks.tokens, axis=1)


def _read_gates(x: jax.Array, i: Index, blocks: Blocks, repeats: int) -> jax.Array:
    x = _cut(x, i, blocks)
    x = x.reshape(*x.shape[:3], x.shape[3] // repeats, repeats).transpose(4, 2, 0, 1, 3)
    return x.reshape(repeats, blocks.chunk, -1)


def _per_key_head(x: jax.Array, key_heads: int) -> jax.Array:
    """[..., N, B] -> [..., N B G]."""
    return jnp.broadcast_to(x[..., None], (*x.shape, key_heads)).reshape(*x.shape[:-2], -1)


def stack_at(x: jax.Array, i: Index) -> jax.Array:
    """x[i]."""
    return lax.dynamic_index_in_dim(x, i, 0, keepdims=False)


def stack_put(stack: jax.Array, x: jax.Array, i: Index) -> jax.Array:
    """stack with x in place i."""
    return lax.dynamic_update_index_in_dim(stack, x, i, 0)


def to_lanes(x: jax.Array) -> jax.Array:
    """[N,B,G,...] -> [..., Z]."""
    return jnp.moveaxis(x, (0, 1, 2), (-3, -2, -1)).reshape(*x.shape[3:], math.prod(x.shape[:3]))


def from_lanes(x: jax.Array, batch: tuple[int, ...]) -> jax.Array:
    """[..., Z] -> [N,B,G,...] with batch = (N, B, G)."""
    return jnp.moveaxis(x.reshape(*x.shape[:-1], *batch), (-3, -2, -1), (0, 1, 2))
