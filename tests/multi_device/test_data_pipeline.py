"""Global batches over meshes of 8 CPU devices: every device holds its tokens, whatever the mesh.

Not covered here: several processes (tests/multi_process).
"""

import jax
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from app.cluster import layout, sharding
from app.cluster.mesh import AXES, SEQUENCE_AXES
from data import manifest, pipeline, prepare
from data.stream import Stream, StreamOptions

SHAPE = (4, 64)
MESHES = [(1, 1, 8, 1, 1), (1, 1, 4, 2, 1), (2, 2, 1, 2, 1), (1, 4, 1, 1, 2), (1, 1, 2, 1, 4), (4, 1, 2, 1, 1)]


@pytest.fixture(scope="module")
def stream(tmp_path_factory):
    folder = tmp_path_factory.mktemp("data")
    rng = np.random.default_rng(0)
    for number, length in enumerate((700, 1, 20, 77, 5, 90)):
        (folder / f"{number}.txt").write_bytes(rng.integers(32, 127, length).astype(np.uint8).tobytes())
    prepare.prepare(f"{folder}/*.txt", folder / "out")
    assert manifest.is_prepared(folder / "out")
    return Stream(
        StreamOptions(
            directory=str(folder / "out"),
            tokenizer="bytes",
            documents="separate",
            weights="",
            whole_documents=False,
            holdout=0.0,
            seq_len=SHAPE[1],
            global_batch=SHAPE[0],
            seed=0,
            split="train",
        )
    )


def mesh_of(sizes):
    count = int(np.prod(sizes))
    return jax.sharding.Mesh(np.array(jax.devices()[:count]).reshape(sizes), AXES)


@pytest.mark.parametrize("sizes", MESHES)
def test_every_mesh_gets_the_same_global_batch(stream, sizes):
    spec = NamedSharding(mesh_of(sizes), sharding.BATCH_SPEC)
    for step, batch in enumerate(pipeline.batches(stream, spec, start_step=0, stop_step=3)):
        for name, field in stream.block(step, (0, SHAPE[0]), (0, SHAPE[1])).items():
            assert batch[name].sharding == spec
            np.testing.assert_array_equal(np.asarray(batch[name]), field, err_msg=name)


def test_ranks_hold_contiguous_tokens_in_sequence_order(stream):
    mesh = mesh_of((1, 2, 2, 2, 1))
    batch = next(pipeline.batches(stream, NamedSharding(mesh, sharding.BATCH_SPEC), start_step=0))
    for shard in batch["stream_index"].addressable_shards:
        place = dict(zip(AXES, np.argwhere(mesh.devices == shard.device)[0], strict=True))
        start, stop = layout.token_range(int(place["context"]) * 2 + int(place["expert"]), 4, SHAPE[1])
        assert np.array_equal(np.asarray(shard.data), np.tile(np.arange(start, stop), (2, 1)))


def test_only_the_tokens_of_its_devices_are_read(stream):
    """A process that had two of eight sequence ranks would read two eighths, in one piece."""
    spec = NamedSharding(mesh_of((1, 1, 8, 1, 1)), sharding.BATCH_SPEC)
    held = pipeline.held_blocks(spec, SHAPE)
    assert pipeline.merged(list(held.values())[2:4]) == (pipeline.Block((0, 4), (16, 32)),)


@pytest.mark.parametrize("time", [("expert", "context"), ("context",), None])
def test_a_sharding_that_is_not_the_sequence_layout_is_refused(stream, time):
    spec = NamedSharding(mesh_of((1, 2, 2, 2, 1)), PartitionSpec("fsdp", time))
    with pytest.raises(ValueError, match=r"would hold tokens .* the layout is .*over the sequence axes in their order"):
        next(pipeline.batches(stream, spec, start_step=0))
    assert SEQUENCE_AXES == ("context", "expert")
