"""The main program as a user runs it: a subprocess, its exit status and its files.

All runs share a compilation cache and one small prepared corpus. The uninterrupted run is the others' yardstick.
"""

import json
import os
import random
import signal
import subprocess
import sys
import time

import pytest

from data import prepare
from tests.tiny import TINY

STEPS = 12
FLAGS = {**TINY, "steps": STEPS, "checkpoint.every_steps": 3, "eval.every_steps": 0}


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    """A few hundred small documents, prepared."""
    folder = tmp_path_factory.mktemp("corpus")
    for number in range(200):
        (folder / f"{number:03}.txt").write_text(f"document {number}: " + "abcdefgh " * (number % 17))
    prepare.prepare(str(folder / "*.txt"), folder / "prepared", tokenizer="bytes")
    return folder / "prepared"


@pytest.fixture(scope="module")
def command(corpus, tmp_path_factory):
    """command(workdir, key=value...) -> (arguments, environment) of a run."""
    cache = tmp_path_factory.mktemp("cache")
    environ = {
        **os.environ,
        "JAX_PLATFORMS": "cpu",
        "JAX_COMPILATION_CACHE_DIR": str(cache),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
    }

    def make(workdir, **changes):
        flags = {**FLAGS, "data.path": corpus, "data.source": "", **changes}
        keys = [f"--config.{key}={value}" for key, value in flags.items()]
        return [sys.executable, "-m", "app.train", "--config=configs/demo.py", f"--workdir={workdir}", *keys], environ

    return make


def run(command, workdir, **changes):
    arguments, environ = command(workdir, **changes)
    return subprocess.run(arguments, env=environ, capture_output=True, text=True, timeout=300, check=False)


def metrics(workdir):
    return [json.loads(line) for line in (workdir / "metrics.jsonl").read_text().splitlines()]


def losses(workdir):
    return {line["step"]: (line["loss"], line["grad_norm"], line["learning_rate"]) for line in metrics(workdir)}


@pytest.fixture(scope="module")
def straight(command, tmp_path_factory):
    """The workdir of a run that nothing interrupts, and what it printed."""
    workdir = tmp_path_factory.mktemp("straight")
    done = run(command, workdir)
    assert done.returncode == 0, done.stderr
    return workdir, done


def test_a_finished_run(straight):
    workdir, done = straight
    lines = metrics(workdir)
    assert [line["step"] for line in lines] == list(range(1, STEPS + 1))
    wanted = {"step", "loss", "grad_norm", "learning_rate", "tokens", "tokens_per_second", "step_seconds"}
    assert all(wanted <= set(line) for line in lines)
    assert lines[0]["loss"] == pytest.approx(5.6, abs=0.2)  # ln 272
    assert lines[-1]["loss"] < lines[0]["loss"] - 0.5
    assert lines[-1]["heldout_loss"] < lines[0]["loss"]
    assert json.loads((workdir / "config.json").read_text())["steps"] == STEPS
    assert (workdir / "checkpoints" / str(STEPS)).is_dir()
    assert list((workdir / "tensorboard").glob("events.*"))
    assert "held-out loss" in done.stderr


def test_running_again_after_the_end_says_so(straight, command):
    workdir, _ = straight
    before = losses(workdir)
    done = run(command, workdir)
    assert done.returncode == 0
    assert "nothing to do" in done.stdout and "compiled" not in done.stdout
    assert losses(workdir) == before


@pytest.mark.parametrize("seed", [0, 1])
def test_sigkill_at_any_moment_changes_nothing(straight, command, tmp_path, seed):
    rng = random.Random(seed)
    arguments, environ = command(tmp_path)
    for _ in range(2):
        process = subprocess.Popen(arguments, env=environ, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
        after = rng.randrange(1, STEPS)
        for line in process.stderr:
            if f"step {after}/" in line:
                break
        time.sleep(rng.random() * 0.1)
        process.kill()
        process.wait()
    done = run(command, tmp_path)
    assert done.returncode == 0, done.stderr
    assert losses(tmp_path) == losses(straight[0])


def test_sigterm_saves_and_exits_42(straight, command, tmp_path):
    arguments, environ = command(tmp_path, **{"checkpoint.every_steps": 1000})
    process = subprocess.Popen(arguments, env=environ, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    for line in process.stderr:
        if "step 4/" in line:
            break
    process.send_signal(signal.SIGTERM)
    _, rest = process.communicate(timeout=120)
    assert process.returncode == 42, rest
    saved = [int(path.name) for path in (tmp_path / "checkpoints").iterdir() if path.name.isdecimal()]
    assert len(saved) == 1 and 4 <= saved[0] < STEPS
    done = run(command, tmp_path)
    assert done.returncode == 0
    assert f"resumed from step {saved[0]}" in done.stdout
    assert losses(tmp_path) == losses(straight[0])


def test_another_model_in_the_workdir_is_refused(straight, command):
    done = run(command, straight[0], **{"model.hidden_size": 64, "steps": 2 * STEPS})
    assert done.returncode == 2
    assert "model.hidden_size" in done.stderr and "32" in done.stderr and "64" in done.stderr
    assert "Traceback" not in done.stderr


def test_all_config_errors_at_once(command, tmp_path):
    done = run(command, tmp_path, **{"global_batch": 0, "model.linear_num_value_heads": 3, "seq_lenn": 64})
    assert done.returncode == 2
    assert all(word in done.stderr for word in ("global_batch", "linear_num_value_heads", "seq_lenn", "seq_len"))
    assert "Traceback" not in done.stderr
    assert not (tmp_path / "checkpoints").exists()


def test_not_finite_stops_with_its_own_status(command, tmp_path):
    done = run(command, tmp_path, **{"optimizer.learning_rate": 1e30, "optimizer.warmup_steps": 0})
    assert done.returncode == 3, done.stderr
    assert "not finite" in done.stderr and "3 in a row" in done.stderr
    bad = [line for line in metrics(tmp_path) if line.get("nonfinite_steps")]
    assert len(bad) == 3 and bad[0]["grad_norm"] is None


def test_weights_of_another_run_start_a_new_one(straight, command, tmp_path):
    """At step 0 with the other run's parameters; a model that computes something else is refused by name."""
    weights = straight[0] / "checkpoints" / str(STEPS)
    done = run(command, tmp_path, init_from=weights, steps=1)
    assert done.returncode == 0, done.stderr
    assert metrics(tmp_path)[0]["step"] == 1
    assert metrics(tmp_path)[0]["loss"] < metrics(straight[0])[0]["loss"] - 0.5
    refused = run(command, tmp_path / "other", init_from=weights, **{"model.rope_theta": 5e5})
    assert refused.returncode == 2
    assert "model.rope_theta" in refused.stderr and "500000.0" in refused.stderr
