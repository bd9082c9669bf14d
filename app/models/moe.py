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

    WIDTH_DIMS = 1, 1, 2  # of gate, up and down

    def __init__(self, config: ModelConfig, runtime: layers.Runtime):
        E, D, F = config.num_experts, config.hidden_size, config.moe_intermediate_size
        init, dtype = layers.normal(config.initializer_range), runtime.precision.params
        self.runtime = runtime
        self.gate_proj = layers.make_param((E, D, F), ("experts", "expert_width", "mlp"), init, dtype)
        self.up_proj = layers.make_param((E, D, F), ("experts", "expert_width", "mlp"), init, dtype)
        self.down_proj = layers.make_param((E, F, D), ("experts", "mlp", "expert_width"), init, dtype)

    def shards(self) -> tuple[jax.Array, jax.Array, jax.Array]:
        """This rank's part of its experts' matrices: gate, up, down."""
        return self.gate_proj[...], self.up_proj[...], self.down_proj[...]

    def whole(self, shards) -> expert_ops.ExpertWeights:
        """This rank's experts with their whole width."""
        compute, width, line = self.runtime.precision.compute, self.runtime.rules.expert_width, self.runtime.line
        gate, up, down = (
            sharding.whole(shard, width, dim, compute, line) for shard, dim in zip(shards, self.WIDTH_DIMS, strict=True)
        )
        return expert_ops.ExpertWeights(gate, up, down)

    def reduced(self, gradient: expert_ops.ExpertWeights) -> tuple[jax.Array, jax.Array, jax.Array]:
        """The gradients of `shards`, from those of the matrices that `whole` makes of them."""
        precision, width, line = self.runtime.precision, self.runtime.rules.expert_width, self.runtime.line
        whole = gradient.gate, gradient.up, gradient.down
        gate, up, down = (
            sharding.reduce_scatter(grad, width, dim, precision.reduce, line).astype(precision.params)
            for grad, dim in zip(whole, self.WIDTH_DIMS, strict=True)
        )
        return gate, up, down


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
        experts_NK, weights_NK, gate_N1, routing = self._route(x_BTD.reshape(-1, shape[-1]), segment_ids_BT.reshape(-1))
        x_ND, weights_NK = sharding.enter_parallel((x_BTD.reshape(-1, shape[-1]), weights_NK), runtime.rules.mlp)
        chosen_ND, rounds, dropped = expert_ops.expert_mlp(
            x_ND,
            experts_NK,
            weights_NK,
            self.experts.shards(),
            num_experts=self.config.num_experts,
            access=expert_ops.Access(self.experts.whole, self.experts.reduced),
            exchange=runtime.expert_exchange,
            kernel=runtime.expert_kernel,
        )
        chosen_BTD = sharding.leave_parallel(chosen_ND, runtime.rules.mlp).reshape(shape)
        shared_BTD = gate_N1.astype(x_BTD.dtype).reshape(*shape[:-1], 1) * self.shared_expert(x_BTD)
        return chosen_BTD + shared_BTD, dataclasses.replace(routing, rounds=rounds, dropped=dropped)

    def _route(self, x_ND, segment_ids_N):
        """Experts (int32, E for none) and weights [N,K], the shared expert's gate [N,1], the Routing; float32 from the
        product's accumulator on."""
        E, K = self.config.num_experts, self.config.num_experts_per_tok
        # One product for both: to the matrix unit one column more is nothing, and one alone as much as 128.
        columns = [layers.gathered(matrix, self.runtime) for matrix in (self.router, self.shared_expert_gate)]
        product = jnp.einsum("nd,de->ne", x_ND, jnp.concatenate(columns, axis=1), preferred_element_type=jnp.float32)
        logits_NE, gate_N1 = product[:, :E], jax.nn.sigmoid(product[:, E:])
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
        return experts_NK, weights_NK, gate_N1, routing
