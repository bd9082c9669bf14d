import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from data import slices
from tests.reference import data_reference

SEED = 7
documents = st.lists(st.integers(1, 9), min_size=1, max_size=30)


def make_order(lengths, shares, group_documents=4, seed=SEED):
    """The order of sources whose documents are all chosen."""
    orders = []
    for number, source in enumerate(lengths):
        selection = slices.Selection(np.array(source, "<u4"), np.zeros(len(source), "<u4"), 0, 1, group_documents)
        orders.append(slices.SourceOrder(selection, number, seed))
    return slices.MixedOrder(orders, shares)


def tokens_of(spans):
    """[(source, document, place)] of every token, and a check that pieces lie end to end."""
    assert np.array_equal(spans.at[1:], (spans.at + spans.count)[:-1])
    return [
        (int(source), int(document), int(offset) + place)
        for source, document, offset, count, _ in zip(*spans, strict=True)
        for place in range(count)
    ]


@settings(max_examples=30, deadline=None)
@given(st.integers(1, 300), st.integers(0, 2**40), st.integers(0, 5))
def test_shuffled_is_the_reference_permutation(count, seed, epoch):
    made = slices.shuffled(count, seed, epoch)
    assert made.tolist() == data_reference.shuffled(count, seed, epoch)
    assert sorted(made.tolist()) == list(range(count))


def test_shuffles_differ_by_every_part_of_the_key():
    made = {tuple(slices.shuffled(20, *key).tolist()) for key in itertools.product((0, 1, 2), repeat=3)}
    assert len(made) == 27


def test_shuffles_move_documents_everywhere():
    """Every document comes to every tenth of the order about equally often."""
    count, trials = 20, 4000
    place = np.array([np.argsort(slices.shuffled(count, trial)) for trial in range(trials)])
    often = np.stack([np.bincount(place[:, document], minlength=count) for document in range(count)])
    assert abs(often / (trials / count) - 1).max() < 6 / np.sqrt(trials / count)


@settings(max_examples=60, deadline=None)
@given(st.lists(documents, min_size=1, max_size=3), st.data())
def test_any_range_of_the_order_equals_the_walk(lengths, data):
    shares = np.array([data.draw(st.integers(1, 20)) for _ in lengths], float)
    shares = (shares / shares.sum()).tolist()
    groups = [max(1, -(-len(source) // 4)) for source in lengths]
    walk = data_reference.mixed(
        [
            data_reference.endless(range(len(source)), groups[number], SEED, number)
            for number, source in enumerate(lengths)
        ],
        lengths,
        shares,
    )
    wanted = 3 * sum(map(sum, lengths)) + 50
    walked = list(
        itertools.islice(
            ((source, document, place) for source, document in walk for place in range(lengths[source][document])),
            wanted,
        )
    )

    order = make_order(lengths, shares)
    for _ in range(5):
        start = data.draw(st.integers(0, wanted - 1))
        stop = data.draw(st.integers(start + 1, wanted))
        spans = order.spans(start, stop)
        assert spans.at[0] == 0
        assert tokens_of(spans) == walked[start:stop]


@settings(max_examples=30, deadline=None)
@given(documents, st.integers(0, 2**32 - 1), st.integers(1, 7))
def test_an_epoch_has_every_chosen_document_once_and_no_other(lengths, border, group_documents):
    hashes = (np.arange(len(lengths), dtype="<u4") * np.uint32(2654435761)).astype("<u4")
    selection = slices.Selection(np.array(lengths, "<u4"), hashes, border, 1 << 32, group_documents)
    chosen = [document for document in range(len(lengths)) if hashes[document] >= border]
    assert selection.documents == len(chosen)
    assert selection.tokens == sum(lengths[document] for document in chosen)
    if not chosen:
        return
    order = slices.SourceOrder(selection, 0, SEED)
    for epoch in (0, 1, 12345):
        found, places, counts = order.beginning(epoch * selection.tokens, (epoch + 1) * selection.tokens)
        assert sorted(found.tolist()) == chosen
        assert counts.tolist() == [lengths[document] for document in found]
        assert np.array_equal(places, epoch * selection.tokens + np.cumsum(counts) - counts)


def test_epochs_have_different_orders():
    order = make_order([[1] * 40], [1.0], group_documents=10)
    epochs = {tuple(order.spans(40 * epoch, 40 * (epoch + 1)).document.tolist()) for epoch in range(5)}
    assert len(epochs) == 5


def test_sources_keep_their_shares_everywhere():
    rng = np.random.default_rng(0)
    lengths = [rng.integers(1, 50, 300), rng.integers(1, 500, 20), np.array([7])]
    shares = [0.7, 0.25, 0.05]
    order = make_order(lengths, shares, group_documents=100)
    spans = order.spans(0, 200_000)
    ends = spans.at + spans.count
    for source, share in enumerate(shares):
        tokens = np.cumsum(np.where(spans.source == source, spans.count, 0))
        slack = sum(int(length.max()) for length in lengths)
        assert abs(tokens - share * ends).max() <= slack


def test_far_places_are_exact():
    """At step ten million of million-token rows a range still equals its parts, token for token."""
    lengths = [np.random.default_rng(1).integers(1, 3000, 500), np.random.default_rng(2).integers(1, 90, 77)]
    order = make_order(lengths, [0.9, 0.1], group_documents=64)
    start = 10_000_000 * (1 << 20)
    whole = order.spans(start, start + 5000)
    parts = [order.spans(start + low, start + low + 500) for low in range(0, 5000, 500)]
    assert tokens_of(whole) == [token for part in parts for token in tokens_of(part)]
    assert len(tokens_of(whole)) == 5000


def test_positions_are_exact_to_the_last_token_of_a_million():
    order = make_order([[3_000_000]], [1.0])
    length = 1 << 20
    row = slices.ContiguousSlices(order, length).slices(1, 2)[0]
    placed = slices.place(row, length - 4, length, separate=True)
    assert placed.positions.dtype == np.int32  # counted from the slice's start: the document's is earlier
    assert placed.positions.tolist() == [1_048_572, 1_048_573, 1_048_574, 1_048_575]


def test_corpus_order_is_every_chosen_document_in_order():
    hashes = np.array([5, 0, 9, 3, 7], "<u4")
    chosen = [
        slices.Selection(np.array([2, 3, 4, 5, 6], "<u4"), hashes, 0, 6, 2),
        slices.Selection(np.array([1, 1], "<u4"), np.array([1, 8], "<u4"), 0, 6, 2),
    ]
    order = slices.CorpusOrder(chosen)
    assert order.total == 2 + 3 + 5 + 1
    everything = [
        (0, 0, 0),
        (0, 0, 1),
        (0, 1, 0),
        (0, 1, 1),
        (0, 1, 2),
        *[(0, 3, place) for place in range(5)],
        (1, 0, 0),
    ]
    assert tokens_of(order.spans(0, 100)) == everything
    assert tokens_of(order.spans(3, 7)) == everything[3:7]
    assert tokens_of(order.spans(11, 20)) == []


@pytest.mark.parametrize("separate", [True, False])
def test_a_row_of_padding_has_no_segment_and_no_loss(separate):
    empty = slices.Spans(*(np.zeros(0, np.int64) for _ in slices.Spans._fields))
    placed = slices.place(empty, 2, 6, separate=separate)
    assert not placed.segment_ids.any()
    assert not placed.loss_mask.any()
    assert placed.stream_index.tolist() == [2, 3, 4, 5]
