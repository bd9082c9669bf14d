"""Every flag that a launch sets, handed to the real libtpu: it ends the process at a name that it does not know."""

import os
import subprocess
import sys

import pytest

from app.cluster.hardware import GENERATIONS, parse_topology
from launch import xla_flags

START = (
    "from jax.experimental import topologies\n"
    "import sys\n"
    "made = topologies.get_topology_desc(platform='tpu', topology_name=sys.argv[1], num_slices=2)\n"
    "print(made.devices[0].device_kind)\n"
)


def start_libtpu(topology, flags):
    environ = {
        **os.environ, "JAX_PLATFORMS": "cpu", "TPU_SKIP_MDS_QUERY": "1", "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
        "LIBTPU_INIT_ARGS": " ".join(flags),
    }  # fmt: skip
    command = [sys.executable, "-c", START, topology]
    return subprocess.run(command, env=environ, capture_output=True, text=True, timeout=120, check=False)


@pytest.mark.parametrize("topology", ["v5p:2x2x2", "v6e:4x4"])
def test_libtpu_takes_every_flag(topology):
    pytest.importorskip("libtpu")
    done = start_libtpu(topology, xla_flags.flags_for(parse_topology(topology), 2))
    assert done.returncode == 0 and "TPU" in done.stdout, done.stderr


def test_libtpu_refuses_a_wrong_name():
    pytest.importorskip("libtpu")
    done = start_libtpu("v5p:2x2x2", ["--xla_tpu_no_such_flag=true"])
    assert done.returncode != 0 and "xla_tpu_no_such_flag" in done.stderr


def test_every_flag_has_a_reason_and_none_contradicts_another():
    for flag in xla_flags.LONG_CONTEXT:
        assert len(flag.reason) > 20 and flag.name[:4] in ("xla_", "mega")
    for generation in GENERATIONS:
        names = [flag.name for flag in xla_flags.LONG_CONTEXT if generation in (flag.generations or GENERATIONS)]
        assert len(names) == len(set(names))
