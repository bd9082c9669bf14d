"""Rows against the plain reference, over random corpora and every way to cut the batch."""

import dataclasses
import itertools
from collections import Counter
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from app.cluster import layout
from data import manifest, prepare
from data.manifest import DataError
from data.packing import WINDOW
from data.stream import HASH_RANGE, Stream, token_shares
from tests.reference import data_reference
from tests.unit.data.conftest import VOCABULARY, options
from tests.unit.data.processes import block_of

FIELDS = ("tokens", "targets", "segment_ids", "positions", "stream_index", "loss_mask")
token_ids = st.integers(0, VOCABULARY - 1)
# One-token documents, short ones and ones of many rows.
documents = st.lists(
    st.one_of(
        st.lists(token_ids, min_size=1, max_size=1),
        st.lists(token_ids, min_size=1, max_size=6),
        st.lists(token_ids, min_size=30, max_size=90),
    ),
    min_size=1,
    max_size=12,
)
corpora = st.dictionaries(st.sampled_from(["a", "b"]), documents, min_size=1)
reuse_fixtures = settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


def walked(corpus, seed):
    """The documents in training order, by the reference."""
    names = sorted(corpus)
    lengths = [[len(document) for document in corpus[name]] for name in names]
    total = sum(map(sum, lengths))
    orders = [data_reference.endless(range(len(source)), 1, seed, number) for number, source in enumerate(lengths)]
    for source, document in data_reference.mixed(orders, lengths, [sum(source) / total for source in lengths]):
        yield corpus[names[source]][document]


def assert_fields(made, expected):
    assert set(made) == set(FIELDS)
    for name in FIELDS:
        assert made[name].dtype == (bool if name == "loss_mask" else np.int32)
        np.testing.assert_array_equal(made[name], expected[name], err_msg=name)


@reuse_fixtures
@given(corpora, st.integers(1, 3), st.sampled_from([1, 2, 4]), st.integers(1, 6), st.booleans(), st.data())
def test_every_block_of_every_batch_equals_the_reference(prepared, corpus, batch, ranks, local, separate, data):
    seq_len = ranks * local
    directory = prepared(corpus, record_tokens=data.draw(st.sampled_from([1, 4, 100])))
    stream = Stream(
        options(directory, seq_len=seq_len, global_batch=batch, documents="separate" if separate else "joined")
    )
    tokens = sum(len(document) for source in corpus.values() for document in source)
    steps = 2 * tokens // (batch * seq_len) + 1
    rows = data_reference.rows(walked(corpus, 3), seq_len, separate=separate, count=steps * batch)
    for step in data.draw(st.lists(st.integers(0, steps - 1), min_size=1, max_size=4)):
        whole = {name: np.stack([row[name] for row in rows[step * batch : (step + 1) * batch]]) for name in FIELDS}
        assert_fields(stream.block(step, (0, batch), (0, seq_len)), whole)
        row = data.draw(st.integers(0, batch - 1))
        for rank in range(ranks):
            start, stop = layout.token_range(rank, ranks, seq_len)
            part = {name: field[row : row + 1, start:stop] for name, field in whole.items()}
            assert_fields(stream.block(step, (row, row + 1), (start, stop)), part)


