"""One optimizer step does not depend on how the same global batch is cut over the mesh (8 CPU devices, float32).

Gradients are compared per parameter; the replicated ones (norms, A_log, dt_bias, convolutions) are where a missing or
doubled sum over ranks shows. Not covered here: speed, more than one process.
"""

import functools
import re
from collections import Counter

import jax
import numpy as np
import pytest
from jax import lax
from jax.sharding import Mesh, PartitionSpec

from app.cluster import sharding
from app.cluster.mesh import AXES, build_mesh, check_sequence_order
from app.config import ConfigError
from app.models import params as model_params
from app.ops import self_check
from app.planning import hlo
from app.training import step
from app.training.step import Program
from tests.tiny import EXPERTS, tiny_config

ROWS, TOKENS = 8, 80  # no size of the model is 80 or 10, so a gathered sequence is seen by its shape
ONE_DEVICE = {"mesh.fsdp": 1}
CUTS = {
    "data 2, fsdp 2, tensor 2": {"mesh.data": 2, "mesh.fsdp": 2, "mesh.tensor": 2},
    "fsdp 2, context 2, tensor 2": {"mesh.fsdp": 2, "mesh.context": 2, "mesh.tensor": 2},
    "context 8": {"mesh.fsdp": 1, "mesh.context": 8},
    "data 2, accumulation 4": {"mesh.data": 2, "mesh.fsdp": 1, "accumulation": 4},
}
# One axis at a time: which one is wrong when a combination fails.
SINGLE_CUTS = {
    "data 2": {"mesh.data": 2, "mesh.fsdp": 1},
    "fsdp 2": {"mesh.fsdp": 2},
    "tensor 2": {"mesh.fsdp": 1, "mesh.tensor": 2},
    "context 2": {"mesh.fsdp": 1, "mesh.context": 2},
    "context 4": {"mesh.fsdp": 1, "mesh.context": 4},
    "accumulation 2": {"mesh.fsdp": 1, "accumulation": 2},
}
# The same of a mixture of experts. The small capacity takes several rounds of exchange.
EXPERT_CUTS = {
    "expert 8": {"mesh.fsdp": 1, "mesh.expert": 8},
    "fsdp 2, expert 4, capacity 0.5": {"mesh.fsdp": 2, "mesh.expert": 4, "experts.capacity": 0.5},
    "context 2, expert 2, tensor 2": {"mesh.fsdp": 1, "mesh.context": 2, "mesh.expert": 2, "mesh.tensor": 2},
}
SINGLE_EXPERT_CUTS = {
    "expert 2": {"mesh.fsdp": 1, "mesh.expert": 2},
    "expert 4": {"mesh.fsdp": 1, "mesh.expert": 4},
    "tensor 2": {"mesh.fsdp": 1, "mesh.tensor": 2},
}


def batch():
    """Documents that cross every cut, one-token documents, padding inside, at the end, and one row of padding only."""
    rng = np.random.default_rng(0)
    segment_ids = np.ones((ROWS, TOKENS), np.int32)
    segment_ids[1, 11:] = 2
    segment_ids[2, 24:] = 2
    segment_ids[3, 5:] += np.cumsum(rng.random(TOKENS - 5) < 0.3).astype(np.int32)
    segment_ids[4, 40:] = 0
    segment_ids[5, 17:23] = 0
    segment_ids[5, 23:] = 2
    segment_ids[6] = 0
    starts = np.diff(segment_ids, axis=1, prepend=-1) != 0
    index = np.arange(TOKENS, dtype=np.int32)
    positions = index - np.maximum.accumulate(np.where(starts, index, 0), axis=1)
    ends = np.append(starts[:, 1:], np.ones((ROWS, 1), bool), axis=1)
    return {
        "tokens": rng.integers(0, 272, (ROWS, TOKENS)).astype(np.int32),
        "targets": rng.integers(0, 272, (ROWS, TOKENS)).astype(np.int32),
        "segment_ids": segment_ids, "positions": positions.astype(np.int32),
        "stream_index": np.broadcast_to(index, (ROWS, TOKENS)),
        "loss_mask": (segment_ids != 0) & ~ends,
    }  # fmt: skip


