"""The chunked rule against the sequential float64 reference over a stated grid: every decay with every write strength,
identical keys, zero keys; lengths around the chunk; 1 to 4 value heads a key head. A row of the batch is one case.
"""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from app.ops.gdn import gated_delta_rule
from tests.reference import gdn_reference

K, V, KEY_HEADS, CHUNK = 8, 12, 2, 64
DECAYS = (0.0, -1e-3, -0.1, -1.0, -5.0, -30.0, "mixed")
CASES = [
    *itertools.product(DECAYS, (0.0, 0.5, 1.0), ("random",)),
    *itertools.product((0.0, "mixed"), (1.0,), ("same", "zero")),
]
OUTPUTS = ("out", "state", "q", "k", "v", "g", "beta")


def inputs(tokens, repeats):
    """q, k, v, g, beta, and cotangents of the output and the state; float32, one row a case."""
    rng = np.random.default_rng(tokens)
    heads, batch = KEY_HEADS * repeats, len(CASES)

    def normal(*shape):
        return rng.normal(size=shape).astype(np.float32)

    def unit(x):
        return x / np.linalg.norm(x, axis=-1, keepdims=True)

    q, k = unit(normal(batch, tokens, KEY_HEADS, K)), unit(normal(batch, tokens, KEY_HEADS, K))
    v, g, beta = normal(batch, tokens, heads, V), np.zeros((batch, tokens, heads), np.float32), None
    beta = np.zeros_like(g)
    for row, (decay, strength, keys) in enumerate(CASES):
        mixed = -np.exp(rng.normal(0, 3, (tokens, heads)))
        g[row], beta[row] = (mixed if decay == "mixed" else decay), strength
        if keys == "same":
            k[row] = k[row, :1]
        if keys == "zero":
            k[row, ::2], q[row, ::3] = 0.0, 0.0
    return (q, k, v, g, beta), normal(*v.shape), normal(batch, heads, K, V)


@pytest.mark.parametrize("tokens, repeats", [(1, 1), (5, 2), (63, 3), (64, 4), (65, 1), (130, 2), (257, 3)])
def test_grid(tokens, repeats):
    arguments, d_out, d_state = inputs(tokens, repeats)

    @jax.jit
    def run(*arguments):
        values, pull = jax.vjp(lambda *a: gated_delta_rule(*a, chunk_size=CHUNK, return_final_state=True), *arguments)
        return (*values, *pull((jnp.asarray(d_out), jnp.asarray(d_state))))

    got = dict(zip(OUTPUTS, map(np.asarray, run(*map(jnp.asarray, arguments))), strict=True))
    out, state = gdn_reference.gated_delta_rule(*arguments)
    want = {"out": out, "state": state} | gdn_reference.gated_delta_rule_vjp(arguments, d_out, d_state)
    for name in OUTPUTS:
        assert np.isfinite(got[name]).all(), name
        sizes = np.array([np.linalg.norm(row) for row in want[name]])
        # Some gradients are zero by cancellation (the decay's, where one key is written again at full strength): what
        # is left of terms of the usual size is measured against that size.
        usual = np.sqrt(np.mean(np.square(sizes)))
        for row, case in enumerate(CASES):
            error = np.linalg.norm(got[name][row] - want[name][row])
            assert error <= 5e-6 * max(sizes[row], usual), (name, case, error, sizes[row], usual)
