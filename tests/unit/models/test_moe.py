"""The mixture-of-experts block on one device: the published formulas in float64, and what padding may not do."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from app.models import params as model_params
from app.models.layers import Runtime
from app.models.qwen import rematerialised
from app.training.loss import router_losses, router_metrics
from tests.reference import moe_reference
from tests.tiny import EXPERTS, tiny_config

CONFIG = tiny_config(**EXPERTS).model
E, K, D = CONFIG.num_experts, CONFIG.num_experts_per_tok, CONFIG.hidden_size
B, T = 2, 12
SEGMENTS = np.array([[1] * 5 + [0] * 3 + [2] * 4, [1] * 12], np.int32)


@functools.cache
def params():
    rng = np.random.default_rng(0)
    return {
        name: jnp.asarray(rng.normal(size=spec.shape) * 0.3, spec.dtype)
        for name, spec in model_params.describe(CONFIG).items()
    }


def block_params():
    prefix = "groups.blocks.0.mlp."
    return {name.removeprefix(prefix): np.asarray(x[0]) for name, x in params().items() if name.startswith(prefix)}


def block(x_BTD, segments=SEGMENTS, config=CONFIG):
    """The first layer's block: (output, Routing)."""
    model = model_params.build(config, Runtime(), params())
    mlp = jax.tree.map(lambda leaf: leaf[0], model.groups.blocks[0].mlp)
    return jax.device_get(mlp(jnp.asarray(x_BTD), jnp.asarray(segments)))


def stream(seed=1):
    return np.random.default_rng(seed).normal(size=(B, T, D)).astype(np.float32)


def softmax(x):
    return np.exp(x - x.max(axis=-1, keepdims=True)) / np.exp(x - x.max(axis=-1, keepdims=True)).sum(-1, keepdims=True)


@pytest.mark.parametrize("normalised", [True, False])
def test_the_block_is_the_published_formula(normalised):
    x, p = stream(), block_params()
    got, routing = block(x, config=dataclasses.replace(CONFIG, norm_topk_prob=normalised))
    tokens = np.float64(x.reshape(-1, D))
    logits = tokens @ p["router"]
    probability, chosen = softmax(logits), np.argsort(-logits, axis=1)[:, :K]
    weights = np.take_along_axis(probability, chosen, axis=1)
    weights = weights / weights.sum(axis=1, keepdims=True) if normalised else weights
    real = SEGMENTS.ravel() != 0
    matrices = (p[f"experts.{name}_proj"] for name in ("gate", "up", "down"))
    want = moe_reference.expert_mlp(tokens, np.where(real[:, None], chosen, E), weights, *matrices)
    gate, up, down = (np.float64(p[f"shared_expert.{name}_proj"]) for name in ("gate", "up", "down"))
    shared = (moe_reference.silu(tokens @ gate) * (tokens @ up)) @ down
    want += shared / (1 + np.exp(-(tokens @ p["shared_expert_gate"])))
    np.testing.assert_allclose(got.reshape(-1, D), want, rtol=1e-4, atol=1e-5)
    np.testing.assert_array_equal(routing.assignments, np.bincount(chosen[real].ravel(), minlength=E))
    assert routing.assignments.sum() == real.sum() * K  # padding is in no expert's load


def test_padding_changes_nothing_real():
    """Any numbers in a padded place: the same outputs, loads and sums to the bit."""
    x, real = stream(), SEGMENTS != 0
    other = np.where(real[:, :, None], x, stream(7) * 5)
    (got, routing), (want, wanted_routing) = block(other), block(x)
    np.testing.assert_array_equal(got[real], want[real])
    jax.tree.map(np.testing.assert_array_equal, routing, wanted_routing)


def test_the_balance_and_z_losses_are_over_layers_and_real_tokens():
    rng = np.random.default_rng(3)
    x = [rng.normal(size=(B, T, D)).astype(np.float32) for _ in range(2)]
    routings = [jax.tree.map(lambda leaf: leaf[None], block(layer)[1]) for layer in x]
    real = SEGMENTS.ravel() != 0
    logits = np.stack([layer.reshape(-1, D)[real] @ np.float64(block_params()["router"]) for layer in x])
    mesh = jax.make_mesh((1,), ("data",))
    spec = jax.sharding.PartitionSpec()

    def losses(routings):
        return router_losses(routings, K, jnp.float32(real.sum()), ("data",))

    got = jax.shard_map(losses, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False)(routings)
    pooled, penalty = moe_reference.balance_loss(logits, K)
    of_layers = np.mean([moe_reference.balance_loss(layer[None], K)[0] for layer in logits])
    assert abs(of_layers - pooled) > 1e-3  # the layers make up for each other
    want = {"balance_loss": pooled, "layer_balance_loss": of_layers, "router_z_loss": penalty}
    assert got == pytest.approx(want, rel=1e-5)
    metrics = jax.device_get(router_metrics(routings, exchanges=1))
    loads = [np.bincount(np.argsort(-layer, axis=1)[:, :K].ravel(), minlength=E) for layer in logits]
    assert metrics["expert_load"] == pytest.approx(max(load.max() / load.mean() for load in loads))
    entropy = np.mean([-np.sum(softmax(layer) * np.log(softmax(layer)), axis=1) for layer in logits])
    assert metrics["router_entropy"] == pytest.approx(entropy, rel=1e-5)
    assert (metrics["expert_rounds"], metrics["expert_dropped"]) == (1, 0)


def test_a_model_of_padding_only_has_no_nan():
    _, routing = block(stream(), np.zeros((B, T), np.int32))
    metrics = jax.device_get(router_metrics([jax.tree.map(lambda leaf: leaf[None], routing)], exchanges=1))
    assert all(np.isfinite(value) for value in metrics.values())
    assert routing.assignments.sum() == 0


@pytest.mark.parametrize("remat, sorts", [("exchanges", 3), ("full", 6)])
def test_the_backward_sorts_nothing_again_where_routes_are_kept(remat, sorts):
    """The router's top k and the two sorts of assignments; "full", which keeps nothing, does each twice."""

    def apply(state, x_BTD):
        model = model_params.build(CONFIG, Runtime(), state)
        return jax.tree.map(lambda leaf: leaf[0], model.groups.blocks[0].mlp)(x_BTD, jnp.asarray(SEGMENTS))[0]

    def loss(state, x_BTD):
        return jnp.sum(rematerialised(apply, remat)(state, x_BTD))

    jaxpr = str(jax.make_jaxpr(jax.grad(loss))(params(), jnp.asarray(stream())))
    assert jaxpr.count("= sort[") + jaxpr.count("= top_k[") == sorts
