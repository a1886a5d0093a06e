"""Sidecars: stored arrays come back, and nothing else ever does."""

import asyncio
import errno
import io
import os
from collections.abc import Coroutine
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import pytest
from gyre_daemon.datasets.formats.base import Arrays
from gyre_daemon.datasets.sidecars import SUFFIX, SidecarKey, SidecarStore
from gyre_daemon.errors import Overloaded
from gyre_daemon.storage.beneath import LocalFile
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as st_numpy
from msgspec.structs import replace

Result = TypeVar("Result")

KEY = SidecarKey("s3://bucket/data", "a.tar", 1234, '"etag"', "webdataset/1")
ARRAYS: Arrays = {
    "start": np.arange(40),
    "meta": np.frombuffer(b'{"extensions": ["txt"]}', np.uint8),
}

in_a_folder = settings(max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture])
keys = st.builds(
    SidecarKey,
    st.text(max_size=20),
    st.text(max_size=20),
    st.integers(0, 2**62),
    st.text(max_size=20),
    st.text(max_size=20),
)
tables = st.dictionaries(
    st.text("abcxyz", min_size=1, max_size=8),
    st_numpy.arrays(
        st_numpy.integer_dtypes() | st_numpy.boolean_dtypes(),
        st_numpy.array_shapes(min_dims=0, min_side=0),
    ),
    max_size=4,
)


def run(work: Coroutine[Any, Any, Result]) -> Result:
    return asyncio.run(work)


def load(store: SidecarStore, key: SidecarKey, local: LocalFile | None) -> Arrays | None:
    return run(store.load(key, local, lambda _: None))


def sidecar(folder: Path) -> Path:
    (path,) = folder.glob(f"*{SUFFIX}")
    return path


@pytest.fixture
def store(tmp_path: Path) -> SidecarStore:
    return SidecarStore(str(tmp_path / "index"), tmp_path / "fallback")


@given(key=keys, arrays=tables)
@in_a_folder
def test_saved_arrays_are_loaded(store: SidecarStore, key: SidecarKey, arrays: Arrays) -> None:
    run(store.save(key, None, arrays))
    loaded = load(store, key, None)
    assert loaded is not None
    for name, array in arrays.items():
        assert loaded[name].dtype == array.dtype
        assert np.array_equal(loaded[name], array)


@given(key=keys)
@in_a_folder
def test_only_the_same_key_finds_a_sidecar(store: SidecarStore, key: SidecarKey) -> None:
    run(store.save(key, None, ARRAYS))
    for changed in (
        replace(key, size_bytes=key.size_bytes + 1),
        replace(key, version=key.version + "x"),
        replace(key, kind=key.kind + "x"),
        replace(key, shard=key.shard + "x"),
        replace(key, location=key.location + "x"),
    ):
        assert load(store, changed, None) is None
    assert load(store, key, None) is not None


def test_beside_a_local_shard_the_folder_may_move(tmp_path: Path) -> None:
    store = SidecarStore("", tmp_path / "fallback")
    (tmp_path / "one").mkdir()
    (tmp_path / "one" / "a.tar").touch()
    run(store.save(KEY, LocalFile.of(tmp_path / "one" / "a.tar"), ARRAYS))
    names = sorted(path.name for path in (tmp_path / "one").iterdir())
    assert names == ["a.tar", "a.tar" + SUFFIX]
    (tmp_path / "one").rename(tmp_path / "two")
    moved = replace(KEY, location="/elsewhere")
    shard = LocalFile.of(tmp_path / "two" / "a.tar")
    assert load(store, moved, shard) is not None
    assert load(store, replace(moved, version="newer"), shard) is None


def test_every_flipped_byte_reads_as_absent(store: SidecarStore, tmp_path: Path) -> None:
    run(store.save(KEY, None, ARRAYS))
    path = sidecar(tmp_path / "index")
    whole = path.read_bytes()

    for position in range(len(whole)):
        damaged = bytearray(whole)
        damaged[position] ^= 1 << position % 8
        path.write_bytes(damaged)
        assert load(store, KEY, None) is None, f"byte {position} of {len(whole)}"
    path.write_bytes(whole)
    assert load(store, KEY, None) is not None


