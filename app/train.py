"""The main program: python -m app.train --config=configs/demo.py --workdir=DIR [--config.x.y=v ...]

Read `train` from top to bottom: devices, data, program, state, loop. Running again with the same workdir resumes.
Exit status: 0 finished, 1 a bug, 2 bad config or input, 3 non-finite training, 42 stopped by a signal after a
checkpoint was saved.
"""

import functools
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from app.cluster import hardware, runtime
from app.config import Config, ConfigError, diff
from app.config_flags import load_config

EXIT_BAD_CONFIG, EXIT_NONFINITE, EXIT_STOPPED = 2, 3, 42
# What a checkpoint is of: another value of one of these keys would continue a different run.
RUN_IDENTITY = (
    "model.", "seq_len", "global_batch", "seed", "data.documents", "data.weights", "data.whole_documents",
    "data.holdout", "dtypes.params", "optimizer.moment_dtype",
)  # fmt: skip


class NonFiniteTraining(Exception):
    """Too many steps in a row whose loss or gradient is not finite."""


def main(argv: list[str] | None = None) -> int:
    from data.manifest import DataError

    try:
        config, flags = load_config(sys.argv[1:] if argv is None else argv)
        return train(config, flags)
    except (ConfigError, DataError) as error:
        print(error, file=sys.stderr)
        return EXIT_BAD_CONFIG
    except NonFiniteTraining as error:
        print(error, file=sys.stderr)
        return EXIT_NONFINITE


def train(config: Config, flags: Any) -> int:
    """Run or continue one training job; returns the exit status."""
    # ---- devices ----------------------------------------------------------------------------------------------------
    runtime.initialise(config.mesh, flags)
    stop = runtime.StopSignal()
    import jax  # only now: what devices there are is settled when jax first looks

    from app.cluster import mesh as meshes
    from app.models import params as model_params
    from app.training import flops
    from app.training.checkpoint import Checkpoints
    from app.training.metrics import MetricsLog, Progress, StepTimer
    from app.training.step import Program
    from data import pipeline

    devices = jax.devices()
    slices = config.mesh.dcn.num_slices
    slice_of = meshes.equal_slices(devices, slices) if config.mesh.cpu_devices else meshes.device_slice
    mesh = meshes.build_mesh(config.mesh, devices, slice_of=slice_of)
    meshes.check_sequence_order(mesh, slice_of=slice_of)
    leader = jax.process_index() == 0
    say = print if leader else lambda _: None
    say(f"devices: {len(devices)} x {devices[0].device_kind}, mesh {dict(mesh.shape)}")
    if (neighbours := meshes.sequence_neighbours_report(mesh, slice_of=slice_of)) is not None:
        say(str(neighbours))

    # ---- data -------------------------------------------------------------------------------------------------------
    workdir = Path(flags.workdir)
    directory = prepared_data(config, workdir)
    open_stream = functools.partial(
        pipeline.open_stream, config.data, directory, seq_len=config.seq_len, global_batch=config.global_batch,
        seed=config.seed)  # fmt: skip
    training = open_stream(split="train")
    heldout = open_stream(split="heldout") if config.data.holdout else None
    check_vocabulary(training.vocab_size, config.model.vocab_size)

    # ---- program: shapes and shardings only, nothing is allocated yet -----------------------------------------------
    program = Program(config, mesh)
    say(f"model: {model_params.count(program.specs):,} parameters; attention kernel {program.runtime.attention_kernel}")
    if config.self_check and mesh.shape["context"] * mesh.shape["expert"] > 1:
        program.check_sequence()
    read = functools.partial(
        pipeline.batches, sharding=program.batch_sharding, workers=config.data.workers, prefetch=config.data.prefetch
    )

    # ---- state: the newest checkpoint, or fresh parameters ----------------------------------------------------------
    checkpoints = Checkpoints(workdir, config.checkpoint)
    facts = {"config": config.to_dict(), "data": training.fingerprint}
    first = checkpoints.latest() or 0
    if first:
        check_same_run(checkpoints.facts(first), facts, first)
        if first >= config.steps:
            say(f"nothing to do: {workdir} is at step {first} and steps={config.steps}; raise steps to go on")
            return 0
        state = checkpoints.restore(first, program.state)
        say(f"resumed from step {first}")
    else:
        state = program.init()

    # ---- compile ----------------------------------------------------------------------------------------------------
    started = time.perf_counter()
    train_step = program.train_step.lower(program.state, program.batch).compile()
    say(f"compiled in {time.perf_counter() - started:.1f} s")
    if (memory := train_step.memory_analysis()) is not None:
        say(f"memory a device: {memory.argument_size_in_bytes / 1e9:.3f} GB state and batch, "
            f"{memory.temp_size_in_bytes / 1e9:.3f} GB temporaries")  # fmt: skip

    # ---- loop -------------------------------------------------------------------------------------------------------
    if leader:
        workdir.mkdir(parents=True, exist_ok=True)
        (workdir / "config.json").write_text(config.to_json())
    log = MetricsLog(workdir, first_step=first, tensorboard=config.log.tensorboard) if leader else None
    progress = Progress(first_step=first, steps=config.steps) if leader else None
    timer = StepTimer()
    step_flops = flops.training_flops_per_token(config.model, config.seq_len) * config.global_batch * config.seq_len
    peak = hardware.peak_flops(devices[0].device_kind)  # None where it is not known

    def tell(line: str) -> None:
        if progress is not None:
            progress.say(line)

    def evaluate(step: int) -> dict[str, float]:
        """Mean cross entropy (nats a token) over the held-out documents, every token once; {} if none are held out."""
        if heldout is None:
            return {}
        entropy = tokens = 0.0
        total = heldout.num_steps
        assert total is not None  # the held-out order ends
        stop_step = total if config.eval.batches < 0 else min(config.eval.batches, total)
        for batch in read(heldout, start_step=0, stop_step=stop_step):
            sums = jax.device_get(program.eval_step(state.params, batch))
            entropy, tokens = entropy + float(sums["entropy"]), tokens + float(sums["loss_tokens"])
        tell(f"step {step}: held-out loss {entropy / tokens:.4f} nats a token over {tokens:,.0f} tokens")
        return {"heldout_loss": entropy / tokens, "heldout_tokens": tokens}

    def report(step: int, metrics: Mapping[str, jax.Array], extra: Mapping[str, float]) -> None:
        """Read a finished step's numbers from the devices; log them if the step is a logged one."""
        numbers = {name: value.item() for name, value in jax.device_get(dict(metrics)).items()}
        timer.step_done()
        in_a_row = numbers["nonfinite_steps"]
        if in_a_row:
            tell(f"step {step}: loss {numbers['loss']} or gradient norm {numbers['grad_norm']} is not finite; "
                 f"parameters unchanged ({in_a_row} in a row)")  # fmt: skip
        if step % config.log.every_steps == 0 or step == config.steps or extra or in_a_row:
            seconds = timer.read()
            numbers |= {"step_seconds": seconds, "tokens_per_second": numbers["tokens"] / seconds}
            if peak is not None:
                numbers["mfu"] = step_flops / seconds / (peak * len(devices))
            if log is not None and progress is not None:
                log.write(step, {**numbers, **extra})
                progress.update(step, numbers)
        if in_a_row >= config.nonfinite_limit:
            raise NonFiniteTraining(
                f"stopped at step {step}: {in_a_row} steps in a row were not finite "
                f"(nonfinite_limit={config.nonfinite_limit}); the newest checkpoint in {workdir} is from before them"
            )

    unread = None  # the numbers of a step are read while the next one runs, so the devices never wait for the host
    try:
        for step, batch in enumerate(read(training, start_step=first, stop_step=config.steps), start=first + 1):
            timer.start()
            state, metrics = train_step(state, batch)
            if unread is not None:
                report(*unread)
            unread = step, metrics, {}
            last = step == config.steps
            stopping = stop.requested(step)  # every process asks at every step
            if last or (config.eval.every_steps and step % config.eval.every_steps == 0):
                jax.block_until_ready(metrics)
                with timer.paused():
                    unread = step, metrics, evaluate(step)
            if last or stopping or step % config.checkpoint.every_steps == 0:
                report(*unread)
                unread = None
                with timer.paused():
                    checkpoints.save(step, state, facts)
            if stopping and not last:
                checkpoints.wait()
                tell(f"stopped by {stop.name} at step {step}; its checkpoint is saved")
                return EXIT_STOPPED
        return 0
    finally:
        if log is not None and progress is not None:
            log.close()
            progress.close()
        checkpoints.close()


