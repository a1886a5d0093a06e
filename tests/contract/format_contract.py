"""What every format promises. Inherited by one class of tests for each."""

import asyncio
import fnmatch
import io
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
from gyre_daemon.config import DatasetConfig
from gyre_daemon.datasets.dataset import block_ranges
from gyre_daemon.datasets.formats import Format, SampleIndex, make_format
from gyre_daemon.datasets.formats.base import Arrays
from gyre_daemon.datasets.sidecars import SidecarKey, SidecarStore
from gyre_daemon.errors import ConfigError, CorruptSample
from gyre_daemon.fetching.layout import max_batch_bytes
from gyre_daemon.fetching.transform import CODECS
from gyre_daemon.storage.shard import Shard

Sample = Mapping[str, bytes]


class Stream(io.RawIOBase):
    """A file that cannot seek, as a storage streams it."""

    def __init__(self, data: bytes) -> None:
        self._data = io.BytesIO(data)

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        return self._data.readinto(buffer)

    def tell(self) -> int:
        return self._data.tell()


def listed(shards: Sequence[bytes], version: str = "1") -> list[Shard]:
    return [Shard(f"{number:03}", len(data), version) for number, data in enumerate(shards)]


def scan_all(dataset_format: Format, shards: Sequence[bytes]) -> list[Arrays]:
    if dataset_format.scanner is None:
        return []
    return [dataset_format.scan(shard.name, io.BytesIO(data)) for shard, data in zip(listed(shards), shards, strict=True)]


