"""Gated softmax attention mixer: per-head norms, partial rope, GQA, causal attention, output gate.

Letters: B batch, T time, D width, H query heads, G key/value heads, K head dim.
Published mathematics: transformers, `Qwen3_5Attention`.
"""

import dataclasses

import jax
import jax.numpy as jnp
from flax import nnx

from app.cluster import sharding
from app.config import ModelConfig
from app.models import layers
from app.ops.attention import causal_attention
from app.ops.ring_attention import ring_attention
from app.ops.zigzag import from_zigzag, to_zigzag


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class AttentionInputs:
    """What every softmax layer needs besides its input, made once a step and already in the layer's own token order:
    segment ids [B,T] and rotary tables [B,T,R]."""

    segment_ids: jax.Array
    cos: jax.Array
    sin: jax.Array


def sequence_ranks(runtime: layers.Runtime) -> int:
    return sharding.axes_size(runtime.rules.time)


def attention_inputs(
    config: ModelConfig, runtime: layers.Runtime, positions_BT: jax.Array, segment_ids_BT: jax.Array
) -> AttentionInputs:
    """Segment ids and rotary tables in the token order that the softmax layers work in (zigzag over ranks)."""
    if sequence_ranks(runtime) > 1:
        positions_BT = to_zigzag(positions_BT, runtime.rules.time)
        segment_ids_BT = to_zigzag(segment_ids_BT, runtime.rules.time)
    rotary_dim = int(config.head_dim * config.partial_rotary_factor)
    cos, sin = layers.rotary_tables(positions_BT, rotary_dim, config.rope_theta)
    return AttentionInputs(segment_ids_BT, cos, sin)


class AttnMixer(nnx.Module):
    """[B,T,D] -> [B,T,D], both in contiguous order; over several sequence ranks the work is done in zigzag order."""

    def __init__(self, config: ModelConfig, runtime: layers.Runtime):
        self.runtime = runtime
        D, H, G, K = config.hidden_size, config.num_attention_heads, config.num_key_value_heads, config.head_dim
        init = layers.normal(config.initializer_range)

        def param(shape, logical):
            return layers.make_param(shape, logical, init, runtime.precision.params)

        def norm():
            return layers.RMSNorm(K, config.rms_norm_eps, runtime, parallel_axes=runtime.rules.heads)

        self.q_proj = param((D, H, K), ("width", "heads", None))
        self.gate_proj = param((D, H, K), ("width", "heads", None))
        self.k_proj = param((D, G, K), ("width", "heads", None))
        self.v_proj = param((D, G, K), ("width", "heads", None))
        self.o_proj = param((H, K, D), ("heads", None, "width"))
        self.q_norm = norm()
        self.k_norm = norm()

    def __call__(self, x_BTD: jax.Array, inputs: AttentionInputs) -> jax.Array:
        rules = self.runtime.rules
        balanced = sequence_ranks(self.runtime) > 1
        # The stream is moved before the projections: D numbers a token instead of those of q, k, v and the gate.
        if balanced:
            x_BTD = to_zigzag(x_BTD, rules.time)
        x_BTD = sharding.enter_parallel(x_BTD, rules.heads)
        q_BTHK, gate_BTHK, k_BTGK, v_BTGK = (
            jnp.einsum("btd,dhk->bthk", x_BTD, layers.gathered(p, self.runtime))
            for p in (self.q_proj, self.gate_proj, self.k_proj, self.v_proj)
        )
        q_BTHK = layers.rotate(self.q_norm(q_BTHK), inputs.cos, inputs.sin)
        k_BTGK = layers.rotate(self.k_norm(k_BTGK), inputs.cos, inputs.sin)
        options = {
            "segment_ids": inputs.segment_ids,
            "block_size": self.runtime.attention_block,
            "kernel": self.runtime.attention_kernel,
        }
        if balanced:
            out_BTHK = ring_attention(q_BTHK, k_BTGK, v_BTGK, axis_name=rules.time, **options)
        else:
            out_BTHK = causal_attention(q_BTHK, k_BTGK, v_BTGK, **options)
        gated = out_BTHK * jax.nn.sigmoid(gate_BTHK)
        out_BTD = jnp.einsum("bthk,hkd->btd", gated, layers.gathered(self.o_proj, self.runtime))
        out_BTD = sharding.leave_parallel(out_BTD, rules.heads)
        return from_zigzag(out_BTD, rules.time) if balanced else out_BTD
