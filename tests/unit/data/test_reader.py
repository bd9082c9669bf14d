"""Damage: named, refused, never trained on."""

import os
import shutil

import numpy as np
import pytest

from data import inspect, manifest, verify
from data.manifest import DataError
from data.reader import decode_record, encode_record
from data.stream import Stream
from tests.unit.data.conftest import VOCABULARY, options


@pytest.fixture
def directory(prepared):
    rng = np.random.default_rng(0)
    corpus = {"a": [rng.integers(0, VOCABULARY, length).tolist() for length in (3000, 10, 1, 500, 2000)]}
    return prepared(corpus, record_tokens=256, files=2)


def read_all(directory):
    """Every token of the directory, as training would read them."""
    stream = Stream(options(directory, seq_len=5511, global_batch=1))
    return stream.block(0, (0, 1), (0, 5511))["tokens"]


def shards(directory):
    return sorted((directory / "a").glob("*.arrayrecord"))


def test_a_sound_directory_verifies(directory, capsys):
    read_all(directory)
    assert verify.main([str(directory)]) == 0
    assert "is sound: 5,511 tokens read" in capsys.readouterr().out


def test_a_record_is_bound_to_its_place():
    tokens = np.arange(5, dtype="<u2")
    record = encode_record(tokens, "a/0", 3)
    assert np.array_equal(decode_record(record, "a/0", 3, np.dtype("<u2")), tokens)
    for shard, number, damaged in (
        ("a/1", 3, record),
        ("a/0", 2, record),
        ("a/0", 3, record[:-1]),
        ("a/0", 3, record[:2] + b"\7" + record[3:]),
    ):
        with pytest.raises(ValueError, match="checksum"):
            decode_record(damaged, shard, number, np.dtype("<u2"))


def test_a_missing_shard_is_named_at_opening(directory, capsys):
    shards(directory)[0].unlink()
    with pytest.raises(DataError, match=r"a/00000\.arrayrecord is missing"):
        read_all(directory)
    assert verify.main([str(directory)]) == 2
    assert "00000.arrayrecord is missing" in capsys.readouterr().out


def test_a_truncated_shard_is_named_at_opening(directory):
    shard = shards(directory)[1]
    os.truncate(shard, shard.stat().st_size // 2)
    with pytest.raises(DataError, match=r"a/00001\.arrayrecord has [\d,]+ bytes, the manifest says [\d,]+"):
        read_all(directory)


def test_every_damaged_byte_of_a_record_is_noticed_when_it_is_read(directory):
    """Bits flipped over a whole shard: the tokens are right or the record is named; verify finds every flip."""
    shard = shards(directory)[0]
    sound, tokens = shard.read_bytes(), read_all(directory)
    refused = 0
    for place in range(0, len(sound), 997):
        damaged = bytearray(sound)
        damaged[place] ^= 1 << place % 8
        shard.write_bytes(damaged)
        assert any("checksum" in fault for fault in verify.faults(directory))
        try:
            assert np.array_equal(read_all(directory), tokens)
        except DataError as error:
            assert "a/00000.arrayrecord, record" in str(error)
            assert "run python -m data.verify" in str(error)
            refused += 1
    assert refused > 3


def test_swapped_shards_of_one_size_are_noticed(directory):
    first, second = shards(directory)
    if first.stat().st_size != second.stat().st_size:  # riegeli files grow by blocks of 64 KiB: here they are equal
        raise AssertionError("the shards of this test must have one size")
    shutil.move(first, directory / "aside")
    shutil.move(second, first)
    shutil.move(directory / "aside", second)
    with pytest.raises(DataError, match=r"a/0000\d\.arrayrecord"):
        read_all(directory)
    assert any("its checksum is not the manifest's" in fault for fault in verify.faults(directory))


def test_a_damaged_index_is_named_at_opening(directory):
    path = directory / "a" / "index.npy"
    content = bytearray(path.read_bytes())
    content[-16] ^= 1
    path.write_bytes(content)
    with pytest.raises(DataError, match=r"a/index\.npy is damaged"):
        read_all(directory)
    assert any("index.npy is damaged" in fault for fault in verify.faults(directory))


@pytest.mark.parametrize(
    "change",
    [
        lambda text: text.replace('"tokens": 5511', '"tokens": 5512'),
        lambda text: text[: len(text) // 2],
        lambda text: "[]",
        lambda text: text.replace('"format": 1', '"format": 0'),
    ],
)
def test_a_damaged_manifest_is_named(directory, change):
    path = directory / manifest.MANIFEST
    path.write_text(change(path.read_text()))
    with pytest.raises(DataError, match=r"manifest\.json is damaged or of another version"):
        read_all(directory)


def test_a_directory_that_is_not_prepared_is_named(tmp_path):
    with pytest.raises(DataError, match=r"holds no prepared data: manifest\.json is missing; make it with"):
        read_all(tmp_path)


def test_inspect_shows_what_is_there(directory, capsys):
    assert inspect.main([str(directory)]) == 0
    shown = capsys.readouterr().out
    assert "source a: 5 documents, 5,511 tokens (100.0%)" in shown
    assert "2,048-4,095" in shown and "54.4%" in shown

    assert inspect.main([str(directory), "--slice=1", "--seq_len=1024", "--holdout=0", "--processes=4"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert "1,024 tokens of 1,024" in lines[0]
    reads = [line for line in lines if "  process " in line]
    assert len(reads) == 4 and "tokens 256-511" in reads[1]

    assert inspect.main([str(directory), "--slice=0", "--seq_len=64", "--holdout=0", "--text"]) == 0
    assert "<<< a document" in capsys.readouterr().out


def test_inspect_refuses_what_is_not_there(directory, tmp_path, capsys):
    assert inspect.main([str(tmp_path / "nowhere")]) == 2
    assert inspect.main([str(directory), "--slice=9", "--seq_len=4096", "--holdout=0.99", "--split=heldout"]) == 2
    assert "--slice=9: the heldout part has slices 0..1" in capsys.readouterr().err
    assert inspect.main([str(directory), "--slice=0", "--seq_len=4096", "--holdout=0", "--processes=3"]) == 2
    assert "--processes=3: seq_len=4096 does not divide" in capsys.readouterr().err