class FormatContract:
    """The subclass brings shards and what is in them."""

    name: str
    options: ClassVar[Mapping[str, Any]]

    @abstractmethod
    def shards(self) -> tuple[list[bytes], list[Sample]]:
        """Several shards and their samples in order, as stored."""

    @abstractmethod
    def empty_shard(self) -> bytes:
        """One without a sample."""

    @abstractmethod
    def damaged_shard(self) -> bytes:
        """One that nobody can make sense of."""

    def format(self, **options: Any) -> Format:
        return make_format("set", DatasetConfig("/data", self.name, {**self.options, **options}))

    def index(self, shards: Sequence[bytes]) -> SampleIndex:
        return self.format().assemble(listed(shards), scan_all(self.format(), shards))

    def test_every_sample_is_where_the_index_says(self) -> None:
        shards, samples = self.shards()
        index = self.index(shards)
        assert index.num_samples == len(samples)
        assert [spec.name for spec in index.fields] == list(samples[0])
        extents = index.locate(np.arange(len(samples)))
        assert extents.shard.shape == (len(samples),)
        assert extents.start.shape == extents.size.shape == (len(samples), len(index.fields))
        assert extents.shard.dtype == extents.start.dtype == extents.size.dtype == np.int64
        for number, sample in enumerate(samples):
            data = shards[extents.shard[number]]
            for column, value in enumerate(sample.values()):
                start, size = int(extents.start[number, column]), int(extents.size[number, column])
                assert 0 <= start <= start + size <= len(data)
                assert data[start : start + size] == value
        assert (np.diff(extents.shard) >= 0).all(), "sample ids follow the order of the shards"

    def test_locating_is_the_same_one_by_one_in_any_order_and_again(self) -> None:
        shards, samples = self.shards()
        index = self.index(shards)
        whole = index.locate(np.arange(len(samples)))
        wanted = np.random.default_rng(0).integers(len(samples), size=50)
        found = index.locate(wanted)
        assert found.shard.tolist() == whole.shard[wanted].tolist()
        assert found.start.tolist() == whole.start[wanted].tolist()
        assert found.size.tolist() == whole.size[wanted].tolist()
        assert index.locate(np.array([], np.int64)).start.shape == (0, len(index.fields))

    @pytest.mark.parametrize("io_block_bytes", [1, 50, 700, 1 << 30])
    def test_one_range_of_one_shard_has_all_of_a_block(self, io_block_bytes: int) -> None:
        shards, samples = self.shards()
        index = self.index(shards)
        table = index.blocks(io_block_bytes)
        everyone, every_block = np.arange(len(samples)), np.arange(table.num_blocks)
        assert table.num_samples == len(samples)
        assert index.blocks(io_block_bytes) is table, "a plan and a cache mean the same blocks"
        extents, ranges = index.locate(everyone), block_ranges(index, table, every_block)
        block = table.block_of(everyone)
        assert np.array_equal(extents.shard, ranges.shard[block])
        assert (extents.start.min(axis=1) >= ranges.start[block]).all()
        assert ((extents.start + extents.size).max(axis=1) <= ranges.stop[block]).all()
        longest = int((extents.start + extents.size - extents.start.min(axis=1)[:, None]).max())
        within_shard = ranges.stop - ranges.start
        assert within_shard.max() <= 1.5 * io_block_bytes + 2 * longest + 1024
        if io_block_bytes == 1 << 30:
            assert table.num_blocks == len(np.unique(extents.shard)), "a shard that is short is one block"

    def test_fields_have_codecs_that_take_them(self) -> None:
        shards, samples = self.shards()
        index = self.index(shards)
        sizes = index.locate(np.arange(len(samples))).size
        for column, spec in enumerate(index.fields):
            fixed = int(np.prod(spec.shape, dtype=int)) * spec.dtype.itemsize
            placed = sizes[:, column] if spec.ragged else np.full(len(samples), fixed)
            assert not CODECS[spec.codec].misfits(sizes[:, column], placed).any()
            assert spec.dtype.byteorder in "<|="

    def test_ragged_bytes_have_a_bound(self) -> None:
        shards, samples = self.shards()
        index = self.index(shards)
        ragged = [spec.ragged for spec in index.fields]
        totals = index.locate(np.arange(len(samples))).size[:, ragged].sum(axis=1)
        for num_samples in (1, 2, len(samples), 3 * len(samples) + 1):
            twice = np.tile(np.sort(totals)[::-1], 5)
            largest_run = max(int(twice[begin : begin + num_samples].sum()) for begin in range(len(samples)))
            assert index.max_ragged_bytes(num_samples) >= largest_run
            assert max_batch_bytes(index, num_samples) >= largest_run

    def test_a_scan_seeks_only_where_it_can(self) -> None:
        dataset_format = self.format()
        for data in self.shards()[0]:
            stream: Any = Stream(data)
            scanned, streamed = dataset_format.scan("a", io.BytesIO(data)), dataset_format.scan("a", stream)
            assert {name: array.tolist() for name, array in scanned.items()} == {n: a.tolist() for n, a in streamed.items()}

    def test_a_scan_survives_its_sidecar(self, tmp_path: Path) -> None:
        shards, _ = self.shards()
        dataset_format, store = self.format(), SidecarStore(str(tmp_path), tmp_path)
        key = SidecarKey("/data", "a", len(shards[0]), "1", str(dataset_format.scanner))

        async def there_and_back(arrays: Arrays) -> Arrays:
            await store.save(key, None, arrays)
            loaded = await store.load(key, None)
            assert loaded is not None
            return loaded

        scans = [asyncio.run(there_and_back(scan)) for scan in scan_all(dataset_format, shards)]
        assert dataset_format.assemble(listed(shards), scans).digest() == self.index(shards).digest()

    def test_the_digest_is_of_the_data_s_meaning(self) -> None:
        shards, _ = self.shards()
        digest = self.index(shards).digest()
        assert digest == self.index(shards).digest()
        dataset_format = self.format()
        newer = dataset_format.assemble(listed(shards, version="2"), scan_all(dataset_format, shards))
        assert newer.digest() == digest, "a copy with another time or etag is the same data"

    def test_no_samples(self) -> None:
        index = self.index([self.empty_shard(), self.empty_shard()])
        assert index.num_samples == 0
        shards, samples = self.shards()
        assert self.index([self.empty_shard(), *shards, self.empty_shard()]).num_samples == len(samples)

    def test_damage_names_the_shard(self) -> None:
        shards, _ = self.shards()
        with pytest.raises(CorruptSample, match="001") as caught:
            self.index([shards[0], self.damaged_shard()])
        assert caught.value.facts["shard"] == "001"

    def test_unknown_options_are_refused(self) -> None:
        with pytest.raises(ConfigError, match="unknown key `nonsense` in dataset `set`"):
            self.format(nonsense=1)

    def test_the_pattern_is_of_files(self) -> None:
        assert "/" not in self.format().pattern
        assert not fnmatch.fnmatch("x.gyre-index", self.format().pattern), "sidecars are no shards"
