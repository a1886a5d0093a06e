"""The contract of the seam `formats/base.py`: each format has a class of tests that inherits it."""

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
from gyre_daemon.datasets.codecs import CODECS
from gyre_daemon.datasets.dataset import block_ranges
from gyre_daemon.datasets.formats import Format, ListedFormat, SampleIndex
from gyre_daemon.datasets.formats.base import (
    Arrays,
    Probe,
    ProbeRequest,
    ProbeResponse,
    Scan,
    stored_fields,
)
from gyre_daemon.datasets.known_formats import make_format
from gyre_daemon.datasets.sidecars import SidecarKey, SidecarStore
from gyre_daemon.errors import ConfigError, CorruptSample
from gyre_daemon.fetching.layout import max_batch_bytes
from gyre_daemon.storage.location import patterns_of
from gyre_daemon.storage.shard import Shard

from tests.shard_formats import shard_format
from tests.unseekable import Unseekable

Sample = Mapping[str, bytes]


def listed(shards: Sequence[bytes], version: str = "1") -> list[Shard]:
    return [Shard(f"{number:03}", len(data), version) for number, data in enumerate(shards)]


def inspect(
    dataset_format: Format,
    shards: Sequence[bytes],
    listing: Sequence[Shard] | None = None,
    beside: Mapping[str, bytes] | None = None,
    requests: list[ProbeRequest] | None = None,
) -> list[Arrays]:
    """What the daemon would pass to `assemble`.

    Args:
        dataset_format: the format.
        shards: their contents.
        listing: the shards as they are listed.
        beside: files beside the shards, by name.
        requests: gets every request of a probe.
    """
    listing = listing or listed(shards)
    match dataset_format.inspection:
        case None:
            return []
        case Scan() as scan:
            pairs = zip(listing, shards, strict=True)
            return [scan.run(shard.name, io.BytesIO(data)) for shard, data in pairs]
        case Probe() as probe:
            steps, response = probe.run(listing), None
            while True:
                try:
                    request = steps.send(response)
                except StopIteration as end:
                    return [end.value]
                if requests is not None:
                    requests.append(request)
                response = _respond(request, shards, listing, beside or {})
    raise AssertionError("an inspection is a scan, a probe or nothing")


def _respond(
    request: ProbeRequest,
    shards: Sequence[bytes],
    listing: Sequence[Shard],
    beside: Mapping[str, bytes],
) -> ProbeResponse | None:
    files = [shards[shard] for shard in request.shard]
    if request.suffix:
        names = [listing[shard].name.rpartition(".")[0] + request.suffix for shard in request.shard]
        if request.is_optional and not all(name in beside for name in names):
            return None
        files = [beside[name] for name in names]
    ranges = zip(files, request.start, request.stop, strict=True)
    return ProbeResponse(
        [file[start:stop] for file, start, stop in ranges], [len(file) for file in files]
    )


class IndexContract:
    """Of the index of any format; a subclass provides shards and the samples in them."""

    name: str
    options: ClassVar[Mapping[str, Any]]

    @abstractmethod
    def shards(self) -> tuple[list[bytes], list[Sample]]:
        """Several shards and their samples in order, as stored."""

    @abstractmethod
    def index(self, shards: Sequence[bytes]) -> SampleIndex:
        """The index of shards."""

    def made(self, **options: Any) -> Format | ListedFormat:
        return make_format("set", DatasetConfig("/data", self.name, {**self.options, **options}))

    def served(self, shards: Sequence[bytes], index: SampleIndex) -> Sequence[bytes]:
        """What the ranges of the index are ranges of."""
        return shards

    def test_every_sample_is_where_the_index_says(self) -> None:
        shards, samples = self.shards()
        index = self.index(shards)
        shards = list(self.served(shards, index))
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

    def test_locating_some_samples_is_like_locating_all(self) -> None:
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
            assert table.num_blocks == len(np.unique(extents.shard)), (
                "a shard that is short is one block"
            )

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
            largest_run = max(
                int(twice[begin : begin + num_samples].sum()) for begin in range(len(samples))
            )
            assert index.max_ragged_bytes(num_samples) >= largest_run
            assert max_batch_bytes(index, num_samples) >= largest_run

    def test_stored_fields_come_first(self) -> None:
        fields = self.index(self.shards()[0]).fields
        assert list(fields[: len(stored_fields(fields))]) == stored_fields(fields)

    def test_unknown_options_are_refused(self) -> None:
        with pytest.raises(ConfigError, match="unknown key `nonsense` in dataset `set`"):
            self.made(nonsense=1)

    def test_the_pattern_is_of_files(self) -> None:
        assert "/" not in self.made().pattern
        patterns = patterns_of(self.made().pattern)
        for name in ("x", *(each.replace("*", "1").replace("[0-9]", "1") for each in patterns)):
            sidecar = f"{name}.gyre-index"
            assert not any(fnmatch.fnmatch(sidecar, each) for each in patterns), sidecar


