"""One job read by 1, 2, 4 and 8 real processes in turn: every step's global batch is the same, bit for bit."""

import dataclasses
import json
import os
import socket
import subprocess
import sys

import numpy as np
import pytest

from data import prepare
from data.stream import Stream, StreamOptions
from tests.multi_process.data_worker import digest

ROWS, TOKENS = 4, 256
# Processes and mesh (data, fsdp, context, expert, tensor) of each part of the run, three steps a part.
PARTS = [
    (1, (1, 1, 1, 1, 1)),
    (2, (1, 1, 2, 1, 1)),
    (4, (2, 1, 1, 2, 1)),
    (8, (1, 1, 8, 1, 1)),
    (4, (1, 2, 2, 1, 1)),
    (2, (2, 1, 1, 1, 1)),
]
STEPS = 3


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("localhost", 0))
        return probe.getsockname()[1]


def run(processes: int, work: str) -> list[dict]:
    address = f"localhost:{free_port()}"
    environment = os.environ | {"JAX_PLATFORMS": "cpu"}
    started = [
        subprocess.Popen(
            [sys.executable, "-m", "tests.multi_process.data_worker", address, str(processes), str(process), work],
            env=environment,
            stdout=subprocess.PIPE,
            text=True,
        )
        for process in range(processes)
    ]
    outputs = [process.communicate(timeout=300)[0] for process in started]
    assert [process.returncode for process in started] == [0] * processes
    return [json.loads(output.splitlines()[-1]) for output in outputs]


@pytest.mark.slow
def test_the_global_batch_does_not_depend_on_the_number_of_processes(tmp_path):
    rng = np.random.default_rng(0)
    for number, length in enumerate((9000, 1, 1, 30, 700, 2000, 64, 5)):
        (tmp_path / f"{number}.txt").write_bytes(rng.integers(32, 127, length).astype(np.uint8).tobytes())
    prepare.prepare(f"{tmp_path}/*.txt", tmp_path / "out")
    options = StreamOptions(
        directory=str(tmp_path / "out"),
        tokenizer="bytes",
        documents="separate",
        weights="",
        whole_documents=False,
        holdout=0.0,
        seq_len=TOKENS,
        global_batch=ROWS,
        seed=5,
        split="train",
    )
    stream = Stream(options)
    for part, (processes, sizes) in enumerate(PARTS):
        start, stop = part * STEPS, (part + 1) * STEPS
        found = run(processes, json.dumps([dataclasses.asdict(options), sizes, start, stop]))
        expected = {step: stream.block(step, (0, ROWS), (0, TOKENS)) for step in range(start, stop)}
        covered = {(step, name): np.zeros((ROWS, TOKENS), int) for step, fields in expected.items() for name in fields}
        for process in found:
            for step, name, rows, columns, seen in process["held"]:
                assert seen == digest(expected[step][name][slice(*rows), slice(*columns)])
                covered[step, name][slice(*rows), slice(*columns)] += 1
        assert all((count == 1).all() for count in covered.values())
