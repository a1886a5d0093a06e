"""Stored indexes that are damaged or forged read as absent, with a warning and nothing else."""

import asyncio
import hashlib
import json
import logging
import os
import struct
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from gyre_daemon.datasets.formats.tokens import TokensFormat, TokensOptions
from gyre_daemon.datasets.indexing.changes import RECORD_SUFFIX, load_previous
from gyre_daemon.datasets.sidecars import SUFFIX, Arrays, SidecarKey, SidecarStore, decode, encode
from gyre_daemon.errors import GyreError
from gyre_daemon.storage.shard import Shard
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.forged_indexes import FORGED, FORMAT, SCAN, TAR

KEY = SidecarKey("/data", "a.tar", len(TAR), "1", FORMAT.inspection.version)


def check(arrays: Arrays) -> None:
    FORMAT.inspection.check(arrays, len(TAR))


def store_in(folder: Path) -> tuple[SidecarStore, Path]:
    store = SidecarStore(str(folder), folder)
    asyncio.run(store.save(KEY, None, SCAN))
    (path,) = folder.glob(f"*{SUFFIX}")
    return store, path


def warnings_of(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [each.getMessage() for each in caplog.records if each.levelno == logging.WARNING]


@pytest.mark.parametrize("kind", FORGED)
def test_arrays_that_no_scan_finds_are_thrown_away(
    kind: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    store, path = store_in(tmp_path)
    path.write_bytes(encode(KEY.encoded(), {**SCAN, **FORGED[kind]}))
    assert asyncio.run(store.load(KEY, None, check)) is None
    assert len(warnings_of(caplog)) == 1
    assert "index thrown away" in warnings_of(caplog)[0]
    asyncio.run(store.save(KEY, None, SCAN))
    assert asyncio.run(store.load(KEY, None, check)) is not None


@pytest.mark.parametrize("name", SCAN)
def test_an_array_that_is_missing_or_empty(name: str, tmp_path: Path) -> None:
    store, path = store_in(tmp_path)
    others = {key: array for key, array in SCAN.items() if key != name}
    for arrays in (others, {**others, name: SCAN[name][:0]}, {**others, name: np.array(["text"])}):
        path.write_bytes(encode(KEY.encoded(), arrays))
        assert asyncio.run(store.load(KEY, None, check)) is None


def forge(header: bytes, rest: bytes = b"") -> bytes:
    """A file with a right checksum and this header."""
    content = struct.pack("<I", len(header)) + header + rest
    whole = bytearray(encode("", {}))
    whole[8:] = hashlib.blake2b(content, digest_size=32).digest() + content
    return bytes(whole)


@pytest.mark.parametrize(
    "content",
    [
        forge(b""),
        forge(b"[" * 60_000),
        forge(b'["k",[["a","<i8",[35184372088832]]]]'),
        forge(b'["k",[["a","<i8",[1099511627776,1099511627776,1099511627776]]]]'),
        forge(b'["k",[["a","<i8",[-1]]]]', bytes(8)),
        forge(b'["k",[["a","|O",[1]]]]', bytes(8)),
        forge(b'["k",[["a","|V8",[1]]]]', bytes(8)),
        forge(b'["k",[["a","<M8[s]",[1]]]]', bytes(8)),
        forge(b'["k",[["a","<U0",[1099511627776]]]]'),
        forge(b'["k",[["a","<i8",[0]],["a","<i8",[0]]]]'),
        forge(b'["k",[]]', b"more"),
        forge(b'["k",[["a","<i8",[2]]]]', bytes(8)),
        forge(b'["k",["a"]]'),
        forge(b'{"key":"k"}'),
        forge(b"[1,[]]"),
        forge(json.dumps(["k", [["a", "<i8", [0]]] * 65]).encode()),
        forge(bytes(70_000)),
        b"",
        b"GYREIDX\x03",
    ],
    ids=range(19),
)
def test_files_of_another_form(content: bytes) -> None:
    with pytest.raises(ValueError, match=r"it |its "):
        decode(content)


def test_every_cut_and_every_flipped_bit_of_a_file(tmp_path: Path) -> None:
    whole = encode(KEY.encoded(), {"a": np.arange(3), "b": np.array(["x", "yz"])})
    for length in range(len(whole)):
        with pytest.raises(ValueError, match="it"):
            decode(whole[:length])
    for bit in range(8 * len(whole)):
        damaged = bytearray(whole)
        damaged[bit // 8] ^= 1 << bit % 8
        with pytest.raises(ValueError, match="it"):
            decode(bytes(damaged))


@pytest.mark.parametrize("make", [os.mkfifo, Path.mkdir, lambda path: path.symlink_to(path)])
def test_what_is_no_file_is_not_waited_for(make: Callable[[Path], None], tmp_path: Path) -> None:
    store, path = store_in(tmp_path)
    path.unlink()
    make(path)
    assert asyncio.run(store.load(KEY, None, check)) is None


def test_a_file_that_is_too_large_is_not_read(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    store, path = store_in(tmp_path)
    with path.open("r+b") as file:
        file.truncate(1 << 40)  # a hole
    assert asyncio.run(store.load(KEY, None, check)) is None
    assert warnings_of(caplog) == ["index thrown away"]
    (record,) = caplog.records
    assert "more than 67108864" in str(record.__dict__["facts"]["reason"])


@given(st.data())
@settings(max_examples=200)
def test_what_passes_can_be_served(data: st.DataObject) -> None:
    """Random changes of the arrays are refused, or give an index that answers."""
    name = data.draw(st.sampled_from([name for name in SCAN if name != "meta"]))
    array = SCAN[name].copy()
    values = st.one_of(st.integers(-2, 20), st.sampled_from([1 << 20, (1 << 31) - 1]))
    for _ in range(data.draw(st.integers(1, 3))):
        array[data.draw(st.integers(0, len(array) - 1))] = data.draw(values)
    forged = {**SCAN, name: array}
    try:
        check(forged)
    except ValueError:
        return
    try:
        index = FORMAT.assemble([Shard("a.tar", len(TAR), "1")], [forged])
    except GyreError:
        return
    extents = index.locate(np.arange(index.num_samples))
    assert (extents.start >= 0).all()
    assert (extents.start + extents.size <= len(TAR)).all()


@pytest.mark.parametrize(
    "arrays",
    [
        {},
        {"kind": np.array([""]), "dtype": np.array([""]), "numbers": np.zeros((3, 2), np.int64)},
        {"kind": np.array(["x"]), "dtype": np.array([""]), "numbers": np.zeros((3, 1), np.int64)},
        {"kind": np.array([""]), "dtype": np.array(["O"]), "numbers": np.zeros((3, 1), np.int64)},
        {"kind": np.array([0]), "dtype": np.array([""]), "numbers": np.zeros((3, 1), np.int64)},
        {"kind": np.array([""]), "dtype": np.array([""]), "numbers": np.full((3, 1), -1)},
        {"kind": np.array([""]), "dtype": np.array([""]), "numbers": np.full((3, 1), 1 << 50)},
    ],
)
def test_stored_headers_of_other_shards(arrays: Arrays) -> None:
    probe = TokensFormat(TokensOptions(4)).inspection
    assert probe
    with pytest.raises(ValueError, match=r"its|it "):
        probe.check(arrays, [Shard("a.bin", 100, "1")])


@pytest.mark.parametrize("shards", [b"[" * 100_000, b"{}", b'[["a", "b", "c"]]', b"\xff", b""])
def test_a_forged_record_of_a_dataset(shards: bytes, tmp_path: Path) -> None:
    records = SidecarStore(str(tmp_path), tmp_path, RECORD_SUFFIX)
    arrays = {
        "shards": np.frombuffer(shards, np.uint8),
        "fingerprint": np.frombuffer(b"abc", np.uint8),
    }
    asyncio.run(records.save(SidecarKey("/data", "set", 0, "", "dataset/1"), None, arrays))
    previous = asyncio.run(load_previous(records, "set", "/data", None))
    assert (previous.shards, previous.fingerprint) == ({}, "")
