"""What a process sets up before jax touches a device, and how it is asked to stop.

Order in a program: `initialise` first, then `StopSignal()` (joining the other processes displaces earlier SIGTERM
handlers), then everything else. Nothing here imports jax before it must.
"""

import contextlib
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from types import FrameType
from typing import NamedTuple, NoReturn, Protocol

from app.config import ConfigError, MeshConfig

# Exit statuses of a run; 1 is left to a bug's traceback. The launchers start a job again after 42 and 128-255.
EXIT_DONE, EXIT_CONFIG, EXIT_NONFINITE, EXIT_COMPILER, EXIT_STOPPED = 0, 2, 3, 4, 42
EXIT_PEER, EXIT_WATCHDOG, EXIT_DEVICE, EXIT_STORAGE = 200, 201, 202, 203

# Variables by which a TPU cluster tells a process of its peers; jax.distributed then finds out the rest by itself.
_PEER_LISTS = ("TPU_WORKER_HOSTNAMES", "TPU_PROCESS_ADDRESSES")
PATIENT_COLLECTIVES = (
    "--xla_cpu_collective_call_warn_stuck_timeout_seconds=600 "
    "--xla_cpu_collective_call_terminate_timeout_seconds=86400"
)


class ProcessFlags(Protocol):
    """The command line's part: `--coordinator=HOST:PORT --num_processes=N --process_id=I`, all None when not given."""

    workdir: str
    coordinator: str | None
    num_processes: int | None
    process_id: int | None


def initialise(
    mesh: MeshConfig,
    controller: str,
    flags: ProcessFlags,
    *,
    join_seconds: float = 900,
    peer_seconds: float = 40,
) -> None:
    """Choose the devices and join the other processes, before anything else uses jax.

    controller: "multi", a process per host, or "single", one process that drives all devices through Pathways.
    join_seconds: the process ends with EXIT_PEER and the names of the missing ones if it has not joined by then.
    peer_seconds: `app.cluster.watch` names a process that is silent for so long; jax itself only ends this one, later.
    Raises ConfigError naming the setting if it comes too late or is incomplete.
    """
    from app.cluster import pathways

    if controller == "single":
        pathways.initialise()
        return
    pathways.check_platform(controller, os.environ.get("JAX_PLATFORMS"))
    if mesh.cpu_devices:
        use_cpu_devices(mesh.cpu_devices)
    peers = find_peers(flags, os.environ)
    if peers is not None:
        _join(peers, Path(flags.workdir) / "joining", join_seconds, peer_seconds)


def use_cpu_devices(count: int) -> None:
    """Make jax see `count` CPU devices in this process and nothing else.

    Raises ConfigError if jax has started with other devices already: they cannot be changed any more.
    """
    import jax

    # Devices of one CPU share its cores, so at a long sequence one waits minutes for another in a collective. XLA ends
    # the process after 40 s of that. Flags that are there already come later, and so they win.
    os.environ["XLA_FLAGS"] = f"{PATIENT_COLLECTIVES} {os.environ.get('XLA_FLAGS', '')}".strip()
    try:
        jax.config.update("jax_num_cpu_devices", count)  # wins over --xla_force_host_platform_device_count
    except RuntimeError as error:  # jax has started
        found = jax.local_devices()
        if len(found) != count or found[0].platform != "cpu":
            raise ConfigError(
                f"mesh.cpu_devices={count} comes too late: jax has already started with {len(found)} "
                f"{found[0].platform} devices; set it in a fresh process, before jax is used"
            ) from error
        return
    jax.config.update("jax_platforms", "cpu")


class Peers(NamedTuple):
    """Arguments of jax.distributed.initialize; None: jax detects it (Slurm, TPU)."""

    coordinator_address: str | None = None
    num_processes: int | None = None
    process_id: int | None = None


def find_peers(flags: ProcessFlags, environ: Mapping[str, str]) -> Peers | None:
    """The processes to join, None for a process on its own.

    Flags win over JAX_COORDINATOR_ADDRESS, JAX_NUM_PROCESSES and JAX_PROCESS_ID. A coordinator alone is enough where
    jax detects the rest. A TPU pod is joined when its environment names more than one host or slice.
    Raises ConfigError for a number of processes or a process id without a coordinator, or one without the other.
    """
    coordinator = flags.coordinator or environ.get("JAX_COORDINATOR_ADDRESS")
    num_processes = _number(flags.num_processes, environ, "JAX_NUM_PROCESSES")
    process_id = _number(flags.process_id, environ, "JAX_PROCESS_ID")
    if (num_processes is None) != (process_id is None) or (num_processes is not None and not coordinator):
        raise ConfigError(
            "--coordinator, --num_processes and --process_id (or JAX_COORDINATOR_ADDRESS, JAX_NUM_PROCESSES, "
            f"JAX_PROCESS_ID) go together; found {coordinator}, {num_processes}, {process_id}"
        )
    if num_processes is not None and process_id is not None and not 0 <= process_id < num_processes:
        raise ConfigError(f"--process_id={process_id} must be at least 0 and below --num_processes={num_processes}")
    many_hosts = any("," in environ.get(name, "") for name in _PEER_LISTS)
    many_slices = int(environ.get("MEGASCALE_NUM_SLICES") or 1) > 1
    if not (coordinator or many_hosts or many_slices):
        return None
    return Peers(coordinator, num_processes, process_id)


