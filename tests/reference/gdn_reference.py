"""Slow references of the gated delta rule and the causal convolution: token after token, nothing of app imported.

Letters: B batch, T time, G key heads, H value heads, K key dim, V value dim, W window, X channels.
"""

import jax.numpy as jnp
import numpy as np
from jax import lax

INPUTS = ("q", "k", "v", "g", "beta")


def document_starts(segment_ids: np.ndarray) -> np.ndarray:
    """[B,T] bool: the id differs from the one before; never at the first token, which continues the initial state."""
    return np.concatenate([np.zeros_like(segment_ids[:, :1], bool), segment_ids[:, 1:] != segment_ids[:, :-1]], axis=1)


def gated_delta_rule(q, k, v, g, beta, *, segment_ids=None, initial_state=None, scale=None):
    """(out [B,T,H,V], state [B,H,K,V]) in float64 numpy, token by token.

    state = e^g state; state += k (beta (v - state^T k))^T; out = scale state^T q. A reset zeroes the state before that.
    """
    q, k, v, g, beta = (np.asarray(x, np.float64) for x in (q, k, v, g, beta))
    batch, tokens, key_heads, key_dim = q.shape
    heads, value_dim = v.shape[2:]
    q, k = (np.repeat(x, heads // key_heads, axis=2) for x in (q, k))
    scale = key_dim**-0.5 if scale is None else scale
    state = np.zeros((batch, heads, key_dim, value_dim))
    if initial_state is not None:
        state = state + np.asarray(initial_state, np.float64)
    starts = np.zeros((batch, tokens), bool) if segment_ids is None else document_starts(np.asarray(segment_ids))
    out = np.zeros(v.shape)
    for t in range(tokens):
        state = np.where(starts[:, t, None, None, None], 0.0, state) * np.exp(g[:, t])[..., None, None]
        write = beta[:, t, :, None] * (v[:, t] - np.einsum("bhkv,bhk->bhv", state, k[:, t]))
        state = state + np.einsum("bhk,bhv->bhkv", k[:, t], write)
        out[:, t] = scale * np.einsum("bhkv,bhk->bhv", state, q[:, t])
    return out, state


def gated_delta_rule_vjp(inputs, dout, dstate=None, *, segment_ids=None, initial_state=None, scale=None):
    """float64 gradients by hand: dict of the cotangents of q, k, v, g, beta, initial_state.

    The adjoint of the recurrence itself, token by token backwards, independent of any automatic differentiation.
    """
    q, k, v, g, beta = (np.asarray(x, np.float64) for x in inputs)
    batch, tokens, key_heads, key_dim = q.shape
    heads, value_dim = v.shape[2:]
    repeats = heads // key_heads
    q, k = (np.repeat(x, repeats, axis=2) for x in (q, k))
    scale = key_dim**-0.5 if scale is None else scale
    starts = np.zeros((batch, tokens), bool) if segment_ids is None else document_starts(np.asarray(segment_ids))
    keep = np.exp(g) * ~starts[:, :, None]
    state = np.zeros((batch, heads, key_dim, value_dim))
    if initial_state is not None:
        state = state + np.asarray(initial_state, np.float64)
    decayed, read, states = [], [], []
    for t in range(tokens):
        decayed.append(state * keep[:, t, :, None, None])
        read.append(v[:, t] - np.einsum("bhkv,bhk->bhv", decayed[t], k[:, t]))
        state = decayed[t] + np.einsum("bhk,bhv->bhkv", k[:, t], beta[:, t, :, None] * read[t])
        states.append(state)
    dout = np.asarray(dout, np.float64)
    ds = np.zeros_like(state) if dstate is None else np.asarray(dstate, np.float64)
    dq, dk, dv, dg, dbeta = np.zeros_like(q), np.zeros_like(k), np.zeros_like(v), np.zeros_like(g), np.zeros_like(beta)
    for t in reversed(range(tokens)):
        dq[:, t] = scale * np.einsum("bhkv,bhv->bhk", states[t], dout[:, t])
        ds = ds + scale * np.einsum("bhk,bhv->bhkv", q[:, t], dout[:, t])
        dwrite = np.einsum("bhkv,bhk->bhv", ds, k[:, t])
        dbeta[:, t] = np.sum(dwrite * read[t], -1)
        dv[:, t] = beta[:, t, :, None] * dwrite
        dk[:, t] = np.einsum("bhkv,bhv->bhk", ds, beta[:, t, :, None] * read[t]) - np.einsum(
            "bhkv,bhv->bhk", decayed[t], dv[:, t]
        )
        ds = ds - np.einsum("bhk,bhv->bhkv", k[:, t], dv[:, t])
        dg[:, t] = np.sum(ds * decayed[t], (-1, -2))
        ds = ds * keep[:, t, :, None, None]
    dq, dk = (x.reshape(batch, tokens, key_heads, repeats, key_dim).sum(3) for x in (dq, dk))
    return dict(zip((*INPUTS, "initial_state"), (dq, dk, dv, dg, dbeta, ds), strict=True))


def gated_delta_rule_scan(q, k, v, g, beta):
    """out [B,T,H,V] float32 by a jax scan over tokens, for sequences too long for numpy."""
    repeats = v.shape[2] // q.shape[2]
    q, k, v, g, beta = (jnp.moveaxis(x.astype(jnp.float32), 1, 0) for x in (q, k, v, g, beta))
    q, k = (jnp.repeat(x, repeats, axis=2) for x in (q, k))
    scale = q.shape[-1] ** -0.5

    def step(state, x):
        q, k, v, g, beta = x
        state = state * jnp.exp(g)[..., None, None]
        write = beta[..., None] * (v - jnp.einsum("bhkv,bhk->bhv", state, k, precision="highest"))
        state = state + k[..., :, None] * write[..., None, :]
        return state, scale * jnp.einsum("bhkv,bhk->bhv", state, q, precision="highest")

    shape = (*v.shape[1:3], q.shape[-1], v.shape[-1])
    _, out = lax.scan(step, jnp.zeros(shape, jnp.float32), (q, k, v, g, beta))
    return jnp.moveaxis(out, 0, 1)


def _document_numbers(segment_ids, batch: int, tokens: int) -> np.ndarray:
    if segment_ids is None:
        return np.zeros((batch, tokens), int)
    return np.cumsum(document_starts(np.asarray(segment_ids)), axis=1)


def causal_conv(x, w, *, segment_ids=None) -> np.ndarray:
    """[B,T,X] float64: tap by tap, a tap counts if no document starts after it up to the token."""
    x, w = np.asarray(x, np.float64), np.asarray(w, np.float64)
    batch, tokens, _ = x.shape
    document = _document_numbers(segment_ids, batch, tokens)
    out = np.zeros(x.shape)
    for t in range(tokens):
        for lag in range(min(len(w), t + 1)):
            same = document[:, t - lag] == document[:, t]
            out[:, t] += np.where(same[:, None], x[:, t - lag] * w[len(w) - 1 - lag], 0.0)
    return out


def causal_conv_vjp(x, w, dout, *, segment_ids=None) -> tuple[np.ndarray, np.ndarray]:
    """float64 cotangents of x and w."""
    x, w, dout = (np.asarray(a, np.float64) for a in (x, w, dout))
    batch, tokens, _ = x.shape
    document = _document_numbers(segment_ids, batch, tokens)
    dx, dw = np.zeros(x.shape), np.zeros(w.shape)
    for t in range(tokens):
        for lag in range(min(len(w), t + 1)):
            dy = np.where((document[:, t - lag] == document[:, t])[:, None], dout[:, t], 0.0)
            dx[:, t - lag] += dy * w[len(w) - 1 - lag]
            dw[len(w) - 1 - lag] += np.sum(dy * x[:, t - lag], axis=0)
    return dx, dw
