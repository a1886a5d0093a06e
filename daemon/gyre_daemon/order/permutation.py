"""The keyed permutation of `[0, N)`, in O(1) memory, for whole arrays of places at a time.

Up to 4096 samples it is a table: the order of N keyed random words. Above, it is a
format-preserving permutation: an unbalanced Feistel network with cycle walking (Black and Rogaway,
"Ciphers with arbitrary finite domains", 2002). The network on `(N - 1).bit_length()` bits permutes
a power of two, at least N and less than 2N; a value that falls outside `[0, N)` is permuted
again until it falls inside. A network alone would not do. On 3 bits, 8 rounds are so far from
uniform that 20,000 orders of 5 samples show it. And it permutes a power of two evenly, so half of
the keys also exchange the samples 0 and 1, which makes odd permutations as likely.
"""

import hashlib
import struct
from collections.abc import Callable, Sequence
from typing import Protocol

import numpy as np
import numpy.typing as npt

# Every change of the numbers below, or of the order `block`, makes other orders of the same seeds.
# It needs a new version, with which cursors of the old one are refused.
ALGORITHM_VERSION = 2
MAX_SAMPLES = 1 << 62

_MAX_TABLE_SAMPLES = 4096
_NUM_ROUNDS = 8  # even, so that the two halves return to their sides
_KEY_FORMAT = f"<{_NUM_ROUNDS}IB"
KEY_BYTES = struct.calcsize(_KEY_FORMAT)
_16, _13, _FIRST_FACTOR, _SECOND_FACTOR = map(np.uint32, (16, 13, 0x85EBCA6B, 0xC2B2AE35))

# Up to this size round functions are looked up in tables, of 128 KiB at most. The result is the
# same. Each bit more would double the tables for two rounds and push others out of the L2 cache.
_MAX_TABLED_BITS = 22

Int64Array = npt.NDArray[np.int64]
Word = npt.NDArray[np.uint64]
RoundKey = np.uint32 | npt.NDArray[np.uint32]
_Half = npt.NDArray[np.uint32]


def epoch_key(seed: int, epoch: int) -> bytes:
    """The key of an epoch: a hash, so that neighbouring seeds and epochs share nothing.

    Args:
        seed: in `[0, 2**64)`.
        epoch: in `[0, 2**64)`.
    """
    return hashlib.blake2b(
        struct.pack("<QQ", seed, epoch), digest_size=KEY_BYTES, person=b"gyre.permutation"
    ).digest()


class _Bijection(Protocol):
    def forward(self, values: Int64Array) -> Int64Array: ...
    def backward(self, values: Int64Array) -> Int64Array: ...


class Permutation:
    """A keyed bijection on `[0, num_samples)`, with its inverse."""

    def __init__(self, key: bytes, num_samples: int) -> None:
        """Prepare the table or the rounds.

        Args:
            key: from `epoch_key`.
            num_samples: N, at least 1 and at most 2**62.
        """
        if not 1 <= num_samples <= MAX_SAMPLES:
            raise ValueError(f"a permutation needs 1 to 2**62 samples, not {num_samples}")
        self.num_samples = num_samples
        kind = _ShuffledTable if num_samples <= _MAX_TABLE_SAMPLES else _FeistelNetwork
        self._bijection: _Bijection = kind(key, num_samples)

    def __call__(self, places: Int64Array) -> Int64Array:
        """Sample ids at places of the epoch; both int64 [n], all in `[0, num_samples)`."""
        return self._bijection.forward(places)

    def inverse(self, sample_ids: Int64Array) -> Int64Array:
        """Places of sample ids; both int64 [n], all in `[0, num_samples)`."""
        return self._bijection.backward(sample_ids)


class _ShuffledTable:
    """All N values, in the order of N random words of 64 bits."""

    def __init__(self, key: bytes, num_samples: int) -> None:
        words = np.frombuffer(hashlib.shake_128(key).digest(8 * num_samples), "<u8")
        self._values = np.argsort(words, kind="stable")

    def forward(self, values: Int64Array) -> Int64Array:
        return self._values[values]

    def backward(self, values: Int64Array) -> Int64Array:
        return np.argsort(self._values)[values]


