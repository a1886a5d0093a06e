"""The keyed permutation of `[0, N)`: an unbalanced Feistel network with cycle walking, in O(1) memory.

A Feistel network on `(N - 1).bit_length()` bits permutes a power of two that is at least N and less than 2N; a value that falls
outside `[0, N)` is permuted again until it falls inside (Black and Rogaway, "Ciphers with arbitrary finite domains", 2002).
Vectorised: each call maps a whole array of positions.
"""

import hashlib
import struct
from collections.abc import Callable

import numpy as np
import numpy.typing as npt

ALGORITHM_VERSION = 1
MAX_SAMPLES = 1 << 62

_NUM_ROUNDS = 8  # even, so that the two halves come back to their places
_KEY_FORMAT = f"<{_NUM_ROUNDS}I"

Int64Array = npt.NDArray[np.int64]
_Half = npt.NDArray[np.uint32]
_Word = npt.NDArray[np.uint64]


def epoch_key(seed: int, epoch: int) -> bytes:
    """The key of an epoch: a hash, so that neighbouring seeds and epochs share nothing.

    Args:
        seed: in `[0, 2**64)`.
        epoch: in `[0, 2**64)`.
    """
    return hashlib.blake2b(
        struct.pack("<QQ", seed, epoch), digest_size=struct.calcsize(_KEY_FORMAT), person=b"gyre.permutation"
    ).digest()


class Permutation:
    """A bijection on `[0, num_samples)` given by a key, with its inverse."""

    def __init__(self, key: bytes, num_samples: int) -> None:
        """Prepare the rounds.

        Args:
            key: from `epoch_key`.
            num_samples: N, at least 1 and at most 2**62.
        """
        if not 1 <= num_samples <= MAX_SAMPLES:
            raise ValueError(f"a permutation needs 1 to 2**62 samples, not {num_samples}")
        num_bits = (num_samples - 1).bit_length()
        self.num_samples = num_samples
        self._round_keys = [np.uint32(word) for word in struct.unpack(_KEY_FORMAT, key)]
        self._left_bits = num_bits // 2
        self._right_bits = num_bits - self._left_bits

    def __call__(self, places: Int64Array) -> Int64Array:
        """Sample ids at places `q` of the epoch; both int64 [n], all in `[0, num_samples)`."""
        return self._walk(places, self._forward)

    def inverse(self, sample_ids: Int64Array) -> Int64Array:
        """Places at which sample ids occur; both int64 [n], all in `[0, num_samples)`."""
        return self._walk(sample_ids, self._backward)

    def _walk(self, values: Int64Array, step: Callable[[_Word], _Word]) -> Int64Array:
        result = step(values.astype(np.uint64))
        outside = np.flatnonzero(result >= self.num_samples)
        while outside.size:
            walked = step(result[outside])
            result[outside] = walked
            outside = outside[walked >= self.num_samples]
        return result.astype(np.int64)

    def _forward(self, values: _Word) -> _Word:
        left, right = self._split(values, self._right_bits)
        left_bits, right_bits = self._left_bits, self._right_bits
        for key in self._round_keys:
            left, right = right, left ^ _mix(right, key, left_bits)
            left_bits, right_bits = right_bits, left_bits
        return _join(left, right, right_bits)

    def _backward(self, values: _Word) -> _Word:
        left, right = self._split(values, self._right_bits)
        left_bits, right_bits = self._left_bits, self._right_bits
        for key in reversed(self._round_keys):
            left, right = right ^ _mix(left, key, right_bits), left
            left_bits, right_bits = right_bits, left_bits
        return _join(left, right, right_bits)

    @staticmethod
    def _split(values: _Word, right_bits: int) -> tuple[_Half, _Half]:
        mask = np.uint64((1 << right_bits) - 1)
        return (values >> np.uint64(right_bits)).astype(np.uint32), (values & mask).astype(np.uint32)


def _join(left: _Half, right: _Half, right_bits: int) -> _Word:
    return (left.astype(np.uint64) << np.uint64(right_bits)) | right


def _mix(half: _Half, key: np.uint32, num_bits: int) -> _Half:
    """The round function: the finaliser of MurmurHash3 over half and key, its top `num_bits` bits."""
    if num_bits == 0:
        return np.zeros_like(half)
    mixed = half ^ key
    mixed ^= mixed >> np.uint32(16)
    mixed *= np.uint32(0x85EBCA6B)
    mixed ^= mixed >> np.uint32(13)
    mixed *= np.uint32(0xC2B2AE35)
    mixed ^= mixed >> np.uint32(16)
    mixed >>= np.uint32(32 - num_bits)
    return mixed