def prepared_data(config: Config, workdir: Path) -> Path:
    """The directory of prepared token shards; the first run prepares `data.source` into it, on one process."""
    import jax
    from jax.experimental import multihost_utils

    from data import prepare

    directory = Path(config.data.path) if config.data.path else workdir / "data"
    if config.data.source:
        if jax.process_index() == 0 and not prepare.is_prepared(directory):
            print(f"preparing {config.data.source!r} into {directory}")
            prepare.prepare(config.data.source, directory, tokenizer=config.data.tokenizer)
        multihost_utils.sync_global_devices("prepared data")
    return directory


def check_vocabulary(data_size: int, model_size: int) -> None:
    if data_size > model_size:
        raise ConfigError(
            f"model.vocab_size={model_size} is smaller than the tokenizer's {data_size} ids that the data was prepared "
            "with: raise model.vocab_size or prepare the data with another tokenizer"
        )


def check_same_run(saved: Mapping[str, Any], wanted: Mapping[str, Any], step: int) -> None:
    """Refuse to continue a checkpoint of another model, data order or parameter dtype, naming every key."""
    changed = [
        (key, old, new) for key, old, new in diff(saved["config"], wanted["config"]) if key.startswith(RUN_IDENTITY)
    ]
    if saved["data"] != wanted["data"]:
        changed.append(("the prepared data", saved["data"], wanted["data"]))
    if changed:
        lines = [f"  {key}: the checkpoint has {old!r}, this run {new!r}" for key, old, new in changed]
        raise ConfigError(
            "\n".join(
                [f"the workdir holds step {step} of another run; use another workdir or the same values:", *lines]
            )
        )


if __name__ == "__main__":
    sys.exit(main())
