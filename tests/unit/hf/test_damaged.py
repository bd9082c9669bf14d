"""Checkpoints that cannot be used: one clear message with every problem, exit status 2, and nothing left behind."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from app import hf
from app.hf.__main__ import main
from app.hf.config import model_config, published_config
from app.hf.published import Published

GOLDENS = Path(__file__).parents[2] / "parity" / "goldens"
SHARDS = ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors")


@pytest.fixture
def source(tmp_path):
    """A checkpoint in float32, in two shards with an index; untied."""
    directory = tmp_path / "source"
    directory.mkdir()
    shutil.copyfile(GOLDENS / "dense_untied" / "config.json", directory / "config.json")
    opened = Published(GOLDENS / "dense_untied")
    tensors = {name: opened.read(name).astype(np.float32) for name in opened.tensors}
    halves = [dict(list(tensors.items())[::2]), dict(list(tensors.items())[1::2])]
    for file, half in zip(SHARDS, halves, strict=True):
        save_file(half, directory / file)
    weight_map = {name: file for file, half in zip(SHARDS, halves, strict=True) for name in half}
    (directory / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    return directory


def change_config(directory, **fields):
    path = directory / "config.json"
    content = json.loads(path.read_text()) | fields
    path.write_text(json.dumps({key: value for key, value in content.items() if value is not None}))


def change_tensors(directory, change):
    """Apply `change` to the dict of the second shard's tensors, and list them in the index."""
    path, index = directory / SHARDS[1], directory / "model.safetensors.index.json"
    tensors = load_file(path)
    weight_map = json.loads(index.read_text())["weight_map"]
    before = set(tensors)
    change(tensors)
    save_file(tensors, path)
    kept = {name: file for name, file in weight_map.items() if name not in before}
    index.write_text(json.dumps({"weight_map": kept | dict.fromkeys(tensors, SHARDS[1])}))


def truncate(path, by):
    path.write_bytes(path.read_bytes()[:-by])


def wrong_shape(tensors):
    name = next(name for name in tensors if name.endswith("input_layernorm.weight"))
    tensors[name] = tensors[name][:-1]


def integers(tensors):
    name = next(iter(tensors))
    tensors[name] = tensors[name].astype(np.int8)


def pickled(directory):
    (directory / "model.safetensors.index.json").unlink()
    for path in directory.glob("*.safetensors"):
        path.rename(path.with_suffix(".bin"))


DAMAGE = {
    "missing shard": (lambda d: (d / SHARDS[0]).unlink(), [f"the shard {SHARDS[0]} is missing"]),
    "truncated": (lambda d: truncate(d / SHARDS[1], 1), [f"{SHARDS[1]} is damaged", "its header describes"]),
    "cut in the header": (lambda d: (d / SHARDS[1]).write_bytes(b"\1\2\3"), [f"{SHARDS[1]} is no whole safetensors"]),
    "header of another kind": (
        lambda d: (d / SHARDS[1]).write_bytes(len(b"[1, 2]").to_bytes(8, "little") + b"[1, 2]"),
        [f"the header of {SHARDS[1]} is damaged"],
    ),
    "wrong shape": (lambda d: change_tensors(d, wrong_shape), ["has the shape [23], the config makes it [24]"]),
    "wrong dtype": (lambda d: change_tensors(d, integers), ["has the dtype I8, not one of BF16, F16, F32"]),
    "missing tensor": (lambda d: change_tensors(d, lambda t: t.popitem()), ["1 tensors are missing: "]),
    "unexpected tensor": (
        lambda d: change_tensors(d, lambda t: t.update({"model.layers.9.odd": np.zeros(1, np.float32)})),
        ["1 tensors are unexpected: model.layers.9.odd"],
    ),
    "another architecture": (
        lambda d: change_config(d, model_type="llama"),
        ["model_type 'llama' is none of 'qwen3_5_text'"],
    ),
    "another size": (lambda d: change_config(d, num_hidden_layers=2, layer_types=None), ["are unexpected"]),
    "tied, but a head": (
        lambda d: change_config(d, tie_word_embeddings=True),
        ["tie_word_embeddings is True, but lm_head.weight is there"],
    ),
    "untied, but no head": (
        lambda d: [change_tensors(d, lambda t: t.pop("lm_head.weight", None)), drop_head(d)],
        ["tie_word_embeddings is False, but lm_head.weight is missing"],
    ),
    "another activation": (lambda d: change_config(d, hidden_act="gelu"), ["hidden_act='gelu' is not supported"]),
    "scaled rope": (
        lambda d: change_config(d, rope_parameters={"rope_type": "yarn", "rope_theta": 1e7, "factor": 4.0}),
        ["rope_type 'yarn' is not supported"],
    ),
    "text for a number": (lambda d: change_config(d, hidden_size="24"), ["hidden_size='24' has the wrong type"]),
    "index into another place": (
        lambda d: (d / "model.safetensors.index.json").write_text('{"weight_map": {"a": "../b.safetensors"}}'),
        ["has no weight_map from tensors to files beside it"],
    ),
    "missing field": (lambda d: change_config(d, head_dim=None), ["the field head_dim is missing"]),
    "remote code": (lambda d: change_config(d, auto_map={"AutoModel": "x.Y"}), ["auto_map"]),
    "no config": (lambda d: (d / "config.json").unlink(), ["there is no config.json"]),
    "pickled weights": (lambda d: pickled(d), ["there is no safetensors file (pickled weights are never loaded"]),
    "no index": (lambda d: (d / "model.safetensors.index.json").unlink(), ["2 safetensors files and no"]),
    "wrong index": (
        lambda d: (d / "model.safetensors.index.json").write_text(
            json.dumps({"weight_map": {"model.norm.weight": SHARDS[0], "odd": SHARDS[1]}})
        ),
        ["1 tensors are not in the shard that", "of the shards are not in"],
    ),
    "several": (
        lambda d: [(d / SHARDS[0]).unlink(), truncate(d / SHARDS[1], 8), (d / "config.json").write_text("{")],
        ["is missing", "is damaged", "config.json is not JSON"],
    ),
}


