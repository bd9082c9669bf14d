"""What a reading process of the tests does; few imports, since every process makes them."""

import numpy as np

from app.cluster import layout
from data.stream import Stream, StreamOptions


def block_of(arguments: tuple[StreamOptions, int, int, int, int]) -> dict[str, np.ndarray]:
    """(options, step, data, ranks, process): a process's part of a step, rows cut over `data`, tokens over `ranks`."""
    options, step, data, ranks, process = arguments
    row_rank, rank = divmod(process, ranks)
    rows = options.global_batch // data
    columns = layout.token_range(rank, ranks, options.seq_len)
    return Stream(options).block(step, (row_rank * rows, (row_rank + 1) * rows), columns)
