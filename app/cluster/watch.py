"""One thread beside training that ends the process when it, or another process, has come to a stop.

A hung collective raises nothing: without this a run of a thousand hosts waits for ever for the one that died.
"""

import contextlib
import faulthandler
import os
import socket
import sys
import threading
import time
from collections.abc import Iterator

from app.cluster import peers
from app.cluster.runtime import EXIT_PEER, EXIT_WATCHDOG
from app.config import LimitsConfig

_SIGNS_PER_LIMIT = 10  # signs of life that a process gives within limits.peer
_LOST = f"{peers.PREFIX}lost"
_ALIVE = f"{peers.PREFIX}alive/"


class Watch:
    """The time limit of what the main thread does (`doing`), and among several processes signs of life.

    Each process writes its host and last step into the key-value store. Process 0 reads them all and names the one that
    fell silent; the others read that name. They notice process 0's own end by the store that it takes with it.
    """

    def __init__(self, limits: LimitsConfig):
        self._limits = limits
        self._what, self._until, self._limit = "starting", time.monotonic() + limits.slow, limits.slow
        self._step = 0
        self._heard: dict[str, tuple[str, float]] = {}  # process -> (its last sign, when it was new)
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._run, name="watch", daemon=True)
        self._thread.start()

    def doing(self, what: str, *, slow: bool = False) -> None:
        """The main thread begins `what`, which has limits.step seconds, limits.slow if it is slow."""
        limit = self._limits.slow if slow else self._limits.step
        self._what, self._limit, self._until = what, limit, time.monotonic() + limit

    @contextlib.contextmanager
    def slow(self, what: str) -> Iterator[None]:
        """Something slow inside a step; afterwards the step has its whole limit again."""
        before = self._what
        self.doing(what, slow=True)
        yield
        self.doing(before)

    def step_done(self, step: int) -> None:
        self._step = step

    def close(self) -> None:
        """The work is done: from now on nobody misses this process."""
        self._closed.set()
        self._thread.join()
        if peers.client() is not None:
            self._give_sign("done")

    def wait_for_verdict(self) -> None:
        """After an error that a lost process may have caused: give the watch the time to name it and end this one."""
        if peers.count() > 1:
            self.doing("waiting for the name of a lost process", slow=True)
            time.sleep(1.5 * self._limits.peer)

    def _run(self) -> None:
        between, signs, due = self._limits.peer / _SIGNS_PER_LIMIT, 0, 0.0
        while not self._closed.wait(min(1.0, between)):
            if time.monotonic() > self._until:
                self._time_out()
            if peers.client() is not None and time.monotonic() >= due:
                signs, due = signs + 1, time.monotonic() + between
                self._look_around(signs)

    def _look_around(self, signs: int) -> None:
        try:
            self._give_sign(str(signs))
            lost = self._find_lost() if peers.index() == 0 else _try_get(_LOST)
        except Exception as error:  # jax's runtime error, of whatever kind: the store does not answer
            lost = f"lost process 0, the coordinator, which keeps the store: {str(error).partition(chr(10))[0]}"
        if lost:
            _end(EXIT_PEER, f"{_me()}, after step {self._step}: {lost}")

    def _give_sign(self, sign: str) -> None:
        value = f"{sign} {self._step} {socket.gethostname()}"
        peers.client().key_value_set(f"{_ALIVE}{peers.index():08}", value, allow_overwrite=True)

    def _find_lost(self) -> str | None:
        """On process 0: which process gave no new sign for limits.peer seconds; told to the others too."""
        now = time.monotonic()
        for key, sign in peers.client().key_value_dir_get(_ALIVE):
            before, since = self._heard.get(key, ("", now))
            if sign != before:
                self._heard[key] = (sign, now)
            elif now - since > self._limits.peer and not sign.startswith("done "):
                _, step, host = sign.split(" ", 2)
                process = int(key.rpartition("/")[2])
                lost = f"lost process {process} (host {host}, last finished step {step}): no sign of life for " \
                       f"{now - since:.0f} s (limits.peer={self._limits.peer:g})"  # fmt: skip
                peers.client().key_value_set(_LOST, lost)
                time.sleep(2 * self._limits.peer / _SIGNS_PER_LIMIT + 1)  # the others read it before the store is gone
                return lost
        return None

    def _time_out(self) -> None:
        faulthandler.dump_traceback(sys.stderr, all_threads=True)
        _end(
            EXIT_WATCHDOG,
            f"{_me()}: {self._what} took longer than {self._limit:g} s (limits.step or limits.slow); last finished "
            f"step {self._step}. Above is where every thread stood.",
        )


def _me() -> str:
    return f"process {peers.index()} of {peers.count()} (host {socket.gethostname()})"


def _try_get(key: str) -> str | None:
    try:
        return peers.client().key_value_try_get(key)
    except Exception as error:  # jax's runtime error
        if "NOT_FOUND" in str(error):
            return None
        raise


def _end(status: int, message: str) -> None:
    """End the process at once, without the shutdown that would wait for the other processes."""
    os.write(2, f"{message}\n".encode())
    os._exit(status)
