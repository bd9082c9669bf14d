"""Real processes that are killed, stopped, or started wrongly: each ends in time, says why, and loses nothing."""

import collections
import functools
import random
import re
import shutil
import signal
import subprocess
import sys
import time

import pytest

from tests.multi_process.survival import (
    STEPS,
    Runs,
    finish,
    is_saving,
    logs,
    losses,
    same_state,
    saved_steps,
    state,
    wait_for,
    wait_until,
)  # fmt: skip


@pytest.fixture(scope="session")
def runs(tmp_path_factory):
    return Runs(tmp_path_factory.mktemp("runs"))


@pytest.fixture(scope="session")
def straight(runs):
    """straight(n): the workdir of a run of n processes that nothing interrupts."""
    done = {}

    def run(count):
        if count not in done:
            workdir = runs.folder / f"straight{count}"
            assert finish(runs.start(workdir, count)) == [0] * count, logs(workdir, count)
            done[count] = workdir
        return done[count]

    return run


def assert_same_run(workdir, other):
    assert losses(workdir) == losses(other)
    assert same_state(state(workdir, STEPS), state(other, STEPS))


def stop_and_resume(runs, straight, workdir, count, step, victim):
    processes = runs.start(workdir, count)
    wait_for(workdir, f"step {step}/", processes)
    processes[victim].send_signal(signal.SIGTERM)
    assert finish(processes) == [42] * count, logs(workdir, count)
    newest = saved_steps(workdir)[-1]
    assert step <= newest < STEPS
    assert finish(runs.start(workdir, count)) == [0] * count, logs(workdir, count)
    assert f"resumed from step {newest}" in logs(workdir, count)[0]
    assert_same_run(workdir, straight(count))


@pytest.mark.slow
def test_sigterm_to_one_of_two_stops_both_with_a_checkpoint(runs, straight, tmp_path):
    stop_and_resume(runs, straight, tmp_path, 2, 6, 1)


@pytest.mark.slow
@pytest.mark.parametrize("count, step, victim", [(1, 9, 0), (2, 17, 0), (4, 5, 3)])
def test_sigterm_at_any_step(runs, straight, tmp_path, count, step, victim):
    stop_and_resume(runs, straight, tmp_path, count, step, victim)


def test_a_killed_process_is_named_and_all_end(runs, tmp_path):
    processes = runs.start(tmp_path, 2)
    wait_for(tmp_path, "step 2/", processes)
    processes[1].kill()
    started = time.monotonic()
    assert finish(processes, 60) == [200, -9], logs(tmp_path, 2)
    assert time.monotonic() - started < 60
    assert "lost process 1 (host" in logs(tmp_path, 2)[0]


@pytest.mark.slow
@pytest.mark.parametrize("victim", [0, 2])
def test_one_of_four_killed(runs, tmp_path, victim):
    processes = runs.start(tmp_path, 4)
    wait_for(tmp_path, "step 3/", processes)
    processes[victim].kill()
    started = time.monotonic()
    statuses = finish(processes, 60)
    print("all ended after", time.monotonic() - started, statuses)
    assert statuses.pop(victim) == -9
    # Without the coordinator, process 0, jax aborts the others (SIGABRT: 134) if the watch is not faster.
    assert all(status in (200, -6) for status in statuses), logs(tmp_path, 4)
    assert victim == 0 or statuses == [200] * 3
    others = [text for index, text in enumerate(logs(tmp_path, 4)) if index != victim]
    assert victim == 0 or all(f"lost process {victim} (host" in text for text in others)


def test_another_config_in_one_process_stops_all_before_compiling(runs, tmp_path):
    processes = runs.start(tmp_path, 2, {1: {"optimizer.b2": 0.9}})
    started = time.monotonic()
    assert finish(processes, 60) == [2, 2], logs(tmp_path, 2)
    assert time.monotonic() - started < 60
    for text in logs(tmp_path, 2):
        assert "config.optimizer.b2: 0.95 in process 0 (host" in text and "0.9 in process 1 (host" in text
        assert "compiled" not in text


