"""A trace of the devices over a few steps, to look at with XProf."""

import contextlib
from collections.abc import Iterable, Iterator

import jax

STEPS = 3


def traced[Batch](steps: Iterable[tuple[int, Batch]], first: int, directory: str) -> Iterator[tuple[int, Batch]]:
    """`steps` (number, batch) as they are. What the devices do from step `first` on, for STEPS of them, is written to
    `directory` (gs:// under a single controller), by every process for its own; nothing where `first` is 0.

    The last of them may be cut: it is still running when the loop asks for the next batch.
    """
    with contextlib.ExitStack() as trace:  # also ended where the loop is left before
        for step, batch in steps:
            if step == first:
                trace.enter_context(jax.profiler.trace(directory))
            elif step == first + STEPS:
                trace.close()
            yield step, batch
