"""Link arithmetic on made-up devices with coordinates, and the walk over a schedule."""

import types

import numpy as np
import pytest

from app.cluster.hardware import GENERATIONS
from app.planning import timeline
from app.planning.hlo import Exchange, Module, exchange
from app.planning.network import HOP_SECONDS, Network
from tests.unit.planning.test_hlo import PROGRAM

V5P = GENERATIONS["v5p"]
# A gather that the SparseCores do, as libtpu prints it: called, given the operand, waited for.
OFFLOADED = """\
HloModule step, is_scheduled=true

%gather (p: bf16[16,4]) -> bf16[64,4] {
  %p = bf16[16,4]{1,0} parameter(0)
  ROOT %g = bf16[64,4]{1,0} all-gather(%p), replica_groups={{0,1,2,3}}, dimensions={0}, backend_config={\
"ici_strategy_config":{"color_strategies":[{"phase_rings":[{"ring_type":"CW"}]},{"phase_rings":[{"ring_type":"CCW"}]}]}}
}, execution_thread="sparsecore"

%rows (p: bf16[16,4]) -> bf16[64,4] {
  %p = bf16[16,4]{1,0} parameter(0)
  ROOT %gather_offload_fusion = bf16[64,4]{1,0} fusion(%p), kind=kCustom, calls=%somewhere
}, execution_thread="sparsecore"

ENTRY %main (x: bf16[16,4]) -> bf16[64,4] {
  %x = bf16[16,4]{1,0} parameter(0)
  %call-start = ((), (), s32[]) call-start(), async_execution_thread="sparsecore", to_apply=%gather
  %a = bf16[16,4]{1,0} copy(%x)
  %call-update = ((bf16[16,4]{1,0}), bf16[64,4]{1,0}) call-update(%call-start, %a)
  %b = bf16[16,4]{1,0} copy(%x)
  %call-done = bf16[64,4]{1,0} call-done(%call-update)
  %call-start.1 = ((), (), s32[]) call-start(), async_execution_thread="sparsecore", to_apply=%rows
  %call-update.1 = ((bf16[16,4]{1,0}), bf16[64,4]{1,0}) call-update(%call-start.1, %x)
  %b.1 = bf16[16,4]{1,0} copy(%x)
  ROOT %call-done.1 = bf16[64,4]{1,0} call-done(%call-update.1)
}
"""
RATE = V5P.ici_bytes_per_second


BETWEEN_SLICES = """\
HloModule step, is_scheduled=true

ENTRY %main (x: bf16[64,4]) -> bf16[64,4] {
  %x = bf16[64,4]{1,0} parameter(0)
  %t = token[] after-all()
  %s = (bf16[64,4]{1,0}, u32[]{:S(2)}, token[]) send(%x, %t), is_host_transfer=true, frontend_attributes={\
_xla_megascale_target="{1,2}x{0:63}",_xla_megascale_transfer_type="TYPE"}
  %r = (bf16[64,4]{1,0}, u32[]{:S(2)}, token[]) recv(%t), is_host_transfer=true, frontend_attributes={\
_xla_megascale_target="{1,2}x{0:63}",_xla_megascale_transfer_type="TYPE"}
  %b = bf16[64,4]{1,0} copy(%x)
  %d = (bf16[64,4]{1,0}, token[]) recv-done(%r), is_host_transfer=true
  ROOT %y = bf16[64,4]{1,0} get-tuple-element(%d), index=0
}
"""


def network(shape=(4, 4, 4), slices=1, axes=("context",), sizes=None):
    """Devices in row-major order of their coordinates, slice after slice."""
    devices = [
        types.SimpleNamespace(coords=tuple(int(x) for x in place), slice_index=one)
        for one in range(slices)
        for place in np.ndindex(*shape)
    ]
    array = np.empty(len(devices), object)
    array[:] = devices
    mesh = types.SimpleNamespace(devices=array.reshape(sizes or (len(devices),)), axis_names=axes)
    return Network(mesh, V5P)  # pyrefly: ignore[bad-argument-type]


def seconds(bytes_, loads, hops):
    return pytest.approx(bytes_ * loads / RATE + hops * HOP_SECONDS)


def test_neighbours_one_link_apart_share_no_link():
    pairs = tuple((n, n + 1) for n in range(3))  # along the last side
    found = network().transfer(Exchange("collective-permute", 10**6, (), pairs))
    assert (found.hops, found.contention, found.network, found.axes) == (1, 1, "ici", ("context",))
    assert found.seconds == seconds(10**6, 1, 1)


def test_a_shift_by_two_on_a_ring_puts_two_messages_on_a_link_unless_both_ways_are_equal():
    eight = network((8, 4, 4), axes=("a", "b"), sizes=(8, 16))
    pairs = tuple((n * 16, (n + 2) % 8 * 16) for n in range(8))
    found = eight.transfer(Exchange("collective-permute", 10**6, (), pairs))
    assert (found.hops, found.contention, found.axes) == (2, 2, ("a",))
    half = tuple((n * 16, (n + 4) % 8 * 16) for n in range(8))
    assert eight.transfer(Exchange("collective-permute", 10**6, (), half)).contention == 2  # four hops, shared two ways