def test_a_process_that_never_comes_is_named(runs, tmp_path):
    processes = runs.start(tmp_path, 4, **{"limits.join": 8.0})
    processes[2].kill()
    statuses = finish(processes, 60)
    assert statuses.pop(2) == -9 and statuses == [200] * 3, logs(tmp_path, 4)
    assert "3 of 4 wait, process 0 (host" in logs(tmp_path, 4)[1] and "not there: 2" in logs(tmp_path, 4)[1]


@pytest.mark.slow
def test_a_step_that_takes_too_long_ends_the_run(runs, tmp_path):
    processes = runs.start(tmp_path, 1, **{"limits.step": 1e-3})
    assert finish(processes) == [201], logs(tmp_path, 1)
    text = logs(tmp_path, 1)[0]
    assert "took longer than 0.001 s (limits.step" in text and 'File "' in text and "in train" in text


# 40 kills: 16 of one process, 14 of two, 10 of four; each row is one run (processes, kills, seed).
KILLS = [(1, 4, 0), (1, 4, 1), (1, 4, 2), (1, 4, 3), (2, 4, 4), (2, 4, 5), (2, 4, 6), (2, 2, 7), (4, 4, 8), (4, 4, 9),
         (4, 2, 10)]  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("count, kills, seed", KILLS)
def test_killed_at_random_moments_and_resumed(runs, straight, tmp_path, count, kills, seed):
    """While stepping, restoring, compiling, and while a save is written beside the steps."""
    rng = random.Random(seed)
    wanted = straight(count)
    workdir = tmp_path / "run"
    killed = collections.Counter()
    for kill in range(kills):
        first = max(saved_steps(workdir), default=0)
        processes = runs.start(workdir, count)
        pattern = ("step", "model: ", "saving", rng.choice(["model: ", "compiled in"]))[kill]
        if pattern == "saving":
            wait_for(workdir, "step ", processes)
            wait_until(functools.partial(is_saving, workdir), processes)
        else:
            wait_for(workdir, f"step {rng.randint(9, 24)}/" if pattern == "step" else pattern, processes)
            time.sleep(rng.random() * 0.2)
        rng.choice(processes).kill()
        time.sleep(rng.random() * 0.05)
        for process in processes:
            process.kill()
        assert finish(processes) == [-9] * count, logs(workdir, count)
        text = logs(workdir, 1)[0]
        restoring = first and "model: " in text and "resumed from" not in text
        moment = "restoring" if restoring else "saving" if is_saving(workdir) else "other"
        killed[moment if moment != "other" or "memory a device" not in text else "stepping"] += 1
    assert finish(runs.start(workdir, count)) == [0] * count, logs(workdir, count)
    assert_same_run(workdir, wanted)
    print(f"{count} processes, killed while:", dict(killed))
    assert killed["restoring"] and (kills < 3 or killed["saving"])


@pytest.mark.slow
def test_the_local_tier_is_restored_while_every_process_has_its_part(runs, straight, tmp_path):
    """All killed: on from the local tier. One part lost, too: on from the checkpoint of all. Exactly, both times."""
    local = tmp_path / "local"
    tiers = {"checkpoint.every_steps": 10, "checkpoint.local_directory": local, "checkpoint.local_every_steps": 3}
    for start, lost in (16, False), (26, True):
        processes = runs.start(tmp_path, 2, **tiers)
        wait_for(tmp_path, f"step {start}/", processes)
        for process in processes:
            process.kill()
        assert finish(processes) == [-9, -9], logs(tmp_path, 2)
        if lost:
            shutil.rmtree(next(local.glob("*/1")))
            assert saved_steps(tmp_path)[-1] == 20
        else:
            assert saved_steps(tmp_path)[-1] == 10
    kept = logs(tmp_path, 1)[0]
    assert re.search(rf"resumed from step (12|15) in {local}", kept)
    assert finish(runs.start(tmp_path, 2, **tiers)) == [0, 0], logs(tmp_path, 2)
    text = logs(tmp_path, 1)[0]
    assert f"resumed from step 20 in {tmp_path}/checkpoints" in text
    assert re.search(r"checkpoint 2[147] is not used: .*/1/2[147]/checksums.json is missing", text)
    assert_same_run(tmp_path, straight(2))


