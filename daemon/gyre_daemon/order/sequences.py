"""The parts of packed sequences, and which sequences make a sample. Plain values."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from gyre_daemon.order.shuffle.permutation import Int64Array

Int32Array = npt.NDArray[np.int32]


class SequenceLengths:
    """Which sequences make which of P samples.

    A sample has room for the tokens of the longest sequences, L. Of a shorter length, which divides
    L, it has as many sequences as that takes. Samples and sequences come length after length, the
    shortest first.

    Attributes:
        each: int64 [C], the lengths, rising.
        per_sample: int64 [C], how many sequences of each length a sample has.
        first_samples: int64 [C + 1], the first sample of each length, and P.
        first_sequences: int64 [C + 1], the first sequence of each length, and their number.
    """

    def __init__(self, lengths: Sequence[int], num_samples: Sequence[int]) -> None:
        """The lengths, rising, and how many samples each has."""
        self.each = np.array(lengths, np.int64)
        self.per_sample = self.each[-1] // self.each
        counts = np.array(num_samples, np.int64)
        self.first_samples = np.concatenate(([0], np.cumsum(counts)))
        self.first_sequences = np.concatenate(([0], np.cumsum(counts * self.per_sample)))

    @property
    def longest(self) -> int:
        """L, and the tokens that a sample has room for."""
        return int(self.each[-1])

    @property
    def num_samples(self) -> int:
        """P."""
        return int(self.first_samples[-1])

    def of(self, samples: Int64Array) -> Int64Array:
        """The lengths of the sequences of samples; both int64 [n]."""
        return self.each[self._number(samples)]

    def sequences_of(self, samples: Int64Array) -> tuple[Int64Array, Int64Array]:
        """The sequences of n samples, and int64 [n + 1], where each one's begin."""
        number = self._number(samples)
        counts = self.per_sample[number]
        first = self.first_sequences[number] + counts * (samples - self.first_samples[number])
        return ranges(first, counts)

    def firsts(self) -> Int64Array:
        """Int64 [P + 1], the first sequence of each sample, and their number."""
        parts = [
            np.arange(first, stop, step)
            for first, stop, step in zip(
                self.first_sequences, self.first_sequences[1:], self.per_sample, strict=False
            )
        ]
        return np.concatenate([*parts, self.first_sequences[-1:]])

    def _number(self, samples: Int64Array) -> Int64Array:
        return np.searchsorted(self.first_samples, samples, side="right") - 1


@dataclass(frozen=True, slots=True, eq=False)
class Sequences:
    """M parts of documents, sequence after sequence.

    Attributes:
        documents: int64 [M], the document of each part.
        begins: int64 [M], the token of its document at which each part begins; None where all parts
            begin at 0.
        lengths: int32 [M], the tokens of each part, at least 1.
        bounds: int64 [S + 1], the first part of each sequence, and M. The last sample of each
            length may have sequences without parts.
        grouped: which sequences make which sample.
        num_empty: documents without tokens, which are in no sequence.
        num_overlong: documents that were left out or cut.
    """

    documents: Int64Array
    begins: Int64Array | None
    lengths: Int32Array
    bounds: Int64Array
    grouped: SequenceLengths
    num_empty: int
    num_overlong: int

    @property
    def num_samples(self) -> int:
        """P."""
        return self.grouped.num_samples

    @property
    def num_sequences(self) -> int:
        """S; as many as samples where all have one length."""
        return len(self.bounds) - 1

    @property
    def num_tokens(self) -> int:
        """Of all documents, as far as they are in sequences."""
        return int(self.lengths.sum(dtype=np.int64))

    @property
    def sample_bounds(self) -> Int64Array:
        """Int64 [P + 1], the first part of each sample, and M."""
        return self.bounds[self.grouped.firsts()]

    def parts_of(self, sequences: Int64Array) -> tuple[Int64Array, Int64Array]:
        """The numbers of the parts of n sequences, and int64 [n + 1], where each one's begin."""
        first = self.bounds[sequences]
        return ranges(first, self.bounds[sequences + 1] - first)

    def most_parts(self, num_samples: int) -> int:
        """An upper bound of the parts of this many samples at successive places of an order.

        The places may begin in one epoch and end in another.
        """
        whole = max(0, num_samples // self.num_samples - 1)
        half = min(-(-(num_samples - whole * self.num_samples) // 2), self.num_samples)
        counts = np.diff(self.sample_bounds)
        largest = np.partition(counts, len(counts) - half)[len(counts) - half :]
        return whole * len(self.documents) + 2 * int(largest.sum())


def ranges(first: Int64Array, counts: Int64Array) -> tuple[Int64Array, Int64Array]:
    """The numbers of n ranges, one range behind the other, and int64 [n + 1], where each begins.

    Args:
        first: int64 [n], the first number of each range.
        counts: int64 [n], how many it has.
    """
    bounds = np.concatenate(([0], np.cumsum(counts)))
    return np.arange(bounds[-1]) + np.repeat(first - bounds[:-1], counts), bounds
