"""Start-up of processes and stopping by signal. What must happen before jax starts runs in processes of its own."""

import os
import signal
import socket
import subprocess
import sys
from types import SimpleNamespace

import pytest

from app.cluster.runtime import Peers, find_peers

NONE = {"coordinator": None, "num_processes": None, "process_id": None}


def found(environ=None, **flags):
    return find_peers(SimpleNamespace(**(NONE | flags)), environ or {})


ENVIRONMENT = {"JAX_COORDINATOR_ADDRESS": "a:1", "JAX_NUM_PROCESSES": "4", "JAX_PROCESS_ID": "3"}
FULL = Peers("a:1", 4, 3)


@pytest.mark.parametrize(
    "flags, environ, expected",
    [
        ({}, {}, None),
        ({}, {"TPU_WORKER_HOSTNAMES": "localhost"}, None),
        ({}, {"TPU_WORKER_HOSTNAMES": "t0,t1"}, Peers()),
        ({}, {"TPU_PROCESS_ADDRESSES": "t0:1,t1:1"}, Peers()),
        ({}, {"TPU_WORKER_HOSTNAMES": "t0", "MEGASCALE_NUM_SLICES": "2"}, Peers()),
        ({}, {"TPU_WORKER_HOSTNAMES": "t0", "MEGASCALE_NUM_SLICES": "1"}, None),
        ({"coordinator": "a:1", "num_processes": 4, "process_id": 3}, {}, FULL),
        ({}, ENVIRONMENT, FULL),
        ({"process_id": 0}, ENVIRONMENT, FULL._replace(process_id=0)),
        ({}, {"JAX_COORDINATOR_ADDRESS": "a:1"}, Peers("a:1")),
    ],
)
def test_which_processes_are_joined(flags, environ, expected):
    assert found(environ, **flags) == expected


@pytest.mark.parametrize(
    "flags, environ, message",
    [
        ({"num_processes": 2, "process_id": 0}, {}, "go together; found None, 2, 0"),
        ({"coordinator": "a:1", "num_processes": 2}, {}, "go together; found a:1, 2, None"),
        ({"coordinator": "a:1", "num_processes": 2, "process_id": 2}, {}, "--process_id=2 .* below --num_processes=2"),
        ({}, ENVIRONMENT | {"JAX_PROCESS_ID": "one"}, "JAX_PROCESS_ID='one' must be a number"),
    ],
)
def test_incomplete_settings_are_refused(flags, environ, message):
    with pytest.raises(ValueError, match=message):
        found(environ, **flags)


def start(code, *args):
    flags = "--xla_cpu_collective_call_terminate_timeout_seconds=5"  # a user's own
    environ = {**os.environ, "XLA_FLAGS": flags}
    return subprocess.Popen(
        [sys.executable, "-c", code, *args], env=environ, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


CPU_DEVICES_AND_SIGTERM = """
import os, signal
from app.cluster import runtime
runtime.use_cpu_devices(3)
import jax
assert [d.platform for d in jax.devices()] == ["cpu"] * 3
assert os.environ["XLA_FLAGS"].startswith("--xla_cpu_collective") and os.environ["XLA_FLAGS"].endswith("=5")
runtime.use_cpu_devices(3)
try:
    runtime.use_cpu_devices(4)
except ValueError as error:
    print(error)
stop = runtime.StopSignal()
assert not stop.requested()
os.kill(os.getpid(), signal.SIGTERM)
assert stop.requested() and stop.requested()
print(stop.name)
os.kill(os.getpid(), signal.SIGINT)
assert stop.requested()
print(stop.name, flush=True)
os.kill(os.getpid(), signal.SIGINT)
print("not reached", flush=True)
"""


def test_cpu_devices_and_signals_of_one_process():
    process = start(CPU_DEVICES_AND_SIGTERM)
    out, err = process.communicate(timeout=60)
    assert process.returncode == -signal.SIGINT, err
    late, *names = out.splitlines()
    assert late.startswith("mesh.cpu_devices=4 comes too late: jax has already started with 3 cpu devices")
    assert names == ["SIGTERM", "SIGINT"]


TWO_PROCESSES = """
import os, signal, sys, time
from types import SimpleNamespace
from app.cluster import runtime
from app.config import MeshConfig
index = int(sys.argv[2])
flags = SimpleNamespace(coordinator=sys.argv[1], num_processes=2, process_id=index, workdir=sys.argv[3])
runtime.initialise(MeshConfig(cpu_devices=2), "multi", flags)
import jax
from jax.experimental import multihost_utils
stop = runtime.StopSignal()
assert (jax.device_count(), jax.local_device_count()) == (4, 2)
for step in range(1, 400):
    multihost_utils.sync_global_devices("step")  # what a training step's collectives do
    if step == 3 and index == 1:
        os.kill(os.getpid(), signal.SIGINT)
    if stop.requested():
        assert stop.requested()
        print(step)
        break
    time.sleep(0.01)
jax.distributed.shutdown()
"""


def test_a_signal_to_one_of_two_processes_stops_both_at_the_same_step(tmp_path):
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{probe.getsockname()[1]}"
    processes = [start(TWO_PROCESSES, address, str(index), str(tmp_path)) for index in range(2)]
    results = [process.communicate(timeout=90) for process in processes]
    assert [process.returncode for process in processes] == [0, 0], results
    steps = [int(out.split()[-1]) for out, _ in results]
    assert steps[0] == steps[1] >= 3
