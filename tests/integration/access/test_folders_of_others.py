"""The daemon's folders and files where another user had a hand in them: refused, never used."""

import asyncio
import os
import stat
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from gyre_daemon.datasets.formats.base import Arrays
from gyre_daemon.datasets.indexing.unpacked import UnpackedShards, _file_name
from gyre_daemon.datasets.sidecars import SUFFIX, SidecarKey, SidecarStore
from gyre_daemon.errors import ConfigError
from gyre_daemon.runtime.listen import (
    NotOurs,
    SocketClaim,
    UnixAddress,
    check_folder,
    make_folder,
    open_ours,
)
from gyre_daemon.storage.beneath import LocalFile, Root
from gyre_daemon.storage.cache.blocks import BlockMap, open_disk_cache
from gyre_daemon.storage.shard import Shard

from tests.conftest import StartDaemon

OTHER = 65534
KEY = SidecarKey("/data", "a.tar", 10, "1.1", "kind/1")
ARRAYS: Arrays = {"start": np.arange(10)}


def accept(arrays: Arrays) -> None:
    """Takes any arrays for those of an inspection."""


as_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can act as two users")


def as_other(act: Callable[[], object]) -> None:
    """Call a function in a process of another user."""
    pid = os.fork()
    if pid == 0:
        try:
            os.setgroups([])
            os.setgid(OTHER)
            os.setuid(OTHER)
            act()
            os._exit(0)
        finally:
            os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0


@pytest.fixture
def open_folder() -> Iterator[Path]:
    """A folder that other users can reach, unlike those of pytest, and write into."""
    with tempfile.TemporaryDirectory() as place:
        Path(place).chmod(0o755)
        folder = Path(place) / "open"
        folder.mkdir()
        folder.chmod(0o777)
        yield folder


def modes(folder: Path) -> dict[str, int]:
    return {
        str(path.relative_to(folder)): stat.S_IMODE(path.lstat().st_mode)
        for path in folder.rglob("*")
    }


def test_a_new_folder_is_for_its_user_alone_whatever_the_umask(tmp_path: Path) -> None:
    for umask in (0, 0o277):
        before = os.umask(umask)
        try:
            make_folder(tmp_path / f"{umask}" / "deep" / "er")
            os.close(open_ours(tmp_path / f"{umask}" / "file", os.O_RDWR | os.O_CREAT | os.O_EXCL))
        finally:
            os.umask(before)
        assert modes(tmp_path / f"{umask}") == {"deep": 0o700, "deep/er": 0o700, "file": 0o600}


@pytest.mark.parametrize("mode", [0o777, 0o1777, 0o722, 0o770, 0o775])
def test_a_folder_that_others_may_write_is_refused(tmp_path: Path, mode: int) -> None:
    (tmp_path / "x").mkdir()
    (tmp_path / "x").chmod(mode)
    with pytest.raises(NotOurs, match=rf"mode {mode:04o}.*`chmod go-w {tmp_path}/x`"):
        make_folder(tmp_path / "x")
    (tmp_path / "x").chmod(0o755)
    make_folder(tmp_path / "x")


