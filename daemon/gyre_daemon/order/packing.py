"""Packs documents into sequences of one length. Pure arithmetic.

Documents are packed in windows of a keyed permutation, so memory for the work is bounded. Which
documents share a sequence follows from their lengths, the seed and the window alone. It is the same
in every epoch; the order then shuffles the sequences anew for each.
"""

import hashlib
import struct
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, NamedTuple

import numpy as np

from gyre_daemon.errors import InvalidRequest
from gyre_daemon.order.best_fit import best_fit
from gyre_daemon.order.sequences import Sequences
from gyre_daemon.order.shuffle.permutation import KEY_BYTES, Int64Array, Permutation

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


class _Packed(NamedTuple):
    """Parts, sequence after sequence.

    Attributes:
        parts: M of them.
        counts: int64 [P], how many each sequence has.
    """

    parts: _Parts
    counts: Int64Array


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
    order = Permutation(_key(rule.seed), max(num_documents, 1))
    windows: list[_Packed] = []
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
        fitted = best_fit(parts.lengths, rule.length)
        windows.append(_Packed(parts.at(fitted.numbers), fitted.counts))
    if rule.overlong == "fail" and num_overlong:
        raise InvalidRequest(
            f"{num_overlong} of {num_documents} documents are longer than {rule.length} tokens, "
            f"the longest has {longest}. Set `overlong` in `pack` to split, truncate or drop."
        )
    if not any(len(its.counts) for its in windows):
        raise InvalidRequest("there is nothing to pack: no document keeps a token")
    parts, counts = _joined(windows)
    return Sequences(
        parts.documents,
        parts.begins,
        parts.lengths.astype(np.int32),
        np.concatenate(([0], np.cumsum(counts))),
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


def _joined(windows: list[_Packed]) -> _Packed:
    """The sequences of all windows, one window behind the other."""
    begins = [its.parts.begins for its in windows if its.parts.begins is not None]
    parts = _Parts(
        np.concatenate([its.parts.documents for its in windows]),
        np.concatenate(begins) if begins else None,
        np.concatenate([its.parts.lengths for its in windows]),
    )
    return _Packed(parts, np.concatenate([its.counts for its in windows]))


def _key(seed: int) -> bytes:
    """The key of the permutation whose windows are packed; no epoch's order shares it."""
    packed = struct.pack("<Q", seed)
    return hashlib.blake2b(packed, digest_size=KEY_BYTES, person=b"gyre.packing").digest()
