"""Links and odd files in a shared data folder: nothing outside of a dataset's folder is served."""

import contextlib
import ctypes
import logging
import os
import socket
import subprocess
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gyre_client import Loader
from gyre_client.errors import NotAllowed as Refused
from gyre_daemon.errors import NotAllowed, ShardMissing
from gyre_daemon.storage import beneath
from gyre_daemon.storage.beneath import LeavesRoot, LocalFile, Root
from gyre_daemon.storage.listing import list_files, stat_shard

from tests.conftest import StartDaemon

TOKENS = {"format": "tokens", "dtype": "uint16", "sequence_length": 2}


@pytest.fixture(params=["openat2", "looks"])
def folder(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A data folder with one shard, beside a secret; with and without the kernel's help."""
    if request.param == "looks":
        monkeypatch.setattr(beneath, "has_openat2", lambda: False)
    elif not beneath.has_openat2():
        pytest.skip("the kernel has no openat2")
    folder = tmp_path / "data"
    (folder / "sub").mkdir(parents=True)
    (folder / "a.bin").write_bytes(b"shard")
    (folder / "sub" / "b.bin").write_bytes(b"other")
    for other in ("secret", "datax"):
        (tmp_path / other).mkdir()
        (tmp_path / other / "key.bin").write_bytes(b"secret")
    return folder


def content(root: Root, name: str) -> bytes:
    with LocalFile(root, name).opened() as descriptor:
        return os.read(descriptor, 100)


@pytest.mark.parametrize(
    ("target", "found"),
    [
        ("a.bin", b"shard"),
        ("./sub/../a.bin", b"shard"),
        ("sub/b.bin", b"other"),
        ("sub/up/sub/b.bin", b"other"),
        ("{root}/a.bin", b"shard"),
        ("{root}/sub/up/a.bin", b"shard"),
    ],
)
def test_links_that_stay_beneath_the_root_are_followed(
    folder: Path, target: str, found: bytes
) -> None:
    (folder / "sub" / "up").symlink_to("..")
    (folder / "link.bin").symlink_to(target.format(root=folder))
    assert content(Root(folder), "link.bin") == found
    (folder.parent / "way").symlink_to(folder)
    assert content(Root(folder.parent / "way"), "link.bin") == found, "also through a link to it"


@pytest.mark.parametrize(
    "target",
    [
        "../secret/key.bin",
        "sub/../../secret/key.bin",
        "{root}/../secret/key.bin",
        "{root}x/key.bin",
        "/etc/passwd",
        "/proc/self/environ",
        "/proc/self/fd/0",
        "/dev/zero",
    ],
)
def test_links_that_leave_the_root_are_refused(folder: Path, target: str) -> None:
    (folder / "link.bin").symlink_to(target.format(root=folder))
    with pytest.raises(LeavesRoot) as refused:
        content(Root(folder), "link.bin")
    assert refused.value.root == folder


def test_a_link_in_the_way_that_leaves_the_root_is_refused(folder: Path) -> None:
    (folder / "sub" / "deep").symlink_to("../../secret")
    with pytest.raises(LeavesRoot):
        content(Root(folder), "sub/deep/key.bin")


def test_files_outside_are_not_opened_to_be_refused(folder: Path) -> None:
    """Opening a device may do something, and opening a pipe wakes its writer."""
    (folder / "link.bin").symlink_to("../secret/key.bin")
    libc = ctypes.CDLL(None, use_errno=True)
    events = libc.inotify_init1(os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        on_open = 0x20
        assert libc.inotify_add_watch(events, bytes(folder.parent / "secret/key.bin"), on_open) >= 0
        with pytest.raises(LeavesRoot):
            content(Root(folder), "link.bin")
        with pytest.raises(BlockingIOError):
            os.read(events, 4096)
        assert (folder.parent / "secret" / "key.bin").read_bytes() == b"secret"
        assert os.read(events, 4096), "an opening is noticed"
    finally:
        os.close(events)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can mount")
def test_a_link_into_another_mount_namespace_is_refused(folder: Path) -> None:
    """There a file outside has a path beneath the root."""
    script = 'mount --bind "$0" "$1" && echo mounted && read -r line'
    files = str(folder.parent / "secret" / "key.bin"), str(folder / "a.bin")
    command = ["unshare", "--mount", "sh", "-c", script, *files]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True) as other:
        assert other.stdout
        if other.stdout.readline() != "mounted\n":
            pytest.skip("nothing can be mounted here")
        way = f"/proc/{other.pid}/root{folder}/a.bin"
        assert Path(way).read_bytes() == b"secret"
        (folder / "link.bin").symlink_to(way)
        with pytest.raises(LeavesRoot):
            content(Root(folder), "link.bin")
        other.communicate("\n")


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can mount")
def test_a_mount_beneath_the_root_is_served(folder: Path) -> None:
    (folder / "link.bin").symlink_to(folder / "sub" / "b.bin")
    command = ["mount", "-t", "tmpfs", "none", str(folder / "sub")]
    if subprocess.run(command, check=False).returncode:
        pytest.skip("nothing can be mounted here")
    try:
        (folder / "sub" / "b.bin").write_bytes(b"mounted")
        assert content(Root(folder), "sub/b.bin") == content(Root(folder), "link.bin") == b"mounted"
    finally:
        subprocess.run(["umount", str(folder / "sub")], check=True)


def test_dots_and_loops(folder: Path) -> None:
    with pytest.raises(LeavesRoot):
        content(Root(folder), "sub/../../secret/key.bin")
    (folder / "loop").symlink_to("loop")
    with pytest.raises(OSError, match="symbolic links"):
        content(Root(folder), "loop")
    with pytest.raises(FileNotFoundError):
        content(Root(folder), "sub/absent")
    with pytest.raises(NotADirectoryError):
        content(Root(folder), "a.bin/x")


def test_with_follow_links_everything_is_followed(folder: Path) -> None:
    (folder / "link.bin").symlink_to("../secret/key.bin")
    assert content(Root(folder, follow_links=True), "link.bin") == b"secret"
    files = list_files(folder, "*.bin", follow_links=True)
    assert [stat_shard(file, file.name).size_bytes for file in files] == [5, 6]


def test_no_descriptor_is_left(folder: Path) -> None:
    (folder / "out").symlink_to("../secret")
    (folder / "sub" / "up").symlink_to("..")
    before = len(list(Path("/proc/self/fd").iterdir()))
    for name in ("a.bin", "sub/up/sub/b.bin", "out/key.bin", "sub", "absent", "sub/b.bin/x"):
        with contextlib.suppress(OSError):
            content(Root(folder), name)
    assert len(list(Path("/proc/self/fd").iterdir())) == before


def make_socket(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(path))


@pytest.mark.parametrize("make", [os.mkfifo, make_socket, os.mkdir])
def test_what_is_no_regular_file_is_refused_at_once(
    folder: Path, make: Callable[[Path], None]
) -> None:
    make(folder / "odd.bin")
    (folder / "link.bin").symlink_to("odd.bin")
    for name in ("odd.bin", "link.bin"):
        with pytest.raises(NotAllowed, match="is no regular file but a folder, a pipe, a socket"):
            stat_shard(LocalFile(Root(folder), name), name)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can make a device")
def test_a_device_is_refused(folder: Path) -> None:
    try:
        os.mknod(folder / "odd.bin", 0o20666, os.makedev(1, 5))
    except PermissionError:
        pytest.skip("no device can be made here")
    with pytest.raises(NotAllowed, match="is no regular file"):
        stat_shard(LocalFile(Root(folder), "odd.bin"), "odd.bin")


@pytest.mark.parametrize(
    "uri",
    ["data", "data/link.bin", "data/*.bin", "data/**/*.bin", "data/lo*/key.bin", "data/*"],
)
def test_a_listing_names_the_file_and_the_key(folder: Path, uri: str) -> None:
    (folder / "link.bin").symlink_to("../secret/key.bin")
    (folder / "lone").symlink_to("../secret")
    with pytest.raises(NotAllowed) as refused:
        for file in list_files(folder.parent / uri, "*.bin"):
            stat_shard(file, file.path.name)
    text = f"a link leads out of the dataset's folder {folder}; if"
    assert text in str(refused.value)
    assert "set follow_links = true" in str(refused.value)
    assert refused.value.facts["root"] == str(folder)


@pytest.mark.parametrize(
    ("uri", "odd"),
    [
        ("data", ["gone.bin", "loop.bin", "odd.bin", "socket.bin"]),
        ("data/?*.bin", ["gone.bin", "loop.bin", "odd.bin", "socket.bin"]),
        ("data/*/gone.bin", ["sub/gone.bin"]),
    ],
)
def test_odd_files_are_passed_over_and_named_in_the_log(
    folder: Path, uri: str, odd: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    os.mkfifo(folder / "odd.bin")
    make_socket(folder / "socket.bin")
    (folder / "loop.bin").symlink_to("loop.bin")
    (folder / "folder.bin").mkdir()
    (folder / "sub" / "also.bin").symlink_to("../folder.bin")
    for name in ("gone.bin", "sub/gone.bin"):
        (folder / name).symlink_to("absent")
    (folder / "folder.bin" / "gone.bin").write_bytes(b"it is there")
    with caplog.at_level(logging.WARNING, "gyre_daemon"):
        assert len(list_files(folder.parent / uri, "*.bin")) == 1
    (record,) = caplog.records
    assert record.getMessage() == "odd files among the shards are passed over"
    facts = record.facts  # type: ignore[attr-defined]
    assert facts["names"] == ", ".join(odd)


def test_where_nothing_but_odd_files_match_they_are_named(folder: Path) -> None:
    for number in range(7):
        os.mkfifo(folder / "sub" / f"odd-{number}.bin")
    with pytest.raises(ShardMissing, match=r"no regular file.*: odd-0\.bin, .*odd-4\.bin, \.\.\.$"):
        list_files(folder / "sub", "odd*.bin")


def test_a_glob_lists_nothing_behind_a_link_that_leaves_the_root(folder: Path) -> None:
    """Not even names: they may be secret too."""
    (folder / "out").symlink_to("../secret")
    for uri in ("*/*.bin", "*/*", "[o]ut/*.bin"):
        with pytest.raises(NotAllowed) as refused:
            for file in list_files(folder / uri, "*.bin"):
                stat_shard(file, file.path.name)
        assert "key" not in str(refused.value)


def names(path: Path, pattern: str = "*.bin") -> list[str]:
    return [file.name for file in list_files(path, pattern)]


def test_globs(folder: Path) -> None:
    (folder / "sub" / ".hidden.bin").write_bytes(b"")
    (folder / "sub" / "x" / "y").mkdir(parents=True)
    (folder / "sub" / "x" / "y" / "c.bin").write_bytes(b"")
    (folder / "[x].bin").write_bytes(b"")
    (folder / "way").symlink_to("sub")
    assert names(folder) == ["[x].bin", "a.bin"]
    assert names(folder / "[x].bin") == ["[x].bin"]
    assert names(folder / "s*" / "b.bin") == ["sub/b.bin"]
    assert names(folder / "*" / "b.bin") == ["sub/b.bin", "way/b.bin"]
    assert names(folder / "**" / "*.bin") == [
        "[x].bin", "a.bin", "sub/.hidden.bin", "sub/b.bin", "sub/x/y/c.bin",
    ]  # fmt: skip
    assert names(folder / "sub" / "**") == [".hidden.bin", "b.bin", "x/y/c.bin"]
    assert names(folder / "?.bin") == ["a.bin"]
    for absent in ("absent/*", "a.bin/*", "*/absent"):
        with pytest.raises(ShardMissing):
            list_files(folder / absent, "*.bin")


def test_a_folder_that_is_exchanged_for_a_link_while_files_are_opened(folder: Path) -> None:
    """Whoever wins each race, the secret is never read."""
    (folder.parent / "secret" / "b.bin").write_bytes(b"secret")
    (folder / "link").symlink_to("../secret")
    done = threading.Event()

    def exchange() -> None:
        while not done.is_set():
            (folder / "sub").rename(folder / "real")
            (folder / "link").rename(folder / "sub")
            (folder / "sub").rename(folder / "link")
            (folder / "real").rename(folder / "sub")

    thread = threading.Thread(target=exchange)
    thread.start()
    seen: set[bytes] = set()
    try:
        for _ in range(2000):
            try:
                seen.add(content(Root(folder), "sub/b.bin"))
            except OSError:
                continue
    finally:
        done.set()
        thread.join()
    assert seen <= {b"other"}


@pytest.fixture
def shared(tmp_path: Path) -> Path:
    """Token shards in a shared folder, and a file that only the daemon's user may read."""
    folder = tmp_path / "shared"
    folder.mkdir()
    np.arange(100, dtype=np.uint16).tofile(folder / "a.bin")
    np.arange(40, dtype=np.uint16).tofile(tmp_path / "secret")
    return folder


def read_all(address: str, name: str) -> np.ndarray:
    with Loader(name, batch_size=1, epochs=1, address=address, order="sequential") as loader:
        return np.concatenate([batch["tokens"].numpy().ravel() for batch in loader])


def test_a_daemon_serves_no_link_of_another_user(gyred: StartDaemon, shared: Path) -> None:
    (shared / "b.bin").symlink_to(shared.parent / "secret")
    dataset = {"uri": str(shared), **TOKENS}
    daemon = gyred({"datasets": {"strict": dataset, "open": dataset | {"follow_links": True}}})
    with pytest.raises(
        Refused, match=r"b\.bin is refused: a link leads out .* set follow_links = true"
    ):
        read_all(daemon.address, "strict")
    assert len(read_all(daemon.address, "open")) == 140


def test_a_shard_that_becomes_a_link_is_no_longer_served(gyred: StartDaemon, shared: Path) -> None:
    daemon = gyred({"datasets": {"set": {"uri": str(shared), **TOKENS}}})
    assert len(read_all(daemon.address, "set")) == 100
    secret = shared.parent / "secret"
    times = (shared / "a.bin").stat()
    secret.write_bytes(b"x" * 200)
    os.utime(secret, ns=(times.st_atime_ns, times.st_mtime_ns))
    (shared / "a.bin").unlink()
    (shared / "a.bin").symlink_to(secret)
    with pytest.raises(Refused, match="follow_links"):
        read_all(daemon.address, "set")


def test_a_private_daemon_follows_links_unless_it_is_told_not_to(shared: Path) -> None:
    """It runs as its user, who could open the files himself; caches of models are full of links."""
    (shared / "blob").write_bytes((shared / "a.bin").read_bytes())
    snapshot = shared / "snapshot"
    snapshot.mkdir()
    (snapshot / "a.bin").symlink_to("../blob")
    options = {"dtype": "uint16", "sequence_length": 2}
    arguments: dict[str, Any] = {"format": "tokens", "batch_size": 1, "epochs": 1}
    with Loader(str(snapshot), options=options, **arguments) as loader:
        assert sum(1 for _ in loader) == 50
    with (
        pytest.raises(Refused, match="set follow_links = true"),
        Loader(str(snapshot), options=options | {"follow_links": False}, **arguments) as loader,
    ):
        next(iter(loader))
