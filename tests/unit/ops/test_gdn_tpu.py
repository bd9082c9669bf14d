"""Estimated cost of the gated delta rule compiled for TPU v5p; a compilation takes a minute of CPU time.

Heads of Qwen3.5-27B, bfloat16. The published implementation: 34.3 and 50.4 million cycles at 1 and 16 ranks.
"""

import functools
import importlib.util

import pytest

from tests.benchmark import hlo_cost

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(importlib.util.find_spec("libtpu") is None, reason="needs libtpu (compiles for TPU topologies)"),
]


@functools.cache
def program(ranks, tokens=4096):
    from tests.benchmark.gdn_tpu import compile_rule  # sets libtpu's environment

    compiled = compile_rule("both", ranks, tokens)
    return hlo_cost.analyze(compiled.as_text() or ""), compiled.memory_analysis()


@pytest.mark.parametrize("ranks", [16, 64, 256])
def test_context_parallelism_costs_a_quarter_at_most(ranks):
    cost, alone = program(ranks)[0], program(1)[0]
    assert not cost.custom_calls and not alone.custom_calls  # they would carry no cycles
    assert cost.cycles <= 1.25 * alone.cycles
    assert cost.cycles <= 0.5 * 50.4e6
    assert set(cost.sent) == {"collective-permute"}


def test_temporaries_of_a_long_rank():
    """At most twice the inputs, outputs and one entry state a block."""
    memory = program(4, 65536)[1]
    entry_states = 65536 // 1024 * 48 * 128 * 128 * 4
    held = memory.argument_size_in_bytes + memory.output_size_in_bytes + entry_states
    assert memory.temp_size_in_bytes <= 2 * held
    assert memory.temp_size_in_bytes <= 5.5e9  # the published form: 53e9


def test_the_cost_tool_counts_what_is_known():
    hlo_cost.check("v5p:2x2x1")


@pytest.mark.parametrize("mode, ranks, most", [("forward", 16, 2.0e6), ("both", 1, 4.0e6), ("both", 16, 5.0e6)])
def test_kernels_cost_what_was_asked_with_both_cores_added(mode, ranks, most):
    from tests.benchmark.gdn_tpu import compile_rule

    text = compile_rule(mode, ranks, 4096, kernel="pallas").as_text() or ""
    cost = hlo_cost.analyze(text, "v5p:2x2x1")
    assert set(cost.custom_calls) == {"tpu_custom_call"}
    assert cost.harsh(cores=2) <= most
