"""Several processes on this machine, to try a run of many hosts: python -m app.local --num_processes=4 --config=...

All other arguments are app.train's. Each line of output starts with its process's number. A signal to this command
goes to process 0, which tells the others. The exit status is 0 if all processes ended with 0, or the first other one.
"""

import contextlib
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Sequence
from typing import IO

FLAG = "--num_processes="


def main(argv: Sequence[str]) -> int:
    counts = [argument.removeprefix(FLAG) for argument in argv if argument.startswith(FLAG)]
    if len(counts) != 1 or not counts[0].isdecimal() or int(counts[0]) < 1:
        print(f"give {FLAG}N once, a number from 1", file=sys.stderr)
        return 2
    rest = [argument for argument in argv if not argument.startswith(FLAG)]
    processes = start(rest, int(counts[0]), stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: processes[0].send_signal(signal.SIGTERM))
    copiers = [
        threading.Thread(target=_copy, args=(index, process.stdout)) for index, process in enumerate(processes)
    ]
    for copier in copiers:
        copier.start()
    statuses = [process.wait() for process in processes]
    for copier in copiers:
        copier.join()
    ended = [status if status >= 0 else 128 - status for status in statuses]  # a shell's number for a signal
    return next((status for status in ended if status), 0)


def start(arguments: Sequence[str], count: int, **options) -> list[subprocess.Popen[str]]:
    """`count` processes of app.train that join each other over loopback. options: those of Popen."""
    address = f"127.0.0.1:{free_port()}"
    return [
        subprocess.Popen(
            [sys.executable, "-m", "app.train", *arguments, *peer_flags(address, count, index)],
            text=True,
            start_new_session=True,  # Ctrl-C reaches this command alone, not each of them at once
            **options,
        )
        for index in range(count)
    ]


def free_port() -> int:
    with contextlib.closing(socket.socket()) as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def peer_flags(address: str, count: int, index: int) -> list[str]:
    """What tells process `index` of `count` to join the others; nothing for one on its own."""
    if count == 1:
        return []
    return [f"--coordinator={address}", f"--num_processes={count}", f"--process_id={index}"]


def _copy(index: int, lines: IO[str] | None) -> None:
    assert lines is not None
    for line in lines:
        os.write(1, f"[{index}] {line}".encode())


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
