"""Causal softmax attention by whole score matrices, in float64 numpy. Slow, obvious, imports nothing from the app."""

import numpy as np


def attention_with_gradients(q, k, v, d_out, segment_ids=None, scale=None):
    """(out [B,T,H,V], dq [B,T,H,K], dk [B,T,G,K], dv [B,T,G,V]) of sum(out * d_out), all float64.

    q [B,T,H,K], k [B,T,G,K], v [B,T,G,V]; query head h reads key head h // (H/G). segment_ids [B,T]: a query sees the
    keys of its own id that are not after it; id 0 is padding, which sees nothing, is seen by nothing and gives 0.
    """
    q, k, v, d_out = (np.asarray(x, np.float64) for x in (q, k, v, d_out))
    B, T, H, K = q.shape
    ratio = H // k.shape[2]
    scale = K**-0.5 if scale is None else scale
    ids = np.ones((B, T), int) if segment_ids is None else np.asarray(segment_ids)
    out, dq, dk, dv = np.zeros((B, T, H, v.shape[3])), np.zeros_like(q), np.zeros_like(k), np.zeros_like(v)
    for b in range(B):
        visible = np.tril(np.ones((T, T), bool)) & (ids[b][:, None] == ids[b][None]) & (ids[b] > 0)[:, None]
        for h in range(H):
            g = h // ratio
            scores = np.where(visible, scale * q[b, :, h] @ k[b, :, g].T, -np.inf)
            weights = np.exp(scores - np.where(visible, scores, -1e300).max(1, keepdims=True))
            p = weights / np.maximum(weights.sum(1, keepdims=True), 1e-300)
            out[b, :, h] = p @ v[b, :, g]
            dv[b, :, g] += p.T @ d_out[b, :, h]
            dp = d_out[b, :, h] @ v[b, :, g].T
            d_scores = scale * p * (dp - (p * dp).sum(1, keepdims=True))
            dq[b, :, h] = d_scores @ k[b, :, g]
            dk[b, :, g] += d_scores.T @ q[b, :, h]
    return out, dq, dk, dv


def example(rng, B, T, H, G, K, V):
    """(q, k, v, d_out) float32 numpy, normal with a few large logits."""
    shapes = ((B, T, H, K), (B, T, G, K), (B, T, G, V), (B, T, H, V))
    return tuple(rng.normal(size=shape).astype(np.float32) for shape in shapes)


def relative_error(got, wanted) -> float:
    """|got - wanted| / |wanted| in the Frobenius norm; 0 / 0 is 0."""
    got, wanted = np.asarray(got, np.float64), np.asarray(wanted, np.float64)
    difference = np.linalg.norm(got - wanted)
    return 0.0 if difference == 0 else float(difference / np.linalg.norm(wanted))
