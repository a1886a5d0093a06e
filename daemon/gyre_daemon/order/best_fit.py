"""Best-fit decreasing: the longest document first, each into the fullest sequence with room for it.

Documents of one length are alike, so whole groups of them are put into whole groups of sequences:
the work grows with the number of different lengths and not with that of documents.
"""

import bisect
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from gyre_daemon.order.shuffle.permutation import Int64Array


class Fitted(NamedTuple):
    """P sequences of parts.

    Attributes:
        numbers: int64 [M], the parts, sequence after sequence.
        counts: int64 [P], how many parts each sequence has.
    """

    numbers: Int64Array
    counts: Int64Array


@dataclass(frozen=True, slots=True)
class _Filling:
    """The parts in equally filled sequences.

    before: the parts put there before.
    length: of the parts put there last.
        length: of the parts that were put there last.
        each: how many of them each sequence has.
    """

    before: "_Filling | None"
    length: int
    each: int


_Group = tuple[int, _Filling]  # the number of sequences filled alike, and their parts


def best_fit(lengths: Int64Array, capacity: int) -> Fitted:
    """Best-fit decreasing.

    Within a sequence longer parts come first; parts of one length are used in the order in which
    they are given.

    Args:
        lengths: int64 [M], in `[1, capacity]`.
        capacity: the tokens that a sequence has room for.
    """
    by_length = np.argsort(lengths, kind="stable")
    distinct, counts = np.unique(lengths, return_counts=True)
    next_of = dict(zip(distinct.tolist(), (np.cumsum(counts) - counts).tolist(), strict=True))
    nothing = np.empty(0, np.int64)
    numbers, sizes = [nothing], [nothing]
    for count, filling in _groups(distinct[::-1].tolist(), counts[::-1].tolist(), capacity):
        columns: list[Int64Array] = []
        last: _Filling | None = filling
        while last:
            begin, end = next_of[last.length], next_of[last.length] + last.each * count
            next_of[last.length] = end
            columns.append(by_length[begin:end].reshape(count, last.each))
            last = last.before
        rows = np.concatenate(columns[::-1], axis=1)
        numbers.append(rows.reshape(-1))
        sizes.append(np.full(count, rows.shape[1]))
    return Fitted(np.concatenate(numbers), np.concatenate(sizes))


def _groups(lengths: list[int], counts: list[int], capacity: int) -> Iterator[_Group]:
    """The sequences that best-fit decreasing makes of these numbers of parts, lengths falling."""
    room: list[int] = []  # the different numbers of free tokens, in rising order
    groups: dict[int, list[_Group]] = {}

    def add(free: int, group: _Group) -> None:
        if free not in groups:
            groups[free] = []
            bisect.insort(room, free)
        groups[free].append(group)

    def take(free: int) -> _Group:
        group = groups[free].pop()
        if not groups[free]:
            del groups[free]
            room.remove(free)
        return group

    for length, count in zip(lengths, counts, strict=True):
        left = count
        while left:
            fullest = bisect.bisect_left(room, length)
            if fullest < len(room):
                free = room[fullest]
                num_sequences, filling = take(free)
            else:
                free, num_sequences, filling = capacity, left, None
            # the fullest sequence stays the fullest until the next part does not fit there
            each = min(free // length, left)
            num_filled = min(num_sequences, left // each)
            if filling and num_filled < num_sequences:
                add(free, (num_sequences - num_filled, filling))
            add(free - each * length, (num_filled, _Filling(filling, length, each)))
            left -= num_filled * each
    for free in room:
        yield from groups[free]
