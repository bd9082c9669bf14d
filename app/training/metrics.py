"""Where a run's numbers go: metrics.jsonl, TensorBoard, and the terminal."""

import contextlib
import json
import math
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TextIO

from tensorboardX import SummaryWriter
from tqdm import tqdm

Number = int | float


class MetricsLog:
    """Appends one json object a logged step to `metrics.jsonl` and the same numbers to TensorBoard.

    A resumed run first drops the lines of the steps that it will do again, so that every step stands there once.
    """

    def __init__(self, workdir: Path, *, first_step: int, tensorboard: bool):
        self._path = workdir / "metrics.jsonl"
        if self._path.exists():
            kept = [line for line in self._path.read_text().splitlines() if _step_of(line) <= first_step]
            scratch = self._path.with_suffix(".tmp")
            scratch.write_text("".join(f"{line}\n" for line in kept))
            scratch.replace(self._path)
        self._board = SummaryWriter(str(workdir / "tensorboard"), purge_step=first_step + 1) if tensorboard else None

    def write(self, step: int, numbers: Mapping[str, Number]) -> None:
        """Numbers that are not finite are written as null, since json has no NaN."""
        finite = {name: value if math.isfinite(value) else None for name, value in numbers.items()}
        with self._path.open("a") as file:  # a mounted bucket shows a file only after it is closed
            file.write(json.dumps({"step": step, **finite}) + "\n")
        if self._board is not None:
            for name, value in numbers.items():
                self._board.add_scalar(name, value, step)

    def close(self) -> None:
        if self._board is not None:
            self._board.close()


def _step_of(line: str) -> float:
    """The step of a line of metrics.jsonl; infinity for a line that a kill cut short."""
    try:
        return json.loads(line)["step"]
    except (json.JSONDecodeError, KeyError, TypeError):
        return math.inf


class Progress:
    """A progress bar with speed and time left on a terminal, plain lines at logged steps otherwise."""

    def __init__(self, *, first_step: int, steps: int, stream: TextIO = sys.stderr):
        self._stream, self._steps = stream, steps
        self._bar = None
        if stream.isatty():
            self._bar = tqdm(total=steps, initial=first_step, file=stream, unit="step", dynamic_ncols=True)

    def update(self, step: int, numbers: Mapping[str, Number]) -> None:
        speed, seconds = numbers["tokens_per_second"], numbers["step_seconds"]
        if self._bar is not None:
            self._bar.n = step
            self._bar.set_postfix_str(f"loss {numbers['loss']:.4f}, {speed:,.0f} tokens/s")
            return
        left = (self._steps - step) * seconds
        self.say(
            f"step {step}/{self._steps}  loss {numbers['loss']:.4f}  grad_norm {numbers['grad_norm']:.3f}  "
            f"lr {numbers['learning_rate']:.2e}  {speed:,.0f} tokens/s  {seconds:.3f} s/step  "
            f"{left / 60:.1f} min left"
        )

    def say(self, line: str) -> None:
        """One line of text, above the bar if there is one."""
        if self._bar is not None:
            self._bar.write(line, file=self._stream)
        else:
            print(line, file=self._stream, flush=True)

    def close(self) -> None:
        if self._bar is not None:
            self._bar.close()


class StepTimer:
    """Mean wall seconds per step since the last reading, without what happens inside `paused`."""

    def __init__(self, clock: Callable[[], float] = time.perf_counter):
        self._clock = clock
        self._since: float | None = None
        self._steps = 0

    def start(self) -> None:
        """Start the clock, unless it runs already. Called when the first step goes to the devices: compilation and the
        wait for the first batch lie before it."""
        if self._since is None:
            self._since = self._clock()

    def step_done(self) -> None:
        self._steps += 1

    def read(self) -> float:
        """Seconds per step since the last reading; at least one step must be done since then."""
        assert self._since is not None and self._steps > 0
        now = self._clock()
        seconds = (now - self._since) / self._steps
        self._since, self._steps = now, 0
        return seconds

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Leave the time inside out of the measurement (evaluation, the copy of the state for a checkpoint)."""
        paused_at = self._clock()
        yield
        if self._since is not None:
            self._since += self._clock() - paused_at
