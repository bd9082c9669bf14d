"""Cases that every implementation of the gated delta rule has to pass: subclass RuleCases and set `rule`.

`rule` has the signature of app.ops.gdn.gated_delta_rule. The reference is sequential, in float64. Letters as there.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.reference import gdn_reference as reference

OUTPUTS = ("out", "state", *reference.INPUTS, "initial_state")


@dataclasses.dataclass
class Problem:
    """float32 inputs, and the cotangents dout of the outputs and dstate of the final state."""

    inputs: tuple[np.ndarray, ...]
    dout: np.ndarray
    dstate: np.ndarray
    initial_state: np.ndarray
    segment_ids: np.ndarray | None = None

    def wanted(self) -> dict[str, np.ndarray]:
        """Outputs and cotangents by the reference."""
        options = {"segment_ids": self.segment_ids, "initial_state": self.initial_state}
        out, state = reference.gated_delta_rule(*self.inputs, **options)
        return {"out": out, "state": state} | reference.gated_delta_rule_vjp(
            self.inputs, self.dout, self.dstate, **options
        )


# (decay, keys) of a row. "trained": keys with a large common part, strong writes, hardly any decay, so that L has the
# infinity norm near 40 that was seen in trained layers.
ROWS = (
    ("weak", "random"),
    ("strong", "random"),
    ("mixed", "random"),
    ("lognormal", "random"),
    ("none", "trained"),
    ("mixed", "trained"),
)


def make_problem(seed: int, *, B: int, T: int, G: int, H: int, K: int, V: int, documents: bool = False) -> Problem:
    """Row b of the batch has the decays and keys of ROWS[b % len(ROWS)]."""
    rng = np.random.default_rng(seed)
    g, beta = np.zeros((B, T, H)), rng.uniform(0, 1, (B, T, H))
    k = rng.normal(size=(B, T, G, K))
    for row in range(B):
        decay, keys = ROWS[row % len(ROWS)]
        g[row] = {
            "none": np.zeros((T, H)),
            "weak": -rng.uniform(1e-4, 0.1, (T, H)),
            "strong": -rng.uniform(5, 30, (T, H)),
            "mixed": -np.where(rng.random((T, H)) < 0.3, rng.uniform(5, 30, (T, H)), rng.uniform(0, 0.05, (T, H))),
            "lognormal": -np.exp(rng.normal(-1, 2.5, (T, H))),
        }[decay]
        if keys == "trained":
            k[row] = 0.75 * k[row] + 2.0 * rng.normal(size=(1, G, K))
            beta[row] = rng.uniform(0.9, 1, (T, H))
    arrays = (unit(rng.normal(size=k.shape)), unit(k), rng.normal(size=(B, T, H, V)), g, beta)
    arrays += (rng.normal(size=(B, T, H, V)), rng.normal(size=(B, H, K, V)), 0.3 * rng.normal(size=(B, H, K, V)))
    *inputs, dout, dstate, initial_state = (x.astype(np.float32) for x in arrays)
    ids = random_documents(rng, B, T) if documents else None
    return Problem(tuple(inputs), dout, dstate, initial_state, ids)


def unit(x: np.ndarray) -> np.ndarray:
    return x / np.linalg.norm(x, axis=-1, keepdims=True)


def random_documents(rng: np.random.Generator, B: int, T: int) -> np.ndarray:
    """[B,T] int32 layouts: borders anywhere, a share of them in runs of 1-token documents; some rows one document."""
    starts = rng.random((B, T)) < rng.choice([0.0, 1 / T, 0.05, 0.3], size=(B, 1))
    for row in range(B):
        if rng.random() < 0.5:
            at = rng.integers(0, T)
            starts[row, at : at + rng.integers(1, 6)] = True
    starts[:, 0] = False
    return (1 + np.cumsum(starts, axis=1)).astype(np.int32)


def error(got: Any, want: np.ndarray) -> float:
    """Relative error of a tensor in the Frobenius norm."""
    assert np.isfinite(np.asarray(got, np.float64)).all()
    return float(np.linalg.norm(np.asarray(got, np.float64) - want) / max(np.linalg.norm(want), 1e-30))


def run(rule: Callable, problem: Problem, dtype=jnp.float32, **options) -> dict[str, np.ndarray]:
    """Outputs, final state and all cotangents by `rule`; q, k, v and dout in `dtype`."""
    return {name: np.asarray(x, np.float64) for name, x in _run(rule, problem, dtype, options).items()}


def _run(rule, problem, dtype, options):
    q, k, v, g, beta = (jnp.asarray(x) for x in problem.inputs)
    ids = None if problem.segment_ids is None else jnp.asarray(problem.segment_ids)

    @jax.jit
    def values_and_cotangents(initial_state, dout, dstate, *inputs):
        def outputs(initial_state, *inputs):
            return rule(*inputs, initial_state=initial_state, segment_ids=ids, return_final_state=True, **options)

        values, pull = jax.vjp(outputs, initial_state, *inputs)
        dinitial, *dinputs = pull((dout, dstate))
        return dict(zip(OUTPUTS, (*values, *dinputs, dinitial), strict=True))

    dout = jnp.asarray(problem.dout).astype(dtype)
    narrow = (x.astype(dtype) for x in (q, k, v))
    return values_and_cotangents(
        jnp.asarray(problem.initial_state), dout, jnp.asarray(problem.dstate), *narrow, g, beta
    )


class RuleCases:
    """The cases. Tolerances are relative errors of whole tensors, a row of the batch at a time."""

    rule: Callable
    tolerance = 5e-6
    chunk_size = 16  # compiles fast; the default is used where the size of a chunk matters

    @pytest.mark.parametrize("documents", [False, True])
    def test_equals_the_sequential_reference(self, documents):
        """Chunks of the default size: the large triangle needs them."""
        problem = make_problem(1, B=12, T=150, G=2, H=6, K=8, V=12, documents=documents)
        got, want = run(self.rule, problem), problem.wanted()
        for name in OUTPUTS:
            for row in range(12):
                assert error(got[name][row], want[name][row]) <= self.tolerance, (name, ROWS[row % len(ROWS)])

    @pytest.mark.parametrize("split", [1, 75])
    def test_any_split_with_a_carried_state_is_the_whole(self, split):
        problem = make_problem(2, B=6, T=96, G=1, H=2, K=8, V=4)

        def in_two(*inputs, initial_state, return_final_state, **options):
            first, second = [x[:, :split] for x in inputs], [x[:, split:] for x in inputs]
            options = {"return_final_state": True, "chunk_size": self.chunk_size}
            out1, state = self.rule(*first, initial_state=initial_state, **options)
            out2, state = self.rule(*second, initial_state=state, **options)
            return jnp.concatenate([out1, out2], axis=1), state

        got, want = run(in_two, problem), problem.wanted()
        assert {name: error(got[name], want[name]) <= self.tolerance for name in OUTPUTS} == dict.fromkeys(
            OUTPUTS, True
        )

    def test_nothing_crosses_a_document_start(self):
        """Another last token of document 1 changes no bit of document 2's outputs, and gets no gradient from them.

        Row 0 has the usual gates, row 1 no memory (g = -100, beta = 1).
        """
        problem = make_problem(3, B=2, T=80, G=1, H=2, K=8, V=4)
        q, k, v, g, beta = (jnp.asarray(x) for x in problem.inputs)
        g, beta = g.at[1].set(-100.0), beta.at[1].set(1.0)
        border = 37
        ids = jnp.where(jnp.arange(80) < border, 1, 2)[None].repeat(2, axis=0).astype(jnp.int32)

        @jax.jit
        def outputs(k, v):
            return self.rule(q, k, v, g, beta, segment_ids=ids, chunk_size=self.chunk_size)

        other = [x.at[:, border - 1].set(-3.0 * x[:, border - 1]) for x in (k, v)]
        before, after = np.asarray(outputs(k, v)), np.asarray(outputs(*other))
        np.testing.assert_array_equal(before[:, border:], after[:, border:])
        assert (np.abs(before[:, border - 1] - after[:, border - 1]).max(axis=(1, 2)) > 1e-3).all()
        grads = jax.jit(jax.grad(lambda k, v: jnp.sum(outputs(k, v)[:, border:] ** 2), argnums=(0, 1)))(k, v)
        for grad in grads:
            assert not np.asarray(grad)[:, :border].any()

    def test_padding_with_zero_gates_is_an_exact_no_op(self):
        """Tokens with g = beta = 0 between real ones change no real output and no state, and get no gradient."""
        problem = make_problem(4, B=6, T=60, G=1, H=2, K=8, V=4)
        at = np.sort(np.random.default_rng(0).choice(90, 60, replace=False))
        wide = [np.random.default_rng(1).normal(size=(6, 90, *x.shape[2:])).astype(np.float32) for x in problem.inputs]
        for x, real in zip(wide, problem.inputs, strict=True):
            x[:, at] = real
        pads = np.setdiff1d(np.arange(90), at)
        wide[3][:, pads] = wide[4][:, pads] = 0.0
        dout = np.zeros((6, 90, 2, 4), np.float32)
        dout[:, at] = problem.dout
        padded = dataclasses.replace(problem, inputs=tuple(wide), dout=dout)
        got, want = run(self.rule, padded, chunk_size=self.chunk_size), problem.wanted()
        for name in OUTPUTS:
            real = got[name] if name.endswith("state") else got[name][:, at]
            assert error(real, want[name]) <= self.tolerance, name
        for name in ("q", "k", "v"):
            assert not got[name][:, pads].any(), name

    def test_bfloat16_error_is_of_the_size_of_bfloat16(self):
        """Against the float64 reference on the same rounded inputs."""
        problem = make_problem(5, B=6, T=256, G=1, H=2, K=32, V=32)
        rounded = [np.asarray(jnp.asarray(x).astype(jnp.bfloat16), np.float32) for x in problem.inputs[:3]]
        dout = np.asarray(jnp.asarray(problem.dout).astype(jnp.bfloat16), np.float32)
        problem = dataclasses.replace(problem, inputs=(*rounded, *problem.inputs[3:]), dout=dout)
        got, want = run(self.rule, problem, jnp.bfloat16), problem.wanted()
        for name in OUTPUTS:
            for row, kind in enumerate(ROWS):
                assert error(got[name][row], want[name][row]) <= self.bfloat16_budget(kind, name), (name, kind)

    def bfloat16_budget(self, kind, name) -> float:
        """Seen with XLA: up to 0.009, with the large triangle 0.018 (beta); the same at 2,048 tokens."""
        return 0.03 if kind == ("none", "trained") else 0.012

    def test_slow_decay_survives_bfloat16_inputs(self):
        """One write, then 4,095 tokens of decay 0.9995, which bfloat16 would round to 1: 0.129 of it is left."""
        T, K = 4096, 4
        q, k, v = (jnp.zeros((1, T, 1, K), jnp.bfloat16).at[:, :, :, 0].set(1) for _ in range(3))
        g = jnp.full((1, T, 1), np.log(0.9995), jnp.float32)
        beta = jnp.zeros((1, T, 1)).at[:, 0].set(1.0)
        out = jax.jit(functools.partial(self.rule, scale=1.0, chunk_size=self.chunk_size))(q, k, v, g, beta)
        np.testing.assert_allclose(np.asarray(out[0, :, 0, 0], np.float64), 0.9995 ** np.arange(T), rtol=1e-2)

    def test_the_error_does_not_grow_with_the_length(self):
        """The last 256 tokens of 1,024 and of 16,384, against a float32 scan over the same inputs."""
        rng = np.random.default_rng(6)
        T, H, K = 16384, 2, 16
        arrays = (
            unit(rng.normal(size=(1, T, 1, K))),
            unit(rng.normal(size=(1, T, 1, K))),
            rng.normal(size=(1, T, H, K)),
        )
        gates = (-rng.uniform(1e-5, 1e-3, (1, T, H)), rng.uniform(0, 1, (1, T, H)))
        q, k, v, g, beta = (jnp.asarray(x, jnp.float32) for x in (*arrays, *gates))
        want = np.asarray(jax.jit(reference.gated_delta_rule_scan)(q, k, v, g, beta))
        got = np.asarray(jax.jit(functools.partial(self.rule, chunk_size=self.chunk_size))(q, k, v, g, beta))
        short, long = (error(got[:, end - 256 : end], want[:, end - 256 : end]) for end in (1024, T))
        assert long <= max(2 * short, 1e-6), (short, long)
