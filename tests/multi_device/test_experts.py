"""Experts shared out over 1, 2, 4 and 8 ranks (CPU devices, float32) against a loop over tokens, forward and backward.

The gradient of the reference is that of the same function on one rank, which the reference proves right. Not covered:
speed; the whole model (test_step_moe.py).
"""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, PartitionSpec

from app.ops import experts as expert_ops
from app.ops.experts import Exchange, ExpertWeights, expert_mlp
from tests.reference import moe_reference

N, K, D, F, E = 64, 3, 16, 8, 32  # tokens of all ranks together
ROUTES = ("even", "one expert", "one rank", "padding")


def operands(route):
    """x, experts, weights, the shared expert's, matrices (of all experts, of the shared one), and a cotangent. Of "one
    rank" every token wants the same K experts."""
    rng = np.random.default_rng(ROUTES.index(route))
    experts = np.argsort(rng.random((N, E)), axis=1)[:, :K].astype(np.int32)
    if route == "one rank":
        experts[:] = np.arange(K)
    if route == "one expert":
        experts[:, 0] = E - 1
        experts[:, 1:] = np.arange(N * (K - 1)).reshape(N, -1) % (E - 1)
    if route == "padding":
        experts[rng.random(N) < 0.3] = E
        experts[40:] = E  # whole ranks of it
    shapes = (N, D), (E, D, F), (E, D, F), (E, F, D), (1, D, F), (1, D, F), (1, F, D), (N, D)
    x, *matrices, cotangent = (rng.normal(size=shape).astype(np.float32) for shape in shapes)
    weights, shared_weight = (rng.random(shape).astype(np.float32) for shape in ((N, K), (N,)))
    return x, experts, weights, shared_weight, (ExpertWeights(*matrices[:3]), ExpertWeights(*matrices[3:])), cotangent


def reference(x, experts, weights, shared_weight, matrices):
    chosen, shared = ((of.gate, of.up, of.down) for of in matrices)
    everyone = np.zeros((N, 1), np.int32)
    return moe_reference.expert_mlp(x, experts, weights, *chosen) + moe_reference.expert_mlp(
        x, everyone, shared_weight[:, None], *shared
    )


@functools.cache
def on_ranks(ranks, capacity=1.25, max_rounds=0):
    """(result, rounds, dropped, gradients of x, weights, the shared weight and matrices), over `ranks` devices."""
    mesh = Mesh(np.array(jax.devices()[:ranks]), ("expert",))
    exchange = Exchange("expert", ("expert",), capacity, max_rounds)
    split, whole = PartitionSpec("expert"), PartitionSpec()

    def body(x, experts, weights, shared_weight, matrices, cotangent):
        def apply(x, weights, shared_weight, matrices):
            return expert_mlp(x, experts, weights, shared_weight, matrices, num_experts=E, exchange=exchange)

        result, pull, counts = jax.vjp(apply, x, weights, shared_weight, matrices, has_aux=True)
        *grads, (grad_chosen, grad_shared) = pull(cotangent)
        dropped, grad_shared = jax.lax.psum((counts["dropped"], grad_shared), "expert")
        return result, counts["rounds"], dropped, (*grads, (grad_chosen, grad_shared))

    arguments = split, split, split, split, (split, whole)
    gradient = split, split, split, (split, whole)
    function = jax.jit(
        jax.shard_map(
            body, mesh=mesh, in_specs=(*arguments, split), out_specs=(split, whole, whole, gradient), check_vma=False
        )
    )
    return lambda *operands: jax.device_get(function(*operands))


def assert_close(got, want):
    jax.tree.map(lambda g, w: np.testing.assert_allclose(g, w, rtol=1e-4, atol=2e-5), got, want)


@pytest.mark.parametrize("route", ROUTES)
def test_one_rank_equals_a_loop_over_tokens(route):
    x, experts, *weights, matrices, cotangent = operands(route)
    result, rounds, dropped, gradient = on_ranks(1)(*operands(route))
    wanted = reference(x, experts, *weights, matrices)
    assert_close(result, wanted)
    assert (rounds, dropped) == (1, 0)

    # The gradient along one random direction, in float64 differences.
    rng = np.random.default_rng(9)
    step = jax.tree.map(lambda a: rng.normal(size=a.shape), (x, *weights, matrices))

    def moved(size):
        moved_x, *rest = jax.tree.map(lambda a, b: a + size * b, (x, *weights, matrices), step)
        return np.sum(reference(moved_x, experts, *rest) * cotangent)

    slope = (moved(1e-5) - moved(-1e-5)) / 2e-5
    along = jax.tree.leaves(jax.tree.map(lambda g, s: np.sum(np.float64(g) * s), gradient, step))
    assert sum(along) == pytest.approx(slope, rel=1e-4)


@pytest.mark.parametrize("ranks, capacity", [(2, 1.25), (4, 1.0), (8, 1.25)])
def test_any_number_of_ranks_equals_one(ranks, capacity):
    for route in ROUTES:
        wanted, _, _, wanted_gradient = on_ranks(1)(*operands(route))
        result, rounds, dropped, gradient = on_ranks(ranks, capacity)(*operands(route))
        assert_close((result, gradient), (wanted, wanted_gradient))
        assert dropped == 0
        if route == "one rank":  # all assignments of a rank go to one, in parts of what even routing needs
            places = Exchange(capacity=capacity).places(N // ranks, K, E // ranks, ranks)
            assert rounds == math.ceil(N * K // ranks / places) > 1


def test_a_limit_on_rounds_drops_and_counts():
    result, rounds, dropped, _ = on_ranks(8, 1.25, 1)(*operands("one rank"))
    places = Exchange(capacity=1.25).places(N // 8, K, E // 8, 8)
    assert rounds == 1
    assert dropped == N * K - 8 * places  # each of the 8 ranks sends `places` of its assignments to rank 0
    whole, *_ = on_ranks(1)(*operands("one rank"))
    assert 0 < np.linalg.norm(result - whole) < np.linalg.norm(whole)


def test_a_wrong_share_of_the_experts_is_seen(monkeypatch):
    """Negative control: every row gets the expert after its own."""
    wanted, *_ = on_ranks(1)(*operands("even"))
    real = expert_ops.lay_out
    monkeypatch.setattr(expert_ops, "lay_out", lambda arriving, *rest: real(jnp.roll(arriving, 1, axis=1), *rest))
    result, *_ = on_ranks.__wrapped__(2)(*operands("even"))
    assert np.linalg.norm(result - wanted) > 0.1 * np.linalg.norm(wanted)
