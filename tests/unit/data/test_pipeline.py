from pathlib import Path

import jax
import numpy as np
import pytest
from jax.sharding import NamedSharding

from app.cluster import sharding
from app.cluster.mesh import AXES
from data import pipeline, slices
from data.manifest import DataError
from data.pipeline import Block
from tests.unit.data.conftest import VOCABULARY, options


@pytest.fixture
def stream(prepared):
    rng = np.random.default_rng(0)
    corpus = {"a": [rng.integers(0, VOCABULARY, length).tolist() for length in (300, 1, 20, 77, 5, 90)]}
    return pipeline.Stream(options(prepared(corpus), seq_len=32, global_batch=2, holdout=0.5))


@pytest.fixture
def one_device():
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:1]).reshape([1] * len(AXES)), AXES)
    return NamedSharding(mesh, sharding.BATCH_SPEC)


def test_neighbouring_blocks_are_read_as_one():
    blocks = [
        Block((0, 2), (8, 16)),
        Block((0, 2), (0, 8)),
        Block((2, 4), (0, 8)),
        Block((0, 2), (0, 8)),
        Block((2, 4), (16, 24)),
    ]
    assert pipeline.merged(blocks) == (Block((0, 2), (0, 16)), Block((2, 4), (0, 8)), Block((2, 4), (16, 24)))


@pytest.mark.parametrize("prefetch", [0, 1, 3])
def test_batches_are_the_streams_in_order_from_any_step(stream, one_device, prefetch):
    for start, stop in ((0, 4), (3, 8), (1_000_000, 1_000_002)):
        made = list(pipeline.batches(stream, one_device, start_step=start, stop_step=stop, prefetch=prefetch))
        assert len(made) == stop - start
        for step, batch in enumerate(made, start):
            for name, field in stream.block(step, (0, 2), (0, 32)).items():
                assert batch[name].dtype == field.dtype
                np.testing.assert_array_equal(np.asarray(batch[name]), field)


def test_training_has_no_end_and_is_left_cleanly(stream, one_device):
    made = pipeline.batches(stream, one_device, start_step=5)
    assert stream.num_steps is None
    for _ in range(3):
        next(made)
    made.close()


def test_the_held_out_part_ends(prepared, one_device):
    corpus = {"a": [[number] * (number % 7 + 1) for number in range(40)]}
    made = options(prepared(corpus), seq_len=16, global_batch=3, holdout=0.5, split="heldout")
    stream = pipeline.Stream(made)
    batches = list(pipeline.batches(stream, one_device, start_step=0))
    assert len(batches) == stream.num_steps > 0
    assert sum(int((batch["segment_ids"] > 0).sum()) for batch in batches) == stream.total
    assert not np.asarray(batches[-1]["loss_mask"])[-1, -1]


def damage(stream):
    """One bit of the first record of the longest document: some steps need it, some do not."""
    shard = next((Path(stream.options.directory) / "a").glob("*.arrayrecord"))
    content = bytearray(shard.read_bytes())
    content[100] ^= 1
    shard.write_bytes(content)


@pytest.mark.parametrize("workers", [0, 2])
def test_batches_are_right_up_to_a_damaged_record_which_stops_training_by_its_name(stream, one_device, workers):
    expected = [stream.block(step, (0, 2), (0, 32)) for step in range(20)]
    damage(stream)
    seen = 0
    stream = pipeline.Stream(stream.options)
    with pytest.raises(DataError, match=r"a/00000\.arrayrecord, record \d+ cannot be read.*data\.verify"):
        for batch in pipeline.batches(stream, one_device, start_step=2, stop_step=20, workers=workers, prefetch=1):
            for name, field in expected[2 + seen].items():
                np.testing.assert_array_equal(np.asarray(batch[name]), field)
            seen += 1
    assert seen > 2


def test_a_batch_out_of_order_is_refused(stream, one_device, monkeypatch):
    place = slices.place

    def backwards(*row, **options):
        placed = place(*row, **options)
        return placed._replace(stream_index=placed.stream_index[::-1])

    monkeypatch.setattr(slices, "place", backwards)
    with pytest.raises(ValueError, match=r"data.documents='separate': row 0 has stream index 31 where token 0 belongs"):
        next(pipeline.batches(stream, one_device, start_step=0, prefetch=0))
