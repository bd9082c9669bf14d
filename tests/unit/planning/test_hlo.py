"""Reading compiled programs: loops by their trips, FLOPs, bytes of collectives, whom they connect."""

import os
import re
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
from jax import lax

from app.planning import hlo, kernels
from app.planning.traffic import bytes_moved

YARDSTICK = Path(__file__).parents[4] / "shared" / "tools"

# A loop of 3 (0, 2, 4 below 6) with a fused product, a permutation and an all-gather, written as libtpu prints them.
PROGRAM = """\
HloModule step, is_scheduled=true

%product (p0: bf16[8,4], p1: bf16[4,16]) -> bf16[8,16] {
  %p0 = bf16[8,4]{1,0} parameter(0)
  %p1 = bf16[4,16]{1,0} parameter(1)
  ROOT %conv = bf16[8,16]{1,0} convolution(%p0, %p1), dim_labels=bf_io->bf
}

%body (arg: (s32[], bf16[8,4], bf16[4,16])) -> (s32[], bf16[8,4], bf16[4,16]) {
  %arg = (s32[], bf16[8,4]{1,0}, bf16[4,16]{1,0}) parameter(0)
  %i = s32[] get-tuple-element(%arg), index=0
  %x = bf16[8,4]{1,0} get-tuple-element(%arg), index=1
  %w = bf16[4,16]{1,0} get-tuple-element(%arg), index=2
  %two = s32[] constant(2)
  %next = s32[] add(%i, %two)
  %y = bf16[8,16]{1,0} fusion(%x, %w), kind=kOutput, calls=%product, backend_config={"estimated_cycles":"100"}
  %start = (bf16[8,4]{1,0}, bf16[8,4]{1,0}, u32[], u32[]) collective-permute-start(%x), channel_id=1, \
source_target_pairs={{0,1},{1,2},{2,3},{3,0}}
  %kernel = bf16[8,4]{1,0} custom-call(%x), custom_call_target="tpu_custom_call", frontend_attributes={kernel_metadata={
}}, backend_config={"custom_call_config":{"body":"AA=="},"scoped_memory_configs":[]}
  %done = bf16[8,4]{1,0} collective-permute-done(%start)
  %all = bf16[16,4]{1,0} all-gather(%done), channel_id=2, replica_groups=mesh['a'=2,'b'=2] {'b'}, dimensions={0}
  ROOT %out = (s32[], bf16[8,4]{1,0}, bf16[4,16]{1,0}) tuple(%next, %done, %w)
}

%test (arg.1: (s32[], bf16[8,4], bf16[4,16])) -> pred[] {
  %arg.1 = (s32[], bf16[8,4]{1,0}, bf16[4,16]{1,0}) parameter(0)
  %i.1 = s32[] get-tuple-element(%arg.1), index=0
  %six = s32[] constant(6)
  ROOT %less = pred[] compare(%i.1, %six), direction=LT
}

ENTRY %main (a: bf16[8,4], b: bf16[4,16]) -> (s32[], bf16[8,4], bf16[4,16]) {
  %a = bf16[8,4]{1,0} parameter(0)
  %b = bf16[4,16]{1,0} parameter(1)
  %zero = s32[] constant(0)
  %init = (s32[], bf16[8,4]{1,0}, bf16[4,16]{1,0}) tuple(%zero, %a, %b)
  ROOT %loop = (s32[], bf16[8,4]{1,0}, bf16[4,16]{1,0}) while(%init), condition=%test, body=%body
}
"""


def found(name):
    return next((x, inside, times) for x, inside, times in hlo.Module.parse(PROGRAM).executed() if x.name == name)


def test_a_loop_counts_by_its_trips_and_a_fusion_by_what_is_in_it():
    module = hlo.Module.parse(PROGRAM)
    assert sum(times * x.cycles for x, _, times in module.executed()) == 3 * 100
    assert sum(times * hlo.flops(module, x, inside) for x, inside, times in module.executed()) == 3 * 2 * 8 * 4 * 16
    y, inside, _ = found("y")
    assert bytes_moved(module, y, inside) == 2 * (8 * 4 + 4 * 16 + 8 * 16)


