"""The gated delta rule over a (possibly sequence-sharded) time axis. STAGE 1: plain chunked form, gradients by autodiff."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from app.ops.affine_scan import AffineMap, AxisName, axis_size, exclusive_scan, neighbour_permute

_HI = lax.Precision.HIGHEST


def gated_delta_rule(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    g: jax.Array,
    beta: jax.Array,
    *,
    segment_ids: jax.Array | None = None,
    initial_state: jax.Array | None = None,
    axis_name: AxisName = None,
    chunk_size: int = 64,
    scale: float | None = None,
    return_final_state: bool = False,
):
    """out [B,T,H,V] in v's dtype (and float32 state [B,H,K,V] after the whole sequence)."""
    B, T, G, K = q.shape
    H, V = v.shape[2:]
    r = H // G
    dtype = v.dtype
    scale = K**-0.5 if scale is None else scale
    sharded = axis_size(axis_name) > 1
    C = chunk_size
    pad = -T % C
    if segment_ids is None:
        count = jnp.zeros((B, T), jnp.int32)
    else:
        prev = segment_ids[:, :1]
        if sharded:
            before = neighbour_permute(segment_ids[:, -1:], axis_name, 1)
            prev = jnp.where(lax.axis_index(axis_name) == 0, prev, before)
        shifted = jnp.concatenate([prev, segment_ids[:, :-1]], 1)
        count = jnp.cumsum((segment_ids != shifted).astype(jnp.int32), 1)
    f32 = jnp.float32
    padt = lambda x: jnp.pad(x, [(0, 0), (0, pad)] + [(0, 0)] * (x.ndim - 2))
    q, k, v, g, beta = (padt(x.astype(f32)) for x in (q, k, v, g, beta))
    q = q * scale
    count = jnp.pad(count, [(0, 0), (0, pad)], mode="edge")
    N = (T + pad) // C
    ch = lambda x: jnp.moveaxis(x.reshape(B, N, C, *x.shape[2:]), 1, 0)
    q, k, count = ch(q), ch(k), ch(count)
    v = ch(v).reshape(N, B, C, G, r, V)
    g, beta = ch(g).reshape(N, B, C, G, r), ch(beta).reshape(N, B, C, G, r)
    first = jnp.concatenate([jnp.zeros((1, B), jnp.int32), count[:-1, :, -1]], 0)
    e = functools.partial(jnp.einsum, precision=_HI)
    tri = np.tril(np.ones((C, C), bool))

    def factors(q, k, g, beta, count, first):
        seg = jnp.where(np.tril(np.ones((C, C), bool), -1)[None, :, :, None, None], g[:, :, None], 0.0)
        D = jnp.exp(jnp.cumsum(seg, 1))
        same = (count[:, :, None] == count[:, None, :]) & tri[None]
        D = jnp.where(same[..., None, None], D, 0.0)
        kk, qk = e("bigk,bjgk->bijg", k, k), e("bigk,bjgk->bijg", q, k)
        strict = np.tril(np.ones((C, C), bool), -1)[None, :, :, None, None]
        L = jnp.where(strict, beta[:, :, None] * kk[..., None] * D, 0.0)
        c = jnp.where((count == first[:, None])[..., None, None], jnp.exp(jnp.cumsum(g, 1)), 0.0)
        A = jnp.moveaxis(L, (1, 2), (3, 4)) + jnp.eye(C)[None, None, None]
        return A, qk[..., None] * D, c, D[:, -1], c[:, -1]

    def vnew(A, rhs):
        x = lax.linalg.triangular_solve(A, jnp.moveaxis(rhs, 1, 3), left_side=True, lower=True, unit_diagonal=True)
        return jnp.moveaxis(x, 3, 1)

    def step(S, x, values):
        q, k, v, g, beta, count, first = x
        A, att, c, dl, cl = factors(q, k, g, beta, count, first)
        kS = e("bigk,bgrkv->bigrv", k, S)
        rhs = (v if values else 0.0) - c[..., None] * kS
        vn = vnew(A, beta[..., None] * rhs)
        out = c[..., None] * e("bigk,bgrkv->bigrv", q, S) + e("bijgr,bjgrv->bigrv", att, vn)
        S = cl[..., None, None] * S + e("bigk,bigrv->bgrkv", k, dl[..., None] * vn)
        return S, out

    xs = (q, k, v, g, beta, count, first)
    run = lambda S, values: lax.scan(jax.checkpoint(functools.partial(step, values=values)), S, xs)
    S0 = jnp.zeros((B, G, r, K, V), f32) if initial_state is None else initial_state.reshape(B, G, r, K, V)
    final = None
    if sharded:
        bias = run(jnp.zeros((B, G, r, K, V), f32), True)[0]
        eye = jnp.broadcast_to(jnp.eye(K)[None, None, None], (B, G, r, K, K))
        xs_m = xs
        M, _ = lax.scan(
            jax.checkpoint(lambda S, x: (step(S, x[:2] + (jnp.zeros((B, C, G, r, K)),) + x[3:], True)[0], None)), eye, xs_m
        )
        S0 = exclusive_scan(AffineMap(M, bias), axis_name, None if initial_state is None else S0)
    S, out = run(S0, True)
    out = jnp.moveaxis(out, 0, 1).reshape(B, T + pad, H, V)[:, :T].astype(dtype)
    if not return_final_state:
        return out
    if sharded:
        S = lax.psum(jnp.where(lax.axis_index(axis_name) == axis_size(axis_name) - 1, S, 0.0), axis_name)
    return out, S.reshape(B, H, K, V)
