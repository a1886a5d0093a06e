"""Very many small keyed permutations at once: each value is permuted within its own range.

A `Permutation` prepares one key for one large range. Here every element names its range by a
number, and a hash of the number is the range's key. The permutation is the same Feistel network
with cycle walking, on at least five bits, since on fewer its pairs are not uniform. Two keyed
rotations of the range, before and after the network, make every value equally likely at every
place.
"""

import struct
from collections.abc import Callable, Sequence

import numpy as np

from gyre_daemon.order.shuffle.permutation import Int64Array, RoundKey, Word, decrypt, encrypt

SCATTER_KEY_BYTES = 8
# The largest size of a range. Up to it, a rotation favours no value by more than a part in 2**32.
MAX_SIZE = 1 << 31

# The constants of SplitMix64, and one for every two round keys. They are part of the algorithm.
_MIX_1, _MIX_2 = np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB)
_WEYL = np.uint64(0x9E3779B97F4A7C15)
_ROUND_CONSTANTS = (
    _MIX_1,
    _MIX_2,
    np.uint64(0xD6E8FEB86659FD93),
    np.uint64(0xA0761D6478BD642F),
)
_MIN_BITS = 5

_Cipher = Callable[[Word, Sequence[RoundKey], int], Word]


class Scatter:
    """A family of permutations, one for each number of a range."""

    def __init__(self, key: bytes) -> None:
        """Take the key of the family, of `SCATTER_KEY_BYTES` bytes."""
        self._key = np.uint64(struct.unpack("<Q", key)[0])

    def __call__(self, ranges: Int64Array, values: Int64Array, sizes: Int64Array) -> Int64Array:
        """Permute each value within `[0, size)` of its range.

        Args:
            ranges: int64 [n], the number of each value's range.
            values: int64 [n].
            sizes: int64 [n], of the ranges, at most `MAX_SIZE`.
        """
        return self._permute(ranges, values, sizes, inverse=False)

    def inverse(self, ranges: Int64Array, values: Int64Array, sizes: Int64Array) -> Int64Array:
        """The inverse of a call."""
        return self._permute(ranges, values, sizes, inverse=True)

    def _permute(
        self, ranges: Int64Array, values: Int64Array, sizes: Int64Array, *, inverse: bool
    ) -> Int64Array:
        seeds = _mix(self._key + ranges.astype(np.uint64) * _WEYL)
        before, after = (rotation.astype(np.int64) % sizes for rotation in _halves(seeds))
        if inverse:
            return (_walk(seeds, (values - after) % sizes, sizes, decrypt) - before) % sizes
        return (_walk(seeds, (values + before) % sizes, sizes, encrypt) + after) % sizes


def _walk(seeds: Word, values: Int64Array, sizes: Int64Array, cipher: _Cipher) -> Int64Array:
    """Cycle walking: encrypt each value until it is in its range, one size after the other."""
    result = values.copy()
    for size in _distinct(sizes):
        if size < 3:  # the rotations are all permutations that there are
            continue
        num_bits = max((size - 1).bit_length(), _MIN_BITS)
        left = np.flatnonzero(sizes == size)
        keys = _round_keys(seeds[left])
        walked = values[left].astype(np.uint64)
        while left.size:
            walked = cipher(walked, keys, num_bits)
            result[left] = walked
            outside = np.flatnonzero(walked >= size)
            left, walked, keys = left[outside], walked[outside], [key[outside] for key in keys]
    return result


def _distinct(sizes: Int64Array) -> list[int]:
    """The different sizes; mostly there is one, and nothing is sorted."""
    distinct: list[int] = (np.unique(sizes) if (sizes != sizes[:1]).any() else sizes[:1]).tolist()
    return distinct


def _round_keys(seeds: Word) -> list[np.ndarray[tuple[int], np.dtype[np.uint32]]]:
    mixed = [_mix(seeds ^ constant) for constant in _ROUND_CONSTANTS]
    return [half.astype(np.uint32) for word in mixed for half in _halves(word)]


def _halves(words: Word) -> tuple[Word, Word]:
    return words >> np.uint64(32), words & np.uint64(0xFFFFFFFF)


def _mix(words: Word) -> Word:
    """SplitMix64's finaliser (Steele, Lea and Flood, 2014), a bijection of 64 bits."""
    words = (words ^ (words >> np.uint64(30))) * _MIX_1
    words = (words ^ (words >> np.uint64(27))) * _MIX_2
    return words ^ (words >> np.uint64(31))
