"""What checkpoints cost: python -m tests.benchmark.checkpoint_cost DIR   (about five minutes; needs 5 GB in DIR)

Time: windows of steps of the demo made wider, without a save, with one written beside them, and with one that has no
checksums; interleaved, and a window ends when its save is committed. Memory: the largest resident set above the one
before, of a save and of a restore of 2 GB, for several limits of what is in flight.
"""

import shutil
import statistics
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from app.cluster import mesh as meshes
from app.cluster import runtime
from app.config import CheckpointConfig, Config, from_config_dict
from app.training import checkpoint, checksums
from app.training.checkpoint import Checkpoints
from app.training.step import BATCH_FIELDS, Program, TrainState
from configs import demo

STEPS = 10  # of a window
REPEATS = 5
KEEP = CheckpointConfig(every_steps=1, every_minutes=0.0, keep_last=1, keep_every=0)
ARRAYS, ARRAY_BYTES = 32, 1 << 26
IN_FLIGHT_GB = (32, 1)


def wide_demo() -> Config:
    config = demo.get_config()
    config.global_batch = 1
    config.model.update(hidden_size=512, intermediate_size=1536, head_dim=64)
    config.model.update(linear_key_head_dim=64, linear_value_head_dim=64)
    return from_config_dict(config)


def batch(program: Program) -> dict[str, jax.Array]:
    rng = np.random.default_rng(0)
    shape = program.batch["tokens"].shape
    position = np.broadcast_to(np.arange(shape[1]), shape)
    values = {"tokens": rng.integers(0, 256, shape), "segment_ids": np.ones(shape), "positions": position}
    values |= {"targets": np.roll(values["tokens"], -1, axis=1), "stream_index": position, "loss_mask": np.ones(shape)}
    fields = {name: values[name].astype(kind) for name, kind in BATCH_FIELDS.items()}
    return jax.device_put(fields, program.batch_sharding)


def step_time(folder: Path) -> None:
    config = wide_demo()
    program = Program(config, meshes.build_mesh(config.mesh, jax.devices()))
    state, data = program.init(), batch(program)
    train_step = program.train_step.lower(program.state, program.batch).compile()
    size = sum(leaf.nbytes for leaf in jax.tree.leaves(state))
    checkpoints = Checkpoints(folder / "steps", KEEP)
    seal, number = checksums.seal, 0

    def window(save: bool) -> tuple[float, float]:
        """(seconds of the steps and of what is left of the save, seconds of them in `save` itself)"""
        nonlocal state, number
        started, inside = time.perf_counter(), 0.0
        for step in range(STEPS):
            state, metrics = train_step(state, data)
            jax.block_until_ready(metrics)
            if save and step == 0:
                number += 1
                before = time.perf_counter()
                checkpoints.save(number, state, {})
                inside = time.perf_counter() - before
        checkpoints.wait()
        return time.perf_counter() - started, inside

    window(True)
    arms: dict[str, tuple[bool, Callable[..., None]]]
    arms = {"no save": (False, seal), "save": (True, seal), "save without checksums": (True, no_checksums)}
    found: dict[str, list[tuple[float, float]]] = {name: [] for name in arms}
    for repeat in range(REPEATS):
        for name in np.roll(list(arms), repeat):
            save, checksums.seal = arms[name]
            found[name].append(window(save))
    checkpoints.close()
    checksums.seal = seal
    plain = statistics.median(total for total, _ in found["no save"])
    print(f"state {size / 1e6:.0f} MB, step {plain / STEPS:.3f} s, {REPEATS} windows of {STEPS} steps each")
    for name in list(arms)[1:]:
        ratios = [with_[0] / without[0] for with_, without in zip(found[name], found["no save"], strict=True)]
        ratio, inside = statistics.median(ratios), statistics.median(inside for _, inside in found[name])
        each = ", ".join(f"{one:.3f}" for one in ratios)
        print(
            f"{name}, every {STEPS} steps: step time x {ratio:.3f} ({each}), every {10 * STEPS}: x "
            f"{1 + (ratio - 1) / 10:.4f}; {(ratio - 1) * plain:.2f} s a save, {inside:.2f} s of it before the next step"
        )


def no_checksums(directory: Path, _: str) -> None:
    (directory / checksums.NAME).write_text("")


def peak_above(work: Callable[[], Any]) -> tuple[Any, float]:
    """(what `work` returns, bytes by which the resident set grew at most meanwhile)"""
    done, largest = threading.Event(), 0

    def watch() -> None:
        nonlocal largest
        while not done.wait(0.002):
            largest = max(largest, resident())

    before = resident()
    thread = threading.Thread(target=watch)
    thread.start()
    result = work()
    done.set()
    thread.join()
    return result, largest - before


def resident() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


def memory(folder: Path) -> None:
    for limit in IN_FLIGHT_GB:
        checkpoint._IN_FLIGHT_GB = limit
        checkpoints = Checkpoints(folder / f"memory{limit}", KEEP)
        rng = np.random.default_rng(0)
        params = {f"w{n}": jnp.asarray(rng.standard_normal(ARRAY_BYTES // 4, np.float32)) for n in range(ARRAYS)}
        state = TrainState(jnp.int32(1), params, (), jnp.int32(0))
        like = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), state)
        del params

        def save(checkpoints: Checkpoints = checkpoints, state: TrainState = state) -> None:
            checkpoints.save(1, state, {})
            checkpoints.wait()

        _, saving = peak_above(save)
        del state, save
        restored, restoring = peak_above(lambda checkpoints=checkpoints, like=like: checkpoints.restore(1, like))
        size = ARRAYS * ARRAY_BYTES
        print(
            f"{size / 1e9:.2f} GB with at most {limit} GB in flight: saving needs {saving / 1e9:.2f} GB, restoring "
            f"{(restoring - size) / 1e9:.2f} GB beside the arrays that it makes"
        )
        del restored
        checkpoints.close()


def main(root: Path) -> None:
    runtime.use_cpu_devices(1)
    folder = root / "checkpoint_cost"
    try:
        step_time(folder)
        memory(folder)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
