"""Mixture of experts: the router, the chosen experts, the shared expert with its gate.

Letters: B batch, T time, N tokens (batch and time flattened), D width, F hidden of one expert, E experts, K experts of
one token. Published mathematics: transformers, `Qwen3_5MoeSparseMoeBlock`; the moves between ranks: `app.ops.experts`.
"""

import dataclasses

import jax
import jax.numpy as jnp
from flax import nnx

from app.cluster import sharding
from app.config import ModelConfig
from app.models import layers
from app.ops import experts as expert_ops


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Routing:
    """What one layer's router did with this rank's tokens: sums, so that layers, ranks and micro-batches add up.

    assignments [E] float32 (whole numbers, no gradient); probability [E], the sum over real tokens of the router's
    softmax; squared_lse and entropy (nats) likewise []; rounds of exchange and dropped assignments [] float32. The
    gradient of the balance and z losses flows through probability and squared_lse.
    """

    assignments: jax.Array
    probability: jax.Array
    squared_lse: jax.Array
    entropy: jax.Array
    rounds: jax.Array
    dropped: jax.Array


class Experts(nnx.Module):
    """The matrices of all experts; each rank of the expert axis holds its share."""

    def __init__(self, config: ModelConfig, runtime: layers.Runtime):
        E, D, F = config.num_experts, config.hidden_size, config.moe_intermediate_size
        init, dtype = layers.normal(config.initializer_range), runtime.precision.params
        self.runtime = runtime
        self.gate_proj = layers.make_param((E, D, F), ("experts", "width", "mlp"), init, dtype)
        self.up_proj = layers.make_param((E, D, F), ("experts", "width", "mlp"), init, dtype)
        self.down_proj = layers.make_param((E, F, D), ("experts", "mlp", "width"), init, dtype)

    def gathered(self) -> expert_ops.ExpertWeights:
        """This rank's experts with their whole width. gate and up become one matrix before they are gathered, where
        putting them together costs least."""
        precision, width = self.runtime.precision, self.runtime.rules.width
        gate_up = jnp.concatenate([self.gate_proj[...], self.up_proj[...]], axis=-1)
        gate_up = sharding.gather(gate_up, width, 1, precision.compute, precision.reduce)
        return expert_ops.ExpertWeights(gate_up, layers.gathered(self.down_proj, self.runtime))


class MoE(nnx.Module):
    """[B,T,D], segment ids [B,T] -> [B,T,D] and the Routing. Padding (segment 0) goes to no expert."""

    def __init__(self, config: ModelConfig, runtime: layers.Runtime):
        self.config, self.runtime = config, runtime
        D, init, dtype = config.hidden_size, layers.normal(config.initializer_range), runtime.precision.params
        self.router = layers.make_param((D, config.num_experts), ("width", None), init, dtype)
        self.experts = Experts(config, runtime)
        self.shared_expert = layers.MLP(D, config.shared_expert_intermediate_size, init, runtime)
        self.shared_expert_gate = layers.make_param((D, 1), ("width", None), init, dtype)

    def __call__(self, x_BTD: jax.Array, segment_ids_BT: jax.Array) -> tuple[jax.Array, Routing]:
        runtime, shape = self.runtime, x_BTD.shape
        experts_NK, weights_NK, routing = self._route(x_BTD.reshape(-1, shape[-1]), segment_ids_BT.reshape(-1))
        x_ND, weights_NK = sharding.enter_parallel((x_BTD.reshape(-1, shape[-1]), weights_NK), runtime.rules.mlp)
        chosen_ND, rounds, dropped = expert_ops.expert_mlp(
            x_ND,
            experts_NK,
            weights_NK,
            self.experts.gathered(),
            num_experts=self.config.num_experts,
            exchange=runtime.expert_exchange,
            kernel=runtime.expert_kernel,
        )
        chosen_BTD = sharding.leave_parallel(chosen_ND, runtime.rules.mlp).reshape(shape)
        gate_BT1 = jax.nn.sigmoid(jnp.einsum("btd,do->bto", x_BTD, layers.gathered(self.shared_expert_gate, runtime)))
        shared_BTD = gate_BT1 * self.shared_expert(x_BTD)
        return chosen_BTD + shared_BTD, dataclasses.replace(routing, rounds=rounds, dropped=dropped)

    def _route(self, x_ND, segment_ids_N):
        """Experts (int32, E for none) and weights (float32) [N,K]; float32 from the router's accumulator on."""
        E, K = self.config.num_experts, self.config.num_experts_per_tok
        router_DE = layers.gathered(self.router, self.runtime)
        logits_NE = jnp.einsum("nd,de->ne", x_ND, router_DE, preferred_element_type=jnp.float32)
        log_probability_NE = jax.nn.log_softmax(logits_NE, axis=-1)
        probability_NE = jnp.exp(log_probability_NE)
        real_N1 = (segment_ids_N != 0)[:, None]
        _, experts_NK = jax.lax.top_k(jax.lax.stop_gradient(logits_NE), K)
        experts_NK = jnp.where(real_N1, experts_NK, E)
        # Picked by comparison: the gradient of a gather is a scatter, which is slow.
        is_chosen_NKE = experts_NK[:, :, None] == jnp.arange(E, dtype=jnp.int32)[None, None, :]
        weights_NK = jnp.sum(jnp.where(is_chosen_NKE, probability_NE[:, None, :], 0.0), axis=-1)
        if self.config.norm_topk_prob:
            total_N1 = jnp.sum(weights_NK, axis=-1, keepdims=True)
            weights_NK = weights_NK / jnp.where(real_N1, total_N1, 1.0)

        def over_tokens(terms):
            return jnp.sum(jnp.where(real_N1, terms, 0.0), axis=0)

        lse_N1 = jax.nn.logsumexp(logits_NE, axis=-1, keepdims=True)
        entropy_N1 = -jnp.sum(probability_NE * log_probability_NE, axis=-1, keepdims=True)
        zero = jnp.zeros((), jnp.float32)
        routing = Routing(
            assignments=jnp.sum(is_chosen_NKE, axis=(0, 1), dtype=jnp.int32).astype(jnp.float32),
            probability=over_tokens(probability_NE),
            squared_lse=over_tokens(jnp.square(lse_N1))[0],
            entropy=jax.lax.stop_gradient(over_tokens(entropy_N1)[0]),
            rounds=zero,
            dropped=zero,
        )
        return experts_NK, weights_NK, routing
