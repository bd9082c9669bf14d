"""The mesh on eight fake CPU devices: what the axis pairs mean to shardings and to collectives.

Not covered here: the physical network (tests/unit/cluster/test_topologies.py).
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from app.cluster.layout import token_range
from app.cluster.mesh import (
    AXES,
    SEQUENCE_AXES,
    build_mesh,
    check_sequence_order,
    equal_slices,
    sequence_neighbours_report,
    sequence_order,
)
from app.config import DcnConfig, MeshConfig


def ids(devices):
    return np.vectorize(lambda device: device.id)(devices)


def build(slices=1, dcn=None, **sizes):
    devices = jax.devices()
    config = MeshConfig(**({"fsdp": 1} | sizes), dcn=DcnConfig(**(dcn or {})))
    return build_mesh(config, devices, slice_of=equal_slices(devices, slices))


@pytest.fixture(scope="module", autouse=True)
def eight_devices():
    assert jax.device_count() == 8, "this folder needs --xla_force_host_platform_device_count=8"


def test_cpu_devices_keep_id_order_along_the_sequence():
    mesh = build(fsdp=2, context=2, expert=2)
    assert mesh.axis_names == AXES
    assert dict(mesh.shape) == {"data": 1, "fsdp": 2, "context": 2, "expert": 2, "tensor": 1}
    assert ids(sequence_order(mesh)).reshape(2, 4).tolist() == [[0, 1, 2, 3], [4, 5, 6, 7]]
    check_sequence_order(mesh)
    assert sequence_neighbours_report(mesh) is None


def test_given_order_of_devices_does_not_matter():
    shuffled = [jax.devices()[place] for place in (3, 1, 7, 0, 2, 6, 5, 4)]
    assert build_mesh(MeshConfig(fsdp=1, context=8), shuffled) == build(context=8)


def test_minus_one_takes_the_rest():
    assert build(context=2, fsdp=-1).shape["fsdp"] == 4
    assert build(2, {"data": 2}, data=2, context=2, fsdp=-1).shape["fsdp"] == 2


def test_shardings_and_collectives_agree_on_the_rank_order():
    """A token's rank by NamedSharding, by axis_index, by all_gather and by ppermute, all equal token_range's."""
    mesh = build(fsdp=2, context=2, expert=2)
    seq_len, ranks = 16, 4
    spec = PartitionSpec(None, SEQUENCE_AXES)
    places = NamedSharding(mesh, spec).devices_indices_map((1, seq_len))
    for row in sequence_order(mesh).reshape(-1, ranks):
        for rank, device in enumerate(row):
            tokens = places[device][1]
            assert (tokens.start, tokens.stop) == token_range(rank, ranks, seq_len)

    def body(x):
        rank = lax.axis_index(SEQUENCE_AXES)
        from_previous = lax.ppermute(rank, SEQUENCE_AXES, [(r, (r + 1) % ranks) for r in range(ranks)])
        own = jnp.stack([rank, from_previous]).astype(jnp.int32)[:, None]
        return own, lax.all_gather(x, SEQUENCE_AXES, axis=1, tiled=True)

    run = jax.shard_map(body, mesh=mesh, in_specs=spec, out_specs=(spec, PartitionSpec()), check_vma=False)
    own, gathered = jax.jit(run)(jnp.arange(seq_len)[None])
    assert own.tolist() == [[0, 1, 2, 3], [3, 0, 1, 2]]
    assert gathered.tolist() == [list(range(seq_len))]


def test_weights_are_cut_over_fsdp_and_context():
    mesh = build(fsdp=2, context=2, expert=2)
    x = jax.device_put(np.arange(8), NamedSharding(mesh, PartitionSpec(("fsdp", "context"))))
    parts = {shard.device.id: shard.data.tolist() for shard in x.addressable_shards}
    # device id = fsdp * 4 + context * 2 + expert; expert ranks hold the same part
    assert parts == {i: [4 * (i // 4) + 2 * (i // 2 % 2), 4 * (i // 4) + 2 * (i // 2 % 2) + 1] for i in range(8)}


@pytest.mark.parametrize(
    "dcn, sizes, expected",
    [
        ({"data": 2}, {"data": 2, "context": 4}, [[0, 1, 2, 3], [4, 5, 6, 7]]),
        ({"context": 2}, {"context": 8}, [[0, 1, 2, 3, 4, 5, 6, 7]]),
        ({"context": 2}, {"context": 4, "expert": 2}, [[0, 1, 2, 3, 4, 5, 6, 7]]),
        ({"fsdp": 2}, {"fsdp": 4, "context": 2}, [[0, 1], [2, 3], [4, 5], [6, 7]]),
    ],
)
def test_two_fake_slices(dcn, sizes, expected):
    mesh = build(2, dcn, **sizes)
    order = ids(sequence_order(mesh))
    assert order.reshape(-1, order.shape[-1]).tolist() == expected
    check_sequence_order(mesh, slice_of=equal_slices(jax.devices(), 2))


@pytest.mark.parametrize(
    "order, slices, message",
    [
        ([7, 6, 5, 4, 3, 2, 1, 0], 1, "mesh.context, mesh.expert: sequence ranks 0 and 1 are .*device ids fall"),
        ([0, 1, 2, 4, 3, 5, 6, 7], 1, "ranks 3 and 4 .*rank order must be sequence order"),
        ([0, 4, 1, 5, 2, 6, 3, 7], 2, r"mesh.context: the sequence visits slices in the order \[0, 1, 0, 1"),
    ],
)
def test_other_orders_of_devices_are_refused(order, slices, message):
    devices = jax.devices()
    mesh = Mesh(np.array([devices[place] for place in order]).reshape(1, 1, 8, 1, 1), AXES)
    with pytest.raises(ValueError, match=message):
        check_sequence_order(mesh, slice_of=equal_slices(devices, slices))


def test_expert_major_order_is_refused():
    devices = np.array(jax.devices()).reshape(1, 1, 2, 4, 1)  # ids run along expert first
    with pytest.raises(ValueError, match="device ids fall"):
        check_sequence_order(Mesh(devices.reshape(1, 1, 4, 2, 1).transpose(0, 1, 3, 2, 4), AXES))
    with pytest.raises(ValueError, match=r"expected .*'context', 'expert'"):
        check_sequence_order(Mesh(devices, ("data", "fsdp", "expert", "context", "tensor")))


def test_sizes_that_do_not_fit_are_refused():
    with pytest.raises(ValueError, match="8"):
        build(context=3)
    with pytest.raises(ValueError, match=r"mesh.dcn.data=2 .* makes 2 slices, but the 8 devices form 1"):
        build(1, {"data": 2}, data=2, context=4)
    with pytest.raises(ValueError, match=r"8 devices do not divide into 3 slices"):
        equal_slices(jax.devices(), 3)
