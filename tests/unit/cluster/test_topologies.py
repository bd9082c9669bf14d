"""The mesh on real TPU topologies: libtpu describes them on a machine without a TPU."""

import importlib.util

import numpy as np
import pytest
from jax.experimental import mesh_utils, topologies
from jax.sharding import Mesh

from app.cluster import sharding
from app.cluster.hardware import GENERATIONS, find_generation, parse_topology
from app.cluster.mesh import (
    AXES,
    build_mesh,
    check_sequence_order,
    line_length,
    sequence_neighbours_report,
    sequence_order,
)
from app.config import ConfigError, DcnConfig, MeshConfig

pytestmark = pytest.mark.skipif(importlib.util.find_spec("libtpu") is None, reason="needs libtpu (TPU topologies)")


@pytest.fixture(scope="module", autouse=True)
def libtpu_environment():
    """Keeps libtpu from looking for TPU hardware and from locking other processes out."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TPU_SKIP_MDS_QUERY", "1")
        patch.setenv("ALLOW_MULTIPLE_LIBTPU_LOAD", "1")
        yield


def devices_of(topology, slices=1):
    options = dict(parse_topology(topology).generation.libtpu_options)
    if slices > 1:
        options["num_slices"] = slices
    return topologies.get_topology_desc(platform="tpu", topology_name=topology, **options).devices


def build(topology, slices=1, dcn=None, **sizes):
    config = MeshConfig(**({"fsdp": 1} | sizes), dcn=DcnConfig(**(dcn or {})))
    return build_mesh(config, devices_of(topology, slices))


@pytest.mark.parametrize("name", GENERATIONS)
def test_the_table_agrees_with_libtpu(name):
    generation = GENERATIONS[name]
    topology = parse_topology(f"{name}:{'4x4' if generation.dims == 2 else '4x4x4'}")
    devices = devices_of(str(topology))
    assert len(devices) == topology.devices
    assert len({device.process_index for device in devices}) == topology.hosts
    assert find_generation(devices[0].device_kind) is generation


def test_the_default_mesh_leaves_neighbours_apart_and_is_refused():
    """The reason for all this: 64 of 256 steps of jax's own mesh (the closing one included) are 2 or 3 hops."""
    order = mesh_utils.create_device_mesh((1, 1, 256, 1, 1), devices=devices_of("v5p:8x8x4"))
    mesh = Mesh(order, AXES)
    report = sequence_neighbours_report(mesh)
    assert (report.far_pairs, report.max_hops, report.closing_hops) == (63, 3, 3)
    assert not report.is_cycle
    with pytest.raises(ValueError, match=r"mesh.context, mesh.expert: sequence ranks 3 and 4 .*more than one hop"):
        check_sequence_order(mesh)


@pytest.mark.parametrize(
    "topology, sizes",
    [
        ("v5p:8x8x4", {"context": 256}),
        ("v5p:4x8x8", {"context": 256}),
        ("v5p:4x4x4", {"context": 64}),
        ("v5p:2x2x4", {"context": 16}),
        ("v5p:2x4x4", {"context": 32}),
        ("v5p:8x8x8", {"context": 512}),
        ("v6e:16x16", {"context": 256}),
        ("v5e:4x8", {"context": 32}),
        ("v5e:1x1", {}),
        ("v4:4x4x4", {"context": 16, "tensor": 4}),
        ("tpu7x:4x4x4", {"context": 128}),
        ("tpu7x:4x4x4", {"context": 64, "tensor": 2}),
        ("v5p:8x8x4", {"fsdp": 4, "context": 64}),
        ("v5p:8x8x4", {"fsdp": -1, "context": 8, "expert": 8}),
        ("v5p:8x8x4", {"data": 2, "fsdp": 2, "context": 32, "tensor": 2}),
    ],
)
def test_the_sequence_is_a_cycle_of_physical_neighbours(topology, sizes):
    mesh = build(topology, **sizes)
    assert mesh.axis_names == AXES
    assert len(set(mesh.devices.flat)) == parse_topology(topology).devices
    check_sequence_order(mesh)
    report = sequence_neighbours_report(mesh)
    assert report.ranks == sizes.get("context", 1) * sizes.get("expert", 1)
    assert report.is_cycle and report.closing_hops <= 1 and report.far_pairs == 0, report