class FormatContract(IndexContract):
    """Of a format that inspects shards."""

    @abstractmethod
    def empty_shard(self) -> bytes:
        """One without a sample."""

    @abstractmethod
    def damaged_shard(self) -> bytes:
        """One that is damaged."""

    def made(self, **options: Any) -> Format:
        return self.format(**options)

    def format(self, **options: Any) -> Format:
        return shard_format(self.name, **{**self.options, **options})

    def index(self, shards: Sequence[bytes]) -> SampleIndex:
        return self.format().assemble(listed(shards), inspect(self.format(), shards))

    def test_a_scan_seeks_only_if_it_says_so_and_counts_its_samples(self) -> None:
        inspection = self.format().inspection
        if not isinstance(inspection, Scan):
            return
        shards, samples = self.shards()
        scans = [inspection.run("a", io.BytesIO(data)) for data in shards]
        assert sum(inspection.num_samples(scan) for scan in scans) == len(samples)
        if inspection.seeks or inspection.skips:
            return
        streamed: Any = [Unseekable(data) for data in shards]
        for scan, stream in zip(scans, streamed, strict=True):
            again = inspection.run("a", stream)
            assert {name: array.tolist() for name, array in scan.items()} == {
                name: array.tolist() for name, array in again.items()
            }

    def test_a_probe_reads_little_of_each_shard(self) -> None:
        requests: list[ProbeRequest] = []
        shards, _ = self.shards()
        inspect(self.format(), shards, requests=requests)
        for request in requests:
            ranges = zip(request.start, request.stop, strict=True)
            assert all(0 <= start <= stop <= start + (1 << 20) for start, stop in ranges)

    def test_what_was_found_survives_its_sidecar(self, tmp_path: Path) -> None:
        shards, _ = self.shards()
        dataset_format, store = self.format(), SidecarStore(str(tmp_path), tmp_path)
        inspection = dataset_format.inspection
        if not isinstance(inspection, Scan | Probe):
            return
        key = SidecarKey("/data", "a", len(shards[0]), "1", inspection.version)
        loaded: list[Any] = []
        for arrays in inspect(dataset_format, shards):
            asyncio.run(store.save(key, None, arrays))
            found = asyncio.run(store.load(key, None, lambda _: None))
            assert found is not None
            if isinstance(inspection, Scan):
                inspection.check(found, len(shards[len(loaded)]))
            else:
                inspection.check(found, listed(shards))
            loaded.append(found)
        index = dataset_format.assemble(listed(shards), loaded)
        assert index.digest() == self.index(shards).digest()

    def test_the_digest_covers_meaning_and_not_versions(self) -> None:
        shards, _ = self.shards()
        digest = self.index(shards).digest()
        assert digest == self.index(shards).digest()
        dataset_format = self.format()
        newer = dataset_format.assemble(
            listed(shards, version="2"), inspect(dataset_format, shards)
        )
        assert newer.digest() == digest, "a copy with another time or etag is the same data"

    def test_no_samples(self) -> None:
        index = self.index([self.empty_shard(), self.empty_shard()])
        assert index.num_samples == 0
        shards, samples = self.shards()
        assert self.index([self.empty_shard(), *shards, self.empty_shard()]).num_samples == len(
            samples
        )

    def test_damage_names_the_shard(self) -> None:
        shards, _ = self.shards()
        with pytest.raises(CorruptSample, match="001") as caught:
            self.index([shards[0], self.damaged_shard()])
        assert caught.value.facts["shard"] == "001"

    def test_damage_stays_within_the_shard(self) -> None:
        """Cut off or with flipped bits: it is refused by its name, or indexed within its bytes."""
        shards, _ = self.shards()
        data = shards[0]
        generator = np.random.default_rng(0)
        places = {0, 1, len(data) // 2, len(data) - 1, *generator.integers(len(data), size=60)}
        damaged = [data[:place] for place in places]
        for place in places:
            flipped = bytearray(data)
            flipped[place] ^= 1 << int(generator.integers(8))
            damaged.append(bytes(flipped))
        for each in damaged:
            index, refusal = self._index_or_refusal(each)
            if index is None:
                assert refusal is None or (
                    "000" in str(refusal) and refusal.facts["shard"] == "000"
                )
                continue
            extents = index.locate(np.arange(index.num_samples))
            assert (extents.start >= 0).all()
            assert (extents.size >= 0).all()
            assert (extents.start + extents.size <= len(each)).all()

    def _index_or_refusal(self, shard: bytes) -> tuple[SampleIndex | None, CorruptSample | None]:
        """Neither where the shard is sound, but something else: with other columns, for one."""
        try:
            return self.index([shard]), None
        except CorruptSample as error:
            return None, error
        except ConfigError:
            return None, None
