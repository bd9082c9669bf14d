"""Import and export give back every tensor bit for bit, in the source's layout; the table covers every parameter."""

import dataclasses
import shutil
from pathlib import Path

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from flax import nnx
from safetensors import safe_open

from app import hf
from app.config import CheckpointConfig
from app.hf import convert
from app.hf.published import DTYPES, Published, Stored, write_index, write_shards
from app.models import params as model_params
from app.training import checkpoint
from app.training.step import TrainState

GOLDENS = Path(__file__).parents[2] / "parity" / "goldens"
NAMES = sorted(path.name for path in GOLDENS.glob("*/"))


def rewritten(source: Path, target: Path, shards: int = 1, extra=(), dtype=lambda name: None) -> Path:
    """A copy of a checkpoint in `shards` files with an index, more tensors (name, array), other dtypes by name."""
    opened = Published(source)
    arrays = {name: opened.read(name) for name in opened.tensors} | dict(extra)
    arrays = {name: x.astype(dtype(name) or x.dtype) for name, x in arrays.items()}
    names = {dtype: name for name, dtype in DTYPES.items()}
    tensors = {
        name: Stored(f"model-{n % shards + 1:05d}-of-{shards:05d}.safetensors", names[x.dtype], x.shape, 0, x.nbytes)
        for n, (name, x) in enumerate(arrays.items())
    }
    target.mkdir()
    write_shards(target, tensors, ((name, [np.ascontiguousarray(x)]) for name, x in arrays.items()))
    write_index(target, tensors)
    shutil.copyfile(source / "config.json", target / "config.json")
    return target


def assert_same_checkpoint(source: Path, exported: Path):
    """The same config, shards, names, dtypes, shapes and bytes; read by the safetensors package too."""
    a, b = Published(source), Published(exported)
    assert a.config == b.config and a.has_index == b.has_index
    assert {n: (s.file, s.dtype, s.shape) for n, s in a.tensors.items()} == {
        n: (s.file, s.dtype, s.shape) for n, s in b.tensors.items()
    }
    for name in a.tensors:
        assert a.read(name).tobytes() == b.read(name).tobytes(), name
    for file in {stored.file for stored in b.tensors.values()}:
        with safe_open(exported / file, framework="numpy") as reader:
            assert reader.metadata() == {"format": "pt"}
            assert {n: tuple(reader.get_slice(n).get_shape()) for n in reader.keys()} == {  # noqa: SIM118
                n: s.shape for n, s in b.tensors.items() if s.file == file
            }


@pytest.mark.parametrize("name", NAMES)
def test_the_table_fills_every_parameter_once(name):
    source, config, entries = convert.open_checkpoint(GOLDENS / name)
    specs = model_params.describe(config)
    filled = {param: np.zeros(spec.shape, np.int32) for param, spec in specs.items()}
    for entry in entries:
        for block in entry.blocks(3):
            parts = block.split(source.read(entry.name, block.rows))
            assert block.join(parts).tobytes() == source.read(entry.name, block.rows).tobytes()
            for i, values in enumerate(parts):
                assert filled[entry.params[i]][block.region(i)].shape == values.shape
                filled[entry.params[i]][block.region(i)] += 1
    assert all((counts == 1).all() for counts in filled.values())


@pytest.mark.parametrize("name", NAMES)
def test_import_and_export_are_bit_equal_and_idempotent(name, tmp_path):
    hf.import_checkpoint(GOLDENS / name, tmp_path / "weights", {"fsdp": 2, "tensor": 2})
    hf.export_checkpoint(tmp_path / "weights", tmp_path / "exported")
    assert_same_checkpoint(GOLDENS / name, tmp_path / "exported")
    hf.import_checkpoint(tmp_path / "exported", tmp_path / "again")
    hf.export_checkpoint(tmp_path / "again", tmp_path / "twice")
    files = sorted(path.name for path in (tmp_path / "exported").iterdir())
    assert files == sorted(path.name for path in (tmp_path / "twice").iterdir())
    for file in files:
        assert (tmp_path / "exported" / file).read_bytes() == (tmp_path / "twice" / file).read_bytes()


