"""The checks to run on the nodes first, on eight CPU devices, in this process."""

import subprocess
import sys

import jax
import pytest

from app.cluster import runtime
from data import prepare
from launch import preflight
from tests.tiny import tiny_config

MESH = {"mesh.data": 2, "mesh.fsdp": 1, "mesh.context": 2, "mesh.tensor": 2, "mesh.dcn.data": 2, "mesh.cpu_devices": 8}


class Flags:
    coordinator = num_processes = process_id = None

    def __init__(self, workdir, topology=""):
        self.workdir, self.topology = str(workdir), topology


def run(name, found, workdir, **changes):
    return list(preflight.CHECKS[name](tiny_config(**{**MESH, **changes}), Flags(workdir), found))


@pytest.fixture
def found(tmp_path):
    made = {"devices": jax.devices()}
    run("mesh", made, tmp_path)
    return made


def test_collectives_along_every_axis_of_several_ranks(found, tmp_path):
    config, flags = tiny_config(**MESH), Flags(tmp_path)
    lines = list(preflight.collectives(config, flags, found, mebibytes=1))
    assert [line.split(",")[0] for line in lines] == ["axis data", "axis context", "axis tensor"]
    assert all(float(line.split(": ")[1].split()[0]) > 0 for line in lines)


def test_a_wrong_sum_is_named(found, tmp_path, monkeypatch):
    gather = jax.lax.all_gather
    monkeypatch.setattr(jax.lax, "all_gather", lambda x, axis, **more: gather(x, axis, **more) + 1)
    with pytest.raises(preflight.CheckError, match="axis data: wrong sums"):
        list(preflight.collectives(tiny_config(**MESH), Flags(tmp_path), found, mebibytes=1))


def test_a_mesh_that_does_not_fit(tmp_path):
    with pytest.raises(ValueError, match="there are 8 devices"):
        run("mesh", {"devices": jax.devices()}, tmp_path, **{"mesh.context": 4})


def test_slices_that_the_platform_says_are_others(tmp_path, monkeypatch):
    monkeypatch.setenv("MEGASCALE_NUM_SLICES", "4")
    with pytest.raises(preflight.CheckError, match=r"MEGASCALE_NUM_SLICES=4, but mesh.dcn.\* makes 2"):
        run("devices", {}, tmp_path)


def test_devices_of_another_kind(tmp_path):
    check = preflight.devices(tiny_config(**MESH), Flags(tmp_path, "v5p:2x2x1"), {})
    with pytest.raises(preflight.CheckError, match="found 8 of cpu"):
        list(check)


def test_workdir_and_data(found, tmp_path):
    assert run("workdir", found, tmp_path / "new") and not list((tmp_path / "new").iterdir())
    (tmp_path / "file").write_text("")
    with pytest.raises(preflight.CheckError, match="cannot write to"):
        run("workdir", found, tmp_path / "file" / "below")
    (tmp_path / "text.txt").write_text("some words " * 50)
    prepare.prepare(str(tmp_path / "text.txt"), tmp_path / "prepared", tokenizer="bytes")
    (line,) = run("data", found, tmp_path, **{"data.path": str(tmp_path / "prepared"), "data.source": ""})
    assert "tokens" in line
    with pytest.raises(preflight.CheckError, match="no prepared data"):
        run("data", found, tmp_path, **{"data.path": str(tmp_path / "none"), "data.source": ""})


def test_the_command_names_a_hang_and_a_failure(tmp_path):
    """One process, because a hang ends it: the limit is cut to nothing and the devices never come."""
    code = (
        "import sys, time\nfrom launch import preflight\n"
        "preflight.HANG_SECONDS['devices'] = 0.2\n"
        "preflight.CHECKS['devices'] = lambda *_: iter(lambda: time.sleep(9), None)\n"
        "sys.exit(preflight.main(sys.argv[1:]))\n"
    )
    arguments = ["--config=configs/demo.py", f"--workdir={tmp_path}"]
    done = subprocess.run([sys.executable, "-c", code, *arguments], capture_output=True, text=True, check=False)
    assert done.returncode == runtime.EXIT_WATCHDOG >= 128
    assert "preflight devices FAILED: not done" in done.stdout and "time.sleep" not in done.stdout
    done = subprocess.run(
        [sys.executable, "-m", "launch.preflight", *arguments, "--config.mesh.context=3"],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == runtime.EXIT_CONFIG and "preflight config FAILED" in done.stderr
