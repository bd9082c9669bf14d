"""Long sequences: memory of the whole step by its arrays, and a run of 131,072 tokens over eight ranks."""

import json
import math
import os
import subprocess
import sys

import jax
import pytest
from jax.extend import core

from app.cluster.mesh import build_mesh
from app.training.step import Program
from tests.tiny import tiny_config

# One softmax layer with one head of 8 dims, one recurrent layer, documents joined; everything else is the demo's.
SMALL_HYBRID = {
    "global_batch": 1, "remat": "exchanges", "mesh.fsdp": 1, "mesh.context": 8, "mesh.cpu_devices": 8,
    "model.num_hidden_layers": 2, "model.full_attention_interval": 2, "model.hidden_size": 32,
    "model.intermediate_size": 64, "model.num_attention_heads": 1, "model.num_key_value_heads": 1, "model.head_dim": 8,
    "model.linear_num_key_heads": 1, "model.linear_num_value_heads": 1, "model.linear_key_head_dim": 16,
    "model.linear_value_head_dim": 16, "ops.attention_block": 512, "data.documents": "joined", "data.holdout": 0.0,
}  # fmt: skip


def arrays(jaxpr):
    """Shapes of every value that the program and the programs inside it make."""
    for equation in jaxpr.eqns:
        yield from (variable.aval.shape for variable in equation.outvars if hasattr(variable.aval, "shape"))
        for inner in jax.tree.leaves(list(equation.params.values()), is_leaf=is_jaxpr):
            if is_jaxpr(inner):
                yield from arrays(inner.jaxpr if isinstance(inner, core.ClosedJaxpr) else inner)


def is_jaxpr(value):
    return isinstance(value, (core.ClosedJaxpr, core.Jaxpr))


def largest_array(seq_len, **changes):
    """Elements of the largest array of the whole train step, on one rank inside shard_map and on all outside."""
    config = tiny_config(seq_len=seq_len, **{**SMALL_HYBRID, "loss.chunk": 1024, **changes})
    program = Program(config, build_mesh(config.mesh, jax.devices()))
    jaxpr = jax.make_jaxpr(program.train_step)(program.state, program.batch)
    return max(math.prod(shape) for shape in arrays(jaxpr.jaxpr))


def test_no_array_grows_faster_than_the_sequence():
    """Masks of all pairs of tiles, made ahead by the differentiation of the layers' scan, once took 6 GB a rank."""
    short, long = largest_array(65_536), largest_array(131_072)
    assert long <= 2 * short
    assert long <= 131_072 // 8 * 512  # the recurrence's chunk factors; a tokens x tokens array is 16,384 a token
    assert largest_array(131_072, **{"loss.chunk": 16_384}) >= 16_384 * 272  # logits of all tokens would be seen


def start(workdir):
    flags = {**SMALL_HYBRID, "seq_len": 131_072, "steps": 3, "log.every_steps": 1, "checkpoint.every_steps": 1}
    arguments = [f"--config.{key}={value}" for key, value in flags.items()]
    command = [sys.executable, "-m", "app.train", "--config=configs/demo.py", f"--workdir={workdir}", *arguments]
    return subprocess.Popen(command, env={**os.environ, "JAX_PLATFORMS": "cpu"}, stderr=subprocess.PIPE, text=True)


def losses(workdir):
    lines = [json.loads(line) for line in (workdir / "metrics.jsonl").read_text().splitlines()]
    return {line["step"]: (line["loss"], line["grad_norm"]) for line in lines}


@pytest.mark.slow
def test_131072_tokens_train_and_resume(tmp_path):
    """Three steps on real text; killed after the second and run again they are the same to the last bit."""
    whole = start(tmp_path / "whole")
    assert whole.wait(timeout=3600) == 0, whole.stderr.read()
    broken = start(tmp_path / "broken")
    for line in broken.stderr:
        if "step 2/" in line:
            break
    broken.kill()
    broken.wait()
    again = start(tmp_path / "broken")
    assert again.wait(timeout=3600) == 0, again.stderr.read()
    assert losses(tmp_path / "broken") == losses(tmp_path / "whole")
    assert list(losses(tmp_path / "whole")) == [1, 2, 3]
