"""The contract of formats of chunks, in addition to that of all formats."""

import asyncio
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import cast

import numpy as np
import pytest
from gyre_daemon.datasets.dataset import block_ranges
from gyre_daemon.datasets.formats import SampleIndex
from gyre_daemon.datasets.formats.base import Scan
from gyre_daemon.datasets.formats.chunk_index import (
    Chunks,
    Expected,
    StoredChunk,
    chunks_of,
)
from gyre_daemon.datasets.made_shards import Decoders, decoded_shards
from gyre_daemon.errors import CorruptSample
from gyre_daemon.monitoring.metrics import Metrics
from gyre_daemon.runtime.threads import FairExecutor
from gyre_daemon.storage.engine.endpoint import EndpointOptions
from gyre_daemon.storage.location import parse_location
from gyre_daemon.storage.reads import Reads
from gyre_daemon.storage.sources.opener import StorageOpener
from gyre_daemon.workers.compute_workers import ComputeServer

from tests.contract.formats.format_contract import FormatContract, inspect, listed


def chunks_in(index: SampleIndex) -> Chunks:
    chunks = chunks_of(index)
    assert chunks is not None
    return chunks


def decode_all(shards: Sequence[bytes], index: SampleIndex) -> list[bytes]:
    """The decoded shards, decoded by this process."""
    chunks = chunks_in(index)
    decoded = [b""] * len(shards)
    for chunk in range(chunks.num_chunks):
        shard = int(chunks.shard[chunk])
        pieces = [
            (start, memoryview(shards[shard])[start:stop]) for start, stop in chunks.pieces(chunk)
        ]
        owner, place = chunks.owner(chunk)
        stored = StoredChunk(
            f"{shard:03}",
            int(owner.numbers[place]),
            len(shards[shard]),
            pieces,
            tuple(owner.parameters[place]),
        )
        columns = owner.decode(stored)
        assert [Expected.of(column) for column in columns] == owner.expected(place)
        decoded[shard] += b"".join(column.data.tobytes() for column in columns)
    return decoded


class ChunkContract(FormatContract):
    """A subclass has shards of which the first has several chunks.

    Attributes:
        has_checksums: whether damage is always noticed; otherwise it may change values.
    """

    has_checksums = True

    def served(self, shards: Sequence[bytes], index: SampleIndex) -> Sequence[bytes]:
        return decode_all(shards, index)

    @pytest.mark.parametrize("io_block_bytes", [1, 1 << 30])
    def test_one_range_of_one_shard_has_all_of_a_block(self, io_block_bytes: int) -> None:
        """A block is a chunk."""
        shards, samples = self.shards()
        index = self.index(shards)
        chunks = chunks_in(index)
        table, everyone = index.blocks(io_block_bytes), np.arange(len(samples))
        assert index.blocks(io_block_bytes) is table
        assert table.num_samples == len(samples)
        assert 2 < table.num_blocks == chunks.num_chunks < len(samples)
        ranges, extents = (
            block_ranges(index, table, np.arange(table.num_blocks)),
            index.locate(everyone),
        )
        assert np.array_equal(ranges.shard, chunks.shard)
        assert np.array_equal(ranges.start, chunks.base)
        assert np.array_equal(ranges.stop, chunks.base + chunks.chunk_bytes)
        block = table.block_of(everyone)
        assert (extents.start.min(axis=1) >= ranges.start[block]).all()
        assert ((extents.start + extents.size).max(axis=1) <= ranges.stop[block]).all()

    def test_forged_arrays_are_refused(self) -> None:
        shards, _ = self.shards()
        inspection = self.format().inspection
        assert isinstance(inspection, Scan)
        (arrays, *_), size = inspect(self.format(), shards), len(shards[0])
        inspection.check(arrays, size)
        for name, array in arrays.items():
            if not array.size:
                continue
            for forged in (array[:-1], np.full_like(array, 255), array.astype(np.float32)):
                has_kind = forged.shape == array.shape and forged.dtype == array.dtype
                if name in ("ends", "present", "shared", "parameters") and has_kind:
                    continue  # those of another shard: chunks do not decode to them
                with pytest.raises(ValueError, match=r"."):
                    inspection.check({**arrays, name: forged}, size)

    def test_damage_is_an_error_or_changes_nothing(self, tmp_path: Path) -> None:
        """Bits are flipped all over a shard; what reads it is a process as the daemon has them."""
        shards, _ = self.shards()
        data, index = shards[0], self.index(shards[:1])
        chunks = chunks_in(index)
        whole = decode_all(shards[:1], index)[0]
        generator = np.random.default_rng(0)
        places = generator.choice(len(data), min(len(data), 40), replace=False).tolist()

        async def read(damaged: bytes) -> bytes:
            (tmp_path / "000").write_bytes(damaged)
            source = await opener.open(parse_location(str(tmp_path)), {}, "*")
            storage = decoded_shards(source, chunks, index.digest(), decoders)
            target = np.empty(len(whole), np.uint8)
            starts, sizes = chunks.base, chunks.chunk_bytes
            targets = [target[a : a + b] for a, b in zip(starts, sizes, strict=True)]
            await storage.read(Reads.into(targets, [0] * chunks.num_chunks, starts.tolist()))
            return target.tobytes()

        async def damage() -> None:
            assert await read(data) == whole
            for place in places:
                damaged = bytearray(data)
                damaged[place] ^= 1 << int(generator.integers(8))
                try:
                    found = await read(bytes(damaged))
                    assert len(found) == len(whole)
                    if self.has_checksums:
                        assert found == whole, f"byte {place} changed a value"
                except* CorruptSample as caught:
                    for error in cast("Sequence[CorruptSample]", caught.exceptions):
                        assert {"shard", "chunk", "offset", "reason"} <= error.facts.keys()
                        assert "of shard 000" in str(error)

        with ThreadPoolExecutor(2) as executor:
            workers, server = FairExecutor(executor, 2), ComputeServer()
            opener = StorageOpener(workers, EndpointOptions(16, 10.0), Metrics())
            decoders = Decoders(server, workers)
            try:
                asyncio.run(damage())
            finally:
                decoders.close()
                server.close()

    def test_damage_stays_within_the_shard(self) -> None:
        """What reads the shards may end its process; see the test before."""

    def test_shards_that_are_cut_off_are_named(self) -> None:
        shards, _ = self.shards()
        inspection = self.format().inspection
        assert isinstance(inspection, Scan)
        for size in (1, len(shards[0]) // 3, len(shards[0]) - 1):
            with pytest.raises(CorruptSample, match="000"):
                inspect(self.format(), [shards[0][:size]], listed([shards[0][:size]]))
