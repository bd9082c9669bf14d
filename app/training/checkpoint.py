"""Checkpoints: the whole TrainState and what is needed to trust it, written asynchronously by orbax.

    WORKDIR/checkpoints/<step>/   state (step, params, opt_state, nonfinite), facts (json), checksums.json
    a weights directory/          params (flat dict name -> array), facts (json), checksums.json

`app.training.checksums` says what the checksums are worth.
"""

import contextlib
import dataclasses
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
import orbax.checkpoint as ocp
from etils import epath
from orbax.checkpoint import checkpoint_managers

from app.cluster import pathways, peers
from app.config import CheckpointConfig, ConfigError
from app.training import checksums
from app.training.step import TrainState

_TEMPORARY = ".orbax-checkpoint-tmp"  # orbax's suffix of a directory that is not committed yet
_SET_ASIDE = ".damaged"


class StorageError(Exception):
    """A checkpoint could not be written or read: the storage's fault, not the program's or the user's."""


class Checkpoints:
    """The checkpoints of one workdir, by step.

    A save copies the state to the host and returns; the write goes on beside training, and becomes visible only when
    it is whole and has its checksums (orbax renames a finished directory). A failed write is raised at the next step's
    `check`, at the next save or at `close`.
    """

    def __init__(self, workdir: str | Path, config: CheckpointConfig):
        keep: list[checkpoint_managers.PreservationPolicy] = [checkpoint_managers.LatestN(config.keep_last)]
        if config.keep_every:
            keep.append(checkpoint_managers.EveryNSteps(config.keep_every))
        self.directory = epath.Path(config.directory or epath.Path(workdir).resolve() / "checkpoints")
        self._config = config
        self._sealing = _Sealing()
        self._last_save = time.monotonic()
        options = ocp.CheckpointManagerOptions(
            preservation_policy=checkpoint_managers.AnyPreservationPolicy(keep),
            cleanup_tmp_directories=True,
            lightweight_initialize=True,
            async_options=_async_options(self._sealing),
        )
        handlers: dict[str, Any] | None = None
        if pathways.workers_write():
            handlers = {"state": ocp.StandardCheckpointHandler(use_ocdbt=False), "facts": ocp.JsonCheckpointHandler()}
        self._manager = _Manager(self.directory, options=options, item_handlers=handlers)

    def latest(self, say: Callable[[str], None] = print) -> int | None:
        """The newest step whose files are as they were written, None if nothing was saved yet. Every process must ask.

        Damaged newer ones are named by `say` and moved out of the way, to <step>.damaged. Raises ConfigError if only
        damaged ones are there.
        """
        for step in sorted(self._manager.all_steps(), reverse=True):
            problem = checksums.find_damage(self.directory / str(step))
            if problem is None:
                return step
            aside = self.directory / f"{step}{_SET_ASIDE}"
            say(f"checkpoint {step} is not used: {problem}; it is moved to {aside}")
            if peers.index() == 0:
                if aside.exists():
                    aside.rmtree()
                (self.directory / str(step)).rename(aside)
            peers.exchange("moved")
            self._manager.reload()
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

    def save(self, step: int, state: TrainState, facts: dict[str, Any]) -> None:
        """Start writing `state` as `step`, with `facts` (json: resolved config, data fingerprint) beside it.

        Raises StorageError with what the previous write failed of. A step that is committed is not written again.
        """
        self.wait()
        self._last_save = time.monotonic()
        if step == self._manager.latest_step():
            return
        args = ocp.args.Composite(state=ocp.args.StandardSave(_tree(state)), facts=ocp.args.JsonSave(facts))
        with _storage_errors(f"saving step {step} in {self.directory}"):
            self._sealing.start(self.directory / str(step))
            if not self._manager.save(step, args=args, force=True):
                raise StorageError(f"orbax refused to save step {step} in {self.directory}")

    def facts(self, step: int) -> dict[str, Any]:
        """What was saved beside the state of `step`."""
        return read_facts(self.directory / str(step))

    def restore(self, step: int, like: TrainState) -> TrainState:
        """The state of `step` with the shapes, dtypes and shardings of `like` (abstract), whatever mesh wrote it."""
        args = ocp.args.StandardRestore(_tree(like))
        return TrainState(**_read(self.directory / str(step), "state", args))

    def check(self) -> None:
        """Raise StorageError if the write that goes on beside training has failed already."""
        with _storage_errors(f"saving in {self.directory}"):
            self._sealing.check()
            self._manager.check_for_errors()

    def wait(self) -> None:
        """Return when every started save is committed; raises StorageError if one failed."""
        with _storage_errors(f"saving in {self.directory}"):
            self._manager.wait_until_finished()
        self.check()

    def close(self) -> None:
        self.wait()
        self._manager.close()


