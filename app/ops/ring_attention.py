"""Causal softmax attention over a sequence that is sharded over ranks: K and V travel, or are gathered.

Letters: B batch, T time (the rank's part), H query heads, G key/value heads, K key head dim, V value head dim, P ranks.
A rank's tokens are parts: two half-blocks in zigzag order (r, the low one, and 2P-1-r, the high one: app.ops.zigzag),
one block in contiguous order. Every product is queries of one part against keys of one part (app.ops.attention_xla).

Ring, zigzag: at step s the rank works on the keys of rank source = r - s (mod P). Step 0 is causal attention inside the
rank. After that the high queries see all of the low keys, always, and

    source < r:  the low queries see all of the low keys         source > r:  the high queries see all of the high keys

and nothing else is visible: two whole half x half products a step on every rank, whose operands are picked by index,
not by a branch. Contiguous order: the one product of a step is seen if source < r and skipped otherwise, so that the
last rank does twice the mean work.

At every step the next K and V travel while the current ones are used. The backward pass turns K and V around once more;
their gradients, float32, follow one step behind, so that no transfer waits for the step's products, and take one more
hop home. With n = B T G (K+V), a rank sends (P-1) n elements of the operands' dtype forward, and P n of it and (P-1) n
float32 backward; with segment ids 2(P-1) B T int32 more. Memory does not depend on P. (all_gather: it does.)
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax import lax

from app.ops.attention import Kernel, check_shapes, make_kernel, named
from app.ops.attention_xla import Keys
from app.ops.kernels import KernelName
from app.ops.zigzag import AxisName

Layout = Literal["zigzag", "contiguous"]


def ring_attention(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    *,
    segment_ids: jax.Array | None = None,
    axis_name: AxisName,
    layout: Layout = "zigzag",
    scale: float | None = None,
    kind: Literal["ring", "all_gather"] = "ring",
    block_size: int = 512,
    kernel: KernelName = "xla",
) -> jax.Array:
    """This rank's part of causal attention over the whole sequence, [B,T,H,V] in q's dtype.

    Under shard_map(check_vma=False). q [B,T,H,K], k [B,T,G,K], v [B,T,G,V] and segment_ids [B,T] are the rank's part
    in the order that `layout` names; `axis_name` is the mesh axis of the sequence, or several, the first the major one.
    segment_ids: documents are numbered within a row over all ranks, 0 is padding; None: one document. scale None:
    K^-0.5. kind "all_gather" holds the K and V of all ranks at once: for few ranks. block_size, kernel: see
    `causal_attention`.
    First derivatives only; a rank's gradients of its own k and v are complete (no sum over ranks is missing).
    Raises ValueError for shapes that do not fit together, an unknown layout or kind, or tokens that cannot be halved.
    """
    check_shapes(q, k, v, segment_ids)
    T = q.shape[1]
    parts = {"zigzag": 2, "contiguous": 1}.get(layout)
    if parts is None:
        raise ValueError(f"layout={layout!r} must be 'zigzag' or 'contiguous'")
    if kind not in ("ring", "all_gather"):
        raise ValueError(f"kind={kind!r} must be 'ring' or 'all_gather'")
    if T % parts:
        raise ValueError(f"zigzag attention halves each rank's tokens: {T} of them is an odd number")
    chosen = make_kernel(kernel, q, k, parts=parts, scale=scale, block_size=block_size)
    plan = _Plan(chosen, axis_name, kind)
    out_BHTV = _attend(*(jnp.swapaxes(x, 1, 2) for x in (q, k, v)), segment_ids, plan)
    return jnp.swapaxes(out_BHTV, 1, 2)


@dataclasses.dataclass(frozen=True)
class _Plan:
    kernel: Kernel
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
    out_BHTV, lse_BHT = kernel.finish(running)
    out_BHTV, lse_BHT = named(out_BHTV, lse_BHT, q_BHTK.dtype)
    return out_BHTV, (q_BHTK, k_BGTK, v_BGTV, segment_ids_BT, out_BHTV, lse_BHT)


def _attend_bwd(plan, residuals, d_out_BHTV):
    kernel = plan.kernel
    q_BHTK, k_BGTK, v_BGTV, segment_ids_BT, out_BHTV, lse_BHT = residuals
    queries, keys = kernel.queries(q_BHTK, segment_ids_BT), kernel.keys(k_BGTK, v_BGTV, segment_ids_BT)
    cotangents = kernel.cotangents(out_BHTV, lse_BHT, d_out_BHTV)

    def visit(dq, keys, products, kind, optional=False):
        return kernel.accumulate_gradients(dq, queries, cotangents, keys, products, kind, optional)

    visit_all = _visit_ring if plan.kind == "ring" else _visit_gathered
    dq, dkv = visit_all(plan, visit, kernel.start_query_gradient(queries), keys)
    K = q_BHTK.shape[-1]
    dkv_BGTX = kernel.finish_key_gradients(dkv, K).astype(k_BGTK.dtype)
    if plan.kind == "ring":
        dkv_BGTX = _send_on(plan.axis_name, dkv_BGTX)
    dk, dv = jnp.split(dkv_BGTX, [K], -1)
    return kernel.finish_query_gradient(dq).astype(q_BHTK.dtype), dk, dv, None


_attend.defvjp(_attend_fwd, _attend_bwd)


# --- which products, and where their keys come from. visit(state, keys, products, kind, optional) -> (state, what the
# --- products add to these keys' gradients: dkv, or () in the forward pass)

Visit = Callable[..., tuple[Any, jax.Array | tuple[()]]]


def _visit_ring(plan: _Plan, visit: Visit, state: Any, keys: Keys) -> tuple[Any, Any]:
    """(state after all keys that this rank's queries see, the gradients of the NEXT rank's keys: one hop from home)"""
    size, rank = lax.axis_size(plan.axis_name), lax.axis_index(plan.axis_name)
    send = functools.partial(_send_on, plan.axis_name)
    zigzag = plan.kernel.parts == 2
    coming = send(keys) if size > 1 else keys

    state, gradients = _visit_own(plan, visit, state, keys)
    if size == 1:
        return state, gradients

    def step(state, gradients, keys, s):
        source = (rank - s) % size
        arriving = send(gradients)
        state, more = visit(state, keys, _ring_products(zigzag, rank, source), "full", not zigzag)
        return state, _sum(arriving, more)

    def body(s, carry):
        state, gradients, keys = carry
        coming = send(keys)
        return *step(state, gradients, keys, s), coming

    # A loop by a counter: an array of step numbers, though tiny, made the compiler's packing of the rest depend on P.
    # (Two steps a trip save the copies of what is sent, but on a TPU the compiler then hides the transfers no longer.)
    state, gradients, keys = lax.fori_loop(1, size - 1, body, (state, gradients, coming))
    return step(state, gradients, keys, jnp.int32(size - 1))


def _visit_gathered(plan: _Plan, visit: Visit, state: Any, keys: Keys) -> tuple[Any, Any]:
    """The same with the keys of all ranks here at once; the gradients, summed at the end, are those of its own keys."""
    size, rank = lax.axis_size(plan.axis_name), lax.axis_index(plan.axis_name)
    state, own = _visit_own(plan, visit, state, keys)
    if size == 1:
        return state, own
    gathered = jax.tree.map(lambda x: lax.all_gather(x, plan.axis_name), keys)
    zigzag = plan.kernel.parts == 2

    def body(s, carry):
        state, gradients = carry
        source = (rank - s) % size
        keys = jax.tree.map(lambda x: x[source], gathered)
        state, more = visit(state, keys, _ring_products(zigzag, rank, source), "full", not zigzag)
        return state, _put(gradients, more, source)

    everywhere = jax.tree.map(lambda x: jnp.zeros((size, *x.shape), x.dtype), own)
    state, gradients = lax.fori_loop(1, size, body, (state, _put(everywhere, own, rank)))
    return state, jax.tree.map(lambda x: lax.psum_scatter(x, plan.axis_name), gradients)


def _visit_own(plan: _Plan, visit: Visit, state: Any, keys: Keys) -> tuple[Any, Any]:
    """Causal attention inside the rank."""
    parts = range(plan.kernel.parts)
    state, gradients = visit(state, keys, jnp.array([(part, part) for part in parts], jnp.int32), "diagonal")
    if len(parts) == 1:
        return state, gradients
    state, more = visit(state, keys, jnp.array([(1, 0)], jnp.int32), "full")
    return state, _sum(gradients, more)


def _ring_products(zigzag: bool, rank: jax.Array, source: jax.Array) -> jax.Array:
    """(query part, key part) [n,2] of a ring step after the first; -1: nothing to see."""
    earlier = source < rank
    if not zigzag:
        return jnp.stack([jnp.int32(0), jnp.where(earlier, 0, -1)])[None]
    both = jnp.where(earlier, 0, 1)
    return jnp.stack([jnp.int32(1), jnp.int32(0), both, both]).reshape(2, 2)


def _send_on(axis_name: AxisName, tree: Any) -> Any:
    """Every rank's `tree` to the next rank, the last one's to the first."""
    size = lax.axis_size(axis_name)
    ring = [(r, (r + 1) % size) for r in range(size)]
    return jax.tree.map(lambda x: lax.ppermute(x, axis_name, ring), tree)


def _sum(x: Any, y: Any) -> Any:
    return jax.tree.map(jnp.add, x, y)


def _put(everywhere: Any, here: Any, at: jax.Array) -> Any:
    return jax.tree.map(lambda x, y: lax.dynamic_update_index_in_dim(x, y, at, 0), everywhere, here)
