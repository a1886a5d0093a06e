"""Compressed shards of other formats than Parquet under the contract of chunks."""

import json
from typing import ClassVar

import numpy as np
import pyarrow as pa
import pytest
from gyre_daemon.datasets.formats import lines
from gyre_daemon.datasets.formats.chunk_index import ChunkIndex

from tests.contract.formats import test_more_formats, test_parquet_columns
from tests.contract.formats.chunk_contract import ChunkContract, decode_all
from tests.contract.formats.compressed_shards import arrow, compressed, seekable
from tests.contract.formats.format_contract import Sample, inspect, listed


class TestCompressedJsonl(ChunkContract):
    """Frames cut documents anywhere, as the seekable format has them, with a table at the end."""

    name = "jsonl"
    options: ClassVar = {}

    def shards(self) -> tuple[list[bytes], list[Sample]]:
        generator = np.random.default_rng(0)
        lines = [
            [
                json.dumps({"id": number, "text": "wörd " * int(generator.integers(200))}).encode()
                for number in range(count)
            ]
            for count in (40, 1, 35)
        ]
        shards = [
            seekable(b"\xef\xbb\xbf" + b"\r\n\n".join(lines[0])),
            compressed(lines[1][0]),
            seekable(b"\n".join(lines[2]) + b"\n\n", 700),
        ]
        return shards, [{"json": line} for its in lines for line in its]

    def empty_shard(self) -> bytes:
        return compressed(b"\n\n")

    def damaged_shard(self) -> bytes:
        return self.shards()[0][0][:-30]

    @pytest.fixture(autouse=True)
    def _small_chunks(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(lines, "MIN_BLOCK_BYTES", 3000)


class TestCompressedArrow(ChunkContract):
    """Files and a stream; record batches have no checksums."""

    name = "arrow"
    options = test_parquet_columns.TestParquet.options
    has_checksums = False

    def shards(self) -> tuple[list[bytes], list[Sample]]:
        tables = [test_parquet_columns.TestParquet().table(count) for count in (90, 1, 55)]
        return [
            arrow(tables[0], "zstd"),
            arrow(tables[1], "lz4", is_stream=True),
            arrow(tables[2], "lz4"),
        ], test_parquet_columns.TestParquet().shards()[1]

    def empty_shard(self) -> bytes:
        return arrow(test_parquet_columns.TestParquet().table(0), "zstd")

    def damaged_shard(self) -> bytes:
        return self.shards()[0][0][:-20]

    def test_dictionaries_are_decoded(self) -> None:
        column = pa.array(["a", "b", None, "a"]).dictionary_encode()
        dataset_format = self.format(columns=[])
        shards = [arrow(pa.table({"word": column}), "zstd")]
        index = dataset_format.assemble(listed(shards), inspect(dataset_format, shards))
        assert isinstance(index, ChunkIndex)
        assert decode_all(shards, index) == [b"aba"]


class TestCompressedMds(ChunkContract):
    """Shards by the library's own writer; each is a chunk."""

    name = "mds"
    options: ClassVar = {"columns": ["id", "image", "tokens"]}

    def shards(self) -> tuple[list[bytes], list[Sample]]:
        shards, samples = test_more_formats.TestMds().shards()
        return [compressed(shard) for shard in shards], samples

    def empty_shard(self) -> bytes:
        return compressed(test_more_formats.TestMds().empty_shard())

    def damaged_shard(self) -> bytes:
        return self.shards()[0][0][:-1]
