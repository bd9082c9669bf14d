"""Checkpoints of a small state: committed or absent, pruned by policy, restored with the shardings of another mesh."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from app.config import CheckpointConfig
from app.training.checkpoint import Checkpoints
from app.training.step import TrainState

KEEP = CheckpointConfig(every_steps=1, keep_last=2, keep_every=4)
FACTS = {"config": {"steps": 3}, "data": "abc"}


def sharding(rows, columns, *spec):
    mesh = Mesh(np.array(jax.devices()[: rows * columns]).reshape(rows, columns), ("rows", "columns"))
    return NamedSharding(mesh, PartitionSpec(*spec))


def state(step, where):
    params = {"a.b": jnp.arange(64.0).reshape(8, 8) + step, "norm": jnp.ones(3, jnp.bfloat16)}
    made = TrainState(jnp.int32(step), params, (jax.tree.map(lambda x: x * 2, params), jnp.int32(step)), jnp.int32(0))
    return jax.tree.map(lambda x: jax.device_put(x, where if x.ndim == 2 else sharding(1, 1)), made)


def abstract(tree, where):
    return jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=where if x.ndim == 2 else sharding(1, 1)), tree
    )


@pytest.mark.parametrize("there", [(1, 1), (2, 1, None, "rows"), (4, 2, "rows", "columns"), (1, 8, "columns")])
def test_restores_with_the_new_shardings(tmp_path, there):
    saved = state(7, sharding(2, 4, "rows", "columns"))
    checkpoints = Checkpoints(tmp_path, KEEP)
    checkpoints.save(7, saved, FACTS)
    checkpoints.close()
    again = Checkpoints(tmp_path, KEEP)
    assert again.latest() == 7 and again.facts(7) == FACTS
    wanted = abstract(saved, sharding(*there))
    restored = again.restore(7, wanted)
    assert jax.tree.structure(restored) == jax.tree.structure(saved)
    for got, want, like in zip(*map(jax.tree.leaves, (restored, saved, wanted)), strict=True):
        np.testing.assert_array_equal(np.asarray(got), np.asarray(want))
        assert got.dtype == want.dtype and got.sharding == like.sharding
    again.close()


def test_keeps_the_last_and_every_so_many(tmp_path):
    checkpoints = Checkpoints(tmp_path, KEEP)
    for step in range(1, 8):
        checkpoints.save(step, state(step, sharding(1, 1)), FACTS)
    checkpoints.close()
    kept = {int(path.name) for path in (tmp_path / "checkpoints").iterdir()}
    assert kept == {4, 6, 7}


def test_a_failed_write_is_raised(tmp_path, monkeypatch):
    checkpoints = Checkpoints(tmp_path, KEEP)
    checkpoints.save(1, state(1, sharding(1, 1)), FACTS)
    checkpoints.wait()
    (tmp_path / "checkpoints").rename(tmp_path / "gone")
    (tmp_path / "checkpoints").write_text("in the way")
    with pytest.raises((OSError, ValueError, RuntimeError)):
        checkpoints.save(2, state(2, sharding(1, 1)), FACTS)
        checkpoints.wait()
    (tmp_path / "checkpoints").unlink()
    (tmp_path / "gone").rename(tmp_path / "checkpoints")
    assert Checkpoints(tmp_path, KEEP).latest() == 1


def test_a_step_is_not_written_twice(tmp_path):
    checkpoints = Checkpoints(tmp_path, KEEP)
    checkpoints.save(3, state(3, sharding(1, 1)), FACTS)
    checkpoints.wait()
    checkpoints.save(3, state(5, sharding(1, 1)), FACTS)
    checkpoints.close()
    again = Checkpoints(tmp_path, KEEP)
    restored = again.restore(3, abstract(state(3, sharding(1, 1)), sharding(1, 1)))
    assert int(restored.step) == 3
    again.close()