def test_other_tensors_dtypes_shards_and_files_are_carried(tmp_path):
    rng = np.random.default_rng(0)
    extra = {
        "mtp.fc.weight": rng.normal(size=(24, 48)).astype(ml_dtypes.bfloat16),
        "model.visual.blocks.0.attn.qkv.bias": rng.normal(size=7).astype(np.float16),
    }

    def dtype(name):  # float16 layers among bfloat16 ones: stacked in float32
        return np.float16 if ".layers.1." in name or name.startswith("lm_head") else None

    source = rewritten(GOLDENS / "next_moe", tmp_path / "source", 3, extra.items(), dtype)
    (source / "tokenizer.json").write_text("{}")
    lines = hf.import_checkpoint(source, tmp_path / "weights")
    assert any("1 tensors model.visual." in line for line in lines) and any("tokenizer.json" in line for line in lines)
    hf.export_checkpoint(tmp_path / "weights", tmp_path / "exported")
    assert_same_checkpoint(source, tmp_path / "exported")
    assert (tmp_path / "exported" / "tokenizer.json").read_text() == "{}"


def test_weights_are_restored_by_training(tmp_path):
    hf.import_checkpoint(GOLDENS / "dense_tied", tmp_path / "weights")
    model = hf.load_model(GOLDENS / "dense_tied")
    where = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    like = {
        name: jax.ShapeDtypeStruct(spec.shape, "float32", sharding=where)
        for name, spec in model_params.describe(model.config).items()
    }
    restored = checkpoint.restore_weights(tmp_path / "weights", like)
    rebuilt = model_params.build(model.config, model.runtime, restored)
    for got, want in zip(jax.tree.leaves(rebuilt), jax.tree.leaves(model), strict=True):
        np.testing.assert_array_equal(np.asarray(got), np.asarray(want))


def with_mtp(source: Path, target: Path) -> Path:
    """The checkpoint with a layer of multi-token prediction: a copy of its softmax layer 1."""
    opened = Published(source)
    block = {name: name[name.index(".layers.1.") :] for name in opened.tensors if ".layers.1." in name}
    rng = np.random.default_rng(1)
    extra = {f"mtp{end.replace('.1.', '.0.', 1)}": opened.read(name) for name, end in block.items()}
    norms = ("pre_fc_norm_embedding", "pre_fc_norm_hidden", "norm")
    extra |= {f"mtp.{norm}.weight": rng.normal(size=24).astype(ml_dtypes.bfloat16) for norm in norms}
    extra["mtp.fc.weight"] = rng.normal(size=(24, 48)).astype(ml_dtypes.bfloat16)
    return rewritten(source, target, extra=extra.items())


def test_the_layer_of_multi_token_prediction_becomes_parameters(tmp_path):
    source = with_mtp(GOLDENS / "next_moe", tmp_path / "source")
    lines = hf.import_checkpoint(source, tmp_path / "weights", mtp=True)
    assert not any("carried to the export" in line for line in lines)
    hf.export_checkpoint(tmp_path / "weights", tmp_path / "exported")
    assert_same_checkpoint(source, tmp_path / "exported")
    model = hf.load_model(source, mtp=True)
    fc = Published(source).read("mtp.fc.weight").astype(np.float32)
    np.testing.assert_array_equal(np.asarray(model.mtp.fc[...]), fc.T)
    with pytest.raises(hf.CheckpointError, match=r"tensors are missing: .*mtp\.fc\.weight"):
        hf.load_model(GOLDENS / "dense_untied", mtp=True)


