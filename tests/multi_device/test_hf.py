"""Published weights onto a mesh of 8 devices, into a run's checkpoint, and back: bit for bit, whatever the mesh."""

import dataclasses
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding

from app import hf
from app.cluster import mesh as meshes
from app.config import CheckpointConfig, MeshConfig
from app.hf.published import Published
from app.models import params as model_params
from app.training.checkpoint import Checkpoints, restore_weights
from app.training.step import TrainState

GOLDENS = Path(__file__).parents[1] / "parity" / "goldens"
MESHES = [
    ("dense_untied", {"fsdp": 8}),
    ("dense_tied", {"context": 4, "tensor": 2}),
    ("moe", {"expert": 4, "tensor": 2}),
    ("next_moe", {"fsdp": 2, "expert": 2, "context": 2}),
]


@pytest.mark.parametrize(("name", "axes"), MESHES)
def test_weights_pass_through_a_mesh(name, axes, tmp_path):
    source = GOLDENS / name
    hf.import_checkpoint(source, tmp_path / "weights", axes)
    model = hf.load_model(source)
    mesh = meshes.build_mesh(MeshConfig(**axes), jax.devices())
    like = {
        name: jax.ShapeDtypeStruct(spec.shape, "float32", sharding=NamedSharding(mesh, spec.partition))
        for name, spec in model_params.describe(model.config).items()
    }
    params = restore_weights(tmp_path / "weights", like)
    assert all(params[name].sharding == leaf.sharding for name, leaf in like.items())
    split = sum(not array.sharding.is_fully_replicated for array in params.values())
    assert split > len(params) // 2  # the mesh does cut the model
    whole = model_params.build(model.config, model.runtime, {name: jax.device_get(x) for name, x in params.items()})
    for got, want in zip(jax.tree.leaves(whole), jax.tree.leaves(model), strict=True):
        np.testing.assert_array_equal(np.asarray(got), np.asarray(want))

    keep = CheckpointConfig(every_steps=1, every_minutes=0, keep_last=1, keep_every=0)
    checkpoints = Checkpoints(tmp_path / "run", keep)
    config = {"model": dataclasses.asdict(model.config), "init_from": str(tmp_path / "weights")}
    facts = {"config": {**config, "loss": {"mtp_weight": 0.0}}}
    checkpoints.save(1, TrainState(jnp.int32(1), params, {"moments": jnp.zeros(3)}, jnp.int32(0)), facts)
    checkpoints.close()
    hf.export_checkpoint(tmp_path / "run", tmp_path / "exported")
    original, exported = Published(source), Published(tmp_path / "exported")
    assert original.tensors == exported.tensors and original.config == exported.config
    for tensor in original.tensors:
        assert original.read(tensor).tobytes() == exported.read(tensor).tobytes(), tensor
