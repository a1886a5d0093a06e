"""Very many small keyed permutations at once: each value of an array is permuted within a range of its own.

A `Permutation` prepares one key for one large range. Here every element has its own range, named by a number, and its key is a
hash of that number. It is the same Feistel network with cycle walking, of at least five bits, since on fewer its pairs are not
uniform; and two keyed rotations of the range around it make every value exactly as likely as any other at every place.
"""

import struct
from collections.abc import Callable, Sequence

import numpy as np

from gyre_daemon.order.permutation import Int64Array, RoundKey, Word, decrypt, encrypt

SCATTER_KEY_BYTES = 8
MAX_SIZE = 1 << 31  # of a range; up to it, a rotation leans to no value by more than its share of 2**-32

_MIX_1, _MIX_2 = np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB)
_ROUND_MARKS = (_MIX_1, _MIX_2, np.uint64(0xD6E8FEB86659FD93), np.uint64(0xA0761D6478BD642F))  # two rounds each
_MIN_BITS = 5
_WEYL = np.uint64(0x9E3779B97F4A7C15)

_Network = Callable[[Word, Sequence[RoundKey], int], Word]


class Scatter:
    """A family of permutations, one for each number of a range."""

    def __init__(self, key: bytes) -> None:
        """Prepare the family that a key of `SCATTER_KEY_BYTES` bytes names."""
        self._key = np.uint64(struct.unpack("<Q", key)[0])

    def __call__(self, ranges: Int64Array, values: Int64Array, sizes: Int64Array) -> Int64Array:
        """Where each value goes within `[0, sizes)` by its range's permutation; all int64 [n], sizes at most `MAX_SIZE`."""
        return self._permute(ranges, values, sizes, inverse=False)

    def inverse(self, ranges: Int64Array, values: Int64Array, sizes: Int64Array) -> Int64Array:
        """Where each value comes from; all int64 [n]."""
        return self._permute(ranges, values, sizes, inverse=True)

    def _permute(self, ranges: Int64Array, values: Int64Array, sizes: Int64Array, *, inverse: bool) -> Int64Array:
        seeds = _mix(self._key + ranges.astype(np.uint64) * _WEYL)
        before, after = (rotation.astype(np.int64) % sizes for rotation in _halves(seeds))
        if inverse:
            return (_walk(seeds, (values - after) % sizes, sizes, decrypt) - before) % sizes
        return (_walk(seeds, (values + before) % sizes, sizes, encrypt) + after) % sizes


def _walk(seeds: Word, values: Int64Array, sizes: Int64Array, network: _Network) -> Int64Array:
    """Through the network until each value is back in its range; the few different sizes one after the other."""
    result = values.copy()
    for size in _distinct(sizes):
        if size < 3:  # the rotations are all that there is
            continue
        num_bits = max((size - 1).bit_length(), _MIN_BITS)
        left = np.flatnonzero(sizes == size)
        keys = _round_keys(seeds[left])
        walked = values[left].astype(np.uint64)
        while left.size:
            walked = network(walked, keys, num_bits)
            result[left] = walked
            outside = np.flatnonzero(walked >= size)
            left, walked, keys = left[outside], walked[outside], [key[outside] for key in keys]
    return result


def _distinct(sizes: Int64Array) -> list[int]:
    """Mostly one: then nothing is sorted."""
    distinct: list[int] = (np.unique(sizes) if (sizes != sizes[:1]).any() else sizes[:1]).tolist()
    return distinct


def _round_keys(seeds: Word) -> list[np.ndarray[tuple[int], np.dtype[np.uint32]]]:
    return [half.astype(np.uint32) for mark in _ROUND_MARKS for half in _halves(_mix(seeds ^ mark))]


def _halves(words: Word) -> tuple[Word, Word]:
    return words >> np.uint64(32), words & np.uint64(0xFFFFFFFF)


def _mix(words: Word) -> Word:
    """SplitMix64's finaliser (Steele, Lea and Flood, 2014): a bijection of 64 bits in which each depends on all."""
    words = (words ^ (words >> np.uint64(30))) * _MIX_1
    words = (words ^ (words >> np.uint64(27))) * _MIX_2
    return words ^ (words >> np.uint64(31))
