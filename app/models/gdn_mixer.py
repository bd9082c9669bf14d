"""Gated DeltaNet mixer: projections, causal convolution, gates, the recurrence, gated norm, output projection.

Letters: B batch, T time, D width, G key heads, H value heads, K key head dim, V value head dim, W conv window,
X conv channels. Formulas: ../ops/README.md; published mathematics: transformers, `Qwen3_5GatedDeltaNet`.
"""

import functools

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax

from app.cluster import sharding
from app.config import ModelConfig
from app.models import layers
from app.ops.conv import causal_conv
from app.ops.gdn import gated_delta_rule

L2_EPS = 1e-6


def l2_normalise(x: jax.Array) -> jax.Array:
    """x / sqrt(|x|^2 + 1e-6) over the last dim; float32 inside. Finite, with slope 1000, at x = 0."""
    x32 = x.astype(jnp.float32)
    return (x32 * jax.lax.rsqrt(jnp.sum(jnp.square(x32), axis=-1, keepdims=True) + L2_EPS)).astype(x.dtype)


@functools.cache
def log_uniform(low: float, high: float) -> layers.Initializer:
    """log of U(low, high): the published initialisation of A_log."""

    def init(key, shape, dtype):
        return jnp.log(jax.random.uniform(key, shape, jnp.float32, low, high)).astype(dtype)

    return init


class GdnMixer(nnx.Module):
    """[B,T,D], segment ids [B,T] -> [B,T,D]. Padding (segment 0) is an exact no-op of the recurrence."""

    def __init__(self, config: ModelConfig, runtime: layers.Runtime):
        self.runtime = runtime
        self.eps = config.rms_norm_eps
        D, G, H = config.hidden_size, config.linear_num_key_heads, config.linear_num_value_heads
        K, V, W = config.linear_key_head_dim, config.linear_value_head_dim, config.linear_conv_kernel_dim
        dtype, init = runtime.precision.params, layers.normal(config.initializer_range)

        def param(shape, logical, init=init):
            return layers.make_param(shape, logical, init, dtype)

        self.q_proj = param((D, G, K), ("width", "heads", None))
        self.k_proj = param((D, G, K), ("width", "heads", None))
        self.v_proj = param((D, H, V), ("width", "heads", None))
        self.z_proj = param((D, H, V), ("width", "heads", None))
        self.b_proj = param((D, H), ("width", "heads"))
        self.a_proj = param((D, H), ("width", "heads"))
        self.q_conv = param((W, G, K), (None, "heads", None))
        self.k_conv = param((W, G, K), (None, "heads", None))
        self.v_conv = param((W, H, V), (None, "heads", None))
        self.A_log = param((H,), ("heads",), log_uniform(0.01, 16.0))
        self.dt_bias = param((H,), ("heads",), nnx.initializers.ones)
        self.norm = param((V,), (None,), nnx.initializers.ones)
        self.out_proj = param((H, V, D), ("heads", None, "width"))

    def __call__(self, x_BTD: jax.Array, segment_ids_BT: jax.Array) -> jax.Array:
        x_BTD = sharding.enter_parallel(x_BTD, self.runtime.rules.heads)
        q_BTGK, k_BTGK, v_BTHV = self._convolved(x_BTD, segment_ids_BT)
        g_BTH, beta_BTH = self._gates(x_BTD, segment_ids_BT)
        out_BTHV = gated_delta_rule(
            l2_normalise(q_BTGK),
            l2_normalise(k_BTGK),
            v_BTHV,
            g_BTH,
            beta_BTH,
            segment_ids=segment_ids_BT,
            axis_name=self.runtime.time_axis,
            chunk_size=self.runtime.gdn_chunk,
            kernel=self.runtime.gdn_kernel,
        )
        z_BTHV = jnp.einsum("btd,dhv->bthv", x_BTD, layers.gathered(self.z_proj, self.runtime))
        return self._output(out_BTHV, z_BTHV)

    def _convolved(self, x_BTD, segment_ids_BT):
        """q, k [B,T,G,K] and v [B,T,H,V] after one convolution over all channels (one halo exchange) and silu."""
        projections = (self.q_proj, self.k_proj, self.v_proj)
        parts = [jnp.einsum("btd,dhk->bthk", x_BTD, layers.gathered(p, self.runtime)) for p in projections]
        flat_BTX = jnp.concatenate([part.reshape(*part.shape[:2], -1) for part in parts], axis=-1)
        kernels = [kernel[...].reshape(kernel.shape[0], -1) for kernel in (self.q_conv, self.k_conv, self.v_conv)]
        kernel_WX = jnp.concatenate(kernels, axis=-1).astype(flat_BTX.dtype)
        mixed_BTX = jax.nn.silu(
            causal_conv(flat_BTX, kernel_WX, segment_ids=segment_ids_BT, axis_name=self.runtime.time_axis)
        )
        key_size = kernels[0].shape[-1]
        # libtpu 0.0.50 aborts where it fuses the pads that are the split's backward with the reshape to heads.
        flat = lax.optimization_barrier(jnp.split(mixed_BTX, (key_size, 2 * key_size), axis=-1))
        return [one.reshape(part.shape) for one, part in zip(flat, parts, strict=True)]

    def _gates(self, x_BTD, segment_ids_BT):
        """Log decay g and write strength beta [B,T,H], float32 from the projection's accumulator on."""

        def project(param):
            weight_DH = layers.gathered(param, self.runtime)
            return jnp.einsum("btd,dh->bth", x_BTD, weight_DH, preferred_element_type=jnp.float32)

        A_log, dt_bias = (p[...].astype(jnp.float32)[None, None, :] for p in (self.A_log, self.dt_bias))
        g_BTH = -jnp.exp(A_log) * jax.nn.softplus(project(self.a_proj) + dt_bias)
        beta_BTH = jax.nn.sigmoid(project(self.b_proj))
        real_BT1 = (segment_ids_BT != 0)[:, :, None]
        return jnp.where(real_BT1, g_BTH, 0.0), jnp.where(real_BT1, beta_BTH, 0.0)

    def _output(self, out_BTHV, z_BTHV):
        """Gated norm (norm before gate, plain weight) over V, then the output projection."""
        heads = self.runtime.rules.heads
        weight = sharding.enter_parallel(self.norm[...], heads).astype(jnp.float32)
        normed = layers.scale_last(layers.rms_normalise(out_BTHV, self.eps), weight)
        gated = (normed * jax.nn.silu(z_BTHV.astype(jnp.float32))).astype(z_BTHV.dtype)
        out_BTD = jnp.einsum("bthv,hvd->btd", gated, layers.gathered(self.out_proj, self.runtime))
        return sharding.leave_parallel(out_BTD, heads)
