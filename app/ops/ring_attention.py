"""Causal softmax attention over a sequence that is sharded over ranks: K and V travel, or are gathered.

Letters: B batch, T time (the rank's part), H query heads, G key/value heads, K key head dim, V value head dim, P ranks.
A rank's tokens are parts: two half-blocks in zigzag order (r, the low one, and 2P-1-r, the high one: app.ops.zigzag), one
block in contiguous order. Every product is queries of one part against keys of one part (app.ops.attention_xla).

Ring, zigzag: at step s the rank works on the keys of rank source = r - s (mod P). Step 0 is causal attention inside the
rank. After that the high queries see all of the low keys, always, and

    source < r:  the low queries see all of the low keys         source > r:  the high queries see all of the high keys

and nothing else is visible: two whole half x half products a step on every rank, whose operands are picked by index, not
by a branch. Contiguous order: the one product of a step is seen if source < r and skipped otherwise, so that the last rank
does twice the mean work.

At every step the next K and V travel while the current ones are used. The backward pass turns K and V around once more;
their gradients, float32, follow one step behind, so that no transfer waits for the step's products, and take one more hop
home. A rank sends 2(P-1) T G (K+V) elements of the operands' dtype (forward and backward) and P T G (K+V) float32, plus
2(P-1) B T int32 of segment ids if there are any. Memory does not depend on P. (all_gather: it does.)
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax import lax

from app.ops.attention import check_shapes, named
from app.ops.attention_xla import KeyGradients, Keys, XlaKernel
from app.ops.zigzag import AxisName

Layout = Literal["zigzag", "contiguous"]


def ring_attention(
    q_BTHK: jax.Array,
    k_BTGK: jax.Array,
    v_BTGV: jax.Array,
    *,
    segment_ids: jax.Array | None = None,
    axis_name: AxisName,
    layout: Layout = "zigzag",
    scale: float | None = None,
    kind: Literal["ring", "all_gather"] = "ring",
    block_size: int = 512,
) -> jax.Array:
    """This rank's part of causal attention over the whole sequence, [B,T,H,V] in q's dtype.

    Under shard_map(check_vma=False). q, k, v and segment_ids [B,T] are the rank's part in the order that `layout` names;
    `axis_name` is the mesh axis of the sequence, or several, the first the major one. segment_ids: documents are numbered
    within a row over all ranks, 0 is padding; None: one document. scale None: K^-0.5. kind "all_gather" holds the K and V
    of all ranks at once: for few ranks. block_size: see `causal_attention`.
    First derivatives only; a rank's gradients of its own k and v are complete (no sum over ranks is missing).
    Raises ValueError for shapes that do not fit together, an unknown layout or kind, or tokens that cannot be halved.
    """
    check_shapes(q_BTHK, k_BTGK, v_BTGV, segment_ids)
    T, H, K = q_BTHK.shape[1:]
    parts = {"zigzag": 2, "contiguous": 1}.get(layout)
    if parts is None:
        raise ValueError(f"layout={layout!r} must be 'zigzag' or 'contiguous'")
    if kind not in ("ring", "all_gather"):
        raise ValueError(f"kind={kind!r} must be 'ring' or 'all_gather'")
    if T % parts:
        raise ValueError(f"zigzag attention halves each rank's tokens: {T} of them is an odd number")
    kernel = XlaKernel(T, parts, H // k_BTGK.shape[2], K**-0.5 if scale is None else float(scale), block_size)
    plan = _Plan(kernel, axis_name, kind)
    out_BHTV = _attend(*(jnp.swapaxes(x, 1, 2) for x in (q_BTHK, k_BTGK, v_BTGV)), segment_ids, plan)
    return jnp.swapaxes(out_BHTV, 1, 2)


@dataclasses.dataclass(frozen=True)
class _Plan:
    kernel: XlaKernel
    axis_name: AxisName
    kind: str


@functools.partial(jax.custom_vjp, nondiff_argnums=(4,))
def _attend(q_BHTK, k_BGTK, v_BGTV, segment_ids_BT, plan):
    return _attend_fwd(q_BHTK, k_BGTK, v_BGTV, segment_ids_BT, plan)[0]


def _attend_fwd(q_BHTK, k_BGTK, v_BGTV, segment_ids_BT, plan):
    kernel = plan.kernel
    queries, keys = kernel.queries(q_BHTK, segment_ids_BT), kernel.keys(k_BGTK, v_BGTV, segment_ids_BT)

    def visit(running, keys, products, kind, optional=False):
        return kernel.accumulate(running, queries, keys, products, kind, optional), ()

    visit_all = _visit_ring if plan.kind == "ring" else _visit_gathered
    running, _ = visit_all(plan, visit, kernel.start(queries, keys), keys)
    out_BHTV, lse_BHT = named(*kernel.finish(running), q_BHTK.dtype)
    return out_BHTV, (q_BHTK, k_BGTK, v_BGTV, segment_ids_BT, out_BHTV, lse_BHT)


def _attend_bwd(plan, residuals, d_out_BHTV):
    kernel = plan.kernel
    q_BHTK, k_BGTK, v_BGTV, segment_ids_BT, out_BHTV, lse_BHT = residuals
    queries, keys = kernel.queries(q_BHTK, segment_ids_BT), kernel.keys(k_BGTK, v_BGTV, segment_ids_BT)
    queries = kernel.with_cotangent(queries, out_BHTV, lse_BHT, d_out_BHTV)

    def visit(dq, keys, products, kind, optional=False):
        return kernel.accumulate_gradients(dq, queries, keys, products, kind, optional)

    visit_all = _visit_ring if plan.kind == "ring" else _visit_gathered
    dq, key_gradients = visit_all(plan, visit, kernel.start_query_gradient(queries), keys)
    gradients = kernel.finish_query_gradient(dq), *kernel.finish_key_gradients(key_gradients)
    return *(d.astype(x.dtype) for d, x in zip(gradients, (q_BHTK, k_BGTK, v_BGTV), strict=True)), None


_attend.defvjp(_attend_fwd, _attend_bwd)


# --- which products, and where their keys come from. visit(state, keys, products, kind, optional) -> (state, what the
# --- products add to these keys' gradients: KeyGradients, or () in the forward pass)

Visit = Callable[..., tuple[Any, KeyGradients | tuple[()]]]


def _visit_ring(plan: _Plan, visit: Visit, state: Any, keys: Keys) -> tuple[Any, Any]:
    """(state after all keys of the sequence that this rank's queries see, the gradients of the rank's own keys)"""
    size, rank = lax.axis_size(plan.axis_name), lax.axis_index(plan.axis_name)
    send = functools.partial(_send_on, plan.axis_name)
    zigzag = plan.kernel.parts == 2
    coming = send(keys) if size > 1 else keys

    state, gradients = visit(state, keys, _table([(part, part) for part in range(plan.kernel.parts)]), "diagonal")
    if zigzag:
        state, more = visit(state, keys, _table([(1, 0)]), "full")
        gradients = _sum(gradients, more)
    if size == 1:
        return state, gradients

    def step(state, gradients, keys, s):
        source = (rank - s) % size
        arriving = send(gradients)
        state, more = visit(state, keys, _ring_products(zigzag, rank, source), "full", not zigzag)
        return state, _sum(arriving, more)

    def body(carry, s):
        state, gradients, keys = carry
        coming = send(keys)
        return (*step(state, gradients, keys, s), coming), None

    (state, gradients, keys), _ = lax.scan(
        body, (state, gradients, coming), jnp.arange(1, size - 1, dtype=jnp.int32), length=size - 2
    )
    state, gradients = step(state, gradients, keys, jnp.int32(size - 1))
    return state, send(gradients)


def _visit_gathered(plan: _Plan, visit: Visit, state: Any, keys: Keys) -> tuple[Any, Any]:
    """The same with the keys of all ranks in one place; part p of rank r is part r * parts + p of them."""
    size, rank, parts = lax.axis_size(plan.axis_name), lax.axis_index(plan.axis_name), plan.kernel.parts
    keys = jax.tree.map(lambda x: lax.all_gather(x, plan.axis_name, axis=0, tiled=True), keys)
    own = jnp.arange(parts, dtype=jnp.int32)
    state, gradients = visit(state, keys, jnp.stack([own, rank * parts + own], axis=1), "diagonal")
    products = _gathered_products(parts == 2, rank, size)
    if len(products):
        state, more = visit(state, keys, products, "full", parts == 1)
        gradients = _sum(gradients, more)
    scatter = functools.partial(lax.psum_scatter, axis_name=plan.axis_name, scatter_dimension=0, tiled=True)
    return state, jax.tree.map(scatter, gradients)


def _ring_products(zigzag: bool, rank: jax.Array, source: jax.Array) -> jax.Array:
    """(query part, key part) [n,2] of a ring step after the first; -1: nothing to see."""
    earlier = source < rank
    if not zigzag:
        return jnp.stack([jnp.int32(0), jnp.where(earlier, 0, -1)])[None]
    both = jnp.where(earlier, 0, 1)
    return jnp.stack([jnp.int32(1), jnp.int32(0), both, both]).reshape(2, 2)


def _gathered_products(zigzag: bool, rank: jax.Array, size: int) -> jax.Array:
    """(query part, key part among those of all ranks) [n,2] of the whole products of a rank; -1: nothing to see."""
    if not zigzag:
        block = jnp.arange(size - 1, dtype=jnp.int32)
        return jnp.stack([jnp.zeros_like(block), jnp.where(block < rank, block, -1)], axis=1)
    n = jnp.arange(2 * size - 1, dtype=jnp.int32)
    high = n >= rank  # the low queries see `rank` half-blocks before their own, the high ones 2P-1-rank
    half_block = jnp.where(high, n - rank, n)
    key_is_high = half_block >= size
    holder = jnp.where(key_is_high, 2 * size - 1 - half_block, half_block)
    return jnp.stack([high.astype(jnp.int32), 2 * holder + key_is_high.astype(jnp.int32)], axis=1)


def _table(products: list[tuple[int, int]]) -> jax.Array:
    return jnp.array(products, jnp.int32)


def _send_on(axis_name: AxisName, tree: Any) -> Any:
    """Every rank's `tree` to the next rank, the last one's to the first."""
    size = lax.axis_size(axis_name)
    ring = [(r, (r + 1) % size) for r in range(size)]
    return jax.tree.map(lambda x: lax.ppermute(x, axis_name, ring), tree)


def _sum(x: Any, y: Any) -> Any:
    return jax.tree.map(jnp.add, x, y)