@pytest.mark.parametrize("axis", ["context", "fsdp"])
@pytest.mark.parametrize("topology, length", [("v5p:8x8x4", 4), ("v5p:4x4x4", 4), ("v5p:8x8x8", 8)])
def test_a_whole_slice_is_lines_and_planes_across_them(topology, length, axis):
    """Weights are gathered along lines, then over planes: each a box of chips, or its ranks would share their links."""
    mesh = build(topology, **{axis: -1})
    assert line_length(mesh) == length
    places = np.array([device.coords for device in mesh.devices.ravel()])
    planes, lines = sharding.planes_and_lines(len(places), length)
    assert all(sorted(np.ptp(places[ranks], axis=0)) == [0, 0, length - 1] for ranks in lines)
    assert all(len(np.unique(places[ranks], axis=0)) == len(places) // length for ranks in planes)
    assert all(min(np.ptp(places[ranks], axis=0)) == 0 for ranks in planes)
    assert sorted(np.ravel(planes)) == sorted(np.ravel(lines)) == list(range(len(places)))


@pytest.mark.parametrize(
    "topology, sizes",
    [("v5p:8x8x4", {"fsdp": 4, "context": 64}), ("v5p:2x4x4", {"context": 32}), ("v6e:16x16", {"context": 256})],
)
def test_part_of_a_slice_and_a_flat_one_are_gathered_at_once(topology, sizes):
    assert line_length(build(topology, **sizes)) == 1


def test_hops_counted_by_hand_on_a_torus():
    """The report's own arithmetic, against coordinates: 8x8x4 with context 256 is 256 single steps."""
    order = sequence_order(build("v5p:8x8x4", context=256)).ravel()
    places = np.array([device.coords for device in order])
    apart = np.abs(places - np.roll(places, -1, axis=0))
    assert (np.minimum(apart, np.array([8, 8, 4]) - apart).sum(axis=1) == 1).all()


@pytest.mark.parametrize(
    "dcn, sizes, ranks, dcn_steps",
    [
        ({"data": 2}, {"data": 2, "context": 256}, 256, 0),
        ({"data": 2}, {"data": 2, "fsdp": -1, "context": 64}, 64, 0),
        ({"context": 2}, {"context": 512}, 512, 2),
        ({"fsdp": 2}, {"fsdp": 8, "context": 64}, 64, 0),
        ({"expert": 2}, {"expert": 16, "fsdp": 32}, 16, 2),
    ],
)
def test_two_slices(dcn, sizes, ranks, dcn_steps):
    mesh = build("v5p:8x8x4", 2, dcn, **sizes)
    check_sequence_order(mesh)
    report = sequence_neighbours_report(mesh)
    assert (report.ranks, report.dcn_steps, report.max_hops) == (ranks, dcn_steps, 1)
    assert report.is_cycle == (dcn_steps == 0)
    slices = np.vectorize(lambda device: device.slice_index)(sequence_order(mesh))
    if dcn_steps:
        assert (slices == np.repeat([0, 1], ranks // 2)).all()
    else:
        assert (slices == slices[..., :1]).all()


def test_slices_that_do_not_fit_are_refused_with_the_numbers():
    with pytest.raises(
        ConfigError, match=r"mesh.dcn.data=1 .* makes 1 slices, but the 8 devices form 2 .*mesh.dcn.data=2"
    ):
        build("v5p:2x2x1", 2, context=8)
    with pytest.raises(ConfigError, match=r"mesh.context=4 .* over 2 slices makes 2 devices per slice.*\{0: 3, 1: 1\}"):
        uneven = devices_of("v5p:2x2x1", 2)[1:5]  # slice 0 is the first four
        build_mesh(MeshConfig(context=4, dcn=DcnConfig(context=2)), uneven)
    with pytest.raises(ConfigError, match=r"mesh.dcn.expert=2 .*mesh.dcn.context"):
        build("v5p:2x2x1", 2, {"expert": 2}, context=4, expert=2)


def test_part_of_a_slice_is_refused():
    with pytest.raises(ValueError, match="15 devices of one slice do not fill a box"):
        build_mesh(MeshConfig(fsdp=15), devices_of("v5p:2x2x4")[1:])
    half = [device for device in devices_of("v5p:4x4x4") if device.coords[2] >= 2]
    report = sequence_neighbours_report(build_mesh(MeshConfig(fsdp=1, context=32), half))
    assert report.is_cycle
