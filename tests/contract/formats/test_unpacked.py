"""Compressed shards are unpacked once and whole, within a limit, and stay while they are served."""

import gc
import gzip
import io
import os
import zlib
from pathlib import Path

import pytest
from gyre_daemon.datasets.indexing import unpacked
from gyre_daemon.datasets.indexing.unpacked import UnpackedDataset, UnpackedShards, gunzipped
from gyre_daemon.errors import CorruptSample, Overloaded
from gyre_daemon.storage.shard import Shard
from hypothesis import given
from hypothesis import strategies as st


def shard(name: str, data: bytes, version: str = "1") -> Shard:
    return Shard(name, len(data), version)


def unpack(whole: bytes) -> bytes:
    return b"".join(gunzipped(io.BytesIO(whole)))


@given(
    st.lists(st.binary(max_size=300), min_size=1, max_size=4),
    st.integers(1, 40),
    st.integers(1, 40),
)
def test_unpacked_bytes_are_those_that_were_compressed(
    members: list[bytes], read_bytes: int, piece_bytes: int
) -> None:
    """In pieces of any size, of one member or of several, with or without zeros behind them."""
    packed = b"".join(gzip.compress(member) for member in members)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(unpacked, "_READ_BYTES", read_bytes)
        patch.setattr(unpacked, "_PIECE_BYTES", piece_bytes)
        pieces = list(gunzipped(io.BytesIO(packed)))
        assert b"".join(pieces) == b"".join(members)
        assert all(len(piece) <= piece_bytes for piece in pieces)
        assert unpack(packed + bytes(1000)) == b"".join(members)


@given(st.binary(min_size=1, max_size=300), st.data())
def test_truncation_and_damage_are_errors(data: bytes, draw: st.DataObject) -> None:
    packed = gzip.compress(data, mtime=0)
    with pytest.raises(ValueError, match=r"truncated|empty"):
        unpack(packed[: draw.draw(st.integers(0, len(packed) - 1))])
    damaged = bytearray(packed)
    damaged[-8 + draw.draw(st.integers(0, 7))] ^= 1  # its checksum and its length
    with pytest.raises(ValueError, match="no sound gzip file"):
        unpack(bytes(damaged))


def test_a_bomb_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(unpacked, "_ALWAYS_ALLOWED_BYTES", 1 << 20)
    with pytest.raises(ValueError, match="unpacks to more than 500 times its size"):
        unpack(gzip.compress(bytes(64 << 20)))
    assert len(unpack(gzip.compress(bytes(1 << 20)))) == 1 << 20


def test_raw_deflate_is_no_gzip() -> None:
    with pytest.raises(ValueError, match="no sound gzip file"):
        unpack(zlib.compress(b"x" * 1000))


class TestUnpackedShards:
    @pytest.fixture
    def folder(self, tmp_path: Path) -> Path:
        return tmp_path / "unpacked"

    def files(self, folder: Path) -> list[bytes]:
        return sorted(path.read_bytes() for path in folder.rglob("*.unpacked*"))

    def test_a_shard_is_found_by_its_name_size_and_version(self, folder: Path) -> None:
        packed = gzip.compress(b"one")
        one = shard("a.tar.gz", packed)
        dataset = UnpackedShards(folder, 1000).open("data", [one])
        path = dataset.unpack(one, io.BytesIO(packed))
        assert path.path.read_bytes() == b"one"
        assert dataset.find(one) == path
        assert dataset.find(shard("a.tar.gz", packed, "2")) is None
        assert dataset.find(Shard("a.tar.gz", 5, "1")) is None
        unversioned = shard("b.tar.gz", packed, "")
        dataset.unpack(unversioned, io.BytesIO(packed))
        assert dataset.find(unversioned) is None, "without a version it cannot be recognised"

    def test_only_this_user_may_look(self, folder: Path) -> None:
        one = shard("a.tar.gz", b"")
        dataset = UnpackedShards(folder, 1000).open("data", [one])
        dataset.unpack(one, io.BytesIO(gzip.compress(b"one")))
        assert [path.stat().st_mode & 0o077 for path in folder.iterdir()] == [0]

    @pytest.mark.parametrize(
        "packed", [gzip.compress(b"x" * 500)[:-1], b"nothing", b""], ids=range(3)
    )
    def test_nothing_unfinished_is_left(self, folder: Path, packed: bytes) -> None:
        one = shard("a.tar.gz", packed)
        dataset = UnpackedShards(folder, 1000).open("data", [one])
        with pytest.raises(CorruptSample, match=r"shard a\.tar\.gz cannot be unpacked: it is"):
            dataset.unpack(one, io.BytesIO(packed))
        assert self.files(folder) == []

    def test_files_that_no_shard_needs_are_removed_when_the_dataset_is_opened_again(
        self, folder: Path
    ) -> None:
        packed, store = gzip.compress(b"one"), UnpackedShards(folder, 1000)
        old, new = shard("a.tar.gz", packed), shard("a.tar.gz", packed, "2")
        first = store.open("data", [old])
        first.unpack(old, io.BytesIO(packed))
        second = store.open("data", [new])
        assert first.find(old), "a daemon serves it"
        del first, second
        gc.collect()
        third = store.open("data", [new])
        assert third.find(old) is None
        assert self.files(folder) == []

    def test_datasets_that_no_daemon_serves_make_room(self, folder: Path) -> None:
        store = UnpackedShards(folder, 1000)
        served: list[UnpackedDataset] = []
        for number in range(3):
            packed = gzip.compress(bytes([number]) * 400)
            one = shard("a.tar.gz", packed)
            dataset = store.open(f"data {number}", [one])
            if number == 2:
                with pytest.raises(
                    Overloaded,
                    match=r"no room to unpack shard a\.tar\.gz: .* unpack_disk is 1000\. Raise it",
                ):
                    dataset.unpack(one, io.BytesIO(packed))
                served.pop(0)
                gc.collect()
            dataset.unpack(one, io.BytesIO(packed))
            served.append(dataset)
        assert self.files(folder) == [b"\1" * 400, b"\2" * 400]

    def test_another_daemon_that_serves_a_dataset_keeps_it(self, folder: Path) -> None:
        packed = gzip.compress(b"x" * 800)
        one, other = shard("a.tar.gz", packed), shard("b.tar.gz", packed)
        theirs = UnpackedShards(folder, 1000).open("theirs", [one])
        theirs.unpack(one, io.BytesIO(packed))
        ours = UnpackedShards(folder, 1000).open("ours", [other])
        with pytest.raises(Overloaded):
            ours.unpack(other, io.BytesIO(packed))
        assert theirs.find(one)

    def test_a_folder_that_cannot_be_made(self, tmp_path: Path) -> None:
        (tmp_path / "file").write_bytes(b"")
        with pytest.raises(
            Overloaded, match=r"cannot be unpacked into .*: Not a directory; set `unpack_dir`"
        ):
            UnpackedShards(tmp_path / "file" / "unpacked", 1000).open(
                "data", [shard("a.tar.gz", b"")]
            )

    def test_a_full_disk_is_reported(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        def full(_: int) -> None:
            raise OSError(28, "No space left on device")

        monkeypatch.setattr(os, "fsync", full)
        one = shard("a.tar.gz", b"")
        with pytest.raises(
            Overloaded,
            match=r"a\.tar\.gz cannot be unpacked into .*: No space left on device\. Free some",
        ):
            UnpackedShards(folder, 1000).open("data", [one]).unpack(
                one, io.BytesIO(gzip.compress(b"one"))
            )
        assert self.files(folder) == []
