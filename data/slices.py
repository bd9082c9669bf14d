"""The stream by arithmetic: which tokens of which documents stand at any place of the training order. Pure numpy.

One source's order is endless: epoch after epoch, each a seeded permutation of its documents, laid end to end. An order
is looked up, never walked: place -> epoch by division, -> group by a table of group lengths, -> document by binary
search over the prefix sums of the group. Groups bound the work and the memory of a look-up for corpora of any size:
document i belongs to group i mod (number of groups), an epoch permutes the groups and the documents within each, so
that the whole is a permutation of all documents (of up to GROUP_DOCUMENTS: an unrestricted one).

Several sources are mixed document by document: the document that begins at place x of source s has the time
x / share_s, and documents are laid end to end by time. So up to any place each source has its share of the tokens to
within a document.
"""

import bisect
import functools
from collections.abc import Sequence
from typing import NamedTuple, Protocol

import numpy as np

GROUP_DOCUMENTS = 1 << 16
_SCAN_DOCUMENTS = 1 << 22  # rows of an index looked at together: bounds memory


class Spans(NamedTuple):
    """Pieces of documents laid end to end; arrays [pieces], int64.

    source, document: whose tokens; offset: the piece's first token within the document; count: its tokens; at: where it
    stands, counted from the start of the range that was asked for.
    """

    source: np.ndarray
    document: np.ndarray
    offset: np.ndarray
    count: np.ndarray
    at: np.ndarray

    def clip(self, start: int, stop: int) -> "Spans":
        """The part in [start, stop); `at` stays counted from the same place."""
        first = np.maximum(self.at, start)
        count = np.minimum(self.at + self.count, stop) - first
        keep = count > 0
        cut = Spans(self.source, self.document, self.offset + first - self.at, count, first)
        return Spans(*(field[keep] for field in cut))

    def moved(self, by: int) -> "Spans":
        return self._replace(at=self.at + by)


class Order(Protocol):
    """Where every token stands. total: tokens in the order, None if it has no end."""

    @property
    def total(self) -> int | None: ...

    def spans(self, start: int, stop: int) -> Spans:
        """The pieces that fill [start, stop), fewer where the order ends."""
        ...


def shuffled(count: int, *key: int) -> np.ndarray:
    """A permutation of 0..count-1 (int64 [count]) that is a function of `key` alone.

    It sorts a 64-bit hash of (key, i) with i itself in the low bits: no ties, so the result depends neither on the sort
    nor on a library's random generator, and a run can be resumed under any version of numpy.
    """
    seed = np.uint64(0)
    for part in key:
        seed = _mix(seed + np.array(part, np.uint64) + _GOLDEN)
    low = np.uint64((1 << max(1, (count - 1).bit_length())) - 1)
    place = np.arange(count, dtype=np.uint64)
    hashed = (_mix(seed + place * _GOLDEN) & ~low) | place
    hashed.sort()
    return (hashed & low).astype(np.int64)


_GOLDEN = np.array(0x9E3779B97F4A7C15, np.uint64)


def _mix(x: np.ndarray) -> np.ndarray:
    """The finaliser of splitmix64 (Steele, Lea, Flood: Fast Splittable Pseudorandom Number Generators, 2014)."""
    x = (x ^ (x >> np.uint64(30))) * np.array(0xBF58476D1CE4E5B9, np.uint64)
    x = (x ^ (x >> np.uint64(27))) * np.array(0x94D049BB133111EB, np.uint64)
    return x ^ (x >> np.uint64(31))


