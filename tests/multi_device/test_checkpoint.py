"""Checkpoints of a small state: committed or absent, pruned by policy, restored with the shardings of another mesh."""

import dataclasses
import errno
import shutil
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from app.config import CheckpointConfig, ConfigError
from app.training import checksums
from app.training.checkpoint import Checkpoints, StorageError, restore_weights, save_weights
from app.training.step import TrainState

KEEP = CheckpointConfig(every_steps=1, every_minutes=0.0, keep_last=2, keep_every=4)
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


def test_a_failed_write_is_raised(tmp_path):
    checkpoints = Checkpoints(tmp_path, KEEP)
    checkpoints.save(1, state(1, sharding(1, 1)), FACTS)
    checkpoints.wait()
    (tmp_path / "checkpoints").rename(tmp_path / "gone")
    (tmp_path / "checkpoints").write_text("in the way")
    with pytest.raises(StorageError, match="saving"):
        checkpoints.save(2, state(2, sharding(1, 1)), FACTS)
        checkpoints.wait()
    (tmp_path / "checkpoints").unlink()
    (tmp_path / "gone").rename(tmp_path / "checkpoints")
    assert Checkpoints(tmp_path, KEEP).latest() == 1


def test_a_committed_checkpoint_that_is_not_there_is_noticed(tmp_path):
    checkpoints = Checkpoints(tmp_path, KEEP)
    checkpoints.save(1, state(1, sharding(1, 1)), FACTS)
    while not (tmp_path / "checkpoints" / "1").exists():
        time.sleep(0.01)
    (tmp_path / "checkpoints" / "1").rename(tmp_path / "gone")
    with pytest.raises(StorageError, match="1 was written and committed, but is not there"):
        checkpoints.wait()


def test_a_write_that_fails_beside_training_costs_no_older_checkpoint(tmp_path, monkeypatch):
    """Asked at every moment of the failure, also between orbax's two threads: step 1 was deleted then."""
    checkpoints = Checkpoints(tmp_path, dataclasses.replace(KEEP, keep_last=1, keep_every=0))
    checkpoints.save(1, state(1, sharding(1, 1)), FACTS)
    checkpoints.wait()
    monkeypatch.setattr(checksums, "seal", fail)
    for step in range(2, 12):
        with pytest.raises(StorageError, match="No space left"):
            checkpoints.save(step, state(step, sharding(1, 1)), FACTS)
            end = time.monotonic() + 20
            while time.monotonic() < end:
                checkpoints.check()
        with pytest.raises(StorageError, match="No space left"):
            checkpoints.wait()
        assert (tmp_path / "checkpoints" / "1").is_dir()
        checkpoints = Checkpoints(tmp_path, dataclasses.replace(KEEP, keep_last=1, keep_every=0))


def fail(*_):
    raise OSError(errno.ENOSPC, "No space left on device")


def test_the_newest_of_both_tiers_is_restored(tmp_path):
    """From the local one if it has all parts of the arrays; what another mesh wrote there is removed."""
    two_tiers = dataclasses.replace(KEEP, every_steps=4, local_directory=str(tmp_path / "local"), local_every_steps=1)
    where = sharding(2, 4, "rows", "columns")
    checkpoints = Checkpoints(tmp_path, two_tiers)
    assert [checkpoints.due_locally(step) for step in (1, 2)] == [True, True]
    for step in (3, 4, 5, 6, 7):
        checkpoints.save(step, state(step, where), FACTS, local=not checkpoints.due(step, look=False))
    checkpoints.close()
    (local,) = (tmp_path / "local").glob("*/0")
    assert sorted(path.name for path in local.iterdir()) == ["6", "7"]
    assert not Checkpoints(tmp_path, dataclasses.replace(two_tiers, every_steps=1, local_directory="")).due_locally(5)

    def restored(where, said):
        again = Checkpoints(tmp_path, two_tiers)
        step = again.latest(said.append, like=abstract(state(0, where), where))
        assert step is not None and again.facts(step)["config"] == FACTS["config"]
        found = again.restore(step, abstract(state(0, where), where))
        for got, want in zip(*map(jax.tree.leaves, (found, state(step, where))), strict=True):
            np.testing.assert_array_equal(np.asarray(got), np.asarray(want))
        again.close()
        return step, again.source

    assert restored(where, said := []) == (7, local) and not said
    flip(next((local / "7" / "state" / "d").iterdir()), 5)
    assert restored(where, said := []) == (6, local)
    assert len(said) == 1 and "checksum differs" in said[0] and not (local / "7").exists()
    shutil.copytree(tmp_path / "checkpoints", tmp_path / "new" / "checkpoints")
    (tmp_path / "new" / "checkpoints" / "run_id").unlink()
    fresh = Checkpoints(tmp_path / "new", two_tiers)
    assert fresh.latest(like=abstract(state(0, where), where)) == 4  # another run: the local tier is not its own
    assert restored(sharding(1, 8, None, "columns"), said := []) == (4, tmp_path / "checkpoints")
    assert len(said) == 1 and "has other parts of the arrays" in said[0] and not list(local.iterdir())


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