def save_weights(path: epath.PathLike, params: Mapping[str, jax.Array], facts: Mapping[str, Any]) -> None:
    """Write a weights directory at `path`, which must not exist: `params`, and `facts` (json) beside them."""
    directory = epath.Path(path).resolve()
    if directory.exists():
        raise ConfigError(f"{directory} exists already: remove it, or choose another directory")
    sealing = _Sealing()
    items = ocp.args.Composite(params=ocp.args.StandardSave(dict(params)), facts=ocp.args.JsonSave(dict(facts)))
    with (
        _storage_errors(f"writing {directory}"),
        ocp.AsyncCheckpointer(
            ocp.CompositeCheckpointHandler(),
            async_options=_async_options(sealing),
        ) as writer,
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
        return _read(directory, item, ocp.args.StandardRestore(dict(like)))
    tree = {"params": dict(like)}
    args = ocp.args.PyTreeRestore(
        tree, restore_args=ocp.checkpoint_utils.construct_restore_args(tree), partial_restore=True
    )
    return _read(directory, item, args)["params"]


def read_facts(path: str | epath.Path) -> dict[str, Any]:
    """The json beside the arrays of a checkpoint or a weights directory."""
    return _read(epath.Path(path).resolve(), "facts", ocp.args.JsonRestore())


class _Manager(ocp.CheckpointManager):
    def reached_preemption(self, step: int) -> bool:
        """Only the training loop asks jax's preemption service: orbax asks again from a thread of process 0 with the
        step of a save that is over, which would set that process's count of steps back."""
        return False


class _Sealing:
    """The checksums of one save at a time: in orbax's thread on process 0, in a thread of their own on the others."""

    def __init__(self) -> None:
        self._directory: epath.Path | None = None
        self._error: BaseException | None = None

    def start(self, directory: epath.Path) -> None:
        """Before a save that will end as `directory` begins."""
        self._directory, self._error = directory, None
        if peers.index() != 0:
            threading.Thread(target=self._help, name="checksums", daemon=True).start()

    def seal(self) -> None:
        """What orbax calls on process 0 when all files are written and the directory is about to get its name."""
        assert self._directory is not None
        temporary = self._directory.parent / f"{self._directory.name}{_TEMPORARY}"
        checksums.seal(temporary if temporary.exists() else self._directory, self._directory.name)

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


def _read(directory: epath.Path, item: str, args: Any) -> Any:
    handler = ocp.CompositeCheckpointHandler()
    with ocp.Checkpointer(handler) as reader:
        return reader.restore(directory, args=ocp.args.Composite(**{item: args}))[item]


def _shapes(directory: epath.Path, item: str) -> dict[str, tuple[int, ...]]:
    """Name -> shape of the saved parameters."""
    with ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as reader:
        tree = reader.metadata(directory / item).item_metadata.tree
    return {name: tuple(leaf.shape) for name, leaf in (tree["params"] if item == "state" else tree).items()}


def _tree(state: TrainState) -> dict[str, Any]:
    return {field.name: getattr(state, field.name) for field in dataclasses.fields(state)}
