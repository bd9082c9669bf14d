"""The table of TPU generations."""

import math

import pytest

from app.cluster.hardware import GENERATIONS, compiler_options, find_generation, parse_topology, peak_flops


@pytest.mark.parametrize(
    "text, gke, accelerator, devices, hosts, machine, wrap",
    [
        ("v4:4x4x4", "4x4x4", "v4-128", 64, 16, "ct4p-hightpu-4t", (True,) * 3),
        ("v5p:8x8x4", "4x8x8", "v5p-512", 256, 64, "ct5p-hightpu-4t", (True,) * 3),
        ("v5p:2x2x4", "2x2x4", "v5p-32", 16, 4, "ct5p-hightpu-4t", (False,) * 3),
        ("v5p:2x4x4", "2x4x4", "v5p-64", 32, 8, "ct5p-hightpu-4t", (False,) * 3),
        ("v5p:16x16x24", "16x16x24", "v5p-12288", 6144, 1536, "ct5p-hightpu-4t", (True,) * 3),
        ("v6e:16x16", "16x16", "v6e-256", 256, 64, "ct6e-standard-4t", (True, True)),
        ("v6e:16x8", "8x16", "v6e-128", 128, 32, "ct6e-standard-4t", (True, False)),
        ("v5e:4x8", "4x8", "v5litepod-32", 32, 8, "ct5lp-hightpu-4t", (False, False)),
        ("v5e:1x1", "1x1", "v5litepod-1", 1, 1, "ct5lp-hightpu-1t", (False, False)),
        ("tpu7x:4x4x8", "4x4x8", "tpu7x-256", 256, 32, "tpu7x-standard-4t", (True,) * 3),
        ("tpu7x:1x1x1", "1x1x1", "tpu7x-2", 2, 1, "tpu7x-standard-1t", (False,) * 3),
    ],
)
def test_parsed_topologies(text, gke, accelerator, devices, hosts, machine, wrap):
    topology = parse_topology(text)
    assert str(topology) == text
    assert (topology.gke_topology, topology.accelerator_type) == (gke, accelerator)
    assert (topology.devices, topology.hosts) == (devices, hosts)
    assert topology.machine_types[topology.chips_per_host] == machine
    assert topology.wrap == wrap


def test_eight_chip_machines_exist_only_as_single_hosts():
    assert set(parse_topology("v6e:2x4").machine_types) == {4, 8}
    assert set(parse_topology("v6e:4x4").machine_types) == {4}


@pytest.mark.parametrize(
    "text, parts",
    [
        ("v5q:8x8x4", ["'v5q'", "did you mean 'v5p'", "v4, v5e, v5p, v6e, tpu7x"]),
        ("h100:8", ["'h100'", "v4, v5e, v5p, v6e, tpu7x"]),
        ("v5p-256", ["write it as v5p:", "multiple of 4"]),
        ("v5p:8x8x5", ["320 chips", "2x2x1, 2x2x2, 2x2x4, 2x4x4", "multiple of 4", "4x8x8"]),
        ("v5p:8x8", ["v5p has no such slice", "4x4x4"]),
        ("v5p:16x16x28", ["up to 6144 chips", "16x16x24"]),
        ("v6e:32x16", ["1x1, 2x2, 2x4, 4x4, 4x8, 8x8, 8x16, 16x16"]),
        ("v6e:16x16x1", ["v6e has no such slice"]),
        ("v5p:0x4x4", ["v5p has no such slice"]),
        ("", ["unknown TPU generation"]),
    ],
)
def test_invalid_topologies_are_refused_by_name_with_the_valid_ones(text, parts):
    with pytest.raises(ValueError) as error:
        parse_topology(text)
    for part in [repr(text), *parts]:
        assert part in str(error.value)


def test_every_listed_topology_parses_and_is_whole_hosts():
    for generation in GENERATIONS.values():
        shapes = generation.topologies()
        assert len(shapes) == len(set(shapes))
        assert max(map(math.prod, shapes)) == generation.max_chips
        for shape in shapes:
            topology = parse_topology(f"{generation.name}:{'x'.join(map(str, shape))}")
            assert topology.shape == shape
            assert topology.hosts * topology.chips_per_host == topology.chips
            assert topology.machine_types


def test_device_kinds_name_one_generation():
    kinds = [kind for generation in GENERATIONS.values() for kind in generation.device_kinds]
    assert len(kinds) == len(set(kinds))
    assert find_generation("TPU v5 lite") is GENERATIONS["v5e"]
    assert find_generation("TPU v5") is GENERATIONS["v5p"]
    assert peak_flops("TPU v6 lite") == 918e12
    assert peak_flops("TPU7x") == 2307e12 / 2  # a device is half a chip
    assert peak_flops("cpu") is None
    assert compiler_options("TPU v5") == compiler_options("TPU v6 lite") != {} == compiler_options("cpu")