@pytest.mark.slow
def test_storage_that_is_full_or_read_only(runs, straight, tmp_path):
    """A full disk ends the run with 203 and leaves the earlier checkpoints whole; with room again it goes on."""
    disk = tmp_path / "disk"
    disk.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=8m", "tmpfs", disk], check=False).returncode:
        pytest.skip("mounting a tmpfs needs root")
    try:
        workdir = disk / "run"
        processes = runs.start(workdir, 1)
        wait_for(workdir, "step 9/", processes)
        filler = disk / "filler"
        filler.write_bytes(b"x" * (shutil.disk_usage(disk).free - 200_000))
        assert finish(processes) == [203], logs(workdir, 1)
        text = logs(workdir, 1)[0]
        print(text[-800:])
        filler.unlink()
        assert saved_steps(workdir)
        assert finish(runs.start(workdir, 1)) == [0], logs(workdir, 1)
        assert_same_run(workdir, straight(1))
        subprocess.run(["mount", "-o", "remount,ro", disk], check=True)
        command = [sys.executable, "-m", "app.train", *runs.arguments(workdir)]
        done = subprocess.run(command, env=runs.environ, capture_output=True, text=True, check=False)
        assert done.returncode == 2 and "cannot be written to: Read-only file system" in done.stderr
    finally:
        subprocess.run(["umount", "-l", disk], check=False)


@pytest.mark.slow
def test_the_same_run_on_other_meshes(runs, tmp_path):
    """Saved by 2 processes at data 2, fsdp 2, context 2: every other mesh goes on with the same losses."""
    four = {"global_batch": 8, "mesh.cpu_devices": 4, "mesh.data": 2, "mesh.fsdp": 2, "mesh.context": 2}
    saved = tmp_path / "saved"
    processes = runs.start(saved, 2, **four, **{"checkpoint.every_steps": 4})
    wait_for(saved, "step 8/", processes)
    processes[0].send_signal(signal.SIGTERM)
    assert finish(processes) == [42, 42], logs(saved, 2)
    first = saved_steps(saved)[-1]
    found = {}
    one = {"global_batch": 8, "mesh.data": 1, "mesh.fsdp": 1, "mesh.context": 1}
    for name, count, mesh in (
        ("same", 2, four),
        ("context 8", 2, one | {"mesh.cpu_devices": 4, "mesh.context": 8}),
        ("fsdp 8", 2, one | {"mesh.cpu_devices": 4, "mesh.fsdp": 8}),
        ("data 2, context 4, one process", 1, one | {"mesh.cpu_devices": 8, "mesh.data": 2, "mesh.context": 4}),
        ("data 4, context 2, four processes", 4, one | {"mesh.cpu_devices": 2, "mesh.data": 4, "mesh.context": 2}),
        ("one device", 1, one | {"mesh.cpu_devices": 1}),
    ):
        workdir = tmp_path / name.replace(" ", "_")
        shutil.copytree(saved, workdir)
        assert finish(runs.start(workdir, count, **mesh)) == [0] * count, logs(workdir, count)
        assert f"resumed from step {first}" in logs(workdir, count)[0]
        found[name] = losses(workdir)[first + 1]
    print(found)
    for name, (loss, norm, tokens) in found.items():
        assert tokens == found["same"][2]
        assert (loss, norm) == pytest.approx(found["same"][:2], rel=1e-4), name
