"""The command: a small real plan where libtpu is installed, and what it says when there is none to make."""

import gzip
import importlib.util
import json
import re

import pytest

from app import plan
from app.cluster.hardware import parse_topology
from app.planning import compiler, search
from tests.tiny import EXPERTS, TINY, tiny_config

CHANGES = {
    "model.num_hidden_layers": 2, "model.full_attention_interval": 2, "mesh.fsdp": 1, "mesh.context": 4,
    "global_batch": 1, "seq_len": 256, "ops.attention_kernel": "xla", "ops.gdn_kernel": "xla",
}  # fmt: skip
SMALL = [
    "--config=configs/base.py",
    *(f"--config.{key}={value}" for key, value in {**TINY, **CHANGES}.items()),
    "--topology=v5p:2x2x1",
]


@pytest.mark.skipif(importlib.util.find_spec("libtpu") is None, reason="needs libtpu (compiles for TPU topologies)")
def test_a_small_plan(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert plan.main([*SMALL, f"--json={tmp_path}/plan.json"]) == 0, capsys.readouterr().err
    found = json.loads((tmp_path / "plan.json").read_text())
    assert found["chips"] == 4 and found["mesh"] == {"context": 4} and found["memory"]["fits"]
    (text,) = (gzip.decompress(path.read_bytes()).decode() for path in tmp_path.rglob("program.hlo.gz"))
    assert re.search(r'all-gather\S* = .* call-start\(.*async_execution_thread="sparsecore"', text)
    kinds = {row["kind"] for row in found["collectives"]}
    assert {"all-gather", "collective-permute"} <= kinds
    memory = found["memory"]
    assert memory["total"] == sum(memory[name] for name in ("arguments", "outputs", "temporaries", "code"))
    assert 0 <= memory["outputs"] < 10_000 < memory["temporaries"]  # the state is updated in place
    assert all(row["axes"] == ["context"] and row["hops"] <= 3 for row in found["collectives"])
    # A whole step computes at least the model's FLOPs, three times the forward (without recomputation).
    model = 3 * sum(found["model_flops_per_token"].values()) * 256 / 4
    assert model < found["compiled"]["flops"] < 40 * model  # blocks of 128 x 128 of tiny heads are mostly padding
    step = found["step"]
    assert step["seconds"] == pytest.approx(sum(step["busy"].values()) + sum(step["exposed"].values()))
    assert {"gdn core", "attention core", "mlp", "head and loss"} <= set(step["busy"])
    assert "MFU" in capsys.readouterr().out


@pytest.mark.parametrize(
    "argument, message",
    [("--topology=v5q:2x2x1", "unknown TPU generation"), ("--topology=v5p:3x3x3", "no such slice")],
)
def test_an_unknown_topology_is_status_2(argument, message, capsys):
    assert plan.main([*SMALL[:-1], argument]) == 2
    assert message in capsys.readouterr().err


def test_a_missing_libtpu_is_status_4(capsys, monkeypatch):
    monkeypatch.setattr(compiler.importlib.util, "find_spec", lambda name: None)
    assert plan.main(SMALL) == 4
    assert "libtpu is not installed" in capsys.readouterr().err


@pytest.mark.parametrize(
    "words",
    [
        "... Used 120.50G of 95.73G hbm. Exceeded by 24.77G.",
        "E1000: the total memory required for HLO temporaries (120.50G) exceeds available HBM (95.73G). HLO module: x.",
    ],
)
def test_a_step_that_does_not_fit_is_status_2_and_names_keys(words, capsys, monkeypatch):
    def exhausted(*_):
        raise compiler._failure(f"E1 x\nRESOURCE_EXHAUSTED: {words}\nSee https://openxla.org")

    monkeypatch.setattr(compiler, "compile_step", exhausted)
    assert plan.main(SMALL) == 2
    error = capsys.readouterr().err
    assert "it needs 120.50G of 95.73G" in error and "remat='full'" in error and "mesh.context" in error


def test_a_stop_inside_libtpu_is_reported_in_its_own_words():
    words = "W0000 x] a warning\nF1129 17:36:29.3 15972 fusion_util.cc:5151] Check failed: window\n    @ 0x7f  frame\n"
    assert "libtpu stopped: Check failed: window" in str(compiler._failure(words))


def test_the_search_offers_valid_meshes_only_the_cheapest_first():
    config = tiny_config(**{"global_batch": 4, "seq_len": 64, "mesh.cpu_devices": 0})
    found = search.candidates(config, parse_topology("v5p:2x2x1"), 1)
    sizes = [(one.mesh.fsdp, one.mesh.context, one.mesh.tensor) for one in found]
    assert sizes[0] == (4, 1, 1) and {(2, 2, 1), (1, 4, 1), (2, 1, 2)} <= set(sizes)
    assert all(fsdp * context * tensor == 4 for fsdp, context, tensor in sizes)
    assert all(one.global_batch % (one.mesh.fsdp * one.accumulation) == 0 for one in found)


def test_the_search_offers_more_ranks_for_the_experts():
    config = tiny_config(**EXPERTS, **{"global_batch": 1, "seq_len": 256, "mesh.cpu_devices": 0, "mesh.fsdp": 1})
    found = search.candidates(config, parse_topology("v5p:2x2x2"), 1)
    assert [(one.mesh.context, one.mesh.expert) for one in found[:2]] == [(8, 1), (2, 4)]
