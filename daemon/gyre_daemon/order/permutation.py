"""The orders of one epoch, in O(1) memory, for whole arrays of places at a time.

[Note: The order `full`] It is a keyed permutation of `[0, N)`. Up to 4096 samples it is a table:
the order of N keyed random words. Above, it is a format-preserving permutation: an unbalanced
Feistel network with cycle walking (Black and Rogaway, "Ciphers with arbitrary finite domains",
2002). The network on `(N - 1).bit_length()` bits permutes a power of two, at least N and less than
2N; a value that falls outside `[0, N)` is permuted again until it falls inside. A network alone
would not do. On 3 bits, 8 rounds are so far from uniform that 20,000 orders of 5 samples show it.
And it permutes a power of two evenly, so half of the keys also exchange the samples 0 and 1, which
makes odd permutations as likely.

[Note: The order `block`] It is a shuffle that reads blocks, and mixes each with hundreds of others,
in O(1) memory. Places of an epoch become sample ids in two steps.

*The block sequence* is all samples, block after block, the blocks in a keyed random order. It is
cut into as many equal *sections* as there are blocks; a section has samples of one to three blocks
next to each other in the sequence.

*The sliding window.* The places of the epoch are cut into *draws* as long as the sections. Draw g
takes its samples from the sections `[g - h, g + h]`, evenly from all of them, and every section
gives its samples evenly to the draws around it: element k of draw g is element k of section
`g - d(k)`, where the offsets d are spread symmetrically over `[-h, h]`. If that section is before
the beginning of the sequence or behind its end, the sequence is reflected there: the mirrored
section gives its mirrored element. As the offsets are symmetric, this is a bijection whose inverse
costs the same, and each section is read within one stretch of `2h + 1` draws and never again.

Within a section the samples are permuted. Within a draw, the elements come in runs that have every
offset once: first the even ones in a random order, then the odd ones, since neighbouring sections
may share a block. If a draw is shorter than the window, a batch spans several draws, and
neighbouring draws read neighbouring sections. So draws are *interleaved* in stretches that reach
every section of the window once: first every fourth draw of a stretch, then the ones behind these.
Thus successive samples, up to a quarter of the window, come from nearly as many blocks, and a batch
of that size is as mixed as one of a global shuffle.

A `Permutation` prepares one key for one large range. Here every element names its range by a
number, and a hash of the number is the range's key. The permutation is the same Feistel network
with cycle walking, on at least five bits, since on fewer its pairs are not uniform. Two keyed
rotations of the range, before and after the network, make every value equally likely at every
place.

[Note: Blocks]

A block is a run of successive samples of one shard that one range request reads.
A table of blocks is a list of *runs*. All blocks of a run have the same number of samples, except
its last, which has the rest. So a shard of samples of one size is one run, however many blocks it
has; where samples differ in size, each block is a run.
"""

import hashlib
import struct
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Protocol

import numpy as np
import numpy.typing as npt
from msgspec import Struct

from gyre_daemon.errors import InvalidRequest

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


def key_of(purpose: bytes, *numbers: int) -> bytes:
    """The key of a permutation: a hash, so that neighbouring numbers and purposes share nothing.

    Args:
        purpose: at most 16 bytes.
        numbers: such as a seed and an epoch, in `[0, 2**64)`.
    """
    packed = struct.pack(f"<{len(numbers)}Q", *numbers)
    return hashlib.blake2b(packed, digest_size=KEY_BYTES, person=purpose).digest()


def epoch_key(seed: int, epoch: int) -> bytes:
    """The key of the order of an epoch."""
    return key_of(b"gyre.permutation", seed, epoch)


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


# Sessions and caches ask for a few block sizes again and again. A table takes up to 16 bytes per
# block, so keeping many costs memory; with fewer, a busy node would make the same tables again.
_MAX_TABLES = 8