def test_damaged_weights_are_not_exported(tmp_path):
    hf.import_checkpoint(GOLDENS / "dense_tied", tmp_path / "weights")
    largest = max((tmp_path / "weights" / "params").rglob("*"), key=lambda path: path.stat().st_size)
    content = bytearray(largest.read_bytes())
    content[len(content) // 2] ^= 1
    largest.write_bytes(content)
    with pytest.raises(hf.CheckpointError, match="checksum differs"):
        hf.export_checkpoint(tmp_path / "weights", tmp_path / "exported")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["weights"]


def save_run(workdir: Path, model, init_from: str = "", mtp_weight: float = 0.0) -> None:
    """A run's checkpoint of step 3, in float32."""
    params = {".".join(map(str, path)): leaf[...] for path, leaf in nnx.to_flat_state(nnx.state(model))}
    keep = CheckpointConfig(every_steps=1, every_minutes=0, keep_last=1, keep_every=0)
    checkpoints = checkpoint.Checkpoints(workdir, keep)
    state = TrainState(jnp.int32(3), params, {"moments": jnp.zeros(3)}, jnp.int32(0))
    config = {"model": dataclasses.asdict(model.config), "init_from": init_from, "loss": {"mtp_weight": mtp_weight}}
    checkpoints.save(3, state, {"config": config})
    checkpoints.close()


@pytest.mark.parametrize(("name", "mtp"), [*((name, False) for name in NAMES), ("dense_tied", True), ("moe", True)])
def test_a_run_without_published_weights_is_exported_in_the_classes_layout(name, mtp, tmp_path, monkeypatch):
    """Written as a run's checkpoint in float32, exported, and read back: the same model."""
    source = with_mtp(GOLDENS / name, tmp_path / "source") if mtp else GOLDENS / name
    model = hf.load_model(source, mtp=mtp)
    save_run(tmp_path / "run", model, mtp_weight=0.3 * mtp)
    if name != "moe":
        monkeypatch.setattr(convert, "_SHARD_BYTES", 50_000)
    hf.export_checkpoint(tmp_path / "run", tmp_path / "exported")
    assert (len(list((tmp_path / "exported").glob("*.safetensors"))) > 1) == (name != "moe")
    again = hf.load_model(tmp_path / "exported", mtp=mtp)
    lost = {"intermediate_size": 0, "router_aux_loss_coef": 0.0}  # of no use in one of the classes, and not in its file
    assert dataclasses.replace(again.config, **lost) == dataclasses.replace(model.config, **lost)
    for got, want in zip(jax.tree.leaves(again), jax.tree.leaves(model), strict=True):
        np.testing.assert_array_equal(np.asarray(got), np.asarray(want))


def test_the_layout_of_a_run_is_found_through_the_runs_before_it(tmp_path):
    """Weights -> run -> run from its checkpoint -> export, also after the weights were moved."""
    source, model = GOLDENS / "dense_untied", hf.load_model(GOLDENS / "dense_untied")
    hf.import_checkpoint(source, tmp_path / "weights")
    save_run(tmp_path / "first", model, str(tmp_path / "weights"))
    save_run(tmp_path / "second", model, str(tmp_path / "first" / "checkpoints" / "3"))
    hf.export_checkpoint(tmp_path / "second", tmp_path / "exported", step=3)
    assert_same_checkpoint(source, tmp_path / "exported")
    with pytest.raises(hf.CheckpointError, match="there is no checkpoint of step 4, only of 3"):
        hf.export_checkpoint(tmp_path / "second", tmp_path / "other", step=4)
    (tmp_path / "weights").rename(tmp_path / "moved")
    with pytest.raises(hf.CheckpointError, match="name its weights directory with --source"):
        hf.export_checkpoint(tmp_path / "second", tmp_path / "other")
    hf.export_checkpoint(tmp_path / "second", tmp_path / "other", source=tmp_path / "moved")
    assert_same_checkpoint(source, tmp_path / "other")
    hf.import_checkpoint(GOLDENS / "dense_tied", tmp_path / "of another model")
    with pytest.raises(hf.CheckpointError, match="its model is not that of the weights in"):
        hf.export_checkpoint(tmp_path / "second", tmp_path / "third", source=tmp_path / "of another model")
