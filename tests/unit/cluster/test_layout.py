"""Which rank holds which tokens, and the guard on batches."""

import numpy as np
import pytest

from app.cluster.layout import check_stream_index, token_range


def check(stream_index, **overrides):
    arguments = {"num_ranks": 4, "seq_len": 32, "setting": "data.documents='joined'"}
    check_stream_index(np.asarray(stream_index, np.int32), **(arguments | overrides))


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 8])
def test_ranges_cover_the_row_in_order(num_ranks):
    tokens = [token for rank in range(num_ranks) for token in range(*token_range(rank, num_ranks, 24))]
    assert tokens == list(range(24))


def test_bad_ranges_are_refused_with_the_numbers():
    with pytest.raises(ValueError, match=r"seq_len=30 does not divide over 4 .*mesh.context x mesh.expert"):
        token_range(0, 4, 30)
    with pytest.raises(ValueError, match="rank 4 does not exist: there are 4"):
        token_range(4, 4, 32)
    with pytest.raises(ValueError, match="rank -1"):
        token_range(-1, 4, 32)


def test_contiguous_rows_and_parts_pass():
    rows = np.tile(np.arange(32), (3, 1))
    check(rows)
    check(rows[:, 8:24], start=8)
    check(rows[:, 28:], start=28)


@pytest.mark.parametrize(
    "order, place, name",
    [
        (np.arange(32).reshape(8, 4)[[0, 7, 1, 6, 2, 5, 3, 4]].ravel(), "inside rank 0", "zigzag"),
        (np.arange(32).reshape(8, 4).T.ravel(), "inside rank 0", "round-robin"),
        (np.arange(32).reshape(4, 8)[[0, 2, 1, 3]].ravel(), "at the border of ranks 0 and 1", ""),
        (np.concatenate([np.arange(8), np.arange(8), np.arange(16, 32)]), "at the border of ranks 0 and 1", ""),
        (np.concatenate([np.arange(20), [20, 20], np.arange(22, 32)]), "inside rank 2", ""),
        (np.arange(32) + 1, "inside rank 0", ""),
    ],
)
def test_other_orders_are_refused(order, place, name):
    rows = np.stack([np.arange(32), order])
    with pytest.raises(ValueError) as error:
        check(rows)
    message = str(error.value)
    assert message.startswith("data.documents='joined': row 1 has stream index")
    assert place in message and name in message
    assert (", which is the" in message) == bool(name)
    assert "recurrence carries its state" in message


def test_a_part_of_a_load_balanced_row_is_recognised():
    zigzag = np.arange(32).reshape(8, 4)[[0, 7, 1, 6, 2, 5, 3, 4]].reshape(1, 32)
    with pytest.raises(ValueError, match="zigzag"):
        check(zigzag[:, 8:16], start=8)


def test_the_part_must_lie_in_the_row():
    with pytest.raises(ValueError, match=r"tokens 24\.\.39 of a row of seq_len=32"):
        check(np.arange(24, 40)[None], start=24)
    with pytest.raises(ValueError, match=r"shape \(32,\), expected \[rows, tokens\]"):
        check(np.arange(32))