class BlockTable(Struct, frozen=True):
    """Which samples each block of a dataset has. No block is empty, and no sample is in two.

    Attributes:
        regular_size: samples of each block but the last of its run.
        first_block: int64 [R + 1], the first block of each run, and the number of all blocks.
        first: int64 [R + 1], the first sample of each run, and the number of all samples.
    """

    regular_size: int
    first_block: Int64Array
    first: Int64Array

    @property
    def num_blocks(self) -> int:
        """The number of blocks of the dataset."""
        return int(self.first_block[-1])

    @property
    def num_samples(self) -> int:
        """N."""
        return int(self.first[-1])

    def block_of(self, sample_ids: Int64Array) -> Int64Array:
        """The block of each sample; both int64 [n]."""
        run = np.searchsorted(self.first, sample_ids, side="right") - 1
        block = self.first_block[run] + (sample_ids - self.first[run]) // self.regular_size
        blocks: Int64Array = np.minimum(block, self.first_block[run + 1] - 1)
        return blocks

    def first_sample(self, blocks: Int64Array) -> Int64Array:
        """The first sample of each block; for the number `num_blocks`, N."""
        run = np.searchsorted(self.first_block, blocks, side="right") - 1
        return self.first[run] + (blocks - self.first_block[run]) * self.regular_size

    def sizes(self, blocks: Int64Array) -> Int64Array:
        """The number of samples of each block."""
        return self.first_sample(blocks + 1) - self.first_sample(blocks)

    def irregular(self) -> Int64Array:
        """The blocks whose size is not the regular one, ascending: at most one of each run."""
        last = self.first_block[1:] - 1
        irregular: Int64Array = last[self.sizes(last) != self.regular_size]
        return irregular

    def of_first(self, num_samples: int) -> "BlockTable":
        """The blocks of the first samples, with the same numbers.

        Raises:
            InvalidRequest: no shard ends there.
        """
        if num_samples == self.num_samples:
            return self
        run = int(np.searchsorted(self.first, num_samples))
        if self.first[run] != num_samples:
            raise InvalidRequest(
                f"no shard of the dataset ends with its first {num_samples} samples"
            )
        return BlockTable(self.regular_size, self.first_block[: run + 1], self.first[: run + 1])


class BlockIndex(Protocol):
    """The facts about a dataset that an order needs."""

    @property
    def num_samples(self) -> int:
        """N."""

    def blocks(self, io_block_bytes: int) -> BlockTable:
        """The samples cut into blocks of about `io_block_bytes`, each within one shard."""


def kept_tables(make: Callable[[int], BlockTable]) -> Callable[[int], BlockTable]:
    """A function that makes tables by block size, with the last few kept."""
    return lru_cache(_MAX_TABLES)(make)


