"""ArrayRecord under the contract of chunks, and compared with the reader of its own library."""

import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import ClassVar

import numpy as np
import pytest
from array_record.python import array_record_module
from gyre_daemon.datasets.formats.base import TolerantFormat
from gyre_daemon.datasets.formats.chunk_index import ChunkIndex
from gyre_daemon.errors import CorruptSample
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.contract.formats.chunk_contract import ChunkContract, decode_all
from tests.contract.formats.format_contract import Sample, inspect, listed
from tests.shard_formats import shard_format


class TestArrayRecord(ChunkContract):
    """A record for each chunk, several, and such as end at the borders of blocks."""

    name = "arrayrecord"
    options: ClassVar = {}

    def shards(self) -> tuple[list[bytes], list[Sample]]:
        generator = np.random.default_rng(0)
        records = [
            [generator.bytes(int(generator.integers(20_000))) for _ in range(count)]
            for count in (40, 1, 35)
        ]
        ways = ["group_size:1", "group_size:4,uncompressed", "group_size:3,transpose:true,brotli"]
        shards = [arrayrecord(its, way) for its, way in zip(records, ways, strict=True)]
        return shards, [{"record": record} for its in records for record in its]

    def empty_shard(self) -> bytes:
        return arrayrecord([])

    def damaged_shard(self) -> bytes:
        return self.shards()[0][0][:-1]


def arrayrecord(records: Sequence[bytes], options: str = "group_size:1") -> bytes:
    """A file by the library's own writer, which checks that its reader reads it."""
    with tempfile.NamedTemporaryFile(suffix=".array_record") as file:
        writer = array_record_module.ArrayRecordWriter(file.name, options)
        for record in records:
            writer.write(record)
        writer.close()
        reader = array_record_module.ArrayRecordReader(file.name)
        assert reader.num_records() == len(records)
        assert not records or reader.read_all() == list(records)
        reader.close()
        return Path(file.name).read_bytes()


@settings(max_examples=40, deadline=None)
@given(
    sizes=st.lists(
        st.one_of(st.integers(0, 9), st.integers(65_400, 65_560), st.integers(0, 150_000)),
        min_size=1,
        max_size=12,
    ),
    group_size=st.integers(1, 5),
    way=st.sampled_from(["uncompressed", "zstd", "brotli", "snappy"]),
    more=st.sampled_from(["", ",transpose:true", ",pad_to_block_boundary:true"]),
)
def test_records_are_those_of_the_reader(
    sizes: list[int], group_size: int, way: str, more: str
) -> None:
    """Chunks end everywhere around the borders of Riegeli's blocks of 64 KiB."""
    noise = np.random.default_rng(len(sizes)).bytes(150_000)
    records = [noise[:size] for size in sizes]
    shard = arrayrecord(records, f"group_size:{group_size},{way}{more}")
    dataset_format = shard_format("arrayrecord")
    index = dataset_format.assemble(listed([shard]), inspect(dataset_format, [shard]))
    assert isinstance(index, ChunkIndex)
    assert index.num_samples == len(records)
    (decoded,) = decode_all([shard], index)
    extents = index.locate(np.arange(len(records)))
    ranges = zip(extents.start[:, 0], extents.size[:, 0], strict=True)
    assert [decoded[start : start + size] for start, size in ranges] == records


def test_a_group_that_cannot_be_decoded_is_kept_with_its_reason() -> None:
    data = bytearray(arrayrecord([b"one" * 30_000, b"two" * 30_000] * 2, "group_size:2,snappy"))
    data[200] ^= 1
    form = shard_format("arrayrecord")
    assert isinstance(form, TolerantFormat)
    scans = inspect(form, [bytes(data)])
    with pytest.raises(
        CorruptSample, match=r"shard 000: group of chunks 0 \(at byte 64\) cannot be read: .*chunk"
    ):
        form.assemble(listed([bytes(data)]), scans)
    assert form.assemble_tolerantly(listed([bytes(data)]), scans)[0].num_samples == 4


def test_riegeli_without_a_footer_is_refused() -> None:
    data = arrayrecord([b"one"] * 4)
    data = data[:64] + bytes(1 << 16)
    with pytest.raises(CorruptSample, match=r"shard 000 at byte 64: .* end with a footer"):
        inspect(shard_format("arrayrecord"), [data])