def _join(peers: Peers, board: Path, join_seconds: float, peer_seconds: float) -> None:
    """Join the other processes. While a process waits, its file stands in the directory `board`."""
    import jax

    mine = board / str(peers.process_id)
    if peers.process_id is not None:
        board.mkdir(parents=True, exist_ok=True)
        mine.write_text(socket.gethostname())
    # jax ends the process by itself when its own limit is over, and does not say who is missing.
    timer = threading.Timer(join_seconds, _give_up, (peers, board, join_seconds))
    timer.daemon = True
    timer.start()
    jax.distributed.initialize(
        **peers._asdict(),
        initialization_timeout=int(join_seconds) + 60,
        # The watch needs 1.3 times its limit to find a lost process and tell the others; jax, which aborts, is later.
        heartbeat_timeout_seconds=int(1.5 * peer_seconds) + 30,
    )
    timer.cancel()
    mine.unlink(missing_ok=True)


def _give_up(peers: Peers, board: Path, join_seconds: float) -> NoReturn:
    """End the process, naming those that wait and those that do not."""
    message = f"not all processes have joined at {peers.coordinator_address or 'the coordinator'} within "
    message += f"{join_seconds:g} s (limits.join)"
    if peers.num_processes is not None:
        fresh = [file for file in board.iterdir() if file.stat().st_mtime > time.time() - 2 * join_seconds]
        there = {int(file.name): file.read_text() for file in fresh}
        absent = sorted(set(range(peers.num_processes)) - set(there))
        message += f": {len(there)} of {peers.num_processes} wait, " + ", ".join(
            f"process {process} (host {host})" for process, host in sorted(there.items())
        )
        message += f"; not there: {', '.join(map(str, absent)) or 'none, so some cannot reach the coordinator'}"
    os.write(2, f"{message}\n".encode())
    os._exit(EXIT_PEER)


def leave(status: int) -> NoReturn:
    """End the program. At once if the launcher is to start it again, or other processes would be waited for."""
    import jax

    if status >= EXIT_PEER or (status not in (EXIT_DONE, EXIT_STOPPED) and jax.distributed.is_initialized()):
        with contextlib.suppress(OSError):  # a full disk must not change the status
            sys.stdout.flush()
            sys.stderr.flush()
        if status in (EXIT_CONFIG, EXIT_NONFINITE):
            _leave_together()
        os._exit(status)
    sys.exit(status)


def _leave_together(seconds: float = 10.0) -> None:
    """Wait for the processes that end for the same reason: jax aborts (134) those that outlive process 0's service."""
    import jax

    from app.cluster import peers

    with contextlib.suppress(jax.errors.JaxRuntimeError):  # some do not end, or are gone: nothing to wait for
        peers.client().wait_at_barrier(f"{peers.PREFIX}leaving", int(1000 * seconds))
    if peers.index() == 0:
        time.sleep(1.0)  # the others have heard that all are there, and go


def _number(flag: int | None, environ: Mapping[str, str], name: str) -> int | None:
    text = environ.get(name)
    if flag is not None or text is None:
        return flag
    if not text.isdecimal():
        raise ConfigError(f"environment variable {name}={text!r} must be a number")
    return int(text)


class StopSignal:
    """A latch that SIGTERM or SIGINT sets and the training loop polls between steps. Make it in the main thread.

    On its own, a process stops at the next poll after the signal. Among several, jax's preemption service owns SIGTERM:
    a signal to any one of them makes all agree on one poll to stop at, so that they save the same checkpoint. SIGINT
    is turned into SIGTERM there. A second SIGINT kills the process at once, without a checkpoint.
    """

    def __init__(self) -> None:
        import jax

        self.name = "SIGTERM"  # of the signal that was seen
        self._several = jax.distributed.is_initialized()
        self._latched = False
        self._polls = 0
        if not self._several:
            signal.signal(signal.SIGTERM, self._latch)
        signal.signal(signal.SIGINT, self._interrupt)

    def requested(self) -> bool:
        """Whether to save and stop now. Several processes must all poll at the same places."""
        self._polls += 1
        if self._several and not self._latched:
            from jax.experimental import multihost_utils

            # True at exactly one poll, hence the latch.
            self._latched = multihost_utils.reached_preemption_sync_point(self._polls)
        return self._latched

    def _latch(self, signum: int, frame: FrameType | None) -> None:
        self.name = signal.Signals(signum).name
        self._latched = True

    def _interrupt(self, signum: int, frame: FrameType | None) -> None:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        if self._several:
            os.kill(os.getpid(), signal.SIGTERM)
        else:
            self._latch(signum, frame)
