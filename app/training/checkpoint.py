"""Checkpoints: the whole TrainState and what is needed to trust it, written asynchronously by orbax.

    WORKDIR/checkpoints/<step>/   state (step, params, opt_state, nonfinite), facts (json), checksums.json
    a weights directory/          params (flat dict name -> array), facts (json), checksums.json

`app.training.checksums` says what the checksums are worth.
"""

import contextlib
import dataclasses
import hashlib
import json
import secrets
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
import orbax.checkpoint as ocp
from etils import epath
from orbax.checkpoint import checkpoint_managers, type_handlers

from app.cluster import pathways, peers
from app.config import CheckpointConfig, ConfigError
from app.training import checksums
from app.training.step import TrainState

_TEMPORARY = ".orbax-checkpoint-tmp"  # orbax's suffix of a directory that is not committed yet
_SET_ASIDE = ".damaged"
# Host memory for what is being written, or read, at one time, beside the copy that a save takes of this host's part.
_IN_FLIGHT_GB: int = 32
_TOGETHER = ocp.options.MultiprocessingOptions()  # all processes write one checkpoint


class StorageError(Exception):
    """A checkpoint could not be written or read: the storage's fault, not the program's or the user's."""


class Checkpoints:
    """The checkpoints of one workdir, by step.

    A save copies the state to the host and returns; the write goes on beside training, and becomes visible only when
    it is whole and has its checksums (orbax renames a finished directory). A failed write is raised at the next step's
    `check`, at the next save or at `close`. One save is written at a time: the host holds one copy of its part.

    checkpoint.local_directory adds a local tier, written more often: every process keeps what its own devices hold on
    its own host, and reads it back after a restart in which all of them find theirs. (orbax's emergency manager wants
    data-parallel replicas; this does not, but neither does it fetch a lost host's part from a replica.)
    """

    def __init__(self, workdir: str | Path, config: CheckpointConfig):
        keep: list[checkpoint_managers.PreservationPolicy] = [checkpoint_managers.LatestN(config.keep_last)]
        if config.keep_every:
            keep.append(checkpoint_managers.EveryNSteps(config.keep_every))
        self.directory = epath.Path(config.directory or epath.Path(workdir).resolve() / "checkpoints")
        self._config = config
        self._last_save = time.monotonic()
        self._shared = _Tier(self.directory, checkpoint_managers.AnyPreservationPolicy(keep))
        self._local = self._local_tier() if config.local_directory else None
        self._tiers = [tier for tier in (self._shared, self._local) if tier is not None]
        self._source = self._shared  # of what is read

    def _local_tier(self) -> "_Tier":
        """This process's folder, by an id of the run: a new run in the same workdir finds nothing of the old one."""
        marker = self.directory / "run_id"
        if peers.index() == 0 and not marker.exists():
            marker.write_text(secrets.token_hex(8))
        run = peers.exchange(marker.read_text() if peers.index() == 0 else "")[0]
        directory = epath.Path(self._config.local_directory).resolve() / run / str(peers.index())
        directory.mkdir(parents=True, exist_ok=True)
        # Two: a process that is killed early may have committed one save fewer than another.
        return _Tier(directory, checkpoint_managers.LatestN(2), alone=True)

    def latest(self, say: Callable[[str], None] = print, *, like: TrainState | None = None) -> int | None:
        """The newest step whose files are as they were written, None if nothing was saved yet. Every process must ask.

        like: the state (abstract) to restore, which the local tier must hold all parts of. Damaged newer ones are named
        by `say` and moved out of the way, to <step>.damaged; unusable ones of the local tier are removed. Raises
        ConfigError if only damaged ones are there.
        """
        found = [(step, tier) for tier in self._tiers for step in tier.steps()]
        for step, tier in sorted(found, key=lambda one: one[0], reverse=True):
            problem = tier.problem(step, like)
            if problem is None:
                self._source = tier
                return step
            aside = tier.set_aside(step)
            say(f"checkpoint {step} is not used: {problem}; it is {f'moved to {aside}' if aside else 'removed'}")
        if damaged := sorted(path.name for path in self.directory.glob(f"*{_SET_ASIDE}")):
            raise ConfigError(
                f"no checkpoint in {self.directory} is whole; there are {', '.join(damaged)}. To begin at step 0, "
                "remove them or use another workdir"
            )
        return None

    def due(self, step: int, *, look: bool) -> bool:
        """Whether `step` is to be saved: by its number or, where `look`, by the clock of process 0."""
        minutes = self._config.every_minutes
        if step % self._config.every_steps == 0 or not (minutes and look):
            return step % self._config.every_steps == 0
        return peers.leader_decides(f"save {step}", lambda: time.monotonic() - self._last_save >= 60 * minutes)

    def due_locally(self, step: int) -> bool:
        """Whether `step` is to be saved in the local tier."""
        return self._local is not None and step % self._config.local_every_steps == 0

    def save(self, step: int, state: TrainState, facts: dict[str, Any], *, local: bool = False) -> None:
        """Start writing `state` as `step`, with `facts` (json: resolved config, data fingerprint) beside it.

        Raises StorageError with what the previous write failed of. A step that is committed is not written again.
        """
        self.wait()
        tier = self._local if local else self._shared
        assert tier is not None
        if not local:
            self._last_save = time.monotonic()
        tier.save(step, state, facts)

    @property
    def source(self) -> epath.Path:
        """Where what `latest` found lies."""
        return self._source.directory

    def facts(self, step: int) -> dict[str, Any]:
        """What was saved beside the state of `step`."""
        return self._source.facts(step)

    def restore(self, step: int, like: TrainState) -> TrainState:
        """The state of `step` with the shapes, dtypes and shardings of `like` (abstract), whatever mesh wrote it."""
        return TrainState(**self._source.read(step, state=_restore_args(_tree(like))))

    def check(self) -> None:
        """Raise StorageError if the write that goes on beside training has failed already."""
        for tier in self._tiers:
            tier.check()

    def wait(self) -> None:
        """Return when every started save is committed; raises StorageError if one failed."""
        for tier in self._tiers:
            tier.wait()

    def close(self) -> None:
        self.wait()
        for tier in self._tiers:
            tier.manager.close()


