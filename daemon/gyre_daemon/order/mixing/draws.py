"""What the random numbers of samples follow from, beside the samples' ids. Pure.

[Note: Samples of sources that depend on chance] A mixture reads a sample of a source as bytes at a
place. Where the source's transforms draw random numbers, these bytes depend on a seed and an epoch,
too: so its reads bring both, the seed of the job on its way down and the epoch of the sample in its
own source. Each mixture that a read passes turns the seed into that of the source, as its order
does. So a sample is what a job on that source alone would get, under the source's seed.
"""

import hashlib
import struct
from dataclasses import dataclass

import numpy as np

from gyre_daemon.order.shuffle.permutation import Int64Array


@dataclass(frozen=True, slots=True, eq=False)
class Draws:
    """The seed and the epochs of n samples or reads.

    Attributes:
        seed: of the job, or of a source of its mixture.
        epochs: int64 [n], of each one's own source.
    """

    seed: int
    epochs: Int64Array

    @classmethod
    def first(cls, num: int) -> "Draws":
        """Those under which samples are measured and verified: seed 0 and epoch 0."""
        return cls(0, np.zeros(num, np.int64))

    def part(self, which: slice | np.ndarray[tuple[int], np.dtype[np.generic]]) -> "Draws":
        """Those of some; `which` as an index of arrays."""
        return Draws(self.seed, self.epochs[which])

    def of_source(self, name: str) -> "Draws":
        """The same under the seed of one source of a mixture."""
        return Draws(source_seed(self.seed, name), self.epochs)


def source_seed(seed: int, name: str) -> int:
    """The seed of a source, from that of the job and the source's name in the mixture."""
    text = struct.pack("<Q", seed) + name.encode()
    digest = hashlib.blake2b(text, digest_size=8, person=b"gyre.source").digest()
    return int.from_bytes(digest, "little")
