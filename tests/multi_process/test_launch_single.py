"""One controller against four: the same program, data and mesh, with eight devices in two slices.

The proxy's client is replaced by one of eight CPU devices, since no package holds a proxy server; everything else is
pathwaysutils' and the program's own.
"""

import json
import os
import subprocess
import sys

import pytest

from data import prepare
from tests.tiny import TINY

STEPS = 6
FLAGS = {**TINY, "steps": STEPS, "global_batch": 8, "checkpoint.every_steps": 3, "eval.every_steps": 0,
         "mesh.data": 2, "mesh.dcn.data": 2, "mesh.fsdp": 2, "mesh.context": 2, "data.source": "",
         "model.num_hidden_layers": 2, "model.full_attention_interval": 2,
         "log.tensorboard": False}  # fmt: skip
PROXY_OF_CPUS = (
    "import sys\n"
    "from jax.extend.backend import ifrt_proxy\n"
    "from jaxlib import xla_client\n"
    "ifrt_proxy.get_client = lambda target, options: xla_client.make_cpu_client(num_devices=8)\n"
    "from app.cluster import mesh\n"
    "mesh.device_slice = lambda device: device.id // 4\n"  # CPU devices do not say their slice
    "from app import train\n"
    "sys.exit(train.main(sys.argv[1:]))\n"
)


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    folder = tmp_path_factory.mktemp("corpus")
    for number in range(200):
        (folder / f"{number:03}.txt").write_text(f"document {number}: " + "abcdefgh " * (number % 17))
    prepare.prepare(str(folder / "*.txt"), folder / "prepared", tokenizer="bytes")
    return folder / "prepared"


def arguments(corpus, workdir, **changes):
    flags = {**FLAGS, "data.path": corpus, **changes}
    keys = [f"--config.{key}={value}" for key, value in flags.items()]
    return ["--config=configs/demo.py", f"--workdir={workdir}", *keys]


def metrics(workdir):
    lines = [json.loads(line) for line in (workdir / "metrics.jsonl").read_text().splitlines()]
    return {line["step"]: (line["loss"], line["grad_norm"], line["tokens"]) for line in lines}


def single(corpus, workdir, **changes):
    environ = {**os.environ, "JAX_PLATFORMS": "proxy", "JAX_BACKEND_TARGET": "grpc://localhost:29000"}
    given = arguments(corpus, workdir, **{"controller": "single", "mesh.cpu_devices": 0, **changes})
    command = [sys.executable, "-c", PROXY_OF_CPUS, *given]
    return subprocess.run(command, env=environ, capture_output=True, text=True, timeout=900, check=False)


@pytest.mark.slow
def test_one_controller_trains_as_four_processes_do(corpus, tmp_path):
    done = single(corpus, tmp_path / "single")
    assert done.returncode == 0, done.stderr
    assert "devices: 8 x cpu" in done.stdout

    command = [sys.executable, "-m", "app.train", *arguments(corpus, tmp_path / "multi", **{"mesh.cpu_devices": 2})]
    peers = [
        subprocess.Popen(
            [*command, "--coordinator=127.0.0.1:29471", "--num_processes=4", f"--process_id={process}"],
            env={**os.environ, "JAX_PLATFORMS": "cpu"}, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        )
        for process in range(4)
    ]  # fmt: skip
    outputs = [peer.communicate(timeout=900)[0] for peer in peers]
    assert [peer.returncode for peer in peers] == [0] * 4, outputs

    one, four = metrics(tmp_path / "single"), metrics(tmp_path / "multi")
    assert list(one) == list(four) == list(range(1, STEPS + 1))
    worst = max(abs(a - b) / abs(b) for step in one for a, b in zip(one[step], four[step], strict=True))
    print(f"largest relative difference of losses and gradient norms: {worst:.1e}")
    assert all(one[step][2] == four[step][2] for step in one)
    # Sums over devices are taken in another order by gloo (between processes) than inside one process.
    assert worst < 1e-5

    done = single(corpus, tmp_path / "single", steps=STEPS + 2)  # resumes
    assert done.returncode == 0 and f"resumed from step {STEPS}" in done.stdout, done.stderr
    assert max(metrics(tmp_path / "single")) == STEPS + 2