class _Tier:
    """A directory of checkpoints: of all processes together or, if `alone`, of what this one's devices hold."""

    def __init__(self, directory: epath.Path, keep: checkpoint_managers.PreservationPolicy, *, alone: bool = False):
        self.directory = directory
        self._alone = alone
        self._written: epath.Path | None = None  # by the last save, not looked at yet
        self._sealing = _Sealing(alone)
        own, processes = peers.index(), _TOGETHER
        if alone:  # then nothing in orbax waits for another process
            processes = ocp.options.MultiprocessingOptions(own, {own}, f"local{own}")
        options = ocp.CheckpointManagerOptions(
            preservation_policy=keep,
            cleanup_tmp_directories=True,
            lightweight_initialize=True,
            create=not alone,
            async_options=_async_options(self._sealing),
            multiprocessing_options=processes,
        )
        self.manager = _Manager(directory, options=options, item_handlers=_handlers("state", processes))

    def steps(self) -> list[int]:
        own = list(self.manager.all_steps())
        everywhere = map(json.loads, peers.exchange(json.dumps(own))) if self._alone else [own]
        return list(set().union(*everywhere))

    def problem(self, step: int, like: TrainState | None) -> str | None:
        """Why `step` cannot be restored to `like`. Every process must ask."""
        path = self.directory / str(step)
        if not self._alone:
            return checksums.find_damage(path)
        assert like is not None
        problem = checksums.own_damage(path)
        if problem is None and self.facts(step)["holds"] != _holds(like):
            problem = f"{path} has other parts of the arrays than process {peers.index()} holds now"
        return next((other for other in peers.exchange(problem or "") if other), None)

    def set_aside(self, step: int) -> epath.Path | None:
        """Move `step` away, and return to where; of the local tier it is removed."""
        path, aside = self.directory / str(step), None
        if self._alone:
            path.rmtree(missing_ok=True)
        else:
            aside = self.directory / f"{step}{_SET_ASIDE}"
            if peers.index() == 0:
                aside.rmtree(missing_ok=True)
                path.rename(aside)
            peers.exchange("moved")
        self.manager.reload()
        return aside

    def save(self, step: int, state: TrainState, facts: dict[str, Any]) -> None:
        if step == self.manager.latest_step():
            return
        if self._alone:
            facts = facts | {"holds": _holds(state)}
        args = ocp.args.Composite(state=ocp.args.PyTreeSave(_tree(state)), facts=ocp.args.JsonSave(facts))
        with _storage_errors(f"saving step {step} in {self.directory}"):
            self._sealing.start(self.directory / str(step))
            if not self.manager.save(step, args=args, force=True):
                raise StorageError(f"orbax refused to save step {step} in {self.directory}")
        self._written = self.directory / str(step)

    def facts(self, step: int) -> dict[str, Any]:
        return self.read(step, facts=ocp.args.JsonRestore())

    def read(self, step: int, **item: Any) -> Any:
        """One item of `step`: its name and orbax's arguments."""
        return self.manager.restore(step, args=ocp.args.Composite(**item))[next(iter(item))]

    def check(self) -> None:
        with _storage_errors(f"saving in {self.directory}"):
            self._sealing.check()
            if self.manager.failure is not None:
                raise self.manager.failure

    def wait(self) -> None:
        with _storage_errors(f"saving in {self.directory}"):
            self.manager.wait_until_finished()
        self.check()
        written, self._written = self._written, None
        if written and (self._alone or peers.index() == 0) and not (written / checksums.NAME).exists():
            raise StorageError(f"{written} was written and committed, but is not there")