@pytest.mark.parametrize("kind, times", [("all-gather", 1), ("reduce-scatter", 1), ("all-reduce", 2)])
def test_a_whole_cube_uses_its_six_links(kind, times):
    found = network().transfer(Exchange(kind, 10**8, (tuple(range(64)),), ()))
    assert found.seconds == seconds(10**8, times * 63 / 64 / 6, 6)


def test_the_sparse_cores_use_as_many_links_as_rings():
    found = network().transfer(Exchange("all-gather", 10**8, (tuple(range(64)),), (), rings=2))
    assert found.seconds == seconds(10**8, 63 / 64 / 2, 63)
    line = network().transfer(Exchange("all-gather", 10**8, ((0, 1), (2, 3)), (), rings=2))
    assert line.contention == pytest.approx(1 / 2)  # two of a side of four: one link


def test_groups_that_interleave_share_links():
    every_second = ((0, 2), (1, 3))
    found = network().transfer(Exchange("all-gather", 10**6, every_second, ()))
    assert found.contention == pytest.approx(1 / 2 * 2)


def test_between_slices_data_moves_at_the_rate_of_the_data_centre():
    two = network(slices=2, axes=("data", "context"), sizes=(2, 64))
    for kind, transfer_type, share in (
        ("collective-permute", "ONE_TO_ONE", 1), ("all-gather", "ALL_GATHER", 1 / 2), ("all-reduce", "ALL_REDUCE", 1),
    ):  # fmt: skip
        module = Module.parse(BETWEEN_SLICES.replace("TYPE", transfer_type))
        x, computation = module.computations["main"]["r"], module.computations["main"]
        found = two.transfer(exchange(x, computation, two.size))
        assert (x.collective, found.network, found.axes) == (kind, "dcn", ("data",))
        assert found.seconds == pytest.approx(64 * 4 * 2 * share / V5P.dcn_bytes_per_second + HOP_SECONDS)
        spent = timeline.walk(module, two, lambda x: 1e-6 * (x.name == "b"), lambda x: "part")
        assert spent.exposed[f"{kind}, part"] == pytest.approx(found.seconds - 1e-6)
    assert two.size == 64  # a program numbers the devices of one slice


def test_an_asynchronous_transfer_costs_what_the_core_has_to_wait():
    """Per trip: a product of 100 us, a transfer issued after it, a kernel beside it, a gather that stops the core."""
    module, four = Module.parse(PROGRAM), network((4, 4, 4))
    transfer = 64 / RATE + HOP_SECONDS  # 0 -> 1 -> 2 -> 3 -> 0 on a ring of four: one hop each

    def walk(kernel):
        def core(x):
            return {"y": 1e-4, "kernel": kernel}.get(x.name, 0.0)

        return timeline.walk(module, four, core, lambda x: "part")

    hidden, waiting = walk(1.0), walk(0.0)
    assert hidden.busy["part"] == pytest.approx(3 * 1.0001)
    assert hidden.exposed["collective-permute, part"] == 0
    assert waiting.exposed["collective-permute, part"] == pytest.approx(3 * transfer, rel=1e-6)
    assert hidden.exposed["all-gather, part"] > 0


def test_the_sparse_cores_work_beside_the_core_from_the_moment_they_have_their_operand():
    module, four = Module.parse(OFFLOADED), network()
    transfer = four.transfer(Exchange("all-gather", 64 * 4 * 2, ((0, 1, 2, 3),), (), rings=2)).seconds

    def walk(before, beside):
        def core(x):
            return {"a": before, "b": beside, "b.1": beside}.get(x.name, 0.0)

        return timeline.walk(module, four, core, lambda x: "part")

    assert walk(1.0, 0.0).exposed["all-gather, part"] == pytest.approx(transfer, rel=1e-6)
    assert walk(0.0, transfer / 4).exposed["all-gather, part"] == pytest.approx(transfer * 3 / 4)
    assert walk(0.0, 1.0).exposed["all-gather, part"] == 0
    assert walk(0.0, 1.0).moving["all-gather, part"] == pytest.approx(transfer)
    # Rows come from the same memory, not over the network.
    rows = 2 * 64 * 4 * 2 / (timeline.GATHER_RATE * V5P.hbm_bytes_per_second)
    assert walk(0.0, rows / 4).exposed["gather, part"] == pytest.approx(rows * 3 / 4)


def test_the_cycles_a_second_make_the_peak():
    assert {name: round(g.cycles_per_second / 1e9, 2) for name, g in GENERATIONS.items()} == {
        "v4": 1.05, "v5e": 1.5, "v5p": 1.75, "v6e": 1.75, "tpu7x": 2.2,
    }  # fmt: skip
