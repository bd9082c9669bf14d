"""The main program: python -m app.train --config=configs/demo.py --workdir=DIR [--config.x.y=v ...]

Read `train` from top to bottom: mesh, data, checkpoint, program, state, loop. Running again with the same workdir
resumes. Exit status: 0 finished, 1 a bug, 2 bad config or input, 3 non-finite training, 42 stopped by a signal after a
checkpoint was saved; 128-255 worth another start: 200 a process was lost, 201 something took too long, 202 an error of
a device, 203 of the storage (or the number of the signal that killed it, +128).
"""

import contextlib
import functools
import os
import re
import sys
import time
import traceback
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from app.cluster import hardware, runtime
from app.config import Config, ConfigError, diff, flatten
from app.config_flags import load_config

if TYPE_CHECKING:
    import jax

    from app.cluster.watch import Watch

# What a checkpoint is of: another value of one of these keys would continue a different run.
RUN_IDENTITY = (
    "model.", "seq_len", "global_batch", "seed", "data.documents", "data.weights", "data.whole_documents",
    "data.holdout", "dtypes.params", "optimizer.moment_dtype",
)  # fmt: skip

# Keys of the model that say nothing about what its weights compute, or no more than their shapes do.
NOT_OF_WEIGHTS = ("initializer_range", "max_position_embeddings", "router_aux_loss_coef", "intermediate_size")


class NonFiniteTraining(Exception):
    """Too many steps in a row whose loss or gradient is not finite."""


def main(argv: list[str] | None = None) -> int:
    """Train as the command line says; returns the exit status. What went wrong stands on stderr."""
    try:
        config, flags = load_config(sys.argv[1:] if argv is None else argv)
        return run(config, flags)
    except Exception as error:
        return failure(error)


def failure(error: Exception) -> int:
    """Say what went wrong, and which exit status that is."""
    from app.training.checkpoint import StorageError
    from data.manifest import DataError

    statuses: dict[type[Exception], int] = {
        ConfigError: runtime.EXIT_CONFIG,
        DataError: runtime.EXIT_CONFIG,
        NonFiniteTraining: runtime.EXIT_NONFINITE,
        StorageError: runtime.EXIT_STORAGE,
        OSError: runtime.EXIT_STORAGE,
    }
    status = next((status for kind, status in statuses.items() if isinstance(error, kind)), None)
    if status is None and of_device(error):
        status = runtime.EXIT_DEVICE
    if status is None:
        traceback.print_exception(error)
        return 1
    named = "" if status < 128 else f"{type(error).__name__}: "
    with contextlib.suppress(OSError):  # stderr may be a file on the same full disk: the status is what counts
        print(f"{named}{error}", file=sys.stderr)
    return status


def of_device(error: BaseException) -> bool:
    """Whether XLA's runtime failed. jax hands on some of its errors, that of a gather which lost a process for one, as
    ValueErrors: they begin with the name of XLA's status."""
    from jax.errors import JaxRuntimeError

    statuses = r"(UNKNOWN|UNAVAILABLE|INTERNAL|ABORTED|CANCELLED|DEADLINE_EXCEEDED): "
    return isinstance(error, JaxRuntimeError) or bool(isinstance(error, ValueError) and re.match(statuses, str(error)))


def run(config: Config, flags: Any) -> int:
    """Join the other processes, and train on the devices that there are."""
    workdir = Path(flags.workdir)
    check_writable(workdir)
    runtime.initialise(
        config.mesh, config.controller, flags, join_seconds=config.limits.join, peer_seconds=config.limits.peer
    )
    stop = runtime.StopSignal()
    import jax  # only now: what devices there are is settled when jax first looks

    from app.cluster import pathways, peers
    from app.cluster.watch import Watch

    watch = Watch(config.limits)
    try:
        keys = {f"config.{key}": value for key, value in flatten(config.to_dict()).items()}
        peers.require_same(keys | peers.versions() | {"--workdir": flags.workdir})
        # jax keeps a CPU's programs by process, and those of process 0 only. A program that was kept can order its
        # collectives otherwise than one just compiled: Gloo ends the processes, or they wait for each other.
        if config.compile_cache and not (peers.count() > 1 and jax.default_backend() == "cpu"):
            jax.config.update("jax_compilation_cache_dir", config.compile_cache)
        if config.elastic.min_slices:
            on_slices = functools.partial(train, workdir=workdir, stop=stop, watch=watch)
            status = pathways.train_elastic(on_slices, config)
        else:
            status = train(config, jax.devices(), workdir=workdir, stop=stop, watch=watch)
    except Exception as error:
        if of_device(error.__cause__ or error):
            watch.wait_for_verdict()
        raise
    watch.close()
    return status