@functools.cache
def run(**changes):
    """Gradients and metrics of the first step on the host, and the compiled program's text."""
    config = tiny_config(global_batch=ROWS, seq_len=TOKENS, **{"loss.z_weight": 1e-3}, **changes)
    devices = jax.devices()[
        : np.prod([max(changes.get(f"mesh.{axis}", 1), 1) for axis in AXES])
    ]
    program = Program(config, build_mesh(config.mesh, devices))
    state = program.init()
    on_devices = {name: jax.device_put(field, program.batch_sharding) for name, field in batch().items()}
    gradients = jax.jit(
        program._on_ranks(
            program._gradients, (program.partitions, program._batch_specs()), (program.partitions, PartitionSpec())
        )
    )
    compiled = gradients.lower(state.params, on_devices).compile()
    gradient, metrics = compiled(state.params, on_devices)
    return jax.device_get(gradient), {name: value.item() for name, value in metrics.items()}, compiled.as_text()


@pytest.mark.parametrize("cut", [*CUTS, *(pytest.param(name, marks=pytest.mark.slow) for name in SINGLE_CUTS)])
def test_gradients_do_not_depend_on_the_cut(cut):
    wanted, wanted_metrics, _ = run(**ONE_DEVICE)
    gradient, metrics, _ = run(**(CUTS | SINGLE_CUTS)[cut])
    assert metrics == pytest.approx(wanted_metrics, rel=1e-5)
    assert_same_gradient(gradient, wanted)


@pytest.mark.parametrize(
    "cut", [*EXPERT_CUTS, *(pytest.param(name, marks=pytest.mark.slow) for name in SINGLE_EXPERT_CUTS)]
)
def test_gradients_do_not_depend_on_where_the_experts_are(cut):
    """Every parameter, the router's too, with the balance and z losses of the global batch; padding goes nowhere."""
    wanted, wanted_metrics, _ = run(**ONE_DEVICE, **EXPERTS)
    gradient, metrics, text = run(**(EXPERT_CUTS | SINGLE_EXPERT_CUTS)[cut], **EXPERTS)
    rounds = metrics["expert_rounds"]
    assert metrics == pytest.approx(wanted_metrics | {"expert_rounds": rounds}, rel=1e-5)
    assert metrics["expert_dropped"] == 0 and rounds >= 1 and (rounds > 1 or "capacity" not in cut)
    assert ("all-to-all" in text) == ("expert" in cut)
    assert_same_gradient(gradient, wanted)


def assert_same_gradient(gradient, wanted):
    errors = {name: np.linalg.norm(gradient[name] - want) / np.linalg.norm(want) for name, want in wanted.items()}
    worst = max(errors, key=errors.__getitem__)
    assert errors[worst] < 2e-5, (worst, errors[worst])


def test_counts_equal_the_hosts():
    _, metrics, _ = run(**ONE_DEVICE)
    fields = batch()
    assert metrics["tokens"] == (fields["segment_ids"] != 0).sum()
    assert metrics["padding"] == (fields["segment_ids"] == 0).sum()
    assert metrics["loss_tokens"] == fields["loss_mask"].sum()


def test_a_sum_too_many_is_seen(monkeypatch):
    """Negative control: summing over tensor ranks what is complete there makes the comparison fail."""
    wanted, _, _ = run(**ONE_DEVICE)
    reduce = sharding.reduce_gradients

    def summed_again(grads, specs):
        return jax.tree.map(lambda grad: lax.psum(grad, "tensor"), reduce(grads, specs))

    monkeypatch.setattr(sharding, "reduce_gradients", summed_again)
    gradient, _, _ = run(**{"mesh.fsdp": 1, "mesh.tensor": 2})
    name = "final_norm.weight"
    np.testing.assert_allclose(gradient[name], 2 * wanted[name], rtol=1e-3, atol=1e-7)


