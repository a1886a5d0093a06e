"""Stored indexes that are damaged or forged read as absent, with a warning and nothing else."""

import hashlib
import io
import json
import logging
import os
import struct
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gyre_daemon.datasets.changes import RECORD_SUFFIX, load_previous
from gyre_daemon.datasets.formats.tokens import TokensFormat, TokensOptions
from gyre_daemon.datasets.formats.webdataset import WebdatasetFormat, WebdatasetOptions
from gyre_daemon.datasets.sidecar_file import Arrays, decode, encode
from gyre_daemon.datasets.sidecars import SUFFIX, SidecarKey, SidecarStore
from gyre_daemon.errors import GyreError
from gyre_daemon.storage.shard import Shard
from hypothesis import given, settings
from hypothesis import strategies as st

FORMAT = WebdatasetFormat(WebdatasetOptions())


def npy(values: Any) -> bytes:
    buffer = io.BytesIO()
    np.save(buffer, np.asarray(values))
    return buffer.getvalue()


def tar_of_samples() -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as archive:
        for number in range(4):
            files = {
                "cls": str(number).encode(),
                "npy": npy(np.zeros((number + 1, 3))),
                "txt": b"text",
            }
            for extension, data in files.items():
                info = tarfile.TarInfo(f"{number}.{extension}")
                info.size = len(data)
                archive.addfile(info, io.BytesIO(data))
    return buffer.getvalue()


TAR = tar_of_samples()
SCAN = FORMAT.inspection.run("a.tar", io.BytesIO(TAR))
KEY = SidecarKey("/data", "a.tar", len(TAR), "1", FORMAT.inspection.version)


def check(arrays: Arrays) -> None:
    FORMAT.inspection.check(arrays, len(TAR))


def meta(**changes: Any) -> np.ndarray:
    text = json.dumps({**json.loads(SCAN["meta"].tobytes()), **changes})
    return np.frombuffer(text.encode(), np.uint8)


def changed(name: str, at: int, value: int) -> np.ndarray:
    array = SCAN[name].copy()
    array[at] = value
    return array


FORGED: dict[str, dict[str, Any]] = {
    "negative start": {"start": changed("start", 2, -512)},
    "start in the header of the archive": {"start": changed("start", 0, 0)},
    "start beyond the shard": {"start": changed("start", -1, 1 << 40)},
    "start near the end of int64": {"start": changed("start", -1, (1 << 63) - 1)},
    "negative size": {"size": changed("size", 1, -1)},
    "size beyond the shard": {"size": changed("size", -1, len(TAR))},
    "size near the end of int64": {"size": changed("size", -1, (1 << 63) - 1)},
    "overlapping members": {"size": changed("size", 0, 4096)},
    "decreasing starts": {"start": SCAN["start"][::-1].copy()},
    "one start too few": {"start": SCAN["start"][1:]},
    "one size too many": {"size": np.append(SCAN["size"], 0)},
    "no samples": {"first": np.zeros(1, np.int64)},
    "empty first": {"first": np.zeros(0, np.int64)},
    "first does not begin at 0": {"first": changed("first", 0, 1)},
    "first decreases": {"first": changed("first", 1, 100)},
    "first ends elsewhere": {"first": changed("first", -1, 3)},
    "negative extension": {"extension": changed("extension", 0, -1)},
    "unknown extension": {"extension": changed("extension", 0, 50)},
    "an extension twice": {"extension": changed("extension", 0, 1)},
    "arrays beyond the members": {"array": changed("array", -1, 1000)},
    "negative array": {"array": changed("array", 0, -1)},
    "arrays missing": {"array": SCAN["array"][:-1], "itemsize": SCAN["itemsize"][:-1]},
    "an array that is text": {"array": changed("array", 0, 2)},
    "dims beyond the shapes": {"dim": changed("dim", -1, 100)},
    "dims decrease": {"dim": changed("dim", 1, 7)},
    "negative shape": {"shape": changed("shape", 0, -1)},
    "huge shape": {"shape": changed("shape", 0, 1 << 62)},
    "shape larger than its member": {"shape": changed("shape", 0, 1 << 20)},
    "itemsize 0": {"itemsize": changed("itemsize", 0, 0)},
    "itemsize of another type": {"itemsize": changed("itemsize", 0, 4)},
    "meta is no JSON": {"meta": np.frombuffer(b"{", np.uint8)},
    "meta is deep": {"meta": np.frombuffer(b"[" * 100_000, np.uint8)},
    "meta is a list": {"meta": np.frombuffer(b"[]", np.uint8)},
    "meta has another key": {"meta": meta(more=1)},
    "meta is huge": {"meta": np.full(5 << 20, ord(" "), np.uint8)},
    "extensions are numbers": {"meta": meta(extensions=[1, 2, 3])},
    "an extension is empty": {"meta": meta(extensions=["cls", "npy", ""])},
    "extensions are equal": {"meta": meta(extensions=["cls", "cls", "txt"])},
    "extensions of other kinds": {"meta": meta(extensions=["cls", "txt", "npy"])},
    "kinds are missing": {"meta": meta(kinds=[])},
    "a kind of an unknown extension": {"meta": meta(kinds=[[[0, 1, 9], 0, 0, "a"]])},
    "arrays of an unknown type": {"meta": meta(arrays=[["npy", "O", 2, 0, "a"]])},
    "arrays of more dims": {"meta": meta(arrays=[["npy", "<f8", 9, 0, "a"]])},
    "starts of another dtype": {"start": SCAN["start"].astype(np.int32)},
    "starts in two dims": {"start": SCAN["start"].reshape(-1, 1)},
}


def store_in(folder: Path) -> tuple[SidecarStore, Path]:
    store = SidecarStore(str(folder), folder)
    store.save(KEY, None, SCAN)
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
    assert store.load(KEY, None, check) is None
    assert len(warnings_of(caplog)) == 1
    assert "index thrown away" in warnings_of(caplog)[0]
    store.save(KEY, None, SCAN)
    assert store.load(KEY, None, check) is not None


@pytest.mark.parametrize("name", SCAN)
def test_an_array_that_is_missing_or_empty(name: str, tmp_path: Path) -> None:
    store, path = store_in(tmp_path)
    others = {key: array for key, array in SCAN.items() if key != name}
    for arrays in (others, {**others, name: SCAN[name][:0]}, {**others, name: np.array(["text"])}):
        path.write_bytes(encode(KEY.encoded(), arrays))
        assert store.load(KEY, None, check) is None


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
    assert store.load(KEY, None, check) is None


def test_a_file_that_is_too_large_is_not_read(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    store, path = store_in(tmp_path)
    with path.open("r+b") as file:
        file.truncate(1 << 40)  # a hole
    assert store.load(KEY, None, check) is None
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
    records.save(SidecarKey("/data", "set", 0, "", "dataset/1"), None, arrays)
    previous = load_previous(records, "set", "/data", None)
    assert (previous.shards, previous.fingerprint) == ({}, "")