def save_weights(path: epath.PathLike, params: Mapping[str, jax.Array], facts: Mapping[str, Any]) -> None:
    """Write a weights directory at `path`, which must not exist: `params`, and `facts` (json) beside them."""
    directory = epath.Path(path).resolve()
    if directory.exists():
        raise ConfigError(f"{directory} exists already: remove it, or choose another directory")
    sealing = _Sealing()
    handler = ocp.CompositeCheckpointHandler(**_handlers("params"))
    items = ocp.args.Composite(params=ocp.args.PyTreeSave(dict(params)), facts=ocp.args.JsonSave(dict(facts)))
    with (
        _storage_errors(f"writing {directory}"),
        ocp.AsyncCheckpointer(handler, async_options=_async_options(sealing)) as writer,
    ):
        sealing.start(directory)
        writer.save(directory, args=items)
        writer.wait_until_finished()
        sealing.check()


def restore_weights(path: epath.PathLike, like: Mapping[str, jax.ShapeDtypeStruct]) -> dict[str, jax.Array]:
    """The parameters of a weights directory or of a WORKDIR/checkpoints/<step>, with `like`'s dtypes and shardings.

    Raises ConfigError if `path` is neither, if its files are not as written, or if it lacks a parameter of `like`,
    has others, or other shapes.
    """
    directory = epath.Path(path).resolve()
    item = next((name for name in ("params", "state") if (directory / name).exists()), None)
    if item is None:
        raise ConfigError(f"{directory} holds no weights: expected WORKDIR/checkpoints/<step> or an imported model")
    if (problem := checksums.find_damage(directory)) is not None:
        raise ConfigError(f"{directory} is damaged: {problem}")
    saved = _shapes(directory, item)
    wanted = {name: leaf.shape for name, leaf in like.items()}
    wrong = [
        f"{name}: {saved.get(name, 'not there')} in {directory}, {wanted.get(name, 'not there')} in this model"
        for name in sorted(saved.keys() | wanted.keys())
        if saved.get(name) != wanted.get(name)
    ]
    if wrong:
        raise ConfigError(*wrong)
    if item == "params":
        return _read(directory, item, _restore_args(dict(like)))
    return _read(directory, item, _restore_args({"params": dict(like)}, partial_restore=True))["params"]


def read_facts(path: str | epath.Path) -> dict[str, Any]:
    """The json beside the arrays of a checkpoint or a weights directory."""
    return _read(epath.Path(path).resolve(), "facts", ocp.args.JsonRestore())


class _Manager(ocp.CheckpointManager):
    failure: BaseException | None = None  # of a write, as soon as it is known

    def reached_preemption(self, step: int) -> bool:
        """Only the training loop asks jax's preemption service: orbax asks again from a thread of process 0 with the
        step of a save that is over, which would set that process's count of steps back."""
        return False

    def _wait_for_checkpointers(self) -> None:
        """Called by orbax's thread that ends a save. Asking orbax's `check_for_errors` from the main thread instead
        could take the error away from it, and it deletes older checkpoints if it finds none."""
        try:
            super()._wait_for_checkpointers()
        except BaseException as error:
            self.failure = error
            raise


