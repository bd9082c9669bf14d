"""Cross entropy over the vocabulary without ever holding tokens x vocabulary; the routers' losses and statistics.

Letters: N tokens (batch and time flattened), D width, V vocabulary (this rank's part), C tokens a chunk.
"""

import functools

import jax
import jax.numpy as jnp
from jax import lax

from app.cluster import sharding
from app.cluster.sharding import MeshAxes
from app.models.moe import Routing


def chunked_cross_entropy(
    hidden: jax.Array,
    head: jax.Array,
    targets: jax.Array,
    mask: jax.Array,
    *,
    chunk: int,
    z_weight: float = 0.0,
    vocab_axes: MeshAxes = (),
    width_axes: MeshAxes = (),
    reduce_dtype: str = "float32",
    line: int = 1,
) -> tuple[jax.Array, jax.Array]:
    """(loss, entropy): sums over this rank's tokens, float32 scalars, nats.

    hidden [B,T,D] in the compute dtype, head [D,V] cut along D over `width_axes` (line: see `sharding.gather`), targets
    [B,T] int32 (ids of the whole vocabulary), mask [B,T] bool. loss = sum of cross entropy + z_weight x logsumexp^2
    carries the gradient; entropy, without the z term and without gradient, is for reports. Products of compute-dtype
    operands accumulate in float32. The largest buffers are chunk x V logits, the gathered head and, for the gradient,
    one float32 [D,V]: it is formed chunk by chunk in the forward pass, where the logits exist anyway (three products a
    chunk instead of four), summed over the ranks at once in `reduce_dtype`, and scaled by the cotangent later, which
    has to be the same on all ranks.
    """
    N = targets.size
    chunk = min(chunk, N)
    pad = -N % chunk
    hidden_ND = jnp.pad(hidden.reshape(N, -1), ((0, pad), (0, 0)))
    targets_N, mask_N = jnp.pad(targets.reshape(N), (0, pad)), jnp.pad(mask.reshape(N), (0, pad))
    hidden_NCD, targets_NC, mask_NC = (x.reshape(-1, chunk, *x.shape[1:]) for x in (hidden_ND, targets_N, mask_N))
    loss, entropy = _summed(
        hidden_NCD, head, targets_NC, mask_NC, z_weight, vocab_axes, (width_axes, reduce_dtype, line)
    )
    return loss, lax.stop_gradient(entropy)


def router_losses(
    routings: list[Routing], experts_per_token: int, tokens: jax.Array, data_axes: MeshAxes
) -> dict[str, jax.Array]:
    """This rank's share of a micro-batch's losses, float32 scalars that add up to the step's.

    routings: of all layers with experts, stacked by group; tokens: real tokens of the global batch (float32). Over the
    real tokens of all ranks, balance = E x sum over experts of (share of assignments x K) x (mean probability), K for a
    balanced router: balance_loss pools all layers first, as transformers does (load_balancing_loss_func), so that they
    may make up for each other; layer_balance_loss is the mean of the layers'. The shares, which carry no gradient, are
    those of the micro-batch: with accumulation the step's loss is the mean of its micro-batches', weighted by tokens.
    router_z_loss: mean of logsumexp^2.
    """
    whole = jax.tree.map(lambda *parts: jnp.concatenate(parts), *routings)
    layer_tokens = tokens * whole.rounds.size

    def balance(assignments_LE, probability_LE):
        share_LE = experts_per_token * assignments_LE / jnp.maximum(jnp.sum(assignments_LE, axis=1, keepdims=True), 1.0)
        return share_LE.shape[1] * jnp.sum(lax.stop_gradient(share_LE) * probability_LE) / layer_tokens

    of_layers = lax.psum(whole.assignments, data_axes), whole.probability
    return {
        "balance_loss": balance(*(jnp.sum(sums_LE, axis=0, keepdims=True) for sums_LE in of_layers)),
        "layer_balance_loss": balance(*of_layers),
        "router_z_loss": jnp.sum(whole.squared_lse) / layer_tokens,
    }


def router_metrics(routings: list[Routing], exchanges: int) -> dict[str, jax.Array]:
    """Of a whole step's sums (all ranks and micro-batches, `exchanges` for each layer), float32 scalars.

    expert_load: of the layer with the worst balance, the busiest expert's assignments / the mean; router_entropy: mean
    over tokens and layers, nats; expert_rounds: mean rounds of exchange (1: all fitted at once); expert_dropped:
    assignments that no expert worked on.
    """
    whole = jax.tree.map(lambda *parts: jnp.concatenate(parts), *routings)
    layers, tokens = whole.rounds.size, jnp.maximum(jnp.sum(whole.probability), 1.0)
    mean_L = jnp.maximum(jnp.mean(whole.assignments, axis=1), 1.0 / whole.assignments.shape[1])
    return {
        "expert_load": jnp.max(jnp.max(whole.assignments, axis=1) / mean_L),
        "router_entropy": jnp.sum(whole.entropy) / tokens,
        "expert_rounds": jnp.sum(whole.rounds) / (layers * exchanges),
        "expert_dropped": jnp.sum(whole.dropped),
    }