def train(
    config: Config, devices: Sequence["jax.Device"], *, workdir: Path, stop: runtime.StopSignal, watch: "Watch"
) -> int:
    """Run or continue one training job on `devices`; returns the exit status."""
    import jax

    from app.cluster import mesh as meshes
    from app.cluster import peers
    from app.models import params as model_params
    from app.training import checkpoint, flops, profile
    from app.training.metrics import MetricsLog, Progress, StepTimer
    from app.training.step import Program, memory
    from data import pipeline

    # ---- mesh -------------------------------------------------------------------------------------------------------
    slices = config.mesh.dcn.num_slices
    slice_of = meshes.equal_slices(devices, slices) if config.mesh.cpu_devices else meshes.device_slice
    mesh = meshes.build_mesh(config.mesh, devices, slice_of=slice_of)
    meshes.check_sequence_order(mesh, slice_of=slice_of)
    leader = peers.index() == 0
    say = print if leader else lambda _: None
    say(f"devices: {len(devices)} x {devices[0].device_kind}, mesh {dict(mesh.shape)}")
    if (neighbours := meshes.sequence_neighbours_report(mesh, slice_of=slice_of)) is not None:
        say(str(neighbours))

    # ---- data -------------------------------------------------------------------------------------------------------
    watch.doing("opening the data", slow=True)
    directory = prepared_data(config, workdir)
    open_stream = functools.partial(
        pipeline.open_stream, config.data, directory, seq_len=config.seq_len, global_batch=config.global_batch,
        seed=config.seed)  # fmt: skip
    training = open_stream(split="train")
    heldout = open_stream(split="heldout") if config.data.holdout else None
    check_vocabulary(training.vocab_size, config.model.vocab_size)
    facts = {"config": config.to_dict(), "data": training.fingerprint}
    peers.require_same({"data": training.fingerprint})

    # ---- program: shapes and shardings only, nothing is allocated yet -----------------------------------------------
    program = Program(config, mesh)
    kernels = f"kernels: attention {program.runtime.attention_kernel}, gated delta rule {program.runtime.gdn_kernel}"
    say(f"model: {model_params.count(program.specs):,} parameters; {kernels}")
    read = functools.partial(
        pipeline.batches, sharding=program.batch_sharding, workers=config.data.workers, prefetch=config.data.prefetch
    )

    # ---- checkpoint: the newest that is whole -----------------------------------------------------------------------
    watch.doing("looking for a checkpoint and checking its files", slow=True)
    checkpoints = checkpoint.Checkpoints(workdir, config.checkpoint)
    first = checkpoints.latest(say, like=program.state) or 0
    if first:
        check_same_run(checkpoints.facts(first), facts, first)
    if first >= config.steps:
        say(f"nothing to do: {workdir} is at step {first} and steps={config.steps}; raise steps to go on")
        return runtime.EXIT_DONE

    # ---- the order of the sequence over the devices, tried out ------------------------------------------------------
    watch.doing("compiling", slow=True)
    if config.self_check and mesh.shape["context"] * mesh.shape["expert"] > 1:
        program.check_sequence()

    # ---- state ------------------------------------------------------------------------------------------------------
    watch.doing("restoring the state", slow=True)
    if first:
        state = checkpoints.restore(first, program.state)
        say(f"resumed from step {first} in {checkpoints.source}")
    elif config.init_from:
        weights = checkpoint.restore_weights(config.init_from, program.state.params)
        check_same_model(checkpoint.read_facts(config.init_from), facts, config.init_from)
        state = program.init(weights)
        say(f"step 0 with the weights of {config.init_from}")
    else:
        state = program.init()

    # ---- compile ----------------------------------------------------------------------------------------------------
    watch.doing("compiling", slow=True)
    started = time.perf_counter()
    train_step = program.train_step.lower(program.state, program.batch).compile()
    say(f"compiled in {time.perf_counter() - started:.1f} s")
    peers.exchange("compiled")  # a process that found it in the cache waits here: gloo gives the others 30 s only
    if sizes := memory(train_step):
        say(f"memory a device: {sizes['arguments'] / 1e9:.3f} GB state and batch, "
            f"{sizes['temporaries'] / 1e9:.3f} GB temporaries")  # fmt: skip

    # ---- loop -------------------------------------------------------------------------------------------------------
    if leader:
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
            if stop.requested():
                tell(f"step {step}: the held-out loss is left out, to stop soon")
                return {}
            sums = jax.device_get(program.eval_step(state.params, batch))
            entropy, tokens = entropy + float(sums["entropy"]), tokens + float(sums["loss_tokens"])
            watch.doing(f"the held-out loss after step {step}")
        tell(f"step {step}: held-out loss {entropy / tokens:.4f} nats a token over {tokens:,.0f} tokens")
        return {"heldout_loss": entropy / tokens, "heldout_tokens": tokens}

    def report(step: int, metrics: Mapping[str, jax.Array], extra: Mapping[str, float]) -> None:
        """Read a finished step's numbers from the devices; log them if the step is a logged one."""
        numbers = {name: value.item() for name, value in jax.device_get(dict(metrics)).items()}
        timer.step_done()
        watch.step_done(step)
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
    watch.doing("the first step", slow=True)
    try:
        numbered = enumerate(read(training, start_step=first, stop_step=config.steps), start=first + 1)
        traces = str(checkpoints.directory.parent / "profile")
        for step, batch in profile.traced(numbered, config.log.profile_step, traces):
            timer.start()
            state, metrics = train_step(state, batch)
            if unread is not None:
                report(*unread)
                watch.doing(f"step {step}")
            unread = step, metrics, {}
            last = step == config.steps
            if last or (config.eval.every_steps and step % config.eval.every_steps == 0):
                jax.block_until_ready(metrics)
                with timer.paused(), watch.slow(f"the held-out loss after step {step}"):
                    unread = step, metrics, evaluate(step)
            checkpoints.check()
            stopping = stop.requested()  # every process asks at every step
            whole = last or stopping or checkpoints.due(step, look=step % config.log.every_steps == 0)
            if whole or checkpoints.due_locally(step):
                report(*unread)
                unread = None
                with timer.paused(), watch.slow(f"saving step {step}"):
                    checkpoints.save(step, state, facts, local=not whole)
            if stopping and not last:
                watch.doing(f"saving step {step}", slow=True)
                checkpoints.close()
                tell(f"stopped by {stop.name} at step {step}; its checkpoint is saved")
                return runtime.EXIT_STOPPED
        watch.doing("saving the last step", slow=True)
        checkpoints.close()
        return runtime.EXIT_DONE
    finally:
        if log is not None and progress is not None:
            log.close()
            progress.close()