def flip(path, at):
    content = bytearray(path.read_bytes())
    content[at % len(content)] ^= 1
    path.write_bytes(content)


def test_every_damaged_file_is_noticed_and_the_checkpoint_before_is_used(tmp_path):
    """A flipped bit, a cut, and a loss of each file of the newest checkpoint in turn."""
    where = sharding(2, 1, "rows")
    checkpoints = Checkpoints(tmp_path, KEEP)
    for step in (1, 2):
        checkpoints.save(step, state(step, where), FACTS)
    checkpoints.close()
    newest = tmp_path / "checkpoints" / "2"
    files = sorted(path.relative_to(newest) for path in newest.rglob("*") if path.is_file())
    assert len(files) > 10
    harmless = {"_CHECKPOINT_METADATA", "commit_success.txt"}  # written by orbax last; nothing is read from them
    kept = tmp_path / "kept"
    shutil.copytree(newest, kept)
    for number, name in enumerate(files):
        for damage in ("flip", "cut", "lose"):
            shutil.rmtree(newest, ignore_errors=True)
            shutil.copytree(kept, newest)
            path = newest / name
            if damage == "flip":
                flip(path, 7 * number + 3)
            elif damage == "cut":
                path.write_bytes(path.read_bytes()[:-1])
            else:
                path.unlink()
            said = []
            again = Checkpoints(tmp_path, KEEP)
            used = again.latest(said.append)
            if name.name in harmless:
                assert used == 2 and not said, (name, damage)
                restored = again.restore(2, abstract(state(2, where), where))
                for got, want in zip(*map(jax.tree.leaves, (restored, state(2, where))), strict=True):
                    np.testing.assert_array_equal(np.asarray(got), np.asarray(want))
            else:
                assert used == 1, (name, damage)
                assert len(said) == 1 and f"checkpoint 2 is not used: {newest}" in said[0] and name.name in said[0]
                assert (tmp_path / "checkpoints" / "2.damaged").is_dir() and not newest.exists()
            again.close()
    again = Checkpoints(tmp_path, KEEP)
    assert again.latest() == 1
    again.save(2, state(2, where), FACTS)  # the run gets there again
    again.close()
    assert Checkpoints(tmp_path, KEEP).latest() == 2
    for step in (1, 2):
        (tmp_path / "checkpoints" / str(step) / "checksums.json").unlink()
    for _ in range(2):  # never silently from step 0
        with pytest.raises(ConfigError, match=r"no checkpoint in .* is whole; there are 1.damaged, 2.damaged"):
            Checkpoints(tmp_path, KEEP).latest()


def test_weights_alone(tmp_path):
    """From a weights directory and from a checkpoint; other shapes, damage and other directories are refused."""
    where = sharding(2, 4, "rows", "columns")
    params = state(3, where).params
    save_weights(tmp_path / "weights.v1", params, {"model": "m"})
    checkpoints = Checkpoints(tmp_path, KEEP)
    checkpoints.save(3, state(3, where), FACTS)
    checkpoints.close()
    like = abstract(params, sharding(1, 8, None, "columns"))
    for path in (tmp_path / "weights.v1", tmp_path / "checkpoints" / "3"):
        found = restore_weights(path, like)
        for name, leaf in like.items():
            np.testing.assert_array_equal(np.asarray(found[name]), np.asarray(params[name]))
            assert found[name].sharding == leaf.sharding
        with pytest.raises(ConfigError, match=r"norm: \(3,\) in .*, \(4,\) in this model"):
            restore_weights(path, like | {"norm": jax.ShapeDtypeStruct((4,), jnp.bfloat16)})
    with pytest.raises(ConfigError, match="exists already"):
        save_weights(tmp_path / "weights.v1", params, {})
    with pytest.raises(ConfigError, match="holds no weights"):
        restore_weights(tmp_path, like)
    flip(next((tmp_path / "weights.v1" / "params" / "d").iterdir()), 11)
    with pytest.raises(ConfigError, match="is damaged"):
        restore_weights(tmp_path / "weights.v1", like)
