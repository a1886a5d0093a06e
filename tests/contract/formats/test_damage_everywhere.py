"""Small files damaged at every byte and cut off at every length: refused by name, or in bounds."""

import io
import re
from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest
import webdataset
from gyre_daemon.errors import ConfigError, CorruptSample

from tests.contract.formats.format_contract import inspect, listed
from tests.contract.formats.test_more_formats import mds_shard, npy, tfrecord
from tests.shard_formats import shard_format


def tar() -> bytes:
    """Without most of the zeros that fill its last record."""
    stream = io.BytesIO()
    with webdataset.TarWriter(stream, encoder=False) as writer:
        writer.write({"__key__": "a", "txt": b"one", "cls": b"1"})
    data = stream.getvalue().rstrip(b"\0")
    return data + bytes(-len(data) % 512 + 1024)


ROW: dict[str, Any] = {"id": 7, "image": b"image", "text": "x", "tokens": np.ones((2, 3), np.int32)}
# Options, a shard, and whether every flipped bit is noticed when it is indexed.
SHARDS: Mapping[str, tuple[dict[str, Any], bytes, bool]] = {
    "tfrecord": ({}, tfrecord([b"one", b"", b"three"]), True),
    "webdataset": ({}, tar(), False),
    "mds": ({"columns": ["id", "image", "tokens"]}, mds_shard([ROW, ROW]), False),
    "npy": ({}, npy(np.zeros((3, 2), np.float32)), False),
    "csv": ({}, b'a,b\n1,"x""y\n"\n2,z\n', False),
    "text": ({}, "eins\nzwölf\n".encode(), False),
    "jsonl": ({}, b'{"a": 1}\n\n{"a": [2]}\n', False),
}


def refusal(name: str, data: bytes) -> str | None:
    """What is said of a shard; None if it is served, from within its bytes."""
    form = shard_format(name, **SHARDS[name][0])
    try:
        index = form.assemble(listed([data]), inspect(form, [data]))
    except CorruptSample as error:
        return str(error)
    except ConfigError:  # it is sound, and has other columns
        return None
    extents = index.locate(np.arange(index.num_samples))
    assert (extents.start >= 0).all()
    assert (extents.size >= 0).all()
    assert (extents.start + extents.size <= len(data)).all()
    return None


@pytest.mark.parametrize("name", SHARDS)
def test_every_byte_and_every_length(name: str) -> None:
    _, shard, is_noticed = SHARDS[name]
    assert refusal(name, shard) is None
    said = []
    for place in range(0, len(shard), 5 if name == "webdataset" else 1):
        flipped = bytearray(shard)
        flipped[place] ^= 1 << place % 8
        found = refusal(name, bytes(flipped))
        assert found or not is_noticed, f"bit {place % 8} of byte {place}"
        said += [found, refusal(name, shard[:place])]
    texts = [each for each in said if each]
    assert texts or name == "text"
    for text in texts:  # those without a number are about the header, or the first line
        assert re.search(r"shard 000.* (byte|record) \d+|cannot be served|first line", text), text