def check_writable(workdir: Path) -> None:
    """Raises ConfigError if nothing can be written to `workdir`, which is made if it is not there."""
    probe = workdir / f"writable.{os.getpid()}"
    try:
        workdir.mkdir(parents=True, exist_ok=True)
        probe.write_text("x")
        probe.unlink()
    except OSError as error:
        raise ConfigError(f"--workdir={workdir} cannot be written to: {error.strerror} ({error.filename})") from error


def prepared_data(config: Config, workdir: Path) -> Path:
    """The directory of prepared token shards; the first run prepares `data.source` into it, on one process."""
    from app.cluster import peers
    from data import prepare

    directory = Path(config.data.path) if config.data.path else workdir / "data"
    if config.data.source:
        if peers.index() == 0 and not prepare.is_prepared(directory):
            print(f"preparing {config.data.source!r} into {directory}")
            prepare.prepare(config.data.source, directory, tokenizer=config.data.tokenizer)
        peers.exchange("prepared")
    return directory


def check_vocabulary(data_size: int, model_size: int) -> None:
    if data_size > model_size:
        raise ConfigError(
            f"model.vocab_size={model_size} is smaller than the tokenizer's {data_size} ids that the data was prepared "
            "with: raise model.vocab_size or prepare the data with another tokenizer"
        )


def check_same_model(saved: Mapping[str, Any], wanted: Mapping[str, Any], path: str) -> None:
    """Refuse weights of a model whose names and shapes may be the same but whose mathematics is not (rope_theta)."""
    theirs = saved["model"] if "model" in saved else saved["config"]["model"]
    changed = [line for line in diff(theirs, wanted["config"]["model"]) if line[0] not in NOT_OF_WEIGHTS]
    if changed:
        raise ConfigError(*(f"model.{key}: {path} has {old!r}, this run {new!r}" for key, old, new in changed))


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
    runtime.leave(main())
