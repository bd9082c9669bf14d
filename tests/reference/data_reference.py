"""The training order and its batches, walked document by document in plain Python. Imports nothing of the project."""

import heapq
import itertools
from collections.abc import Iterable, Iterator, Sequence

import numpy as np

MASK = (1 << 64) - 1
GOLDEN = 0x9E3779B97F4A7C15


def mix(x: int) -> int:
    x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9 & MASK
    x = (x ^ x >> 27) * 0x94D049BB133111EB & MASK
    return x ^ x >> 31


def shuffled(count: int, *key: int) -> list[int]:
    """0..count-1 by a 64-bit hash of (key, number) whose low bits are the number."""
    seed = 0
    for part in key:
        seed = mix((seed + part + GOLDEN) & MASK)
    low = (1 << max(1, (count - 1).bit_length())) - 1
    return sorted(range(count), key=lambda i: mix((seed + i * GOLDEN) & MASK) & ~low | i)


def epoch_order(chosen: Sequence[int], groups: int, seed: int, source: int, epoch: int) -> list[int]:
    """One epoch of a source's chosen documents: the groups (number mod groups) shuffled, and each within itself."""
    order = []
    for group in shuffled(groups, seed, source, epoch):
        members = [document for document in chosen if document % groups == group]
        order.extend(members[place] for place in shuffled(len(members), seed, source, epoch, group))
    return order


def endless(chosen: Sequence[int], groups: int, seed: int, source: int) -> Iterator[int]:
    for epoch in itertools.count():
        yield from epoch_order(chosen, groups, seed, source, epoch)


def mixed(
    sources: Sequence[Iterable[int]], lengths: Sequence[Sequence[int]], shares: Sequence[float]
) -> Iterator[tuple[int, int]]:
    """(source, document) by the time at which the document begins: tokens of the source before it / its share."""
    walks = [iter(source) for source in sources]
    waiting = [(0.0, number, 0, next(walk)) for number, walk in enumerate(walks)]
    heapq.heapify(waiting)
    while True:
        _, source, place, document = heapq.heappop(waiting)
        yield source, document
        place += lengths[source][document]
        heapq.heappush(waiting, (place / shares[source], source, place, next(walks[source])))


def rows(documents: Iterable[Sequence[int]], length: int, *, separate: bool, count: int) -> list[dict[str, np.ndarray]]:
    """`count` rows of `length` tokens of documents laid end to end, padded where these end."""
    tokens: list[tuple[int, int, int]] = []  # (token, number of the document in the stream, place in the document)
    for number, document in enumerate(documents):
        if len(tokens) > count * length:
            break
        tokens.extend((token, number, place) for place, token in enumerate(document))
    return [row(tokens[start : start + length + 1], length, separate) for start in range(0, count * length, length)]


def row(tokens: list[tuple[int, int, int]], length: int, separate: bool) -> dict[str, np.ndarray]:
    made = {name: np.zeros(length, np.int32) for name in ("tokens", "targets", "segment_ids", "positions")}
    made["stream_index"] = np.arange(length, dtype=np.int32)
    made["loss_mask"] = np.zeros(length, bool)
    segment = 1
    begin = 0
    for t, (token, document, _) in enumerate(tokens[:length]):
        if separate and t and document != tokens[t - 1][1]:
            segment, begin = segment + 1, t
        made["tokens"][t], made["segment_ids"][t], made["positions"][t] = token, segment, t - begin
        if t + 1 < len(tokens):
            following, its_document, _ = tokens[t + 1]
            made["targets"][t] = following
            made["loss_mask"][t] = its_document == document or not separate
    return made