class _FeistelNetwork:
    """A Feistel network with cycle walking."""

    def __init__(self, key: bytes, num_samples: int) -> None:
        num_bits = (num_samples - 1).bit_length()
        self._num_samples = num_samples
        *round_keys, last = struct.unpack(_KEY_FORMAT, key)
        rounds = _TabledRounds if num_bits <= _MAX_TABLED_BITS else _ComputedRounds
        self._rounds: _Bijection = rounds([np.uint32(word) for word in round_keys], num_bits)
        self._exchanges = last & 1

    def forward(self, values: Int64Array) -> Int64Array:
        return self._exchange(self._walk(values, self._rounds.forward))

    def backward(self, values: Int64Array) -> Int64Array:
        return self._walk(self._exchange(values.copy()), self._rounds.backward)

    def _exchange(self, values: Int64Array) -> Int64Array:
        """Exchange 0 and 1 in place, if this key does so."""
        if self._exchanges:
            values[np.flatnonzero(values < 2)] ^= 1
        return values

    def _walk(self, values: Int64Array, step: Callable[[Int64Array], Int64Array]) -> Int64Array:
        result = step(values)
        outside = np.flatnonzero(result >= self._num_samples)
        while outside.size:
            walked = step(result[outside])
            result[outside] = walked
            outside = outside[walked >= self._num_samples]
        return result


class _ComputedRounds:
    """The rounds of a network, computed."""

    def __init__(self, round_keys: Sequence[np.uint32], num_bits: int) -> None:
        self._round_keys = round_keys
        self._num_bits = num_bits

    def forward(self, values: Int64Array) -> Int64Array:
        return encrypt(values.astype(np.uint64), self._round_keys, self._num_bits).astype(np.int64)

    def backward(self, values: Int64Array) -> Int64Array:
        return decrypt(values.astype(np.uint64), self._round_keys, self._num_bits).astype(np.int64)


class _TabledRounds:
    """The same rounds, looked up in small tables in a fifth of the time."""

    def __init__(self, round_keys: Sequence[np.uint32], num_bits: int) -> None:
        self._right_bits = num_bits - num_bits // 2
        bits = (num_bits // 2, self._right_bits)
        self._tables = [
            _mix(np.arange(1 << bits[1 - index % 2], dtype=np.uint32), key, bits[index % 2]).astype(
                np.int64
            )
            for index, key in enumerate(round_keys)
        ]

    def forward(self, values: Int64Array) -> Int64Array:
        left, right = values >> self._right_bits, values & (1 << self._right_bits) - 1
        for table in self._tables:
            left, right = right, left ^ table.take(right)
        return left << self._right_bits | right

    def backward(self, values: Int64Array) -> Int64Array:
        left, right = values >> self._right_bits, values & (1 << self._right_bits) - 1
        for table in reversed(self._tables):
            left, right = right ^ table.take(left), left
        return left << self._right_bits | right


def encrypt(values: Word, round_keys: Sequence[RoundKey], num_bits: int) -> Word:
    """A Feistel network: a keyed bijection of the numbers below 2**num_bits.

    Args:
        values: uint64 [n].
        round_keys: an even number of uint32 keys, each one for all values or [n].
        num_bits: 2 to 64.
    """
    left_bits, right_bits = num_bits // 2, num_bits - num_bits // 2
    left, right = _split(values, right_bits)
    for key in round_keys:
        left, right = right, left ^ _mix(right, key, left_bits)
        left_bits, right_bits = right_bits, left_bits
    return _join(left, right, right_bits)


def decrypt(values: Word, round_keys: Sequence[RoundKey], num_bits: int) -> Word:
    """The inverse of `encrypt`."""
    left_bits, right_bits = num_bits // 2, num_bits - num_bits // 2
    left, right = _split(values, right_bits)
    for key in reversed(round_keys):
        left, right = right ^ _mix(left, key, right_bits), left
        left_bits, right_bits = right_bits, left_bits
    return _join(left, right, right_bits)


def _split(values: Word, right_bits: int) -> tuple[_Half, _Half]:
    mask = np.uint64((1 << right_bits) - 1)
    return (values >> np.uint64(right_bits)).astype(np.uint32), (values & mask).astype(np.uint32)


def _join(left: _Half, right: _Half, right_bits: int) -> Word:
    return (left.astype(np.uint64) << np.uint64(right_bits)) | right


def _mix(half: _Half, key: RoundKey, num_bits: int) -> _Half:
    """The round function: the top `num_bits` bits of MurmurHash3's finaliser of half and key."""
    mixed = half ^ key
    mixed ^= mixed >> _16
    mixed *= _FIRST_FACTOR
    mixed ^= mixed >> _13
    mixed *= _SECOND_FACTOR
    mixed ^= mixed >> _16
    mixed >>= np.uint32(32 - num_bits)
    return mixed