def _chunk_terms(logits_CV, targets_C, mask_C, z_weight, vocab_axes):
    """Sums [loss, entropy], the rows' logsumexp [C], and the targets' columns in this rank's part (-1: elsewhere)."""
    size = logits_CV.shape[1]
    column_C = targets_C - (lax.axis_index(vocab_axes) * size if vocab_axes else 0)
    column_C = jnp.where((column_C >= 0) & (column_C < size), column_C, -1)
    picked_C = jnp.take_along_axis(logits_CV, jnp.maximum(column_C, 0)[:, None], axis=1)[:, 0]
    target_C = jnp.where(column_C >= 0, picked_C, 0.0)
    peak_C = jnp.max(logits_CV, axis=1)
    if vocab_axes:
        peak_C = lax.pmax(peak_C, vocab_axes)
    normaliser_C = jnp.sum(jnp.exp(logits_CV - peak_C[:, None]), axis=1)
    if vocab_axes:
        normaliser_C, target_C = lax.psum((normaliser_C, target_C), vocab_axes)
    lse_C = peak_C + jnp.log(normaliser_C)
    # where, not a product: a masked token must not turn a non-finite logit into a NaN
    entropy = jnp.sum(jnp.where(mask_C, lse_C - target_C, 0.0))
    penalty = jnp.sum(jnp.where(mask_C, jnp.square(lse_C), 0.0))
    return jnp.stack([entropy + z_weight * penalty, entropy]), lse_C, column_C


def _logits(hidden_CD, head_DV):
    return jnp.einsum("cd,dv->cv", hidden_CD, head_DV, preferred_element_type=jnp.float32)


def _whole(head, hidden, cut):
    width_axes, _, line = cut
    return sharding.whole(head, width_axes, 0, hidden.dtype.name, line)


@functools.partial(jax.custom_vjp, nondiff_argnums=(4, 5, 6))
def _summed(hidden_NCD, head, targets_NC, mask_NC, z_weight, vocab_axes, cut):
    head_DV = _whole(head, hidden_NCD, cut)

    def step(total, chunk):
        hidden_CD, targets_C, mask_C = chunk
        terms, _, _ = _chunk_terms(_logits(hidden_CD, head_DV), targets_C, mask_C, z_weight, vocab_axes)
        return total + terms, None

    total, _ = lax.scan(step, jnp.zeros(2, jnp.float32), (hidden_NCD, targets_NC, mask_NC))
    return total[0], total[1]


def _summed_fwd(hidden_NCD, head, targets_NC, mask_NC, z_weight, vocab_axes, cut):
    head_DV = _whole(head, hidden_NCD, cut)

    def step(carry, chunk):
        total, grad_head_DV = carry
        hidden_CD, targets_C, mask_C = chunk
        logits_CV = _logits(hidden_CD, head_DV)
        terms, lse_C, column_C = _chunk_terms(logits_CV, targets_C, mask_C, z_weight, vocab_axes)
        # d(lse - target + z lse^2) / d logits = softmax (1 + 2 z lse) - onehot
        grad_CV = jnp.exp(logits_CV - lse_C[:, None]) * (1.0 + 2.0 * z_weight * lse_C)[:, None]
        is_target_CV = jnp.arange(logits_CV.shape[1])[None, :] == column_C[:, None]
        grad_CV = jnp.where(is_target_CV, grad_CV - 1.0, grad_CV)
        grad_CV = jnp.where(mask_C[:, None], grad_CV, 0.0).astype(hidden_CD.dtype)
        grad_CD = jnp.einsum("cv,dv->cd", grad_CV, head_DV, preferred_element_type=jnp.float32)
        if vocab_axes:  # hidden is replicated over the vocabulary's ranks: only their sum is its whole cotangent
            grad_CD = lax.psum(grad_CD, vocab_axes)
        grad_head_DV += jnp.einsum("cd,cv->dv", hidden_CD, grad_CV, preferred_element_type=jnp.float32)
        return (total + terms, grad_head_DV), grad_CD.astype(hidden_CD.dtype)

    width_axes, reduce_dtype, line = cut
    start = jnp.zeros(2, jnp.float32), jnp.zeros(head_DV.shape, jnp.float32)
    (total, grad_head_DV), grad_hidden_NCD = lax.scan(step, start, (hidden_NCD, targets_NC, mask_NC))
    grad_head = sharding.reduce_scatter(grad_head_DV, width_axes, 0, reduce_dtype, line).astype(head.dtype)
    return (total[0], total[1]), (grad_hidden_NCD, grad_head)


def _summed_bwd(z_weight, vocab_axes, cut, residuals, grads):
    scaled = ((grad.astype(jnp.float32) * grads[0]).astype(grad.dtype) for grad in residuals)
    return *scaled, None, None


_summed.defvjp(_summed_fwd, _summed_bwd)
