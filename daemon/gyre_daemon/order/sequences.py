"""Packs documents into sequences of one length. Pure arithmetic.

Documents are packed in windows of a keyed permutation, so memory for the work is bounded. Which
documents share a sequence follows from their lengths, the seed and the window alone. It is the same
in every epoch; the order then shuffles the sequences anew for each.

Documents of one length are alike, so whole groups of them are put into whole groups of sequences:
the work grows with the number of different lengths and not with that of documents.
"""

import bisect
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Literal, NamedTuple

import numpy as np
import numpy.typing as npt
from msgspec import Struct

from gyre_daemon.errors import InvalidRequest
from gyre_daemon.order.permutation import Int64Array, Permutation, key_of

Int32Array = npt.NDArray[np.int32]


@dataclass(frozen=True, slots=True, eq=False)
class Sequences:
    """M parts of documents, sequence after sequence.

    Attributes:
        documents: int64 [M], the document of each part.
        begins: int64 [M], the token of its document at which each part begins; None where all parts
            begin at 0.
        lengths: int32 [M], the tokens of each part, at least 1.
        bounds: int64 [P + 1], the first part of each sequence, and M.
        num_empty: documents without tokens, which are in no sequence.
        num_overlong: documents that were left out or cut.
    """

    documents: Int64Array
    begins: Int64Array | None
    lengths: Int32Array
    bounds: Int64Array
    num_empty: int
    num_overlong: int

    @property
    def num_samples(self) -> int:
        """P, the number of sequences."""
        return len(self.bounds) - 1

    @property
    def num_tokens(self) -> int:
        """Of all documents, as far as they are in sequences."""
        return int(self.lengths.sum(dtype=np.int64))

    def parts_of(self, sequences: Int64Array) -> tuple[Int64Array, Int64Array]:
        """The numbers of the parts of n sequences, and int64 [n + 1], where each one's begin."""
        first = self.bounds[sequences]
        counts = self.bounds[sequences + 1] - first
        bounds = np.concatenate(([0], np.cumsum(counts)))
        return np.arange(bounds[-1]) + np.repeat(first - bounds[:-1], counts), bounds

    def most_parts(self, num_samples: int) -> int:
        """An upper bound of the parts of this many samples at successive places of an order.

        The places may begin in one epoch and end in another.
        """
        whole = max(0, num_samples // self.num_samples - 1)
        half = min(-(-(num_samples - whole * self.num_samples) // 2), self.num_samples)
        counts = np.diff(self.bounds)
        largest = np.partition(counts, len(counts) - half)[len(counts) - half :]
        return whole * len(self.documents) + 2 * int(largest.sum())


class _Filling(Struct, frozen=True):
    """The parts in equally filled sequences.

    Attributes:
        before: the parts that were put there before.
        length: of the parts that were put there last.
        each: how many of them each sequence has.
    """

    before: "_Filling | None"
    length: int
    each: int


_Group = tuple[int, _Filling]  # the number of sequences filled alike, and their parts


def best_fit(lengths: Int64Array, capacity: int) -> tuple[Int64Array, Int64Array]:
    """Best-fit decreasing.

    Within a sequence longer parts come first; parts of one length are used in the order in which
    they are given.

    Args:
        lengths: int64 [M], in `[1, capacity]`.
        capacity: the tokens that a sequence has room for.

    Returns:
        Int64 [M], the parts, sequence after sequence, and int64 [P], how many each of these has.
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
    return np.concatenate(numbers), np.concatenate(sizes)


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


Overlong = Literal["fail", "drop", "truncate", "split"]

# Every change of the code below packs the same documents otherwise, and needs a new version.
PACKING_VERSION = 1


@dataclass(frozen=True, slots=True)
class PackRule:
    """How documents become sequences.

    Attributes:
        length: L, the tokens of a sequence.
        overlong: how to treat a document of more than L tokens: `fail` refuses the dataset,
            `drop` leaves it out, `truncate` keeps its first L tokens, `split` cuts it into parts of
            L tokens and a rest.
        window: the number of documents packed together.
        seed: of the permutation whose windows are packed.
    """

    length: int
    overlong: Overlong = "fail"
    window: int = 1 << 20
    seed: int = 0


class _Parts(NamedTuple):
    """Parts of documents to pack; see `Sequences`."""

    documents: Int64Array
    begins: Int64Array | None
    lengths: Int64Array

    def at(self, numbers: Int64Array) -> "_Parts":
        """Some of them, in this order."""
        begins = None if self.begins is None else self.begins[numbers]
        return _Parts(self.documents[numbers], begins, self.lengths[numbers])


def pack_documents(
    num_documents: int,
    lengths_of: Callable[[Int64Array], Int64Array],
    rule: PackRule,
    left_out: Int64Array,
) -> Sequences:
    """Pack the documents of a dataset; takes a quarter of a second for a million.

    Args:
        num_documents: D.
        lengths_of: takes int64 [n] documents and returns int64 [n], their tokens.
        rule: how.
        left_out: int64 [C], documents in no sequence, in rising order.

    Raises:
        InvalidRequest: a document is too long and the rule says `fail`, or nothing is left.
    """
    order = Permutation(key_of(b"gyre.packing", rule.seed), max(num_documents, 1))
    windows: list[_Parts] = []  # sequence after sequence
    counts: list[Int64Array] = []  # the parts of each sequence
    num_empty = num_overlong = longest = 0
    for begin in range(0, num_documents, rule.window):
        documents = order(np.arange(begin, min(begin + rule.window, num_documents)))
        if len(left_out):
            documents = documents[~np.isin(documents, left_out)]
        lengths = lengths_of(documents)
        num_empty += int(np.count_nonzero(lengths == 0))
        num_overlong += int(np.count_nonzero(lengths > rule.length))
        longest = max(longest, int(lengths.max(initial=0)))
        parts = _parts(documents, lengths, rule)
        fitted, num_parts = best_fit(parts.lengths, rule.length)
        windows.append(parts.at(fitted))
        counts.append(num_parts)
    if rule.overlong == "fail" and num_overlong:
        raise InvalidRequest(
            f"{num_overlong} of {num_documents} documents are longer than {rule.length} tokens, "
            f"the longest has {longest}. Set `overlong` in `pack` to split, truncate or drop."
        )
    if not any(map(len, counts)):
        raise InvalidRequest("there is nothing to pack: no document keeps a token")
    begins = [its.begins for its in windows if its.begins is not None]
    return Sequences(
        np.concatenate([its.documents for its in windows]),
        np.concatenate(begins) if begins else None,
        np.concatenate([its.lengths for its in windows]).astype(np.int32),
        np.concatenate(([0], np.cumsum(np.concatenate(counts)))),
        num_empty,
        num_overlong,
    )


def _parts(documents: Int64Array, lengths: Int64Array, rule: PackRule) -> _Parts:
    """The parts of documents to pack, by the rule for overlong ones."""
    if rule.overlong == "split":
        counts = -(-lengths // rule.length)
        first = np.cumsum(counts) - counts
        begins = (np.arange(counts.sum()) - np.repeat(first, counts)) * rule.length
        rest = np.repeat(lengths, counts) - begins
        return _Parts(np.repeat(documents, counts), begins, np.minimum(rest, rule.length))
    kept = lengths > 0
    if rule.overlong == "truncate":
        lengths = np.minimum(lengths, rule.length)
    else:
        kept &= lengths <= rule.length
    return _Parts(documents[kept], None, lengths[kept])
