"""The gated delta rule on one rank, and what its jaxpr and its factors promise (the stated grid: test_gdn_grid.py)."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from app.ops import gdn
from app.ops.gdn_chunk import pairwise_decay, unit_lower_inverse
from app.ops.gdn_layout import plan_blocks
from tests.unit.ops.gdn_base import ROWS, RuleCases, error, make_problem, run


class TestGatedDeltaRule(RuleCases):
    rule = staticmethod(gdn.gated_delta_rule)

    def test_many_blocks_are_the_same_as_one(self):
        """Enough rows that a block holds 256 tokens only."""
        problem = make_problem(7, B=64, T=600, G=1, H=1, K=4, V=4, documents=True)
        assert plan_blocks(600, 64, self.chunk_size).blocks > 1
        got, want = run(self.rule, problem, chunk_size=self.chunk_size), problem.wanted()
        assert max(error(got[name], want[name]) for name in got) <= self.tolerance


def test_the_trained_like_rows_have_a_large_lower_triangle():
    problem = make_problem(1, B=len(ROWS), T=64, G=1, H=1, K=128, V=1)
    k, beta = problem.inputs[1][4, :, 0], problem.inputs[4][4, :, 0]
    norm = np.abs(np.tril(beta[:, None] * (k @ k.T), -1)).sum(1).max()
    assert 30 < norm < 64


def test_pairwise_sums_keep_small_decays_next_to_large_ones():
    """exp of differences of the cumulative sum misses by 1e-5 what is exact here."""
    rng = np.random.default_rng(0)
    g = np.where(rng.random((1, 64, 8)) < 0.5, -rng.uniform(5, 30, (1, 64, 8)), -rng.uniform(0, 1e-3, (1, 64, 8)))
    g = g.astype(np.float32)
    exact = g.astype(np.float64).cumsum(1)
    lower = np.tril(np.ones((64, 64)))[:, :, None]
    want = lower * np.exp(np.minimum(exact[0, :, None] - exact[0, None], 0))
    got = np.asarray(pairwise_decay(jnp.asarray(g)).pair)[0]
    assert np.abs(got - want).max() < 3e-7
    naive = np.cumsum(g, axis=1)
    naive = lower * np.exp(np.minimum(naive[0, :, None] - naive[0, None], 0))
    assert np.abs(naive - want).max() > 5e-6


def test_the_inverse_survives_triangles_whose_powers_overflow():
    """Against float64: an L whose inverse has integer entries up to 2^63, and a trained-like one with norm over 40."""
    length = 64
    lower = np.diag(np.full(length - 1, 2.0), -1)
    got = np.asarray(unit_lower_inverse(jnp.asarray(lower, jnp.float32)[None, :, :, None]))[0, :, :, 0]
    i, j = np.indices((length, length))
    np.testing.assert_array_equal(got, np.where(i >= j, (-2.0) ** np.maximum(i - j, 0), 0.0))
    rng = np.random.default_rng(0)
    k = rng.normal(size=(length, 16)) + 2.0
    k /= np.linalg.norm(k, axis=1, keepdims=True)
    lower = np.tril(k @ k.T, -1)
    got = np.asarray(unit_lower_inverse(jnp.asarray(lower, jnp.float32)[None, :, :, None]))[0, :, :, 0]
    assert error(got, np.linalg.inv(np.eye(length) + lower.astype(np.float32))) < 1e-6
    assert np.linalg.norm(lower, np.inf) > 40


def equations(jaxpr):
    """All equations, those of inner jaxprs too."""
    for equation in jaxpr.eqns:
        yield equation
        for value in equation.params.values():
            for inner in value if isinstance(value, tuple | list) else [value]:
                if hasattr(inner, "jaxpr"):
                    yield from equations(inner.jaxpr)
                elif hasattr(inner, "eqns"):
                    yield from equations(inner)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_precision_is_stated_in_every_product(dtype):
    """float32 operands are multiplied with HIGHEST; bfloat16 ones accumulate in float32; carried states are float32."""
    problem = make_problem(0, B=1, T=128, G=1, H=2, K=8, V=4)
    q, k, v = (jnp.asarray(x).astype(dtype) for x in problem.inputs[:3])
    g, beta = (jnp.asarray(x) for x in problem.inputs[3:])

    def both(*inputs):
        out, pull = jax.vjp(gdn.gated_delta_rule, *inputs)
        return pull(out)

    found = list(equations(jax.make_jaxpr(both)(q, k, v, g, beta).jaxpr))
    products = [e for e in found if e.primitive.name == "dot_general"]
    assert len(products) > 10
    for product in products:
        operand, result = product.invars[0].aval.dtype, product.outvars[0].aval.dtype
        assert result == jnp.float32
        if operand == jnp.float32:
            assert product.params["precision"] == (jax.lax.Precision.HIGHEST,) * 2
        else:
            assert operand == dtype
    states = [
        carried.aval
        for loop in found
        if loop.primitive.name in ("scan", "while")
        for carried in loop.outvars
        if carried.aval.shape == (1, 1, 2, 8, 4)
    ]
    assert states and all(state.dtype == jnp.float32 for state in states)


def test_key_heads_are_not_repeated():
    """No product of q or k with themselves has the value heads among its dims: [N,B,G,C,C], not [N,B,G,R,C,C]."""
    problem = make_problem(0, B=1, T=64, G=2, H=8, K=8, V=4)
    jaxpr = jax.make_jaxpr(lambda *x: gdn.gated_delta_rule(*x, chunk_size=64))(*map(jnp.asarray, problem.inputs))
    shapes = [e.outvars[0].aval.shape for e in equations(jaxpr.jaxpr) if e.primitive.name == "dot_general"]
    assert shapes.count((1, 1, 2, 64, 64)) == 2
    assert (1, 1, 2, 4, 64, 64) not in shapes


def test_outputs_keep_the_dtype_and_mixed_inputs_are_widened():
    problem = make_problem(0, B=1, T=20, G=1, H=2, K=8, V=4)
    q, k, v, g, beta = map(jnp.asarray, problem.inputs)
    out, state = gdn.gated_delta_rule(q, k, v.astype(jnp.bfloat16), g, beta, return_final_state=True)
    assert out.dtype == jnp.bfloat16 and state.dtype == jnp.float32
    grad = jax.grad(lambda beta: jnp.sum(gdn.gated_delta_rule(q, k, v, g, beta)))(beta.astype(jnp.bfloat16))
    assert grad.dtype == jnp.bfloat16


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"v": (1, 8, 3, 4)}, "3 value heads (v) are no multiple of 2 key heads"),
        ({"k": (1, 8, 2, 5)}, "expected q, k [B,T,G,K]"),
        ({"g": (1, 8, 2)}, "g must have shape (1, 8, 4), got (1, 8, 2)"),
        ({"segment_ids": (1, 7)}, "segment_ids must have shape (1, 8)"),
        ({"initial_state": (1, 4, 4, 8)}, "initial_state must have shape (1, 4, 8, 4)"),
        ({"chunk_size": 48}, "chunk_size must be a power of two, got 48"),
    ],
)
def test_wrong_shapes_are_named(change, words):
    shapes = {"q": (1, 8, 2, 8), "k": (1, 8, 2, 8), "v": (1, 8, 4, 4), "g": (1, 8, 4), "beta": (1, 8, 4)} | change
    options = {"chunk_size": shapes.pop("chunk_size", 64)}
    arrays = {
        name: jnp.zeros(shape, jnp.int32 if name == "segment_ids" else jnp.float32) for name, shape in shapes.items()
    }
    positional = [arrays.pop(name) for name in ("q", "k", "v", "g", "beta")]
    with pytest.raises(ValueError) as raised:
        gdn.gated_delta_rule(*positional, **arrays, **options)
    assert words in str(raised.value)


@pytest.mark.parametrize("tokens", [1, 63, 64, 65, 4096, 65536, 100_000])
@pytest.mark.parametrize("problems", [1, 16, 300])
def test_blocks_cover_the_tokens_with_little_padding(tokens, problems):
    blocks = plan_blocks(tokens, problems, 64)
    assert blocks.padded >= tokens
    assert blocks.padded - tokens < 64 * blocks.blocks
    assert blocks.blocks == 1 or blocks.tokens >= 192
