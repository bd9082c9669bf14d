"""The loss for the token after the next does not depend on the mesh, and counts exactly the positions that have one."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, PartitionSpec

from app.models.mtp import second_targets
from app.ops.affine_scan import SequenceAxis
from tests.multi_device.test_step import ONE_DEVICE, assert_same_gradient, batch, run

MODEL = {"model.num_hidden_layers": 1, "model.full_attention_interval": 1, "loss.mtp_weight": 0.5}


def second_by_hand(fields):
    """Targets and mask of the tokens after the next, position by position."""
    targets, counts = np.zeros_like(fields["targets"]), np.zeros_like(fields["loss_mask"])
    for row, position in np.ndindex(targets.shape):
        if position + 1 < targets.shape[1]:
            targets[row, position] = fields["targets"][row, position + 1]
            counts[row, position] = fields["loss_mask"][row, position] and fields["loss_mask"][row, position + 1]
    return targets, counts


@pytest.mark.parametrize("ranks", [1, 4, 8])
def test_second_targets(ranks):
    """Over any number of ranks of the sequence, with documents that end at and beside their borders."""
    fields = batch()
    mesh = Mesh(np.array(jax.devices()[:ranks]), ("context",))
    axis = SequenceAxis(("context",)) if ranks > 1 else None
    spec = PartitionSpec(None, "context")
    shifted = jax.shard_map(
        lambda targets, mask: second_targets(targets, mask, axis), mesh=mesh, in_specs=spec, out_specs=spec
    )
    targets, counts = jax.jit(shifted)(jnp.asarray(fields["targets"]), jnp.asarray(fields["loss_mask"]))
    wanted, wanted_counts = second_by_hand(fields)
    np.testing.assert_array_equal(np.asarray(counts), wanted_counts)
    np.testing.assert_array_equal(np.asarray(targets)[wanted_counts], wanted[wanted_counts])
    assert 0 < wanted_counts.sum() < fields["loss_mask"].sum()


@pytest.mark.slow
def test_gradients_do_not_depend_on_the_cut():
    wanted, wanted_metrics, _ = run(**ONE_DEVICE, **MODEL)
    gradient, metrics, _ = run(**{"mesh.fsdp": 2, "mesh.context": 2, "mesh.tensor": 2}, **MODEL)
    assert metrics == pytest.approx(wanted_metrics, rel=1e-5)
    assert_same_gradient(gradient, wanted)
    assert metrics["total_loss"] > metrics["loss"] + 0.5 * metrics["mtp_loss"] > metrics["loss"] > 0  # and the z loss
    assert all(np.any(gradient[name]) for name in gradient if name.startswith("mtp.")) and "mtp.fc" in gradient