def blocks_of_equal_samples(
    num_samples: Int64Array, stride_bytes: int, io_block_bytes: int
) -> BlockTable:
    """Blocks of shards whose samples begin every `stride_bytes`.

    A shard's last block has half to one and a half times the size of the others.

    Args:
        num_samples: int64 [S], of each shard.
        stride_bytes: from one sample to the next.
        io_block_bytes: the size that blocks should have.
    """
    size = max(1, io_block_bytes // stride_bytes)
    counts = num_samples[num_samples > 0]
    num_blocks = np.maximum(1, (counts + size // 2) // size)
    return BlockTable(size, _cumulated(num_blocks), _cumulated(counts))


def blocks_of_unequal_samples(
    shard: Int64Array, start: Int64Array, stop: Int64Array, io_block_bytes: int
) -> BlockTable:
    """Blocks of consecutive samples in each shard.

    The blocks of one shard have about the same number of bytes.

    Args:
        shard: int64 [N], ascending.
        start: int64 [N], first byte of each sample, ascending within a shard.
        stop: int64 [N], the byte after its last.
        io_block_bytes: the size that blocks should have.
    """
    shard_first = np.flatnonzero(np.diff(shard, prepend=-1))  # first sample of each shard
    counts = np.diff(shard_first, append=len(shard))
    begin, end = start[shard_first], np.maximum.reduceat(stop, shard_first)
    num_bytes = np.maximum(end - begin, 1)
    num_pieces = np.maximum(1, (num_bytes + io_block_bytes // 2) // io_block_bytes)
    piece_bytes = -(-num_bytes // num_pieces)
    last_piece = (num_bytes - 1) // piece_bytes
    piece = (start - np.repeat(begin, counts)) // np.repeat(piece_bytes, counts)
    # an empty sample at the end of a shard makes no piece
    piece = np.minimum(piece, np.repeat(last_piece, counts))
    is_first = np.diff(piece, prepend=-1) != 0
    is_first[shard_first] = True
    first = np.append(np.flatnonzero(is_first), len(shard)).astype(np.int64)
    return BlockTable(max(1, len(shard) // (len(first) - 1)), np.arange(len(first)), first)


def blocks_that_begin_at(first: Int64Array) -> BlockTable:
    """Blocks of any size.

    Args:
        first: int64 [B + 1], the first sample of each, and the number of all samples.
    """
    sizes, counts = np.unique(np.diff(first), return_counts=True)
    regular = int(sizes[counts.argmax()]) if len(sizes) else 1
    return BlockTable(regular, np.arange(len(first)), first)


def _cumulated(counts: Int64Array) -> Int64Array:
    return np.concatenate(([0], np.cumsum(counts)))


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
        seeds = _split_mix(self._key + ranges.astype(np.uint64) * _WEYL)
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
    mixed = [_split_mix(seeds ^ constant) for constant in _ROUND_CONSTANTS]
    return [half.astype(np.uint32) for word in mixed for half in _halves(word)]


def _halves(words: Word) -> tuple[Word, Word]:
    return words >> np.uint64(32), words & np.uint64(0xFFFFFFFF)


def _split_mix(words: Word) -> Word:
    """SplitMix64's finaliser (Steele, Lea and Flood, 2014), a bijection of 64 bits."""
    words = (words ^ (words >> np.uint64(30))) * _MIX_1
    words = (words ^ (words >> np.uint64(27))) * _MIX_2
    return words ^ (words >> np.uint64(31))


# Part of the algorithm: every other value is another order (see `ALGORITHM_VERSION`).
_NUM_INTERLEAVED = 4
_KEY_ENDS = np.cumsum((KEY_BYTES, SCATTER_KEY_BYTES, SCATTER_KEY_BYTES))
# Limits of the default window and block size. A window below 256 blocks would shuffle small batches
# badly. A window's blocks should fit into 512 MiB, half of a node cache of the usual size; blocks
# below 128 KiB cost nearly as many requests as single samples, and above 4 MiB nothing is gained.
_MIN_WINDOW_BLOCKS, _MAX_WINDOW_BLOCKS, _WINDOW_BYTES = 256, 4096, 512 << 20
_MIN_IO_BLOCK_BYTES, _MAX_IO_BLOCK_BYTES = 128 << 10, 4 << 20


def default_window_blocks(global_batch_size: int) -> int:
    """Four blocks for each sample of a batch, so that hardly two samples of it share a block."""
    return min(max(4 * global_batch_size, _MIN_WINDOW_BLOCKS), _MAX_WINDOW_BLOCKS)


def default_io_block_bytes(window_blocks: int) -> int:
    """The block size with which a window of `window_blocks` takes 512 MiB, within limits."""
    return min(max(_WINDOW_BYTES // window_blocks, _MIN_IO_BLOCK_BYTES), _MAX_IO_BLOCK_BYTES)


def window_of_chunks(window_blocks: int, chunk_bytes: float) -> int:
    """The default window where blocks are chunks: no more of them than take 512 MiB, if two do.

    Args:
        window_blocks: the default for the size of a batch.
        chunk_bytes: of a decoded chunk, on average.
    """
    return min(window_blocks, max(2, int(_WINDOW_BYTES // max(chunk_bytes, 1))))


class BlockOrder:
    """A bijection from the places of one epoch to sample ids, with its inverse."""

    def __init__(self, seed: int, epoch: int, table: BlockTable, window_blocks: int) -> None:
        """Prepare one epoch, in time and memory proportional to the number of irregular blocks.

        With samples of one size there is at most one irregular block per shard.

        Args:
            seed: in `[0, 2**64)`.
            epoch: in `[0, 2**64)`.
            table: the blocks of the dataset.
            window_blocks: how many blocks are mixed with each other, at least 1.
        """
        key = hashlib.blake2b(epoch_key(seed, epoch), person=b"gyre.block.order").digest()
        blocks_key, section_key, half_key, _ = np.split(np.frombuffer(key, np.uint8), _KEY_ENDS)
        self._sequence = _BlockSequence(blocks_key.tobytes(), table)
        self._within_section = Scatter(section_key.tobytes())
        self._within_half = Scatter(half_key.tobytes())
        self._sections = _Sections(table.num_samples, table.num_blocks)
        self._window = 2 * min((window_blocks - 1) // 2, table.num_blocks - 1) + 1
        num_turns = max(1, self._window // (_NUM_INTERLEAVED * self._sections.size))
        self._stretch = _NUM_INTERLEAVED * num_turns  # draws to interleave

    def __call__(self, places: Int64Array) -> Int64Array:
        """Sample ids at places of the epoch; both int64 [n], all in `[0, N)`."""
        turn, element = self._sections.split(places)
        draw = self._interleave(turn)
        section, element = self._slide(draw, self._shuffle_runs(draw, element), sign=-1)
        element = self._within_section(section, element, self._sections.sizes(section))
        return self._sequence(self._sections.join(section, element))

    def inverse(self, sample_ids: Int64Array) -> Int64Array:
        """Places of sample ids; both int64 [n], all in `[0, N)`."""
        section, element = self._sections.split(self._sequence.inverse(sample_ids))
        element = self._within_section.inverse(section, element, self._sections.sizes(section))
        draw, element = self._slide(section, element, sign=1)
        return self._sections.join(self._deinterleave(draw), self._unshuffle_runs(draw, element))

    def span(self, blocks: Int64Array) -> tuple[Int64Array, Int64Array]:
        """For each block, places `[first, end)` of the epoch that have all of its samples."""
        first, last = (self._sections.split(ends)[0] for ends in self._sequence.ends(blocks))
        reach, count = self._window // 2, self._sections.count
        first_turn, last_turn = np.maximum(first - reach, 0), np.minimum(last + reach, count - 1)
        if self._stretch > _NUM_INTERLEAVED:  # otherwise draws come in their order
            first_turn -= first_turn % self._stretch
            last_turn = np.minimum(last_turn - last_turn % self._stretch + self._stretch, count) - 1
        end = self._sections.join(last_turn, self._sections.sizes(last_turn))
        return self._sections.join(first_turn, np.zeros_like(first_turn)), end

    def _interleave(self, turn: Int64Array) -> Int64Array:
        """The draw that comes at each turn: a transposition of the stretch as a matrix."""
        place = turn % self._stretch
        quarter = self._stretch // _NUM_INTERLEAVED
        moved = turn - place + place % quarter * _NUM_INTERLEAVED + place // quarter
        return np.where(self._is_interleaved(turn), moved, turn)

    def _deinterleave(self, draw: Int64Array) -> Int64Array:
        """The inverse of `_interleave`."""
        place = draw % self._stretch
        quarter = self._stretch // _NUM_INTERLEAVED
        moved = draw - place + place % _NUM_INTERLEAVED * quarter + place // _NUM_INTERLEAVED
        return np.where(self._is_interleaved(draw), moved, draw)

    def _is_interleaved(self, draw: Int64Array) -> npt.NDArray[np.bool_]:
        """Whether the stretch of a draw is whole and has draws of one length only."""
        begin = draw // self._stretch * self._stretch
        end, num_longer = begin + self._stretch, self._sections.num_longer
        return (end <= self._sections.count) & ((end <= num_longer) | (begin >= num_longer))

    def _slide(
        self, origin: Int64Array, element: Int64Array, sign: int
    ) -> tuple[Int64Array, Int64Array]:
        """From draws to sections (sign -1) or back (1): add the offset, reflect at the ends."""
        begin, place, length = self._runs(element)
        doubled = (2 * place + 1 - length) * self._window
        offset = np.sign(doubled) * (np.abs(doubled) // (2 * length))
        moved = origin + sign * offset
        mirrored = np.minimum(moved, 2 * self._sections.count - 1 - moved)
        reflected = np.where(moved < 0, -1 - moved, mirrored)
        return reflected, np.where(reflected == moved, element, begin + length - 1 - place)

    def _shuffle_runs(self, draw: Int64Array, element: Int64Array) -> Int64Array:
        """The element at each place of a draw: the even ones of a run, then the odd ones."""
        begin, place, length = self._runs(element)
        num_even = (length + 1) // 2
        odd = (place >= num_even).astype(np.int64)
        sizes = np.where(odd, length // 2, num_even)
        halves = self._half_numbers(draw, begin, odd)
        return begin + 2 * self._within_half(halves, place - odd * num_even, sizes) + odd

    def _unshuffle_runs(self, draw: Int64Array, element: Int64Array) -> Int64Array:
        """The inverse of `_shuffle_runs`."""
        begin, place, length = self._runs(element)
        num_even = (length + 1) // 2
        odd = place % 2
        sizes = np.where(odd, length // 2, num_even)
        halves = self._half_numbers(draw, begin, odd)
        return begin + self._within_half.inverse(halves, place // 2, sizes) + odd * num_even

    def _half_numbers(self, draw: Int64Array, begin: Int64Array, odd: Int64Array) -> Int64Array:
        """A number for each half of a run, which names its permutation."""
        return 2 * (draw * (self._sections.size + 1) + begin) + odd

    def _runs(self, element: Int64Array) -> tuple[Int64Array, Int64Array, Int64Array]:
        """The first element of each element's run, its place in the run, and the run's length.

        A run is as long as the window, except the last run of a draw. The surplus element of a
        longer draw is a separate run.
        """
        size = self._sections.size
        begin = np.where(element == size, size, element // self._window * self._window)
        length = np.where(element == size, 1, np.minimum(self._window, size - begin))
        return begin, element - begin, length


class _Sections:
    """N places cut into `count` sections of `size` elements; the first ones have one more."""

    def __init__(self, num_places: int, count: int) -> None:
        self.count = count
        self.size, self.num_longer = divmod(num_places, count)

    def split(self, places: Int64Array) -> tuple[Int64Array, Int64Array]:
        """The section of each place, and its element in it."""
        edge = self.num_longer * (self.size + 1)
        longer = places < edge
        begin, size = np.where(longer, 0, edge), np.where(longer, self.size + 1, self.size)
        section, element = np.divmod(places - begin, size)
        return section + np.where(longer, 0, self.num_longer), element

    def join(self, sections: Int64Array, elements: Int64Array) -> Int64Array:
        """The place of an element of each section."""
        return sections * self.size + np.minimum(sections, self.num_longer) + elements

    def sizes(self, sections: Int64Array) -> Int64Array:
        """The number of elements of each section."""
        return self.size + (sections < self.num_longer)


class _BlockSequence:
    """All samples, block after block, the blocks in a keyed random order.

    If all blocks had one size, a block's beginning would follow from its turn. The irregular ones
    are kept with their beginnings and ends: at most one per shard if samples are of one size.
    """

    def __init__(self, key: bytes, table: BlockTable) -> None:
        self._table = table
        self._turn = Permutation(key, table.num_blocks)  # turn to block
        irregular = table.irregular()
        turns = self._turn.inverse(irregular)
        in_order = np.argsort(turns)
        sizes = table.sizes(irregular[in_order])
        size = table.regular_size
        surplus = np.cumsum(sizes - size)
        # A sentinel at the end stands for "before all irregular blocks": index -1 finds it.
        self._turns = np.append(turns[in_order], -1)
        self._begins = self._turns * size + np.append(surplus - sizes + size, 0)
        self._ends = self._begins + np.append(sizes, size)

    def __call__(self, places: Int64Array) -> Int64Array:
        """Sample ids at places of the sequence."""
        last = np.searchsorted(self._begins[:-1], places, side="right") - 1  # irregular one so far
        size = self._table.regular_size
        behind = places - self._ends[last]
        turns = self._turns[last] + np.where(behind < 0, 0, 1 + behind // size)
        elements = np.where(behind < 0, places - self._begins[last], behind % size)
        ids: Int64Array = self._table.first_sample(self._turn(turns)) + elements
        return ids

    def ends(self, blocks: Int64Array) -> tuple[Int64Array, Int64Array]:
        """The first and the last place of each block."""
        first = self.inverse(self._table.first_sample(blocks))
        return first, first + self._table.sizes(blocks) - 1

    def inverse(self, sample_ids: Int64Array) -> Int64Array:
        """Places of sample ids."""
        blocks = self._table.block_of(sample_ids)
        turns = self._turn.inverse(blocks)
        last = np.searchsorted(self._turns[:-1], turns, side="right") - 1
        behind = turns - self._turns[last] - 1
        regular = self._ends[last] + behind * self._table.regular_size
        begins = np.where(behind < 0, self._begins[last], regular)
        places: Int64Array = begins + sample_ids - self._table.first_sample(blocks)
        return places
