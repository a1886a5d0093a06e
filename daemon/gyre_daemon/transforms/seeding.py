"""The random numbers of a sample. Pure.

They follow from the job's seed, the epoch and the sample's id alone. So a sample is transformed
alike on any number of ranks, by any worker, and after any restart.
"""

import hashlib
import struct

import numpy as np

_KEY = struct.Struct("<3Q")


class SampleGenerators:
    """Generators of random numbers for one sample after the other.

    One generator is seeded again and again: that takes 3 us, and a new one 14.
    """

    def __init__(self) -> None:
        self._bits = np.random.Philox(key=0)
        self._state = self._bits.state
        self._generator = np.random.Generator(self._bits)

    def of(self, seed: int, epoch: int, sample_id: int) -> np.random.Generator:
        """The generator of a sample; valid until the next call."""
        digest = hashlib.blake2b(_KEY.pack(seed, epoch, sample_id), digest_size=16).digest()
        state = self._state
        state["state"]["key"] = np.frombuffer(digest, "<u8")
        state["state"]["counter"] = np.zeros(4, np.uint64)
        self._bits.state = state  # with an empty buffer, as it was at first
        return self._generator
