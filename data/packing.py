"""Slices whose documents are not cut where it can be helped: the option `data.whole_documents`.

The stream is taken WINDOW slices at a time and the documents of a window change places within it, so that one that
fits a slice lies in one slice whole; nothing is padded, every token still appears once an epoch, and a slice is still
found by arithmetic. What must be cut: documents longer than a slice, those at the borders of a window, and those that
fill up the slices (the shortest, since the long ones are placed first).
"""

import bisect
import functools

import numpy as np

from data.slices import Order, Spans, shuffled

WINDOW = 32  # slices


class WholeDocumentSlices:
    """The slices of an endless order, repacked. A piece that does not begin its document counts as a document there."""

    total = None

    def __init__(self, order: Order, length: int) -> None:
        self._order, self._length = order, length
        self._window = functools.lru_cache(2)(self._make_window)

    def slices(self, first: int, stop: int) -> list[Spans]:
        """What slices [first, stop) are made of; the look-ahead token is there if the slice's last document goes on."""
        return [self._window(number // WINDOW)[number % WINDOW] for number in range(first, stop)]

    def _make_window(self, number: int) -> list[Spans]:
        tokens = WINDOW * self._length
        laid = self._order.spans(number * tokens, (number + 1) * tokens)
        bins = pack(laid.count.tolist(), self._length, WINDOW)
        return [_laid_out(laid, bins[place]) for place in shuffled(WINDOW, number)]


# (piece, its first token taken, tokens taken)
Cut = tuple[int, int, int]


def pack(counts: list[int], length: int, bins: int) -> list[list[Cut]]:
    """Lay pieces of `counts` tokens, bins * length in all, into bins of `length` tokens, cutting few and short ones.

    Best fit, longest first; what fits nowhere whole fills the gaps in order. A bin lists its pieces in their order,
    the one that is cut at its end last.
    """
    made: list[list[Cut]] = [[] for _ in range(bins)]
    room = [(length, number) for number in range(bins)]  # sorted: tokens left, bin
    left: list[Cut] = []
    for piece in sorted(range(len(counts)), key=lambda piece: -counts[piece]):
        count, begin = counts[piece], 0
        while count - begin > length and room[-1][0] == length:  # longer than a slice: fill empty ones
            made[room.pop()[1]].append((piece, begin, length))
            begin += length
        fit = bisect.bisect_left(room, (count - begin, -1))
        if fit == len(room):
            left.append((piece, begin, count - begin))
            continue
        free, number = room.pop(fit)
        made[number].append((piece, begin, count - begin))
        bisect.insort(room, (free - count + begin, number))
    _fill(made, [(number, free) for free, number in room], left)
    for cuts in made:
        cuts.sort(key=lambda cut: (cut[1] + cut[2] < counts[cut[0]], cut[0]))
    return made


def _fill(made: list[list[Cut]], gaps: list[tuple[int, int]], left: list[Cut]) -> None:
    """Lay the cuts `left` end to end over the gaps (bin, tokens), which they fill exactly."""
    waiting = iter(left)
    piece, begin, count = next(waiting, (0, 0, 0))
    for number, free in gaps:
        while free:
            taken = min(free, count)
            made[number].append((piece, begin, taken))
            free, begin, count = free - taken, begin + taken, count - taken
            if not count:
                piece, begin, count = next(waiting, (0, 0, 0))


def _laid_out(laid: Spans, cuts: list[Cut]) -> Spans:
    piece, begin, count = np.array(cuts, np.int64).T
    at = np.cumsum(count) - count
    if begin[-1] + count[-1] < laid.count[piece[-1]]:
        count[-1] += 1  # the look-ahead token
    return Spans(laid.source[piece], laid.document[piece], laid.offset[piece] + begin, count, at)
