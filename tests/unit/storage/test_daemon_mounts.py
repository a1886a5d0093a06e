import asyncio
import os
import threading
from pathlib import Path

import pytest
from gyre_daemon.errors import StorageUnavailable
from gyre_daemon.runtime.threads import DaemonThreads, compute, in_thread
from gyre_daemon.storage.mounts import Mounts

TABLE = """\
21 1 0:20 / / rw,relatime shared:1 - ext4 /dev/vda1 rw
22 21 0:21 / /proc rw - proc proc rw
30 21 0:44 / /mnt/nfs rw,relatime shared:7 master:2 - nfs4 server:/export rw,vers=4.2
31 30 0:45 / /mnt/nfs/inner\\040folder rw - fuse.s3fs s3fs rw
32 21 0:46 / /mnt/twice rw - ext4 /dev/vdb1 rw
33 32 0:47 / /mnt/twice rw - fuse.sshfs host:/ rw
"""


@pytest.fixture
def table(tmp_path: Path) -> Path:
    path = tmp_path / "mountinfo"
    path.write_text(TABLE)
    return path


@pytest.mark.parametrize(
    ("path", "mount", "file_system"),
    [
        ("/data/x.tar", "/", "ext4"),
        ("/mnt/nfs", "/mnt/nfs", "nfs4"),
        ("/mnt/nfs/", "/mnt/nfs", "nfs4"),
        ("/mnt/nfs2/x", "/", "ext4"),
        ("/mnt/nfs/a/../b", "/mnt/nfs", "nfs4"),
        ("/mnt/nfs/../x", "/", "ext4"),
        ("/mnt/nfs/inner folder/x", "/mnt/nfs/inner folder", "fuse.s3fs"),
        ("/mnt/twice/x", "/mnt/twice", "fuse.sshfs"),
    ],
)
def test_the_mount_of_a_path_is_found_without_touching_the_path(
    table: Path, path: str, mount: str, file_system: str
) -> None:
    found = Mounts(table).at(path)
    assert (found.path, found.file_system) == (mount, file_system)


def test_a_table_without_a_root_has_one_of_unknown_type(tmp_path: Path) -> None:
    table = tmp_path / "mountinfo"
    table.write_text(TABLE.partition("\n")[2])
    assert Mounts(table).at("/data").file_system == "unknown"


def test_a_link_is_followed_to_the_mount_of_its_target(table: Path, tmp_path: Path) -> None:
    (tmp_path / "first").symlink_to("second")
    (tmp_path / "second").symlink_to("/mnt/nfs/inner folder")
    mounts, path = Mounts(table), tmp_path / "first" / "shard.tar"
    assert mounts.at(path).path == "/"
    assert asyncio.run(mounts.of(path)).file_system == "fuse.s3fs"
    assert mounts.at(path).file_system == "fuse.s3fs"


def test_links_in_a_circle_end(table: Path, tmp_path: Path) -> None:
    (tmp_path / "one").symlink_to("other")
    (tmp_path / "other").symlink_to("one")
    assert asyncio.run(Mounts(table).of(tmp_path / "one")).path == "/"


def test_a_mount_keeps_its_threads_until_something_else_is_mounted(
    table: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gyre_daemon.storage.mounts._RENEW_AFTER_S", 0)
    mounts = Mounts(table)
    before = mounts.at("/mnt/nfs/x")
    assert mounts.at("/mnt/nfs/y") is before
    table.write_text(TABLE.replace("30 21 0:44", "40 21 0:48"))
    assert mounts.at("/mnt/nfs/x") is not before
    assert mounts.at("/data") is mounts.at("/")


def test_only_calls_that_stand_still_count_as_hung(
    table: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gyre_daemon.storage.mounts.HANGS_AFTER_S", 0.0)
    mounts, (reader, writer) = Mounts(table), os.pipe()

    def hung() -> list[str]:
        mounts.look()
        return [mount.path for mount in mounts if mount.hangs_since_s is not None]

    async def hang() -> None:
        waiting = asyncio.create_task(mounts.run("/mnt/nfs/x", os.read, reader, 1))
        while hung() != ["/mnt/nfs"]:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        os.write(writer, b"x")
        assert await waiting == b"x"
        while hung():  # noqa: ASYNC110
            await asyncio.sleep(0.01)

    try:
        asyncio.run(hang())
    finally:
        os.close(reader)
        os.close(writer)


def test_a_mount_that_hangs_is_not_waited_for_where_others_could_not_go_on(
    table: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gyre_daemon.storage.mounts.HANGS_AFTER_S", 0.0)
    monkeypatch.setattr("gyre_daemon.storage.mounts._LOOK_EVERY_S", 0.01)
    mounts, (reader, writer) = Mounts(table), os.pipe()
    with pytest.raises(TimeoutError, match=r"/mnt/nfs \(nfs4\) does not answer"):
        asyncio.run(mounts.answered("/mnt/nfs/x", os.read, reader, 1))
    os.write(writer, b"x")
    os.close(reader)
    os.close(writer)


def test_a_call_that_hangs_for_minutes_fails(table: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gyre_daemon.storage.mounts._GIVEN_UP_AFTER_S", 0.1)
    monkeypatch.setattr("gyre_daemon.storage.mounts._LOOK_EVERY_S", 0.01)
    mounts, (reader, writer) = Mounts(table), os.pipe()

    async def hang() -> None:
        mount = mounts.at("/mnt/nfs/x")
        with pytest.raises(
            StorageUnavailable, match=r"/mnt/nfs \(nfs4\) has not answered for 0.1 s"
        ):
            await mount.run(os.read, reader, 1)
        with pytest.raises(StorageUnavailable):
            async with mount.opened(lambda: os.open("/", len(os.read(reader, 1)) and os.O_RDONLY)):
                pass

    asyncio.run(hang())
    os.write(writer, b"xx")
    os.close(writer)
    os.close(reader)


def test_a_descriptor_is_closed_in_a_thread_of_its_mount(table: Path, tmp_path: Path) -> None:
    mounts = Mounts(table)

    async def open_and_close() -> int:
        mount = await mounts.of(tmp_path)
        async with mount.opened(lambda: os.open(tmp_path, os.O_RDONLY)) as descriptor:
            os.fstat(descriptor)
        while is_open(descriptor):  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        return descriptor

    asyncio.run(open_and_close())


def is_open(descriptor: int) -> bool:
    try:
        os.fstat(descriptor)
    except OSError:
        return False
    return True


def test_threads_are_reused_and_at_most_as_many_as_allowed() -> None:
    threads = DaemonThreads(2, "test")
    idents = {threads.submit(threading.get_ident).result() for _ in range(3)}
    assert len(idents) == threads.num_threads == 1
    gate = threading.Event()
    waiting = [threads.submit(gate.wait) for _ in range(5)]
    assert threads.num_threads == 2
    assert waiting[-1].cancel()
    gate.set()
    assert all(each.result() for each in waiting[:-1])
    threads.shutdown()
    with pytest.raises(RuntimeError, match="shut down"):
        threads.submit(gate.wait)


def test_what_work_raises_is_raised() -> None:
    def fail() -> None:
        raise ValueError("no")

    with pytest.raises(ValueError, match="no"):
        asyncio.run(compute(fail))
    with pytest.raises(ValueError, match="no"):
        asyncio.run(in_thread(fail, "test"))
