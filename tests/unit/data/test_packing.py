import itertools
from collections import Counter

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from data import packing, slices
from tests.unit.data.test_slices import make_order, tokens_of


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 40), st.integers(1, 8), st.data())
def test_bins_are_full_and_every_token_is_placed_once(length, bins, data):
    borders = data.draw(st.sets(st.integers(1, max(1, length * bins - 1)), max_size=20))
    edges = [0, *sorted(borders - {length * bins}), length * bins]
    counts = [stop - start for start, stop in itertools.pairwise(edges)]
    made = packing.pack(counts, length, bins)
    assert [sum(count for _, _, count in cuts) for cuts in made] == [length] * bins
    placed = Counter(
        (piece, place) for cuts in made for piece, begin, count in cuts for place in range(begin, begin + count)
    )
    assert placed == Counter((piece, place) for piece, count in enumerate(counts) for place in range(count))
    for cuts in made:
        goes_on = [begin + count < counts[piece] for piece, begin, count in cuts]
        assert goes_on == sorted(goes_on)  # whole ones and ends first


def test_documents_that_fit_a_slice_are_hardly_ever_cut():
    rng = np.random.default_rng(0)
    lengths = np.concatenate([rng.integers(300, 1000, 200), rng.integers(1, 100, 2000)])
    order = make_order([lengths], [1.0], group_documents=10_000)
    length, count = 1024, 4 * packing.WINDOW

    def share_cut(rows):
        pieces = [
            (document, taken)
            for row in rows
            for document, taken in zip(row.document, row.clip(0, length).count, strict=False)
        ]
        long = [taken < lengths[document] for document, taken in pieces if lengths[document] >= 300]
        return np.mean(long)

    plain = share_cut(slices.ContiguousSlices(order, length).slices(0, count))
    packed = share_cut(packing.WholeDocumentSlices(order, length).slices(0, count))
    assert plain > 0.5
    assert packed < 0.05


def test_repacked_slices_hold_the_same_tokens_as_the_stream():
    lengths = [np.random.default_rng(3).integers(1, 300, 50), np.array([1, 2, 3])]
    order = make_order(lengths, [0.9, 0.1])
    length = 64
    packed = packing.WholeDocumentSlices(order, length)
    rows = packed.slices(0, 2 * packing.WINDOW)
    tokens = [token for row in rows for token in tokens_of(row.clip(0, length))]
    assert Counter(tokens) == Counter(tokens_of(order.spans(0, 2 * packing.WINDOW * length)))
    again = packing.WholeDocumentSlices(order, length).slices(40, 45)  # found directly, not by walking there
    assert [tokens_of(row) for row in again] == [tokens_of(row) for row in rows[40:45]]


def test_a_slice_looks_one_token_ahead_where_its_last_document_goes_on():
    order = make_order([[500]], [1.0])
    rows = packing.WholeDocumentSlices(order, 64).slices(0, packing.WINDOW)
    for row in rows:
        assert row.count.sum() in (64, 65)
        if row.count.sum() == 65:
            document = tokens_of(row)
            assert document[64][2] == document[63][2] + 1
    assert sum(row.count.sum() == 65 for row in rows) > packing.WINDOW // 2
