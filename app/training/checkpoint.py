"""Checkpoints: the whole TrainState and what is needed to trust it, written asynchronously by orbax."""

import dataclasses
from pathlib import Path
from typing import Any

import orbax.checkpoint as ocp
from etils import epath
from orbax.checkpoint import checkpoint_managers

from app.config import CheckpointConfig
from app.training.step import TrainState


class Checkpoints:
    """The checkpoints of one workdir, by step.

    A save copies the state to the host and returns; the write goes on beside training, and becomes visible only when
    it is whole (orbax renames a finished directory). A failed write is raised at the next save or at `close`.
    """

    def __init__(self, workdir: str | Path, config: CheckpointConfig):
        keep: list[checkpoint_managers.PreservationPolicy] = [checkpoint_managers.LatestN(config.keep_last)]
        if config.keep_every:
            keep.append(checkpoint_managers.EveryNSteps(config.keep_every))
        options = ocp.CheckpointManagerOptions(
            preservation_policy=checkpoint_managers.AnyPreservationPolicy(keep), cleanup_tmp_directories=True
        )
        self.directory = epath.Path(workdir).resolve() / "checkpoints"
        self._manager = ocp.CheckpointManager(self.directory, options=options)

    def latest(self) -> int | None:
        """The newest committed step, or None."""
        return self._manager.latest_step()

    def save(self, step: int, state: TrainState, facts: dict[str, Any]) -> None:
        """Start writing `state` as `step`, with `facts` (json: resolved config, data fingerprint) beside it.

        Raises whatever the previous write failed with. A step that is already committed is not written again.
        """
        self._manager.check_for_errors()
        if step == self.latest():
            return
        saved = self._manager.save(
            step,
            args=ocp.args.Composite(state=ocp.args.StandardSave(_tree(state)), facts=ocp.args.JsonSave(facts)),
            force=True,
        )
        if not saved:
            raise RuntimeError(f"orbax refused to save step {step} in {self.directory}")

    def facts(self, step: int) -> dict[str, Any]:
        """What was saved beside the state of `step`."""
        return self._manager.restore(step, args=ocp.args.Composite(facts=ocp.args.JsonRestore()))["facts"]

    def restore(self, step: int, like: TrainState) -> TrainState:
        """The state of `step` with the shapes, dtypes and shardings of `like` (abstract), whatever mesh wrote it."""
        args = ocp.args.Composite(state=ocp.args.StandardRestore(_tree(like)))
        return TrainState(**self._manager.restore(step, args=args)["state"])

    def wait(self) -> None:
        """Return when every started save is committed; raises if one failed."""
        self._manager.wait_until_finished()
        self._manager.check_for_errors()

    def close(self) -> None:
        self.wait()
        self._manager.close()


def _tree(state: TrainState) -> dict[str, Any]:
    return {field.name: getattr(state, field.name) for field in dataclasses.fields(state)}