def test_a_link_to_a_folder_is_refused(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir(mode=0o700)
    (tmp_path / "link").symlink_to("real")
    with pytest.raises(NotOurs, match="is a link to real; name the folder itself"):
        check_folder(tmp_path / "link")
    (tmp_path / "dangling").symlink_to("absent")
    with pytest.raises(NotOurs, match="is a link"):
        make_folder(tmp_path / "dangling")
    (tmp_path / "file").touch()
    with pytest.raises(NotADirectoryError):
        make_folder(tmp_path / "file")


@as_root
def test_a_folder_of_another_user_is_refused(open_folder: Path) -> None:
    as_other((open_folder / "theirs").mkdir)
    with pytest.raises(NotOurs, match=rf"belongs to user {OTHER}.*`chown 0 {open_folder}/theirs`"):
        make_folder(open_folder / "theirs")


@pytest.mark.parametrize(
    ("make", "sentence"),
    [
        (lambda path: path.symlink_to(path.with_name("kept")), "is a link; remove it"),
        (lambda path: path.hardlink_to(path.with_name("kept")), "another name elsewhere"),
        (os.mkfifo, "is no regular file"),
        (lambda path: (path.touch(), path.chmod(0o666)), "writable for other users"),
    ],
    ids=["link", "hard link", "pipe", "writable"],
)
def test_a_lock_file_that_is_something_else(
    tmp_path: Path, make: Callable[[Path], None], sentence: str
) -> None:
    """What it leads to stays as it was."""
    (tmp_path / "kept").write_bytes(b"precious")
    make(tmp_path / "gyre.sock.lock")
    with pytest.raises(ConfigError, match=f"cannot claim the socket .*{sentence}"):
        SocketClaim(UnixAddress(tmp_path / "gyre.sock"))
    assert (tmp_path / "kept").read_bytes() == b"precious"


@as_root
def test_a_lock_file_of_another_user_is_refused(open_folder: Path) -> None:
    as_other((open_folder / "gyre.sock.lock").touch)
    open_folder.chmod(0o755)
    with pytest.raises(ConfigError, match=f"belongs to user {OTHER}; remove it"):
        SocketClaim(UnixAddress(open_folder / "gyre.sock"))


def test_what_a_claim_makes(tmp_path: Path) -> None:
    claim = SocketClaim(UnixAddress(tmp_path / "run" / "gyre.sock"))
    assert modes(tmp_path) == {"run": 0o750, "run/gyre.sock.lock": 0o600}
    claim.give_up()


def test_a_daemon_refuses_an_open_socket_folder(gyred: StartDaemon, tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run").chmod(0o777)
    with pytest.raises(AssertionError, match=r"mode 0777, so other users.*`chmod go-w"):
        gyred({"listen": [f"unix:{tmp_path}/run/gyre.sock"]})


@pytest.mark.parametrize("key", ["cache_dir", "index_dir", "unpack_dir"])
def test_a_daemon_refuses_an_open_folder(tmp_path: Path, key: str) -> None:
    """`check-config` says so before the daemon is started; it imports less."""
    (tmp_path / "x").mkdir()
    (tmp_path / "x").chmod(0o777)
    (tmp_path / "gyre.toml").write_text(f'{key} = "{tmp_path}/x"\n')
    checked = subprocess.run(
        [sys.executable, "-m", "gyre_daemon", "check-config", "--config", tmp_path / "gyre.toml"],
        check=False,
        capture_output=True,
        text=True,
    )
    assert checked.returncode == 2
    assert f"gyred: {key} cannot be used: the folder {tmp_path}/x has mode 0777" in checked.stderr


def cache_name(folder: Path) -> str:
    """Store one block; gives the name of its mirror, which is closed afterwards."""
    disk = open_disk_cache(folder, 1 << 20)
    assert disk
    mirror = disk.open_mirror("data", BLOCKS)
    mirror.write(0, np.full(100, 7, np.uint8))
    del mirror
    disk.close()
    (blocks,) = folder.glob("*.blocks")
    return blocks.name.removesuffix(".blocks")


BLOCKS = BlockMap.of(np.zeros(2, np.int64), np.array([0, 100]), np.array([100, 200]))


def test_what_a_cache_makes_is_for_its_user_alone(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        name = cache_name(tmp_path / "cache")
    finally:
        os.umask(before)
    assert modes(tmp_path) == {
        "cache": 0o700,
        "cache/lock": 0o600,
        f"cache/{name}.blocks": 0o600,
        f"cache/{name}.digests": 0o600,
    }


@as_root
def test_a_forged_cache_of_another_user_is_not_served(open_folder: Path) -> None:
    """It was put there while the folder was open to all; its digests are right."""
    name = cache_name(open_folder.parent / "cache")
    for suffix in (".blocks", ".digests"):
        forged = (open_folder.parent / "cache" / (name + suffix)).read_bytes()
        as_other(partial((open_folder / (name + suffix)).write_bytes, forged))
    assert open_disk_cache(open_folder, 1 << 20) is None, "others may still write"
    open_folder.chmod(0o755)
    disk = open_disk_cache(open_folder, 1 << 20)
    assert disk
    assert disk.unopened == {}
    mirror = disk.open_mirror("data", BLOCKS)
    assert 0 not in mirror
    assert (open_folder / f"{name}.blocks").stat().st_uid == 0
    del mirror
    disk.close()


@as_root
@pytest.mark.parametrize("owner", [0, OTHER, 1000])
def test_an_index_counts_if_root_or_the_shards_owner_wrote_it(
    open_folder: Path, caplog: pytest.LogCaptureFixture, owner: int
) -> None:
    shard = open_folder / "a.tar"
    shard.write_bytes(b"0123456789")
    os.chown(shard, OTHER, OTHER)
    file = LocalFile(Root(open_folder), "a.tar")
    asyncio.run(SidecarStore("", open_folder.parent / "first").save(KEY, file, ARRAYS))
    sidecar = open_folder / ("a.tar" + SUFFIX)
    os.chown(sidecar, owner, owner)
    store = SidecarStore("", open_folder.parent / "second")
    is_trusted = owner != 1000
    assert (asyncio.run(store.load(KEY, file, accept)) is not None) == is_trusted
    assert asyncio.run(store.load(KEY, file, accept)) is None or is_trusted
    warnings = [record for record in caplog.records if "index ignored" in record.getMessage()]
    assert len(warnings) == (0 if is_trusted else 1), "one warning, although it was asked twice"
    asyncio.run(store.save(KEY, file, ARRAYS))
    again = asyncio.run(store.load(KEY, file, accept))
    assert again is not None, "it was made again, elsewhere if need be"
    assert sidecar.stat().st_uid == (0 if is_trusted else owner)


@as_root
def test_an_index_that_more_users_may_write_than_the_shard_does_not_count(
    open_folder: Path,
) -> None:
    (open_folder / "a.tar").write_bytes(b"0123456789")
    (open_folder / "a.tar").chmod(0o644)
    file = LocalFile(Root(open_folder), "a.tar")
    store = SidecarStore("", open_folder.parent / "elsewhere")
    asyncio.run(store.save(KEY, file, ARRAYS))
    sidecar = open_folder / ("a.tar" + SUFFIX)
    assert stat.S_IMODE(sidecar.stat().st_mode) == 0o644, "who reads the shard reads its index"
    assert asyncio.run(store.load(KEY, file, accept)) is not None
    sidecar.chmod(0o666)
    assert asyncio.run(store.load(KEY, file, accept)) is None
    (open_folder / "a.tar").chmod(0o600)
    sidecar.unlink()
    asyncio.run(store.save(KEY, file, ARRAYS))
    assert stat.S_IMODE(sidecar.stat().st_mode) == 0o600


@as_root
def test_an_index_in_a_folder_of_the_daemons_must_be_its_own(open_folder: Path) -> None:
    store = SidecarStore(str(open_folder / "index"), open_folder / "unused")
    asyncio.run(store.save(KEY, None, ARRAYS))
    (sidecar,) = (open_folder / "index").iterdir()
    assert modes(open_folder) == {"index": 0o700, f"index/{sidecar.name}": 0o600}
    os.chown(sidecar, OTHER, OTHER)
    assert asyncio.run(store.load(KEY, None, accept)) is None
    sidecar.unlink()
    sidecar.symlink_to(open_folder / "x")
    assert asyncio.run(store.load(KEY, None, accept)) is None


def test_an_index_that_is_a_pipe_keeps_nobody_waiting(tmp_path: Path) -> None:
    (tmp_path / "a.tar").write_bytes(b"0123456789")
    os.mkfifo(tmp_path / ("a.tar" + SUFFIX))
    file, store = LocalFile.of(tmp_path / "a.tar"), SidecarStore("", tmp_path / "elsewhere")
    assert asyncio.run(store.load(KEY, file, accept)) is None
    asyncio.run(store.save(KEY, file, ARRAYS))
    assert asyncio.run(store.load(KEY, file, accept)) is not None


@as_root
def test_an_unpacked_shard_of_another_user_is_unpacked_again(open_folder: Path) -> None:
    packed = Shard("a.tar.gz", 10, "1")
    unpacked = UnpackedShards(open_folder / "unpacked", 1 << 20)
    unpacked.write(packed, [b"mine"], unpacked_path(unpacked, packed))
    assert modes(open_folder / "unpacked").keys()
    assert set(modes(open_folder / "unpacked").values()) == {0o600, 0o700}
    dataset = unpacked.open("data", [packed])
    assert dataset.find(packed) is not None
    os.chown(unpacked_path(unpacked, packed), OTHER, OTHER)
    assert dataset.find(packed) is None


def unpacked_path(unpacked: UnpackedShards, shard: Shard) -> Path:
    return unpacked.open("data", [shard]).folder / _file_name(shard)
