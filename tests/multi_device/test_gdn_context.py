"""The gated delta rule over a sharded sequence against the sequential reference, on fake CPU devices.

Every tensor is compared rank by rank and row by row: a mistake at one rank border disappears in the mean of all. What
the compiled program sends is in test_gdn_hlo.py.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as PS

from app.ops import affine_scan, gdn, gdn_ranks, self_check
from app.ops.affine_scan import SequenceAxis, sequence_axis
from app.ops.gdn import gated_delta_rule
from tests.unit.ops.gdn_base import OUTPUTS, ROWS, Problem, error, make_problem

TOLERANCE = 5e-6


def run(P, axis, problem: Problem, chunk_size=16, gradient="inside", documents=True):
    """Outputs, final state and cotangents over P ranks; whole sequences, float64 numpy."""
    names = sequence_axis_names(axis)
    shape = (P,) if len(names) == 1 else (P // 2, 2)
    mesh = Mesh(np.array(jax.devices()[:P]).reshape(shape), names)
    time = PS(None, names)
    ids = problem.segment_ids if documents else None

    def rule(ids, initial_state, *inputs):
        return gated_delta_rule(
            *inputs,
            segment_ids=ids,
            initial_state=initial_state,
            axis_name=axis,
            chunk_size=chunk_size,
            return_final_state=True,
        )

    def inside(ids, dout, dstate, initial_state, *inputs):
        """The gradient of this rank's own loss: only one rank counts the replicated final state."""
        values, pull = jax.vjp(functools.partial(rule, ids), initial_state, *inputs)
        dinitial, *dinputs = pull((dout, jnp.where(lax.axis_index(names) == P // 2, dstate, 0.0)))
        return dict(zip(OUTPUTS, (*values, *dinputs, lax.psum(dinitial, names)), strict=True))

    id_spec = PS() if ids is None else time
    outputs = dict(zip(OUTPUTS, (time, PS(), *[time] * 5, PS()), strict=True))
    if gradient == "inside":
        specs = (id_spec, time, PS(), PS(), *[time] * 5)
        call = jax.shard_map(inside, mesh=mesh, in_specs=specs, out_specs=outputs, check_vma=False)
    else:
        specs = (id_spec, PS(), *[time] * 5)
        sharded = jax.shard_map(rule, mesh=mesh, in_specs=specs, out_specs=(time, PS()), check_vma=False)

        def call(ids, dout, dstate, initial_state, *inputs):
            values, pull = jax.vjp(functools.partial(sharded, ids), initial_state, *inputs)
            dinitial, *dinputs = pull((dout, dstate))
            return dict(zip(OUTPUTS, (*values, *dinputs, dinitial), strict=True))

    got = jax.jit(call)(ids, problem.dout, problem.dstate, problem.initial_state, *problem.inputs)
    return {name: np.asarray(x, np.float64) for name, x in got.items()}


def sequence_axis_names(axis):
    return axis.names if isinstance(axis, SequenceAxis) else (axis,) if isinstance(axis, str) else axis


def per_rank_errors(P, got, want):
    """(name, rank, row) -> relative error, for every tensor; states have rank 0 only."""
    errors = {}
    for name in OUTPUTS:
        parts = 1 if name.endswith("state") else P
        for rank, (one, other) in enumerate(
            zip(*(np.array_split(x[name], parts, axis=1) for x in (got, want)), strict=True)
        ):
            for row in range(len(one)):
                errors[name, rank, row] = error(one[row], other[row])
    return errors


@functools.cache
def example(P, documents):
    """24 tokens a rank, no multiple of the chunk; all decays, two rows each."""
    problem = make_problem(P, B=2 * len(ROWS), T=24 * P, G=1, H=2, K=8, V=12, documents=documents)
    return problem, problem.wanted()


AXES = [
    (1, "c"), (2, "c"), (3, "c"), (4, ("c", "e")), (5, "c"), (8, "c"),
    (8, SequenceAxis(("c",), slices=2)), (5, SequenceAxis(("c",), exchange="all_gather")),
]  # fmt: skip


@pytest.mark.parametrize(("P", "axis"), AXES)
def test_equals_the_reference_on_every_rank(P, axis):
    problem, want = example(P, True)
    errors = per_rank_errors(P, run(P, axis, problem), want)
    assert max(errors.values()) <= TOLERANCE, max(errors.items(), key=lambda item: item[1])


@pytest.mark.parametrize("gradient", ["inside", "outside"])
def test_one_document(gradient):
    problem, want = example(4, False)
    errors = per_rank_errors(4, run(4, "c", problem, gradient=gradient, documents=False), want)
    assert max(errors.values()) <= TOLERANCE, max(errors.items(), key=lambda item: item[1])


@pytest.mark.parametrize("P", [3, 8])
def test_random_document_layouts(P):
    """300 layouts, one a row: borders anywhere, also at rank borders, 1-token documents, documents over all ranks."""
    tokens, rows, rng = 10, 300, np.random.default_rng(P)
    problem = make_problem(P, B=rows, T=tokens * P, G=1, H=1, K=4, V=6, documents=True)
    ids = problem.segment_ids
    for row in range(40):
        # A document that starts with a rank, or is the last token before it.
        border = tokens * rng.integers(1, P) - (row % 2)
        ids[row, border:] += 1
    ids[40] = 1
    ids[41] = np.arange(tokens * P)
    lengths = np.concatenate([np.diff(np.flatnonzero(np.diff(row, prepend=-1, append=-1))) for row in ids])
    assert {1, tokens * P} <= set(lengths) and len(np.unique(ids, axis=0)) > 200
    want, got = problem.wanted(), run(P, "c", problem, chunk_size=8)
    for name in OUTPUTS:
        parts = 1 if name.endswith("state") else P
        # A rank whose gradient is zero but for rounding (nothing of a document reaches it) is measured against the row.
        for one, other in zip(*(np.array_split(x[name], parts, axis=1) for x in (got, want)), strict=True):
            sizes = [np.linalg.norm(x.reshape(rows, -1), axis=1) for x in (one - other, other, want[name])]
            assert (sizes[0] <= TOLERANCE * np.maximum(sizes[1], 0.01 * sizes[2]) + 1e-12).all(), name


def worst(P, documents):
    problem, want = example(P, documents)
    return max(per_rank_errors(P, run(P, "c", problem, documents=documents), want).values())


def test_negative_controls(monkeypatch):
    """Each mistake is orders of magnitude outside the tolerance."""
    with monkeypatch.context() as patch:
        product = affine_scan.matmul
        swapped = lambda a, b: product(b, a) if a.shape == b.shape else product(a, b)  # noqa: E731
        patch.setattr(affine_scan, "matmul", swapped)
        assert worst(8, False) > 1e-2, "order of composition"
    with monkeypatch.context() as patch:
        send = SequenceAxis.send
        patch.setattr(SequenceAxis, "send", lambda self, x, pairs: send(self, x, [(d, s) for s, d in pairs]))
        assert worst(4, False) > 1e-2, "the map of the wrong neighbour"
    with monkeypatch.context() as patch:
        shift = SequenceAxis.shift
        alone = lambda self, x, distance: x[:, :1] * 0 if x.dtype == jnp.int32 else shift(self, x, distance)  # noqa: E731
        patch.setattr(SequenceAxis, "shift", alone)
        assert worst(4, True) > 1e-2, "the segment id before a rank is not exchanged"
    with monkeypatch.context() as patch:
        scan = gdn_ranks.exclusive_scan
        patch.setattr(gdn_ranks, "exclusive_scan", lambda *a, reverse=False, **k: scan(*a, reverse=False, **k))
        assert worst(4, False) > 1e-2, "cotangents travel the wrong way"


def test_states_and_messages_are_float32_with_bfloat16_inputs():
    """Everything that travels, and every product of maps; the border's segment id is the only other message."""
    problem, _ = example(4, True)
    mesh = Mesh(np.array(jax.devices()[:4]), ("c",))

    def both(ids, *inputs):
        out, pull = jax.vjp(lambda *x: gated_delta_rule(*x, segment_ids=ids, axis_name="c"), *inputs)
        return pull(out)

    narrow = [jnp.asarray(x).astype(jnp.bfloat16) for x in problem.inputs[:3]]
    spec = PS(None, "c")
    mapped = jax.shard_map(both, mesh=mesh, in_specs=(spec,) * 6, out_specs=(spec,) * 5, check_vma=False)
    jaxpr = jax.make_jaxpr(mapped)(problem.segment_ids, *narrow, *problem.inputs[3:])
    text = str(jaxpr)
    sent = [line for line in text.splitlines() if "ppermute[" in line or "= ppermute" in line]
    kinds = {line.split(":")[1].split("[")[0] for line in sent}
    assert len(sent) > 4 and kinds == {"f32", "i32"}
    assert not any(word in text for word in ("all_gather", "all_to_all"))


def test_a_kept_state_repeats_no_collective():
    """jax.checkpoint with keep_states: the backward holds the reverse scan only; with keep_all nothing is rerun."""
    problem, _ = example(4, True)
    mesh = Mesh(np.array(jax.devices()[:4]), ("c",))
    spec = PS(None, "c")

    def count(policy):
        def body(ids, *inputs):
            layer = lambda *x: jnp.sin(gated_delta_rule(*x, segment_ids=ids, axis_name="c"))  # noqa: E731
            loss, grads = jax.value_and_grad(lambda x: jnp.sum(jax.checkpoint(layer, policy=policy)(*x)))(inputs)
            return loss[None, None], grads

        out_specs = (spec, (spec,) * 5)
        mapped = jax.shard_map(body, mesh=mesh, in_specs=(spec,) * 6, out_specs=out_specs, check_vma=False)
        lowered = jax.jit(mapped).lower(problem.segment_ids, *problem.inputs).as_text()
        return lowered.count("stablehlo.collective_permute"), lowered.count("stablehlo.dot_general")

    rounds = sum(affine_scan.exchange_rounds(4))
    full, states, everything = (count(policy) for policy in (None, gdn.keep_states, gdn.keep_all))
    assert full[0] == 2 * (rounds + 1) + rounds
    assert states[0] == everything[0] == (rounds + 1) + rounds
    assert everything[1] < states[1] <= full[1]


def test_start_up_check_sees_a_wrong_device_order(monkeypatch):
    mesh = Mesh(np.array(jax.devices()).reshape(4, 2), ("c", "e"))

    def errors():
        body = lambda: self_check.sequence_errors(("c", "e"))  # noqa: E731
        mapped = jax.shard_map(body, mesh=mesh, in_specs=(), out_specs=PS(), check_vma=False)
        return {name: float(value) for name, value in jax.jit(mapped)().items()}

    good = errors()
    assert max(good.values()) < 1e-6 and len(good) == 4
    self_check.require_small(good, "mesh.context=4")
    send = SequenceAxis.send
    swap = {2: 3, 3: 2}
    wrong = lambda self, x, pairs: send(self, x, [(swap.get(s, s), swap.get(d, d)) for s, d in pairs])  # noqa: E731
    monkeypatch.setattr(SequenceAxis, "send", wrong)
    bad = errors()
    assert min(bad.values()) > 1e-2
    with pytest.raises(ValueError, match=r"mesh\.context=4: the sharded sequence does not match a single rank"):
        self_check.require_small(bad, "mesh.context=4")
    with pytest.raises(ValueError, match="causal_conv nan"):
        self_check.require_small({"causal_conv": float("nan")}, "mesh.context=4")


def test_an_axis_of_one_rank_is_no_axis():
    mesh = Mesh(np.array(jax.devices()[:1]), ("c",))

    def body(x):
        assert sequence_axis("c") is None
        return x

    jax.shard_map(body, mesh=mesh, in_specs=PS("c"), out_specs=PS("c"), check_vma=False)(jnp.zeros(1))
    assert dataclasses.asdict(SequenceAxis(("c",))) == {"names": ("c",), "slices": 1, "exchange": "ppermute"}