def test_weights_move_as_often_as_the_formula_says():
    """By the planner's count of the compiled program: each is gathered once (the loop over layers has one trip here, so
    XLA gives the backward the forward's) and its gradient is reduce-scattered once, in float32."""
    cut = CUTS["context 8"]
    module, moved = hlo.Module.parse(run(**cut)[2]), Counter()
    for x, inside, times in module.executed():
        if x.collective in ("all-gather", "reduce-scatter"):
            one = hlo.exchange(x, inside, 8)
            moved[one.kind] += times * one.bytes * (len(one.groups[0]) > 1)
    specs = model_params.describe(tiny_config(**cut).model).values()
    weights = 4 * sum(np.prod(spec.shape) for spec in specs if "width" in spec.logical)
    assert moved["all-gather"] == moved["reduce-scatter"] == weights


def test_the_sequence_is_never_gathered():
    """Of context 8, every all-gather is of a weight: none has the length of the sequence, there is no all-to-all."""
    _, _, text = run(**CUTS["context 8"])
    gathered = re.findall(r"= (\S+) all-gather(?:-start)?\(", text)
    assert gathered and not any(str(TOKENS) in re.findall(r"\d+", shape) for shape in gathered), gathered
    assert "all-to-all" not in text
    assert "collective-permute" in text


def curve(**changes):
    """Losses of 50 steps on one batch of ten documents."""
    config = tiny_config(
        steps=50, global_batch=ROWS, seq_len=TOKENS, **{"optimizer.learning_rate": 1e-3, "mesh.fsdp": 1}, **changes
    )
    program = Program(config, build_mesh(config.mesh, jax.devices()[: config.mesh.context]))
    state = program.init()
    on_devices = {name: jax.device_put(field, program.batch_sharding) for name, field in batch().items()}
    losses = []
    for _ in range(50):
        state, metrics = program.train_step(state, on_devices)
        losses.append(metrics["loss"].item())
    return np.array(losses)


def test_fifty_steps_at_context_1_and_4_have_the_same_losses():
    alone, sharded = curve(), curve(**{"mesh.context": 4})
    assert alone[-1] < alone[0] - 0.5  # it learns, so that the states and gradients of every step matter
    np.testing.assert_allclose(sharded, alone, rtol=1e-5)


def test_the_start_up_check(monkeypatch):
    config = tiny_config(global_batch=ROWS, seq_len=TOKENS, **{"mesh.fsdp": 1, "mesh.context": 4})
    program = Program(config, build_mesh(config.mesh, jax.devices()[:4]))
    program.check_sequence()
    whole = self_check.gated_delta_rule
    monkeypatch.setattr(self_check, "gated_delta_rule", lambda *a, axis_name, **k: whole(*a, axis_name=None, **k))
    with pytest.raises(ConfigError, match=r"mesh.context=4.*gated_delta_rule"):
        program.check_sequence()


def test_a_wrong_order_of_devices_is_refused():
    mesh = build_mesh(tiny_config(**{"mesh.fsdp": 1, "mesh.context": 4}).mesh, jax.devices()[:4])
    check_sequence_order(mesh)
    swapped = Mesh(mesh.devices.reshape(-1)[[0, 2, 1, 3]].reshape(mesh.devices.shape), mesh.axis_names)
    with pytest.raises(ValueError, match=r"mesh.context.*rank order must be sequence order"):
        check_sequence_order(swapped)


def test_the_steps_are_compiled_with_what_the_devices_need(monkeypatch):
    monkeypatch.setattr(step, "compiler_options", lambda kind: {f"no_option_of_a_{kind}": "true"})
    program = Program(tiny_config(global_batch=1, seq_len=16), build_mesh(tiny_config().mesh, jax.devices()[:1]))
    for jitted, arguments in (
        (program.train_step, (program.state, program.batch)),
        (program.eval_step, (program.state.params, program.batch)),
    ):
        with pytest.raises(jax.errors.JaxRuntimeError, match="no_option_of_a_cpu"):
            jitted.lower(*arguments).compile()