def test_every_torn_file_reads_as_absent(store: SidecarStore, tmp_path: Path) -> None:
    run(store.save(KEY, None, ARRAYS))
    path = sidecar(tmp_path / "index")
    whole = path.read_bytes()

    for length in range(len(whole)):
        path.write_bytes(whole[:length])
        assert load(store, KEY, None) is None, f"the first {length} of {len(whole)} bytes"
    path.write_bytes(whole + b"more")
    assert load(store, KEY, None) is None


def npz(**arrays: Any) -> bytes:
    buffer = io.BytesIO()
    np.savez_compressed(buffer, allow_pickle=True, **arrays)
    return buffer.getvalue()


def npy(array: Any) -> bytes:
    buffer = io.BytesIO()
    np.save(buffer, array)
    return buffer.getvalue()


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"PK\x03\x04",
        b"\x80\x04K\x01.",
        b'{"json": 1}',
        bytes(100_000),
        np.random.default_rng(0).bytes(5000),
        npy(np.arange(3)),
        npz(start=np.arange(3)),
        npz(key=np.arange(3)),
        npz(key=np.array([object()], object)),
    ],
    ids=range(10),
)
def test_foreign_files_read_as_absent(store: SidecarStore, tmp_path: Path, content: bytes) -> None:
    run(store.save(KEY, None, ARRAYS))
    sidecar(tmp_path / "index").write_bytes(content)
    assert load(store, KEY, None) is None
    run(store.save(KEY, None, ARRAYS))
    assert load(store, KEY, None) is not None, "and are written over"


@given(st.binary(max_size=300))
@in_a_folder
def test_noise_reads_as_absent(store: SidecarStore, tmp_path: Path, content: bytes) -> None:
    run(store.save(KEY, None, ARRAYS))
    sidecar(tmp_path / "index").write_bytes(content)
    assert load(store, KEY, None) is None


@pytest.mark.parametrize(
    "make", [Path.mkdir, lambda path: path.symlink_to(path)], ids=["folder", "loop"]
)
def test_a_folder_reads_as_absent(store: SidecarStore, tmp_path: Path, make: Any) -> None:
    run(store.save(KEY, None, ARRAYS))
    path = sidecar(tmp_path / "index")
    path.unlink()
    make(path)
    assert load(store, KEY, None) is None


def test_a_shard_folder_that_cannot_be_written(tmp_path: Path) -> None:
    """The path beside the shard is no folder; root could write into any folder."""
    (tmp_path / "file").write_text("")
    store = SidecarStore("", tmp_path / "fallback")
    shard = LocalFile.of(tmp_path / "file" / "a.tar")
    run(store.save(KEY, shard, ARRAYS))
    assert sidecar(tmp_path / "fallback")
    assert load(store, KEY, shard) is not None


def test_a_full_disk_leaves_nothing_and_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = SidecarStore("", tmp_path / "fallback")
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "a.tar").touch()
    shard = LocalFile.of(tmp_path / "data" / "a.tar")

    def full(_: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(
        Overloaded,
        match=r"the index of shard a\.tar \(\d+ bytes\) cannot be stored at .*: No space left",
    ) as caught:
        run(store.save(KEY, shard, ARRAYS))
    assert caught.value.facts["shard"] == "a.tar"
    assert int(caught.value.facts["needed_bytes"]) > ARRAYS["start"].nbytes
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == [shard.path]
    monkeypatch.undo()
    run(store.save(KEY, shard, ARRAYS))
    assert load(store, KEY, shard) is not None


def test_two_writers_of_one_sidecar_do_not_mix(store: SidecarStore, tmp_path: Path) -> None:
    """Two datasets may have one shard; readers meanwhile see nothing, or one of both whole."""
    tables: list[Arrays] = [{"a": np.full(50_000, fill)} for fill in range(6)]

    async def write_and_read() -> None:
        async with asyncio.TaskGroup() as group:
            for arrays in tables:
                group.create_task(store.save(KEY, None, arrays))
            for _ in range(20):
                loaded = await store.load(KEY, None, lambda _: None)
                assert loaded is None or len(np.unique(loaded["a"])) == 1
        loaded = await store.load(KEY, None, lambda _: None)
        assert loaded is not None
        assert len(np.unique(loaded["a"])) == 1

    run(write_and_read())
    assert [path.suffix for path in (tmp_path / "index").iterdir()] == [SUFFIX], (
        "nothing unfinished is left"
    )
