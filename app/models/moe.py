"""Mixture of experts: the router, the chosen experts, the shared expert with its gate.

Letters: B batch, T time, N tokens (batch and time flattened), D width, F hidden of one expert, E experts, K experts of
one token. Published mathematics: transformers, `Qwen3_5MoeSparseMoeBlock`; the moves between ranks: `app.ops.experts`.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
from flax import nnx
from jax.ad_checkpoint import checkpoint_name

from app.cluster import sharding
from app.config import ModelConfig
from app.models import layers
from app.ops.experts import ROUTE_NAME, Access, ExpertWeights, expert_mlp

WIDTH_DIMS = ExpertWeights(1, 1, 2)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Routing:
    """What one layer's router did with this rank's tokens: sums, so that layers, ranks and micro-batches add up.

    assignments [E] float32 (whole numbers, no gradient); probability [E], the sum over real tokens of the router's
    softmax; squared_lse and entropy (nats) likewise []; rounds of exchange and dropped assignments [] float32. The
    gradient of the balance and z losses flows through probability and squared_lse.
    """

    assignments: jax.Array
    rounds: jax.Array
    dropped: jax.Array
    probability: jax.Array
    squared_lse: jax.Array
    entropy: jax.Array


class Experts(nnx.Module):
    """The matrices of all experts; each rank of the expert axis holds its share."""

    def __init__(self, config: ModelConfig, runtime: layers.Runtime):
        E, D, F = config.num_experts, config.hidden_size, config.moe_intermediate_size
        init, dtype = layers.normal(config.initializer_range), runtime.precision.params
        self.gate_proj = layers.make_param((E, D, F), ("experts", "expert_width", "mlp"), init, dtype)
        self.up_proj = layers.make_param((E, D, F), ("experts", "expert_width", "mlp"), init, dtype)
        self.down_proj = layers.make_param((E, F, D), ("experts", "mlp", "expert_width"), init, dtype)


class MoE(nnx.Module):
    """[B,T,D], segment ids [B,T] -> [B,T,D] and the Routing. Padding (segment 0) goes to no expert but the shared."""

    def __init__(self, config: ModelConfig, runtime: layers.Runtime):
        self.config, self.runtime = config, runtime
        D, init, dtype = config.hidden_size, layers.normal(config.initializer_range), runtime.precision.params
        self.router = layers.make_param((D, config.num_experts), ("width", None), init, dtype)
        self.experts = Experts(config, runtime)
        self.shared_expert = layers.MLP(D, config.shared_expert_intermediate_size, init, runtime)
        self.shared_expert_gate = layers.make_param((D, 1), ("width", None), init, dtype)

    def __call__(self, x_BTD: jax.Array, segment_ids_BT: jax.Array) -> tuple[jax.Array, Routing]:
        runtime, x_ND = self.runtime, x_BTD.reshape(-1, x_BTD.shape[-1])
        experts_NK, weights_NK, shared_weight_N, sums = self._route(x_ND, segment_ids_BT.reshape(-1))
        x_ND, weights_NK, shared_weight_N = sharding.enter_parallel(
            (x_ND, weights_NK, shared_weight_N), runtime.rules.mlp
        )
        out_ND, counts = expert_mlp(
            x_ND,
            experts_NK,
            weights_NK,
            shared_weight_N,
            self._shards(),
            num_experts=self.config.num_experts,
            access=Access(self._whole, self._reduced),
            exchange=runtime.expert_exchange,
            kernel=runtime.expert_kernel,
        )
        return sharding.leave_parallel(out_ND, runtime.rules.mlp).reshape(x_BTD.shape), Routing(**counts, **sums)

    def _shards(self) -> tuple[ExpertWeights, ExpertWeights]:
        """This rank's parts of the matrices, of its experts and of the shared one."""
        chosen, shared = self.experts, self.shared_expert
        return (
            ExpertWeights(chosen.gate_proj[...], chosen.up_proj[...], chosen.down_proj[...]),
            ExpertWeights(shared.gate_proj[None], shared.up_proj[None], shared.down_proj[None]),
        )

    def _whole(self, shards):
        compute, line = self.runtime.precision.compute, self.runtime.line
        return self._each(lambda axes, part, dim: sharding.whole(part, axes, dim, compute, line), shards)

    def _reduced(self, gradients):
        """The gradients of `_shards`, from those of the matrices that `_whole` makes of them."""
        precision, line = self.runtime.precision, self.runtime.line

        def reduced(axes, grad, dim):
            return sharding.reduce_scatter(grad, axes, dim, precision.reduce, line).astype(precision.params)

        return self._each(reduced, gradients)

    def _each(self, function, both):
        """function(mesh axes of the width, matrix, dim of the width) of each matrix."""
        rules, (chosen, shared) = self.runtime.rules, both
        return (
            jax.tree.map(functools.partial(function, rules.expert_width), chosen, WIDTH_DIMS),
            jax.tree.map(functools.partial(function, rules.width), shared, WIDTH_DIMS),
        )

    def _route(self, x_ND, segment_ids_N):
        """Experts (int32, E for none) and weights [N,K], the shared expert's weight [N], sums of the Routing; float32
        from the product's accumulator on."""
        E, K = self.config.num_experts, self.config.num_experts_per_tok
        # One product for both: to the matrix unit one column more is nothing, and one alone as much as 128.
        columns = [layers.gathered(matrix, self.runtime) for matrix in (self.router, self.shared_expert_gate)]
        product = jnp.einsum("nd,de->ne", x_ND, jnp.concatenate(columns, axis=1), preferred_element_type=jnp.float32)
        logits_NE, shared_weight_N = product[:, :E], jax.nn.sigmoid(product[:, E])
        chosen_NK, experts_NK = _top(logits_NE, K)
        lse_N1 = jax.nn.logsumexp(logits_NE, axis=-1, keepdims=True)
        normaliser_N1 = jax.nn.logsumexp(chosen_NK, axis=-1, keepdims=True) if self.config.norm_topk_prob else lse_N1
        real_N1 = (segment_ids_N != 0)[:, None]

        def over_tokens(terms):
            return jnp.sum(jnp.where(real_N1, terms, 0.0), axis=0)

        log_probability_NE = logits_NE - lse_N1
        probability_NE = jnp.exp(log_probability_NE)
        entropy_N1 = -jnp.sum(probability_NE * log_probability_NE, axis=-1, keepdims=True)
        sums = {
            "probability": over_tokens(probability_NE),
            "squared_lse": over_tokens(jnp.square(lse_N1))[0],
            "entropy": jax.lax.stop_gradient(over_tokens(entropy_N1)[0]),
        }
        return jnp.where(real_N1, experts_NK, E), jnp.exp(chosen_NK - normaliser_N1), shared_weight_N, sums


@functools.partial(jax.custom_vjp, nondiff_argnums=(1,))
def _top(logits_NE: jax.Array, K: int) -> tuple[jax.Array, jax.Array]:
    """The K largest of each row and where they are (int32)."""
    return jax.lax.top_k(logits_NE, K)


def _top_fwd(logits_NE, K):
    found = checkpoint_name(_top(logits_NE, K), ROUTE_NAME)
    return found, (found[1], logits_NE[:0])


def _top_bwd(K, residuals, grads):
    """By comparison: the derivative of top_k is a scatter, which is slow."""
    index_NK, like = residuals
    is_it_NKE = index_NK[:, :, None] == jnp.arange(like.shape[1], dtype=jnp.int32)[None, None, :]
    return (jnp.sum(jnp.where(is_it_NKE, grads[0][:, :, None], 0.0), axis=1),)


_top.defvjp(_top_fwd, _top_bwd)
