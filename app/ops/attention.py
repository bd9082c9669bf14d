"""Causal softmax attention of one rank's whole sequence, and what every form of attention here has in common.

Letters: B batch, T time, H query heads, G key/value heads, K key head dim, V value head dim. Formulas: attention_xla.

Segment ids: a query sees the keys of its own document. 0 is padding: it sees nothing, nothing sees it, and its output
and its gradients are exactly zero. Blocks that share no document in any row of the batch are skipped. An order of the
ids is not assumed (skipping looks at ranges of them, and finds most when they ascend).
"""

import functools

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from app.ops.attention_xla import XlaKernel
from app.ops.kernels import KernelName
from app.ops.pallas.attention import PallasKernel

Kernel = XlaKernel | PallasKernel

# Names of the residuals that a rematerialisation policy has to keep: recomputing them reruns the whole forward pass.
OUT_NAME = "attention_out"
LSE_NAME = "attention_lse"


def causal_attention(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    *,
    segment_ids: jax.Array | None = None,
    scale: float | None = None,
    block_size: int = 512,
    kernel: KernelName = "xla",
) -> jax.Array:
    """Softmax attention of every token to itself and the earlier tokens of its document; [B,T,H,V] in q's dtype.

    q [B,T,H,K], k [B,T,G,K], v [B,T,G,V]: query head h uses key/value head h // (H/G). segment_ids: int32 [B,T], 0 is
    padding; None: one document. scale None: K^-0.5. block_size: tokens of a block of the xla kernel at most (a length
    that it does not divide is cut into equal blocks and padded by less than a token a block); the pallas kernel chooses
    its own. First derivatives only.
    Raises ValueError for shapes that do not fit together or not the kernel.
    """
    check_shapes(q, k, v, segment_ids)
    chosen = make_kernel(kernel, q, k, parts=1, scale=scale, block_size=block_size)
    out_BHTV = _causal(*(jnp.swapaxes(x, 1, 2) for x in (q, k, v)), segment_ids, chosen)
    return jnp.swapaxes(out_BHTV, 1, 2)


def check_shapes(q_BTHK: jax.Array, k_BTGK: jax.Array, v_BTGV: jax.Array, segment_ids: jax.Array | None) -> None:
    """Raises ValueError if q, k, v and segment ids are not [B,T,H,K], [B,T,G,K], [B,T,G,V], [B,T] of one dtype."""
    shapes = f"q {q_BTHK.shape}, k {k_BTGK.shape}, v {v_BTGV.shape}"
    if not q_BTHK.ndim == k_BTGK.ndim == v_BTGV.ndim == 4:
        raise ValueError(f"attention takes q [B,T,H,K], k [B,T,G,K], v [B,T,G,V]; got {shapes}")
    if q_BTHK.shape[:2] != k_BTGK.shape[:2] or k_BTGK.shape[:3] != v_BTGV.shape[:3]:
        raise ValueError(f"q, k and v differ in batch, tokens or key/value heads: {shapes}")
    if q_BTHK.shape[3] != k_BTGK.shape[3] or q_BTHK.shape[2] % k_BTGK.shape[2]:
        raise ValueError(f"q and k must have one head dim, and key/value heads must divide query heads: {shapes}")
    if not q_BTHK.dtype == k_BTGK.dtype == v_BTGV.dtype:
        raise ValueError(f"q, k and v must have one dtype, got {q_BTHK.dtype}, {k_BTGK.dtype}, {v_BTGV.dtype}")
    if segment_ids is not None and segment_ids.shape != q_BTHK.shape[:2]:
        raise ValueError(f"segment_ids {segment_ids.shape} must be [B,T] = {q_BTHK.shape[:2]}")


def make_kernel(
    name: KernelName, q_BTHK: jax.Array, k_BTGK: jax.Array, *, parts: int, scale: float | None, block_size: int
) -> Kernel:
    """The block products for these operands, `parts` parts of the tokens at a time.

    Raises ValueError for an unknown name, a scale that is not positive, or shapes that the kernel cannot take.
    """
    T, H, K = q_BTHK.shape[1:]
    scale = K**-0.5 if scale is None else float(scale)
    if not scale > 0:
        raise ValueError(f"scale={scale} must be positive")
    ratio = H // k_BTGK.shape[2]
    if name == "xla":
        return XlaKernel(T, parts, ratio, scale, block_size)
    if name in ("pallas", "interpret"):
        return PallasKernel(T, parts, ratio, scale, interpret=name == "interpret")
    raise ValueError(f"kernel={name!r} must be 'xla', 'pallas' or 'interpret'")


def named(out_BHTV: jax.Array, lse_BHT: jax.Array, dtype: jax.typing.DTypeLike) -> tuple[jax.Array, jax.Array]:
    """The output in its dtype and the logsumexp, under the names by which remat policies keep them."""
    return checkpoint_name(out_BHTV.astype(dtype), OUT_NAME), checkpoint_name(lse_BHT, LSE_NAME)


_ITSELF = ((0, 0),)


@functools.partial(jax.custom_vjp, nondiff_argnums=(4,))
def _causal(q_BHTK, k_BGTK, v_BGTV, segment_ids_BT, kernel):
    return _causal_fwd(q_BHTK, k_BGTK, v_BGTV, segment_ids_BT, kernel)[0]


def _causal_fwd(q_BHTK, k_BGTK, v_BGTV, segment_ids_BT, kernel):
    queries, keys = kernel.queries(q_BHTK, segment_ids_BT), kernel.keys(k_BGTK, v_BGTV, segment_ids_BT)
    products = jnp.array(_ITSELF, jnp.int32)
    running = kernel.accumulate(kernel.start(queries, keys), queries, keys, products, "diagonal")
    out_BHTV, lse_BHT = kernel.finish(running)
    out_BHTV, lse_BHT = named(out_BHTV, lse_BHT, q_BHTK.dtype)
    return out_BHTV, (q_BHTK, k_BGTK, v_BGTV, segment_ids_BT, out_BHTV, lse_BHT)


def _causal_bwd(kernel, residuals, d_out_BHTV):
    q_BHTK, k_BGTK, v_BGTV, segment_ids_BT, out_BHTV, lse_BHT = residuals
    queries, keys = kernel.queries(q_BHTK, segment_ids_BT), kernel.keys(k_BGTK, v_BGTV, segment_ids_BT)
    cotangents = kernel.cotangents(out_BHTV, lse_BHT, d_out_BHTV)
    dq, dkv = kernel.accumulate_gradients(
        kernel.start_query_gradient(queries), queries, cotangents, keys, jnp.array(_ITSELF, jnp.int32), "diagonal"
    )
    K = q_BHTK.shape[-1]
    gradients = kernel.finish_query_gradient(dq), *jnp.split(kernel.finish_key_gradients(dkv, K), [K], -1)
    return *(d.astype(x.dtype) for d, x in zip(gradients, (q_BHTK, k_BGTK, v_BGTV), strict=True)), None


_causal.defvjp(_causal_fwd, _causal_bwd)
