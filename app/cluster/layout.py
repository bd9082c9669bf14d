"""Which rank of the sequence axis holds which tokens: the one definition that loader, guards and ops share.

The sequence axis is the pair (context, expert), context major: rank = context index * expert ranks + expert index. The
recurrence hands its state from rank r to rank r + 1, so ranks hold contiguous slices in order. Softmax layers rebalance
their own input (app.ops.zigzag); nothing else may. No jax here: the loader's workers use this.
"""

import numpy as np

_WHY = (
    "the recurrence carries its state from token to token and from rank r to rank r + 1, so every rank must hold one "
    "contiguous slice, in order (balance for causal attention is made inside the softmax layers: app.ops.zigzag)"
)


def token_range(rank: int, num_ranks: int, seq_len: int) -> tuple[int, int]:
    """(start, stop) of the tokens that sequence rank `rank` of `num_ranks` holds of a row of `seq_len` tokens.

    Raises ValueError if the tokens do not divide over the ranks or there is no such rank.
    """
    if num_ranks < 1 or seq_len % num_ranks:
        raise ValueError(
            f"seq_len={seq_len} does not divide over {num_ranks} sequence ranks "
            "(mesh.context x mesh.expert): change one of them"
        )
    if not 0 <= rank < num_ranks:
        raise ValueError(f"sequence rank {rank} does not exist: there are {num_ranks} (mesh.context x mesh.expert)")
    local = seq_len // num_ranks
    return rank * local, (rank + 1) * local


def check_stream_index(stream_index: np.ndarray, *, num_ranks: int, seq_len: int, setting: str, start: int = 0) -> None:
    """Refuse a batch whose tokens are not in sequence order within a rank or across the border of two ranks.

    stream_index: integers [B, n], each token's place in its row's slice (0..seq_len-1); the columns are the tokens
    start .. start+n-1 of the layout, one rank's part, several neighbouring ranks' or whole rows. setting: what made the
    order, named in the error ("data.documents='separate'"). One pass over host memory, about a millisecond a million
    tokens.
    Raises ValueError naming the setting, the row, the place and the reason.
    """
    if stream_index.ndim != 2:
        raise ValueError(f"{setting}: stream_index has shape {stream_index.shape}, expected [rows, tokens]")
    stop = start + stream_index.shape[1]
    if start < 0 or stop > seq_len:
        raise ValueError(f"{setting}: stream_index covers tokens {start}..{stop - 1} of a row of seq_len={seq_len}")
    local = token_range(0, num_ranks, seq_len)[1]

    expected = np.arange(start, stop)
    wrong = stream_index != expected
    if not wrong.any():
        return
    row, column = (int(place) for place in np.argwhere(wrong)[0])
    token, found = start + column, int(stream_index[row, column])
    rank, offset = divmod(token, local)
    where = f"at the border of ranks {rank - 1} and {rank}" if rank and not offset else f"inside rank {rank}"
    raise ValueError(
        f"{setting}: row {row} has stream index {found} where token {token} belongs, {where} of "
        f"{num_ranks} ({local} tokens each){_known_order(stream_index[row], start, num_ranks, seq_len)}; "
        f"{_WHY}"
    )


def _known_order(row: np.ndarray, start: int, num_ranks: int, seq_len: int) -> str:
    """Names the wrong order if it is one of the load-balanced ones in use elsewhere; "" otherwise."""
    orders = {"round-robin (striped)": np.arange(seq_len).reshape(-1, num_ranks).T.ravel()}
    if seq_len % (2 * num_ranks) == 0:
        halves = np.arange(seq_len).reshape(2 * num_ranks, -1)
        pairs = [half for rank in range(num_ranks) for half in (rank, 2 * num_ranks - 1 - rank)]
        orders["zigzag (load-balanced)"] = halves[pairs].ravel()
    for name, order in orders.items():
        if np.array_equal(row, order[start : start + len(row)]):
            return f", which is the {name} order"
    return ""
