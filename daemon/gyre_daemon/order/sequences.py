"""The parts of packed sequences. Plain values."""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from gyre_daemon.order.shuffle.permutation import Int64Array

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
