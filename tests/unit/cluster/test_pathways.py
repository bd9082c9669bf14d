"""controller="single" against the real pathwaysutils, the proxy's client alone replaced; elasticity with CPU devices.

What changes jax for good runs in a process of its own.
"""

import os
import subprocess
import sys
import textwrap

import pytest

from app.cluster import pathways
from app.config import ConfigError
from app.config_check import validate
from tests.tiny import tiny_config

pytest.importorskip("pathwaysutils")
FOUR = {"mesh.data": 4, "mesh.fsdp": 2, "mesh.dcn.data": 4, "global_batch": 24, "controller": "single",
        "mesh.cpu_devices": 0}  # fmt: skip


def run(code, **environ):
    """`code` in a fresh process whose proxy is a client of eight CPU devices; returns what it printed."""
    start = """
        import jax
        from jax.extend.backend import ifrt_proxy
        from jaxlib import xla_client
        asked = []
        def get_client(target, options):
            asked.append(target)
            return xla_client.make_cpu_client(num_devices=8)
        ifrt_proxy.get_client = get_client
        from app.cluster import pathways
        from app.config import ConfigError
        from tests.tiny import tiny_config
    """
    given = {"JAX_PLATFORMS": "proxy", "JAX_BACKEND_TARGET": "grpc://localhost:29000", **environ}
    text = textwrap.dedent(start) + textwrap.dedent(code)
    environ = {name: value for name, value in {**os.environ, **given}.items() if value is not None}
    done = subprocess.run([sys.executable, "-c", text], env=environ, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize(
    "controller, platforms, words",
    [
        ("single", "tpu,cpu", "controller='single' with JAX_PLATFORMS='tpu,cpu'"),
        ("single", None, "JAX_PLATFORMS=''"),
        ("multi", "proxy", "controller='multi' with JAX_PLATFORMS='proxy'"),
        ("multi", "proxy,cpu", "--config.controller=single"),
    ],
)
def test_controller_and_platform_must_fit(controller, platforms, words):
    with pytest.raises(ConfigError, match=words):
        pathways.check_platform(controller, platforms)


def test_fitting_ones_pass():
    pathways.check_platform("single", "proxy,cpu")
    pathways.check_platform("multi", "tpu,cpu")
    pathways.check_platform("multi", None)


def test_initialise_connects_and_makes_pathways_changes():
    code = """
        pathways.initialise()
        import pathwaysutils
        from pathwaysutils import _initialize, profiling
        devices = jax.devices()
        assert asked == ["grpc://localhost:29000"], asked
        assert len(devices) == 8 and jax.process_count() == 1 and len(jax.local_devices()) == 8
        assert _initialize.is_pathways_backend_used()
        assert not jax.config.jax_enable_compilation_cache
        assert jax.profiler.start_trace.__module__.startswith("pathwaysutils")
        assert pathways.workers_write() is True
        from orbax.checkpoint import type_handlers
        print(type(type_handlers.get_type_handler(jax.Array)).__name__)
    """
    assert "CloudPathwaysArrayHandler" in run(code, ENABLE_PATHWAYS_PERSISTENCE="1")


def test_checkpoints_are_left_to_the_workers(tmp_path):
    """Arrays go through orbax's handler for Pathways, sharded as they are; only the workers' writing is replaced."""
    code = f"""
        import concurrent.futures, os
        import jax.numpy as jnp
        import numpy as np
        from jax.sharding import Mesh, NamedSharding, PartitionSpec
        from orbax.checkpoint._src.serialization import cloud_pathways_helper as helper
        from app.config import CheckpointConfig
        from app.training.checkpoint import Checkpoints
        from app.training.step import TrainState
        pathways.initialise()
        stored, calls = {{}}, []
        done = concurrent.futures.Future()
        done.set_result(None)
        def write(location, names, arrays, timeout):
            calls.append((location, len(names)))
            stored.update(zip(names, map(np.asarray, arrays)))
            return done
        def read(location, names, dtypes, shapes, shardings, devices, timeout):
            found = zip(names, dtypes, shapes, shardings)
            return [jax.device_put(stored[n].astype(d).reshape(s), where) for n, d, s, where in found], done
        helper.write_arrays, helper.read_arrays = write, read
        mesh = Mesh(np.array(jax.devices()).reshape(8), ("fsdp",))
        split, whole = NamedSharding(mesh, PartitionSpec("fsdp")), NamedSharding(mesh, PartitionSpec())
        numbers = jax.device_put(jnp.arange(16.0), split)
        count = lambda n: jax.device_put(jnp.int32(n), whole)
        state = TrainState(count(7), {{"w": numbers}}, {{"mu": {{"w": numbers * 2}}}}, count(0))
        like = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), state)
        keep = CheckpointConfig(1, 0.0, keep_last=2, keep_every=0, directory={str(tmp_path)!r})
        checkpoints = Checkpoints("elsewhere", keep)
        checkpoints.save(7, state, {{"data": 1}})
        checkpoints.wait()
        assert checkpoints.latest() == 7 and checkpoints.facts(7) == {{"data": 1}}
        back = checkpoints.restore(7, like)
        assert jax.tree.all(jax.tree.map(lambda a, b: bool((a == b).all()) and a.sharding == b.sharding, state, back))
        assert sum(count for _, count in calls) == 4, calls
        assert all({str(tmp_path)!r} in location for location, _ in calls)
        held = [name for _, _, files in os.walk({str(tmp_path)!r}) for name in files]
        assert not any("ocdbt" in name for name in held), held
        print("by the workers")
    """
    assert "by the workers" in run(code, ENABLE_PATHWAYS_PERSISTENCE="1")


def test_initialise_refuses_what_cannot_work():
    code = """
        import os, sys
        def attempt():
            try:
                pathways.initialise()
            except ConfigError as error:
                print(error)
        sys.modules["pathwaysutils"] = None
        attempt()
        os.environ["ENABLE_PATHWAYS_PERSISTENCE"] = "yes"
        attempt()
        del os.environ["JAX_BACKEND_TARGET"]
        attempt()
        jax.config.update("jax_platforms", "cpu")
        attempt()
    """
    expected = (
        "install the extra 'pathways'", "ENABLE_PATHWAYS_PERSISTENCE='yes': must be 0 or 1", "needs JAX_BACKEND_TARGET",
        "JAX_PLATFORMS='cpu'",
    )  # fmt: skip
    lines = run(code).splitlines()
    assert len(lines) == len(expected)
    assert all(words in line for words, line in zip(expected, lines, strict=True)), lines


@pytest.mark.parametrize(
    "slices, batch, accumulation, expected",
    [
        (4, 24, 1, (4, 8, 4, 1)),  # nothing lost
        (3, 24, 1, (3, 6, 3, 2)),  # 3 rows a rank became 4: two micro-batches of 2
        (2, 24, 1, (2, 4, 2, 2)),
        (1, 24, 3, (1, 2, 1, 12)),
        (3, 16, 1, (2, 4, 2, 2)),  # 16 rows do not divide over three slices
        (3, 40, 5, (2, 4, 2, 10)),  # nor do 40
    ],
)  # fmt: skip
def test_rows_of_lost_slices_go_to_the_others(slices, batch, accumulation, expected):
    """expected: slices used, ranks with rows of their own, mesh.data, accumulation; by hand for 2 ranks a slice."""
    config = tiny_config(**{**FOUR, "global_batch": batch, "accumulation": accumulation})
    smaller = pathways.with_slices(config, slices)
    mesh = smaller.mesh
    assert (mesh.dcn.num_slices, mesh.data * mesh.fsdp, mesh.data, smaller.accumulation) == expected
    assert (smaller.global_batch, smaller.seq_len, smaller.steps) == (batch, config.seq_len, config.steps)
    rows = batch // (mesh.data * mesh.fsdp * smaller.accumulation)
    assert rows * mesh.data * mesh.fsdp * smaller.accumulation == batch  # whole rows
    assert rows <= batch // (4 * 2 * accumulation)  # no larger than what fitted
    validate(smaller, mesh.data * mesh.fsdp)


def test_a_lost_slice_ends_in_a_run_on_those_that_are_left():
    """Losses of slices 1 and 2 are survived; with max_losses=1 the second ends the run; another error always does."""
    code = f"""
        from pathwaysutils.elastic import elastic
        pathways.initialise()
        devices = jax.devices()
        slices = {{n: devices[2 * n : 2 * n + 2] for n in range(4)}}  # CPU devices do not say their slice
        elastic.get_slice_to_devices = lambda _: slices

        def attempt(error, **changes):
            seen, lost = [], set()
            elastic.DefaultSliceHealthChecker.validate = lambda self: frozenset(set(slices) - lost)
            def train(config, devices):
                seen.append((config.mesh.dcn.num_slices, [device.id for device in devices]))
                if len(seen) <= 2:
                    lost.add(len(seen))
                    raise jax.errors.JaxRuntimeError(error)
                return 0
            try:
                config = tiny_config(**{FOUR!r}, **changes)
                print("status", pathways.train_elastic(train, config), seen)
            except Exception as error:
                print(type(error).__name__, error, seen)

        attempt("DATA_LOSS: slice is gone", **{{"elastic.min_slices": 2}})
        attempt("DATA_LOSS: slice is gone", **{{"elastic.min_slices": 1, "elastic.max_losses": 1}})
        attempt("INVALID_ARGUMENT: a bug", **{{"elastic.min_slices": 1}})
    """
    lines = run(code).splitlines()
    four, three, two = "(4, [0, 1, 2, 3, 4, 5, 6, 7])", "(3, [0, 1, 4, 5, 6, 7])", "(2, [0, 1, 6, 7])"
    assert "slices [0, 3] of 4: mesh.data=2, accumulation=2" in lines
    assert f"status 0 [{four}, {three}, {two}]" in lines
    assert f"JaxRuntimeError DATA_LOSS: slice is gone [{four}, {three}]" in lines
    assert f"JaxRuntimeError INVALID_ARGUMENT: a bug [{four}]" in lines


@pytest.mark.parametrize(
    "changes, words",
    [
        ({"controller": "multi", "elastic.min_slices": 1}, "only a single controller"),
        ({"mesh.cpu_devices": 8}, "mesh.cpu_devices=8 with controller='single'"),
        ({"elastic.min_slices": 5}, "more than the 4 slices"),
        ({"elastic.min_slices": 1, "mesh.dcn.data": 2, "mesh.dcn.fsdp": 2}, "along mesh.dcn.data"),
        ({"elastic.min_slices": 1, "elastic.max_losses": 0}, "elastic.max_losses=0"),
    ],
)
def test_rules_of_elasticity(changes, words):
    with pytest.raises(ConfigError, match=words):
        validate(tiny_config(**{**FOUR, **changes}), 8)