def drop_head(directory):
    for file in SHARDS:
        tensors = load_file(directory / file)
        if tensors.pop("lm_head.weight", None) is not None:
            save_file(tensors, directory / file)
    index = directory / "model.safetensors.index.json"
    weight_map = json.loads(index.read_text())["weight_map"]
    weight_map.pop("lm_head.weight", None)
    index.write_text(json.dumps({"weight_map": weight_map}))


@pytest.mark.parametrize("kind", DAMAGE)
def test_damage_is_named_and_leaves_nothing(kind, source, tmp_path, capsys):
    damage, messages = DAMAGE[kind]
    damage(source)
    assert main(["import", "--checkpoint", str(source), "--out", str(tmp_path / "weights")]) == 2
    output = capsys.readouterr()
    assert output.out == "" and all(message in output.err for message in messages), output.err
    assert output.err.count("cannot be used") == 1
    assert [path.name for path in tmp_path.iterdir()] == ["source"]


def test_undamaged_is_imported_and_only_into_an_empty_place(source, tmp_path, capsys):
    arguments = ["import", "--checkpoint", str(source), "--out", str(tmp_path / "weights")]
    assert main(arguments) == 0
    assert "imported" in capsys.readouterr().out
    assert main(arguments) == 2
    assert "exists already" in capsys.readouterr().err
    assert main(["import", "--checkpoint", str(tmp_path / "weights"), "--out", str(tmp_path / "other")]) == 2
    assert "Longscan's own" in capsys.readouterr().err
    assert main([*arguments[:3], "--out", str(tmp_path / "other"), "--mesh", "tensor=5"]) == 2
    assert "is not a multiple" in capsys.readouterr().err
    assert sorted(path.name for path in tmp_path.iterdir()) == ["source", "weights"]


def test_a_failed_write_leaves_nothing(source, tmp_path, monkeypatch):
    def failing(self, name, rows=slice(None)):
        raise OSError("the disk is gone")

    monkeypatch.setattr(Published, "read", failing)
    with pytest.raises(OSError, match="the disk is gone"):
        hf.import_checkpoint(source, tmp_path / "weights")
    assert [path.name for path in tmp_path.iterdir()] == ["source"]


@pytest.mark.parametrize("workdir", ["nowhere", "source"])
def test_export_of_something_else(source, tmp_path, capsys, workdir):
    assert main(["export", "--workdir", str(tmp_path / workdir), "--out", str(tmp_path / "out")]) == 2
    assert "neither imported weights nor the checkpoints of a run" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_old_spellings_of_rope_and_the_place_of_tied():
    published = json.loads((GOLDENS / "dense_tied" / "config.json").read_text())
    wanted = model_config(published)
    rope = published.pop("rope_parameters")
    flat = {**published, "rope_theta": rope["rope_theta"], "partial_rotary_factor": rope["partial_rotary_factor"]}
    assert model_config({**flat, "rope_scaling": None}) == wanted
    assert model_config({**flat, "rope_parameters": {"type": "default", "rope_theta": rope["rope_theta"]}}) == wanted
    del flat["tie_word_embeddings"]
    assert model_config({"model_type": "qwen3_5", "tie_word_embeddings": True, "text_config": flat}) == wanted
    assert model_config(published_config(wanted, "float32")) == wanted