@reuse_fixtures
@given(corpora, st.integers(1, 3), st.integers(2, 9), st.floats(0.1, 0.9), st.booleans())
def test_held_out_tokens_appear_once_and_the_rest_is_padding(prepared, corpus, batch, seq_len, holdout, separate):
    directory = prepared(corpus)
    chosen = []
    for source in manifest.load(directory).sources:
        hashes = manifest.load_index(directory, source)["hash"]
        chosen += [
            document
            for document, hashed in zip(corpus[source.name], hashes, strict=True)
            if hashed < round(holdout * HASH_RANGE)
        ]
    made = options(
        directory,
        seq_len=seq_len,
        global_batch=batch,
        holdout=holdout,
        split="heldout",
        documents="separate" if separate else "joined",
    )
    if not chosen:
        with pytest.raises(DataError, match="leaves none of the"):
            Stream(made)
        return
    stream = Stream(made)
    tokens = sum(map(len, chosen))
    assert stream.num_steps == -(-tokens // (batch * seq_len))
    rows = data_reference.rows(chosen, seq_len, separate=separate, count=stream.num_steps * batch)
    for step in range(stream.num_steps):
        expected = {name: np.stack([row[name] for row in rows[step * batch : (step + 1) * batch]]) for name in FIELDS}
        assert_fields(stream.block(step, (0, batch), (0, seq_len)), expected)
        for columns in ((0, seq_len // 2), (seq_len // 2, seq_len)):  # as two processes read it
            part = {name: field[:, slice(*columns)] for name, field in expected.items()}
            assert_fields(stream.block(step, (0, batch), columns), part)
    assert sum(int((row["segment_ids"] > 0).sum()) for row in rows) == tokens


@pytest.mark.parametrize("files", [1, 2, 5])
def test_an_epoch_has_every_token_of_every_training_document_once(prepared, files):
    rng = np.random.default_rng(0)
    lengths = [1, 1, 1, 700, 2, 15, 16, 17, *rng.integers(1, 40, 60), 333]
    corpus = {"a": [rng.integers(0, VOCABULARY, length).tolist() for length in lengths]}
    directory = prepared(corpus, files=files)
    index = manifest.load_index(directory, manifest.load(directory).sources[0])
    training = [
        document
        for document, hashed in zip(corpus["a"], index["hash"], strict=True)
        if hashed >= round(0.1 * HASH_RANGE)
    ]
    tokens = sum(map(len, training))
    stream = Stream(options(directory, seq_len=16, global_batch=1, holdout=0.1))
    rows = [stream.block(step, (0, 1), (0, 16)) for step in range(-(-3 * tokens // 16))]
    read = np.concatenate([row["tokens"][0] for row in rows])
    for epoch in range(3):
        found = Counter(read[epoch * tokens : (epoch + 1) * tokens].tolist())
        assert found == Counter(itertools.chain(*training))
    assert {len(document) for document in training} >= {1, 700}


def test_whole_documents_keep_every_token_and_its_target(prepared):
    """A token's id tells its document and place, so that its target is known."""
    lengths = [40, 3, 7, 30, 1, 25, 9, 2, 31, 18, 120]
    corpus = {
        "a": [[*range(stop - length, stop)] for stop, length in zip(np.cumsum(lengths).tolist(), lengths, strict=True)]
    }
    last = {document[-1] for document in corpus["a"]}
    made = options(prepared(corpus), seq_len=32, global_batch=4, holdout=0.0)
    steps = range(2 * WINDOW // 4)
    found = {}
    for whole in (False, True):
        stream = Stream(dataclasses.replace(made, whole_documents=whole))
        rows = [stream.block(step, (0, 4), (0, 32)) for step in steps]
        fields = {name: np.concatenate([row[name] for row in rows]).ravel() for name in FIELDS}
        counted = fields["loss_mask"]
        assert np.array_equal(fields["targets"][counted], fields["tokens"][counted] + 1)
        assert not set(fields["tokens"][counted].tolist()) & last
        found[whole] = Counter(fields["tokens"].tolist()), counted.mean()
    assert found[True][0] == found[False][0]
    assert abs(found[True][1] - found[False][1]) < 0.02


def test_real_processes_make_the_same_batches_in_any_number(prepared):
    """1, 2, 4, 8 processes, cut by rows or by tokens, another number each step: the global batch is the same."""
    rng = np.random.default_rng(1)
    corpus = {"a": [rng.integers(0, VOCABULARY, length).tolist() for length in (1, 1, 500, 3, 64, 129, 40)]}
    made = options(prepared(corpus, files=2), seq_len=64, global_batch=4)
    stream = Stream(made)
    cuts = [(1, 1), (2, 1), (1, 2), (1, 8), (4, 2), (2, 4), (1, 4), (2, 2)]  # one a step: (data, ranks)
    with ProcessPoolExecutor(8, get_context("spawn")) as pool:
        for step, (data, ranks) in enumerate(cuts):
            parts = list(pool.map(block_of, [(made, step, data, ranks, process) for process in range(data * ranks)]))
            expected = stream.block(step, (0, 4), (0, 64))
            for name in FIELDS:
                rows = [
                    np.concatenate([part[name] for part in parts[first : first + ranks]], axis=1)
                    for first in range(0, data * ranks, ranks)
                ]
                assert np.array_equal(np.concatenate(rows), expected[name])


def test_reads_no_more_than_its_part_and_a_record_at_each_end(prepared):
    rng = np.random.default_rng(2)
    corpus = {"a": [rng.integers(0, VOCABULARY, length).tolist() for length in (40_000, 17, 3_000, 9_000)]}
    record = 64
    stream = Stream(options(prepared(corpus, record_tokens=record), seq_len=8192, global_batch=1))
    for step, rank in itertools.product(range(6), range(8)):
        before = stream.reader.bytes_read
        start, stop = layout.token_range(rank, 8, 8192)
        pieces = len(stream.rows(step, 0, 1)[0].clip(start, stop + 1).at)
        stream.block(step, (0, 1), (start, stop))
        checksums = 4 * (1024 // record + 2 * pieces)
        assert stream.reader.bytes_read - before <= 2 * (1024 + 2 * record) + checksums


def test_the_split_is_by_content(prepared):
    """A document is held out or not wherever it stands and whatever stands beside it."""
    rng = np.random.default_rng(4)
    corpus = {"a": [rng.integers(0, VOCABULARY, 20).tolist() for _ in range(60)]}
    turned = {"b": [*corpus["a"][::-1], *corpus["a"][:20]]}

    def held_out(directory):
        stream = Stream(options(directory, holdout=0.3, split="heldout", seq_len=20, global_batch=1))
        return {tuple(stream.block(step, (0, 1), (0, 20))["tokens"][0]) for step in range(stream.num_steps)}

    found = held_out(prepared(corpus))
    assert 5 < len(found) < 40
    assert found == held_out(prepared(turned))


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_a_document_of_eight_tokens_has_seven_targets_however_it_is_cut(prepared, ranks):
    directory = prepared({"a": [[1, 2, 3, 4, 5, 6, 7, 8]]})
    stream = Stream(options(directory, seq_len=8, global_batch=1, holdout=1.0, split="heldout"))
    parts = [stream.block(0, (0, 1), layout.token_range(rank, ranks, 8)) for rank in range(ranks)]
    fields = {name: np.concatenate([part[name][0] for part in parts]) for name in FIELDS}
    assert fields["targets"][fields["loss_mask"]].tolist() == [2, 3, 4, 5, 6, 7, 8]
    assert fields["positions"].tolist() == fields["stream_index"].tolist() == list(range(8))


def test_weights_are_shares_of_tokens(prepared):
    rng = np.random.default_rng(5)
    corpus = {"a": [[1] * int(length) for length in rng.integers(1, 30, 40)], "b": [[2] * 10] * 3, "c": [[3]] * 5}
    stream = Stream(options(prepared(corpus), weights="b=3,a=1,c=0", seq_len=500, global_batch=4))
    tokens = np.concatenate([stream.block(step, (0, 4), (0, 500))["tokens"] for step in range(5)])
    assert abs(np.mean(tokens == 2) - 0.75) < 0.005
    assert not (tokens == 3).any()


@pytest.mark.parametrize(
    ("weights", "message"),
    [
        ("a=1", "must name each source once"),
        ("a=1,b=1,d=2", "must name each source once"),
        ("a=1,b=1,b=2", "must name each source once"),
        ("a=1,b", "'b' is not NAME=WEIGHT"),
        ("a=1,b=-1", "the weight of b must be 0 or more"),
        ("a=nan,b=1", "the weight of a must be 0 or more"),
        ("a=0,b=0", "at least one weight must be above 0"),
    ],
)
def test_bad_weights_are_refused(weights, message):
    with pytest.raises(DataError, match=message):
        token_shares(weights, {"a": 10, "b": 20})


def test_a_source_without_training_tokens_cannot_have_weight():
    with pytest.raises(DataError, match="source b has no training tokens"):
        token_shares("a=1,b=1", {"a": 10, "b": 0})


def test_another_tokenizer_is_refused(prepared):
    directory = prepared({"a": [[1, 2]]})
    with pytest.raises(DataError, match=r"prepared with tokenizer 'ids:1000' .* data.tokenizer='bytes'"):
        Stream(options(directory, tokenizer="bytes"))


def test_an_unknown_documents_mode_is_refused(prepared):
    with pytest.raises(DataError, match=r"data\.documents='glued'"):
        Stream(options(prepared({"a": [[1, 2]]}), documents="glued"))


def test_the_fingerprint_is_of_the_content(prepared):
    one, same, other = ({"a": [[1, 2, 3]]}, {"a": [[1, 2, 3]]}, {"a": [[1, 2, 4]]})
    found = [Stream(options(prepared(corpus))).fingerprint for corpus in (one, same, other)]
    assert found[0] == found[1] != found[2]


def test_preparing_is_what_the_pipeline_needs(tmp_path):
    """The byte tokenizer from text to batch: end of document, targets, borders."""
    (tmp_path / "a.txt").write_text("ab")
    prepare.prepare(f"{tmp_path}/a.txt", tmp_path / "out")
    stream = Stream(options(tmp_path / "out", tokenizer="bytes", seq_len=4, global_batch=1))
    fields = stream.block(0, (0, 1), (0, 4))
    assert fields["tokens"].tolist() == [[97, 98, 256, 97]]
    assert fields["targets"].tolist() == [[98, 256, 97, 98]]
    assert fields["segment_ids"].tolist() == [[1, 1, 1, 2]]
    assert fields["positions"].tolist() == [[0, 1, 2, 0]]
    assert fields["loss_mask"].tolist() == [[True, True, False, True]]