def test_a_loop_without_a_bound_is_refused_unless_its_name_tells():
    endless = PROGRAM.replace("direction=LT", "direction=NE")
    with pytest.raises(ValueError, match="number of trips of loop loop"):
        list(hlo.Module.parse(endless).executed())
    named = re.sub(r"(body=%?[\w.]+)", r'\1, metadata={op_name="jit(step)/jvp(usually_skipped)/while"}', endless)
    assert sum(times * x.cycles for x, _, times in hlo.Module.parse(named).executed()) == 0


def test_collectives_name_their_bytes_and_partners():
    x, inside, times = found("start")
    one = hlo.exchange(x, inside, 4)
    assert (times, one.kind, one.bytes) == (3, "collective-permute", 64)
    assert one.pairs == ((0, 1), (1, 2), (2, 3), (3, 0))
    gather = hlo.exchange(*found("all")[:2], 4)
    assert (gather.bytes, gather.groups) == (128, ((0, 1), (2, 3)))


@pytest.mark.parametrize(
    "text, groups",
    [
        ("replica_groups={{0,2},{1,3}}, x", ((0, 2), (1, 3))),
        ("replica_groups=[2,2]<=[4], x", ((0, 1), (2, 3))),
        ("replica_groups=[2,2]<=[2,2]T(1,0), x", ((0, 2), (1, 3))),
        ("replica_groups=mesh['a'=2,'b'=2] {'a'}, x", ((0, 2), (1, 3))),
        ("replica_groups=mesh['a'=2,'b'=2] {'a','b'}, x", ((0, 1, 2, 3),)),
        ("replica_groups={}, x", ((0, 1, 2, 3),)),
    ],
)
def test_every_way_to_write_groups(text, groups):
    assert hlo._groups(text, 4) == groups


def test_a_kernel_is_cut_out_with_all_that_it_depends_on():
    wanted = kernels.request(*found("kernel")[:2], "v5p:2x2x1")
    assert wanted["operands"] == wanted["results"] == [["bfloat16", [8, 4]]]
    assert wanted["kernel"]["custom_call_config"] == {"body": "AA=="}


def test_bundles_count_by_the_trips_of_their_loops_and_empty_ones_count():
    original = "  loop: start=0, step=1, limit=10\n  loop: start=0, step=2, limit=8\n"
    final = "\n".join(["  0   :  { a }", " 0x1 LB: > { b }", " 0x2   : > {}", " 0x3 LB: >> { c }", " 0x4  :  { d }"])
    assert kernels.count_bundles(final, original) == 1 + 10 + 10 + 10 * 4 + 1


@pytest.mark.parametrize("strides, padding", [((1, 1), "SAME"), ((2, 1), "VALID")])
def test_a_convolution_counts_the_positions_it_reads(strides, padding):
    def function(x, w):
        return lax.conv_general_dilated(x, w, strides, padding, dimension_numbers=("NHWC", "HWIO", "NHWC"))

    x, w = jnp.zeros((2, 9, 8, 3)), jnp.zeros((3, 3, 3, 5))
    module = hlo.Module.parse(jax.jit(function).lower(x, w).compile().as_text())
    counted = sum(hlo.flops(module, y, inside) for y, inside, _ in module.executed())
    ones = function(jnp.ones_like(x), jnp.ones_like(w))
    assert counted in (2 * int(ones.sum()), 0)  # a multiply-add for every read; 0 where XLA calls a library


def test_the_yardstick_agrees():
    """The reference script of the design, where it is there: the same cycles, FLOPs and bytes on a program of ours."""
    if not (YARDSTICK / "hlo_cost.py").exists():
        pytest.skip("the workspace's shared/tools are not there")

    def function(x, w):
        return lax.scan(lambda x, _: (jnp.tanh(x @ w), None), x, length=7)[0]

    text = jax.jit(function).lower(jnp.zeros((16, 32)), jnp.zeros((32, 32))).compile().as_text()
    program = "import sys, json, hlo_cost; print(json.dumps(hlo_cost.analyze(sys.stdin.read())['flops']))"
    for one in (text, PROGRAM):
        module = hlo.Module.parse(one)
        ours = sum(times * hlo.flops(module, x, inside) for x, inside, times in module.executed())
        environment = {**os.environ, "PYTHONPATH": str(YARDSTICK), "PYTHONDONTWRITEBYTECODE": "1"}
        theirs = subprocess.run([sys.executable, "-c", program], input=one, capture_output=True, text=True, check=True,
                                env=environment).stdout  # fmt: skip
        assert ours == float(theirs)
