"""Runs of app.train in several real processes, for the tests of this folder: start, wait for a step, compare."""

import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import orbax.checkpoint as ocp

from app import local
from data import prepare
from tests.tiny import TINY

STEPS = 32
# What is quick to trace: every process does that anew.
FLAGS = {**TINY, "steps": STEPS, "checkpoint.every_steps": 4, "remat": "none", "data.holdout": 0.0,
         "log.tensorboard": False, "data.source": "", "limits.peer": 20.0, "limits.join": 60.0}  # fmt: skip
# Several processes on a CPU compile at each start (app.train.run says why).
QUICK_TO_COMPILE = "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true"
# Processes x devices -> mesh: the same four rows, on one device each or cut along the sequence too.
MESHES = {1: {"mesh.fsdp": 1}, 2: {"mesh.fsdp": 2}, 4: {"mesh.fsdp": 2, "mesh.context": 2}}


class Runs:
    """Runs that share a corpus and a compilation cache."""

    def __init__(self, folder: Path):
        self.folder = folder
        corpus = folder / "corpus"
        corpus.mkdir(parents=True, exist_ok=True)
        if not (folder / "prepared").exists():
            for number in range(200):
                (corpus / f"{number:03}.txt").write_text(f"document {number}: " + "abcdefgh " * (number % 17))
            prepare.prepare(str(corpus / "*.txt"), folder / "prepared", tokenizer="bytes")
        bytecode = {"PYTHONPYCACHEPREFIX": str(folder / "bytecode"), **os.environ, "PYTHONDONTWRITEBYTECODE": ""}
        self.environ = {**bytecode, "JAX_PLATFORMS": "cpu", "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
                        "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1", "PYTHONUNBUFFERED": "1",
                        "XLA_FLAGS": QUICK_TO_COMPILE}  # fmt: skip

    def arguments(self, workdir: Path, **changes) -> list[str]:
        flags = {**FLAGS, "data.path": self.folder / "prepared", "compile_cache": self.folder / "cache", **changes}
        keys = [f"--config.{key}={value}" for key, value in flags.items()]
        return ["--config=configs/demo.py", f"--workdir={workdir}", *keys]

    def start(self, workdir: Path, count: int, changes: dict[int, dict] | None = None, **common):
        """Processes on the mesh of MESHES, each one's output in WORKDIR/log.<index>. changes: flags of single ones."""
        address = f"127.0.0.1:{local.free_port()}"
        workdir.mkdir(parents=True, exist_ok=True)
        started = []
        for index in range(count):
            flags = {**MESHES[count], **common, **(changes or {}).get(index, {})}
            command = [sys.executable, "-m", "app.train", *self.arguments(workdir, **flags)]
            command += local.peer_flags(address, count, index)
            with (workdir / f"log.{index}").open("w") as log:
                started.append(subprocess.Popen(command, env=self.environ, stdout=log, stderr=log, text=True))
        return started


def logs(workdir: Path, count: int) -> list[str]:
    return [(workdir / f"log.{index}").read_text() for index in range(count)]


def wait_for(workdir: Path, pattern: str, processes: list[subprocess.Popen[str]], timeout: float = 300) -> None:
    """Until process 0 has printed a line with `pattern`, or a process has ended."""
    wait_until(lambda: re.search(pattern, (workdir / "log.0").read_text()) is not None, processes, timeout)


def wait_until(seen: Callable[[], bool], processes: list[subprocess.Popen[str]], timeout: float = 300) -> None:
    """Until `seen()`, or a process has ended, or `timeout` seconds."""
    end = time.monotonic() + timeout
    while time.monotonic() < end and all(process.poll() is None for process in processes) and not seen():
        time.sleep(0.02)


def finish(processes: list[subprocess.Popen[str]], timeout: float = 600) -> list[int]:
    """Everybody's exit status; whoever is still there after `timeout` is killed, and counts as -9."""
    end = time.monotonic() + timeout
    for process in processes:
        try:
            process.wait(max(0.0, end - time.monotonic()))
        except subprocess.TimeoutExpired:
            process.kill()
    return [process.wait() for process in processes]


def losses(workdir: Path) -> dict[int, tuple[float, ...]]:
    lines = [json.loads(line) for line in (workdir / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == sorted({line["step"] for line in lines})
    return {line["step"]: (line["loss"], line["grad_norm"], line["tokens"]) for line in lines}


def saved_steps(workdir: Path) -> list[int]:
    return sorted(int(path.name) for path in (workdir / "checkpoints").glob("*") if path.name.isdecimal())


def is_saving(workdir: Path) -> bool:
    """Whether a checkpoint is being written: always False again once it is committed."""
    return any((workdir / "checkpoints").glob("*.orbax-checkpoint-tmp"))


def state(workdir: Path, step: int) -> dict[str, np.ndarray]:
    """Every array of a checkpoint, read on this process's one device."""
    with ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as reader:
        path = workdir / "checkpoints" / str(step) / "state"
        tree = reader.metadata(path).item_metadata.tree
        import jax

        args = jax.tree.map(lambda _: ocp.RestoreArgs(restore_type=np.ndarray), tree)
        found = reader.restore(path, args=ocp.args.PyTreeRestore(restore_args=args))
    return {jax.tree_util.keystr(name): np.asarray(leaf) for name, leaf in jax.tree_util.tree_leaves_with_path(found)}


def same_state(a: dict[str, np.ndarray], b: dict[str, np.ndarray]) -> bool:
    return a.keys() == b.keys() and all(np.array_equal(a[name], b[name]) for name in a)