class Selection:
    """The documents of a source's index whose hash lies in [low, high): the held-out ones or the others.

    lengths, hashes: [documents] of the whole source (they may be mapped files). Document numbers stay the source's own.
    """

    def __init__(
        self, lengths: np.ndarray, hashes: np.ndarray, low: int, high: int, group_documents: int = GROUP_DOCUMENTS
    ) -> None:
        self._lengths, self._hashes, self._low, self._high = lengths, hashes, low, high
        self.groups = max(1, -(-len(lengths) // group_documents))
        self.group_tokens = np.zeros(self.groups, np.int64)
        self.documents, self.longest = 0, 0
        block = self.groups * max(1, _SCAN_DOCUMENTS // self.groups)
        for start in range(0, len(lengths), block):
            part = np.where(self._chosen(slice(start, start + block)), lengths[start : start + block], 0)
            part = part.astype(np.int64)
            self.documents += int(np.count_nonzero(part))
            self.longest = max(self.longest, int(part.max()))
            self.group_tokens += np.pad(part, (0, -len(part) % self.groups)).reshape(-1, self.groups).sum(0)
        self.tokens = int(self.group_tokens.sum())

    def _chosen(self, where: slice) -> np.ndarray:
        hashes = self._hashes[where]
        return (hashes >= self._low) & (hashes < self._high)

    def group(self, number: int) -> tuple[np.ndarray, np.ndarray]:
        """(document numbers, their lengths) of one group, int64, in corpus order."""
        members = slice(number, None, self.groups)
        chosen = np.flatnonzero(self._chosen(members))
        return number + chosen * self.groups, self._lengths[members][chosen].astype(np.int64)


class Unit(NamedTuple):
    """One group of one epoch. first: its place in the source's order; starts: [documents + 1], counted from there."""

    first: int
    documents: np.ndarray
    starts: np.ndarray


class SourceOrder:
    """The endless order of one source. Looking up a place costs one group's permutation; the last few are kept."""

    def __init__(self, selection: Selection, source: int, seed: int) -> None:
        self._selection, self._key, self.source = selection, (seed, source), source
        self.tokens, self.longest = selection.tokens, selection.longest
        self._groups = functools.lru_cache(4)(self._make_groups)
        self._unit = functools.lru_cache(4)(self._make_unit)

    def _make_groups(self, epoch: int) -> tuple[np.ndarray, np.ndarray]:
        """(group numbers in this epoch's order, where each begins in the epoch [groups + 1])."""
        groups = shuffled(self._selection.groups, *self._key, epoch)
        return groups, _prefix(self._selection.group_tokens[groups])

    def _make_unit(self, epoch: int, place: int) -> Unit:
        groups, starts = self._groups(epoch)
        documents, lengths = self._selection.group(int(groups[place]))
        order = shuffled(len(documents), *self._key, epoch, int(groups[place]))
        return Unit(epoch * self.tokens + int(starts[place]), documents[order], _prefix(lengths[order]))

    def _unit_at(self, position: int) -> tuple[int, int]:
        """(epoch, place in it) of the unit that holds a token of the order."""
        epoch, inside = divmod(position, self.tokens)
        return epoch, int(np.searchsorted(self._groups(epoch)[1], inside, side="right")) - 1

    def _next_unit(self, epoch: int, place: int) -> tuple[int, int]:
        return (epoch, place + 1) if place + 1 < self._selection.groups else (epoch + 1, 0)

    def first_at(self, time: float, share: float) -> int:
        """The place of the first document whose time (place / share) is at least `time`."""
        at = self._unit_at(max(0, int(time * share) - 1))  # -1: rounding must not skip a document
        while True:
            unit = self._unit(*at)
            index = bisect.bisect_left(
                unit.starts, time, hi=len(unit.documents), key=lambda start: (unit.first + int(start)) / share
            )
            if index < len(unit.documents):
                return unit.first + int(unit.starts[index])
            at = self._next_unit(*at)

    def beginning(self, start: int, stop: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """(documents, places, lengths) of the documents that begin in [start, stop), in order, int64."""
        found = []
        at, end = self._unit_at(start), start
        while end < stop:
            unit = self._unit(*at)
            low, high = np.searchsorted(unit.starts[:-1], (start - unit.first, stop - unit.first))
            starts = unit.starts[low : high + 1]
            found.append((unit.documents[low:high], unit.first + starts[:-1], np.diff(starts)))
            at, end = self._next_unit(*at), unit.first + int(unit.starts[-1])
        documents, places, lengths = (np.concatenate(fields) for fields in zip(*found, strict=True))
        return documents, places, lengths


class MixedOrder:
    """The endless order of several sources, each with its share of the tokens (shares add up to 1)."""

    total = None

    def __init__(self, orders: Sequence[SourceOrder], shares: Sequence[float]) -> None:
        self._orders, self._shares = orders, shares
        self._longest = sum(order.longest for order in orders)

    def _places(self, time: float) -> list[int]:
        """Per source, the place of its first document at `time` or later; their sum is that moment's place here."""
        return [order.first_at(time, share) for order, share in zip(self._orders, self._shares, strict=True)]

    def _before(self, position: int) -> list[int]:
        """_places of a time whose place here is not after `position`, and hardly before the document that holds it."""
        # Each source is at most one document ahead of its share, never behind; 2 tokens more for rounding.
        low, high = max(0.0, float(position - self._longest - 2)), float(position + 2)
        while high - low > 1:
            middle = (low + high) / 2
            low, high = (middle, high) if sum(self._places(middle)) <= position else (low, middle)
        return self._places(low)

    def spans(self, start: int, stop: int) -> Spans:
        begin = self._before(start)
        end = self._places(float(stop) * (1 + 1e-12) + 2)
        pieces = []
        for order, share, first, stop_at in zip(self._orders, self._shares, begin, end, strict=True):
            document, place, count = order.beginning(first, max(stop_at, first + 1))
            pieces.append((np.full_like(document, order.source), document, count, place / share))
        source, document, count, time = (np.concatenate(fields) for fields in zip(*pieces, strict=True))
        by_time = np.argsort(time, kind="stable")  # ties: the lower source number first
        count = count[by_time]
        at = sum(begin) - start + _prefix(count)[:-1]
        laid = Spans(source[by_time], document[by_time], np.zeros_like(at), count, at)
        return laid.clip(0, stop - start)


class CorpusOrder:
    """Every chosen document once, in corpus order, source after source: the held-out part."""

    def __init__(self, selections: Sequence[Selection]) -> None:
        fields = []
        for source, selection in enumerate(selections):
            groups = [selection.group(number) for number in range(selection.groups)]
            document, length = (np.concatenate(field) for field in zip(*groups, strict=True))
            order = np.argsort(document)
            fields.append((np.full_like(document, source), document[order], length[order]))
        self._source, self._document, length = (np.concatenate(field) for field in zip(*fields, strict=True))
        self._starts = _prefix(length)
        self.total = int(self._starts[-1])

    def spans(self, start: int, stop: int) -> Spans:
        low = int(np.searchsorted(self._starts, start, side="right")) - 1
        high = int(np.searchsorted(self._starts[:-1], stop))
        at = self._starts[low:high] - start
        laid = Spans(
            self._source[low:high],
            self._document[low:high],
            np.zeros_like(at),
            np.diff(self._starts[low : high + 1]),
            at,
        )
        return laid.clip(0, stop - start)


def _prefix(lengths: np.ndarray) -> np.ndarray:
    starts = np.zeros(len(lengths) + 1, np.int64)
    np.cumsum(lengths, out=starts[1:])
    return starts


class ContiguousSlices:
    """Slice i is tokens [i * length, (i + 1) * length) of an order."""

    def __init__(self, order: Order, length: int) -> None:
        self._order, self._length, self.total = order, length, order.total

    def slices(self, first: int, stop: int) -> list[Spans]:
        """What slices [first, stop) are made of: for each the pieces of its tokens and of the look-ahead token."""
        length = self._length
        laid = self._order.spans(first * length, stop * length + 1)
        return [laid.clip(row * length, (row + 1) * length + 1).moved(-row * length) for row in range(stop - first)]


class Placement(NamedTuple):
    """What is known of a row's tokens [start, stop) without reading them; arrays [stop - start]."""

    segment_ids: np.ndarray
    positions: np.ndarray
    stream_index: np.ndarray
    loss_mask: np.ndarray


def place(spans: Spans, start: int, stop: int, *, separate: bool) -> Placement:
    """Segment ids, positions, stream index and loss mask of tokens [start, stop) of a row laid out by `spans`.

    spans: the row's pieces and its look-ahead token's, `at` counted from the row's start. Tokens after the last piece
    are padding: segment 0, no loss. separate: documents are numbered 1.. within the row, positions count from the
    document's start (or the row's, if that is later) and a target in another document does not count; otherwise the
    row is one document. All int32 but loss_mask, bool.
    """
    length = stop - start
    borders = np.clip(np.append(spans.at, spans.at[-1:] + spans.count[-1:]), start, stop + 1)
    inside = np.diff(borders)  # tokens of each piece that are wanted or looked ahead at
    filled = int(inside.sum())
    segment = np.zeros(length + 1, np.int32)
    segment[:filled] = np.repeat(np.arange(1, len(inside) + 1, dtype=np.int32), inside) if separate else 1
    stream_index = np.arange(start, stop, dtype=np.int32)
    positions = stream_index.copy()
    if separate:
        positions[:filled] -= np.repeat(spans.at.astype(np.int32), inside)[:length]
    positions[filled:] = 0
    loss_mask = segment[1:] == segment[:-1]
    loss_mask[max(filled - 1, 0) :] = False
    return Placement(segment[:-1], positions, stream_index, loss_mask)