class _Sealing:
    """The checksums of one save at a time: in orbax's thread on process 0, in a thread of their own on the others.

    alone: the files are this process's only, and so are the checksums."""

    def __init__(self, alone: bool = False) -> None:
        self._alone = alone
        self._directory: epath.Path | None = None
        self._error: BaseException | None = None

    def start(self, directory: epath.Path) -> None:
        """Before a save that will end as `directory` begins."""
        self._directory, self._error = directory, None
        if peers.index() != 0 and not self._alone:
            threading.Thread(target=self._help, name="checksums", daemon=True).start()

    def seal(self) -> None:
        """What orbax calls on process 0, or alone, when the files are written, before the directory gets its name."""
        assert self._directory is not None
        temporary = self._directory.parent / f"{self._directory.name}{_TEMPORARY}"
        written = temporary if temporary.exists() else self._directory
        checksums.seal_alone(written) if self._alone else checksums.seal(written, self._directory.name)

    def check(self) -> None:
        if self._error is not None:
            raise self._error

    def _help(self) -> None:
        assert self._directory is not None
        try:
            checksums.help_to_seal(self._directory.name)
        except Exception as error:  # raised in the main thread, by `check`
            self._error = error


def _async_options(sealing: _Sealing) -> ocp.AsyncOptions:
    # Directories are made before `save` returns: one that cannot be made is an error there, not a timeout of threads.
    return ocp.AsyncOptions(post_finalization_callback=sealing.seal, create_directories_asynchronously=False)


@contextlib.contextmanager
def _storage_errors(doing: str) -> Iterator[None]:
    """Turn what file systems, tensorstore (ValueError) and orbax's barriers raise into StorageError."""
    try:
        yield
    except (OSError, ValueError, RuntimeError) as error:
        raise StorageError(f"{doing} failed: {error}") from error


def _handlers(item: str, processes: ocp.options.MultiprocessingOptions = _TOGETHER) -> dict[str, Any]:
    """What reads and writes `item`, a tree of arrays, and the facts beside it."""
    options: dict[str, Any] = {}
    if processes.active_processes:  # one copy of each part that its devices hold, whichever replica of it that is
        arrays = type_handlers.ArrayHandler(None, processes.primary_host, replica_id=None, use_replica_parallel=False)
        options["type_handler_registry"] = type_handlers.create_type_handler_registry((jax.Array, arrays))
    return {
        item: ocp.PyTreeCheckpointHandler(
            save_concurrent_gb=_IN_FLIGHT_GB,
            restore_concurrent_gb=_IN_FLIGHT_GB,
            use_ocdbt=not pathways.workers_write(),
            multiprocessing_options=processes,
            **options,
        ),
        "facts": ocp.JsonCheckpointHandler(multiprocessing_options=processes),
    }


def _restore_args(tree: Any, **options: Any) -> ocp.args.PyTreeRestore:
    """Arguments to read arrays with the shapes, dtypes and shardings of `tree` (abstract)."""
    restore_args = ocp.checkpoint_utils.construct_restore_args(tree)
    return ocp.args.PyTreeRestore(tree, restore_args=restore_args, **options)


def _holds(state: TrainState) -> str:
    """Digest of which parts of which arrays this process's devices hold; of an abstract state too."""
    parts = [
        (jax.tree_util.keystr(path), leaf.shape, str(leaf.dtype),
         sorted({str(part) for part in leaf.sharding.addressable_devices_indices_map(leaf.shape).values()}))
        for path, leaf in jax.tree_util.tree_leaves_with_path(_tree(state))
    ]  # fmt: skip
    return hashlib.sha256(repr(parts).encode()).hexdigest()


def _read(directory: epath.Path, item: str, args: Any) -> Any:
    with ocp.Checkpointer(ocp.CompositeCheckpointHandler(**_handlers(item if item != "facts" else "state"))) as reader:
        return reader.restore(directory, args=ocp.args.Composite(**{item: args}))[item]


def _shapes(directory: epath.Path, item: str) -> dict[str, tuple[int, ...]]:
    """Name -> shape of the saved parameters."""
    with ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as reader:
        tree = reader.metadata(directory / item).item_metadata.tree
    return {name: tuple(leaf.shape) for name, leaf in (tree["params"] if item == "state" else tree).items()}


def _tree(state: TrainState) -> dict[str, Any]:
    return {field.name: getattr(state, field.name) for field in dataclasses.fields(state)}
