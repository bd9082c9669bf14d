"""A rendered JobSet really started: four processes in two slices, killed one at a time, by the manifest's own rules."""

import json
import os
import re
import shutil

import pytest
import yaml
from jax._src.clusters import cloud_tpu_cluster

from app.cluster import runtime
from data import prepare
from launch.job import read_job
from launch.render import render
from tests.multi_process.jobset_standin import JobSet, kill
from tests.tiny import TINY

STEPS = 24
# 2 slices of v5p:2x2x2, two hosts of four chips each: 16 chips. Here a host is one CPU device.
LAUNCH = ("--config=configs/demo.py", "--target=gke-jobset", "--topology=v5p:2x2x2", "--name=demo", "--image=i",
          "--mounts=/runs=pvc:runs", "--workdir=/runs/demo", "--grace_seconds=3", "--max_restarts=4")  # fmt: skip
SIZES = {**TINY, "steps": STEPS, "global_batch": 16, "checkpoint.every_steps": 2, "eval.every_steps": 0,
         "model.num_hidden_layers": 2, "model.full_attention_interval": 2,
         "data.path": "/runs/corpus", "data.source": "", "data.holdout": 0,
         "mesh.data": 2, "mesh.dcn.data": 2, "mesh.cpu_devices": 0,
         "log.tensorboard": False}  # fmt: skip


def jobset(folder, *more, **changes):
    keys = [f"--config.{key}={value}" for key, value in {**SIZES, **changes}.items()]
    manifest = yaml.safe_load(render(read_job([*LAUNCH, *keys, *more])))
    (folder / "runs").mkdir(parents=True, exist_ok=True)
    environ = {
        "JAX_PLATFORMS": "cpu",
        "JAX_NUM_CPU_DEVICES": "1",
        "PYTHONUNBUFFERED": "1",  # as in the image: what a killed pod said is there
    }
    return JobSet(manifest, folder, {"/runs": folder / "runs"}, environ)


def losses(folder):
    path = folder / "runs" / "demo" / "metrics.jsonl"
    lines = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    return {line["step"]: line["loss"] for line in lines}


def steps_saved(folder):
    return [int(path.name) for path in (folder / "runs" / "demo" / "checkpoints").glob("*") if path.name.isdecimal()]


def test_jax_finds_the_processes_in_what_a_pod_gets(tmp_path, monkeypatch):
    """With nothing but the manifest's variables and GKE's, jax knows number, ids and coordinator."""
    monkeypatch.setattr(cloud_tpu_cluster, "running_in_cloud_tpu_vm", True)
    flags = type("Flags", (), {"coordinator": None, "num_processes": None, "process_id": None})
    cluster, found = cloud_tpu_cluster.GkeTpuCluster, []
    for _, variables in jobset(tmp_path).environments():
        with monkeypatch.context() as patch:
            for name in os.environ:
                if name.startswith(("TPU_", "MEGASCALE_", "JAX_")):
                    patch.delenv(name)
            for name, value in variables.items():
                patch.setenv(name, value)
            assert runtime.find_peers(flags, os.environ) == runtime.Peers()  # join, and let jax find out
            assert cluster.is_env_present()
            address = cluster.get_coordinator_address(5, None)
            found.append((cluster.get_process_id(), cluster.get_process_count(), address))
    assert found == [(process, 4, "127.0.0.1:8482") for process in range(4)]


@pytest.mark.slow
def test_a_killed_host_restarts_the_whole_job_which_goes_on(tmp_path):
    """Every host is killed once, at another step; the losses are those of a run that nothing disturbs."""
    for number in range(200):
        (tmp_path / f"{number:03}.txt").write_text(f"document {number}: " + "abcdefgh " * (number % 17))
    prepare.prepare(str(tmp_path / "*.txt"), tmp_path / "corpus", tokenizer="bytes")
    straight, killed = jobset(tmp_path / "straight"), jobset(tmp_path / "killed")
    for run in (straight, killed):
        shutil.copytree(tmp_path / "corpus", run.folder / "runs" / "corpus")
    assert straight.run(timeout=900) == "Complete", straight.logs()
    assert straight.restarts == 0

    saved = []  # by kill: the newest checkpoint then

    def disturb(running):
        """The next host, as soon as there are three new steps and a new checkpoint."""
        newest = max(steps_saved(tmp_path / "killed"), default=0)
        done = max(losses(tmp_path / "killed"), default=0)
        if len(saved) == running.restarts < 4 and newest > max(saved, default=0) and done >= 3 * (len(saved) + 1):
            saved.append(newest)
            kill(running.pods[len(saved) - 1])

    assert killed.run(disturb, timeout=1500) == "Complete", killed.logs()
    assert killed.restarts == len(saved) == 4, saved
    for restart, least in enumerate(saved, start=1):
        said = re.search(r"resumed from step (\d+)", (killed.folder / f"demo-slice-job-0-0.{restart}.log").read_text())
        assert said and int(said[1]) >= least
    assert losses(tmp_path / "killed") == losses(tmp_path / "straight")
    assert list(losses(tmp_path / "killed")) == list(range(1, STEPS + 1))


@pytest.mark.slow
def test_bad_input_ends_the_job_without_a_restart(tmp_path):
    """Exit status 2 fails the JobSet at once; so does one restart more than there may be."""
    wrong = jobset(tmp_path / "wrong", **{"data.path": "/runs/nothing"})
    assert wrong.run() == "Failed" and wrong.restarts == 0
    assert 2 in {pod.process.returncode for pod in wrong.pods}
    assert "holds no prepared data" in wrong.logs()
