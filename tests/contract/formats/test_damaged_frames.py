"""Files that zstd compressed, damaged and cut off at every byte: an error says where."""

import json
import re
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import pytest
from gyre_daemon.datasets.formats import jsonl, lines
from gyre_daemon.datasets.formats.chunk_index import ChunkIndex
from gyre_daemon.errors import CorruptSample

from tests.contract.formats.chunk_contract import decode_all
from tests.contract.formats.compressed_shards import compressed, seekable
from tests.contract.formats.format_contract import inspect, listed
from tests.contract.formats.test_more_formats import mds_shard
from tests.shard_formats import shard_format

LINES = b"".join(
    json.dumps({"id": number, "text": "word " * number}).encode() + b"\n" for number in range(20)
)
MDS_ROWS = [
    {"id": number, "image": b"image" * number, "text": "x", "tokens": np.ones((2, 3), np.int32)}
    for number in range(5)
]
# Several frames with checksums; those of lines with a skippable frame at the end.
SHARDS: Mapping[str, tuple[str, dict[str, Any], bytes]] = {
    "lines": ("jsonl", {}, seekable(LINES, 300)),
    "keys": ("jsonl", {"columns": ["*"]}, seekable(LINES, 300)),
    "mds": ("mds", {}, compressed(mds_shard(MDS_ROWS))),
}


@pytest.fixture(autouse=True)
def _small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lines, "MIN_BLOCK_BYTES", 300)
    monkeypatch.setattr(jsonl, "MIN_CHUNK_BYTES", 300)


def damaged(shard: bytes) -> Iterator[tuple[str, bytes]]:
    """Every byte with one bit flipped, and every length but none."""
    for place in range(len(shard)):
        flipped = bytearray(shard)
        flipped[place] ^= 1 << place % 8
        yield f"bit {place % 8} of byte {place}", bytes(flipped)
        if place:  # a file without a byte has no samples
            yield f"cut off at byte {place}", shard[:place]


def read(name: str, options: Mapping[str, Any], shard: bytes) -> list[bytes]:
    form = shard_format(name, **options)
    index = form.assemble(listed([shard]), inspect(form, [shard]))
    assert isinstance(index, ChunkIndex)
    return decode_all([shard], index)


@pytest.mark.parametrize("kind", SHARDS)
def test_what_is_damaged_anywhere_is_refused_with_its_place(kind: str) -> None:
    """Unless it changes nothing, as the table at the end of the seekable format does."""
    name, options, shard = SHARDS[kind]
    whole = read(name, options, shard)
    refusals = {}
    for what, data in damaged(shard):
        try:
            found = read(name, options, data)
        except CorruptSample as error:
            refusals[what] = str(error)
        else:
            assert whole[0].startswith(found[0]) if what.startswith("cut") else found == whole, what
    assert len(refusals) > len(shard)
    for what, text in refusals.items():
        assert re.search(r"shard 000.* (byte|offset|line) \d+", text), (what, text)


@pytest.mark.parametrize("kind", SHARDS)
def test_what_is_damaged_after_it_was_indexed_is_refused(kind: str) -> None:
    name, options, shard = SHARDS[kind]
    form = shard_format(name, **options)
    index = form.assemble(listed([shard]), inspect(form, [shard]))
    assert isinstance(index, ChunkIndex)
    whole, refused = decode_all([shard], index), 0
    for place in range(len(shard)):
        flipped = bytearray(shard)
        flipped[place] ^= 1 << place % 8
        try:
            found = decode_all([bytes(flipped)], index)
        except (ValueError, AssertionError):  # what runs it names shard, chunk and byte
            refused += 1
        else:
            assert found == whole, f"byte {place}"
    assert refused > len(shard) // 2
