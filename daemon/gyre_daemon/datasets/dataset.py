"""A dataset that is open: its shards, its index, and the fingerprint that tells it from every other."""

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from gyre_daemon.datasets.formats import FieldSpec, SampleIndex
from gyre_daemon.order.blocks import BlockTable
from gyre_daemon.storage.base import Storage
from gyre_daemon.storage.shard import Shard


@dataclass(frozen=True, slots=True)
class Dataset:
    """What sessions read from.

    Attributes:
        name: the operator's.
        format: the format's name.
        uri: where it lies, credentials redacted.
        storage: its shards.
        index: its samples.
        fingerprint: hexadecimal; equal for equal data, wherever it lies.
    """

    name: str
    format: str
    uri: str
    storage: Storage
    index: SampleIndex
    fingerprint: str

    @property
    def num_samples(self) -> int:
        """N, the samples of an epoch."""
        return self.index.num_samples

    @property
    def fields(self) -> Sequence[FieldSpec]:
        """The tensors of a sample."""
        return self.index.fields

    @property
    def has_equal_samples(self) -> bool:
        """No field is ragged: all batches of one size have the same layout."""
        return not any(spec.ragged for spec in self.fields)

    @property
    def num_bytes(self) -> int:
        """Of all shards together."""
        return sum(shard.size_bytes for shard in self.storage.shards)


@dataclass(frozen=True, slots=True)
class BlockRanges:
    """The range request of each of n blocks: the bytes `[start, stop)` of a shard.

    Attributes:
        shard: int64 [n].
        start: int64 [n].
        stop: int64 [n].
    """

    shard: npt.NDArray[np.int64]
    start: npt.NDArray[np.int64]
    stop: npt.NDArray[np.int64]


def block_ranges(index: SampleIndex, table: BlockTable, blocks: npt.NDArray[np.int64]) -> BlockRanges:
    """Where blocks lie: every field of every one of a block's samples is within its range.

    Args:
        index: of the samples, which lie in their shard in the order of their ids.
        table: from `index.blocks`.
        blocks: int64 [n].
    """
    first, last = index.locate(table.first_sample(blocks)), index.locate(table.first_sample(blocks + 1) - 1)
    return BlockRanges(first.shard, first.start.min(axis=1), (last.start + last.size).max(axis=1))


def fingerprint(shards: Sequence[Shard], index: SampleIndex, probes: Sequence[bytes]) -> str:
    """The identity of a dataset's data.

    It covers the shards' relative names and sizes, the place of every sample in them, and the probed contents. It leaves out
    times and etags, so that a copy of the data elsewhere has the same fingerprint.

    Args:
        shards: in the dataset's order.
        index: of all samples.
        probes: some bytes of some shards, chosen by `probe_ranges`.
    """
    digest = hashlib.blake2b(digest_size=16)
    digest.update(json.dumps([(shard.name, shard.size_bytes) for shard in shards]).encode())
    digest.update(index.digest())
    for probe in probes:
        digest.update(hashlib.blake2b(probe, digest_size=16).digest())
    return digest.hexdigest()


def probe_ranges(shards: Sequence[Shard], max_shards: int = 32, num_bytes: int = 4096) -> list[tuple[int, int, int]]:
    """Which contents the fingerprint looks at: the middle of evenly chosen shards, as (shard, start, stop).

    It is a probe, not a proof: it tells a regenerated dataset from its predecessor, not every flipped bit.
    """
    chosen = range(0, len(shards), max(1, -(-len(shards) // max_shards)))
    ranges = []
    for shard in chosen:
        size = shards[shard].size_bytes
        start = max(0, (size - num_bytes) // 2)
        ranges.append((shard, start, min(start + num_bytes, size)))
    return ranges
