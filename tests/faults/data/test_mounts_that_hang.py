"""A mount that hangs holds up the jobs that read from it, and nothing else."""

import contextlib
import json
import signal
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
import webdataset
from gyre_client import Loader
from gyre_client.command.cli import main
from gyre_client.errors import GyreError

from tests.conftest import Daemon, GyredCommand, StartDaemon
from tests.daemons import status
from tests.fuse_folder import FuseFolder, why_not
from tests.waiting import until

pytestmark = pytest.mark.skipif(bool(why_not()), reason=why_not())

TOKENS = {"format": "tokens", "dtype": "int32", "sequence_length": 1024}
FILES = {"format": "files", "extensions": ["txt"]}
NUM_SEQUENCES = 2000  # 8 MB: more than the kernel reads ahead


def write_tokens(folder: Path) -> None:
    folder.mkdir()
    np.arange(1024 * NUM_SEQUENCES, dtype=np.int32).tofile(folder / "a.bin")


def write_tars(folder: Path) -> None:
    folder.mkdir()
    for shard in range(2):
        with webdataset.TarWriter(str(folder / f"{shard}.tar"), mtime=0) as writer:
            for sample in range(20):
                writer.write({"__key__": f"{shard}-{sample:02}", "cls": sample})


def write_files(folder: Path) -> None:
    for name in ("cat", "dog"):
        (folder / name).mkdir(parents=True)
        for number in range(50):
            (folder / name / f"{number}.txt").write_text(f"{name} {number}")


@pytest.fixture
def there(tmp_path: Path) -> Iterator[FuseFolder]:
    """A mounted folder with the same datasets as the folder `here`, and a folder for indexes."""
    for place in ("here", "source"):
        (tmp_path / place).mkdir()
        write_tokens(tmp_path / place / "tokens")
        write_tars(tmp_path / place / "tars")
        write_files(tmp_path / place / "files")
    (tmp_path / "mount").mkdir()
    with FuseFolder(tmp_path / "source", tmp_path / "mount") as folder:
        yield folder


def tables(there: FuseFolder) -> dict[str, dict[str, object]]:
    here = there.path.parent / "here"
    return {
        f"{name} {kind}": {"uri": str(folder / kind), **options}
        for name, folder in (("here", here), ("there", there.path))
        for kind, options in (("tokens", TOKENS), ("tars", {}), ("files", FILES))
    }


@pytest.fixture
def daemon(gyred: StartDaemon, there: FuseFolder) -> Daemon:
    return gyred({"datasets": tables(there)})


def read(daemon: Daemon, name: str, num_batches: int = 2) -> list[int]:
    with Loader(name, batch_size=8, seed=1, address=daemon.address) as loader:
        stream = iter(loader)
        return [number for _ in range(num_batches) for number in next(stream)["sample_id"].tolist()]


@contextlib.contextmanager
def in_background(work: Callable[[], object]) -> Iterator[threading.Event]:
    """Work that ends when the mount answers again; the event is set then."""
    done = threading.Event()

    def run() -> None:
        with contextlib.suppress(GyreError):  # the test has failed before
            work()
            done.set()

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    yield done
    thread.join(120)


def hanging(daemon: Daemon) -> list[str]:
    return [mount.path for mount in status(daemon).mounts if mount.HasField("hangs_since_s")]


@pytest.mark.parametrize("kind", ["tokens", "tars", "files"])
def test_a_dataset_that_cannot_be_opened_holds_up_no_other(
    daemon: Daemon, there: FuseFolder, kind: str, capsys: pytest.CaptureFixture[str]
) -> None:
    there.stop()
    try:
        with in_background(lambda: read(daemon, f"there {kind}")) as done:
            until(lambda: hanging(daemon) == [str(there.path)])
            assert main(["status", "--check", "--address", daemon.address]) == 1
            assert f"the mount {there.path} (fuse.test) has not" in capsys.readouterr().out
            for other in ("tokens", "tars", "files"):
                assert len(set(read(daemon, f"here {other}"))) == 16
            assert main(["index", "here tars", "--address", daemon.address]) == 0
            for ask in (["status"], ["why", f"there {kind}", "--step", "0"]):
                capsys.readouterr()
                assert main([*ask, "--address", daemon.address]) == 0
                told = "".join(capsys.readouterr().out.split())
                assert f"hangs{there.path}(fuse.test)hasnotansweredfor" in told
            assert not done.is_set()
            there.go_on()
        assert done.is_set()
        until(lambda: not hanging(daemon))
    finally:
        there.go_on()


@pytest.mark.parametrize("kind", ["tokens", "tars", "files"])
def test_a_job_whose_reads_hang_holds_up_no_other(
    daemon: Daemon, there: FuseFolder, kind: str, capsys: pytest.CaptureFixture[str]
) -> None:
    name = f"there {kind}"
    num = {"tokens": NUM_SEQUENCES, "tars": 40, "files": 100}[kind]
    wanted = read(daemon, f"here {kind}", num // 8)
    with Loader(name, batch_size=8, seed=1, address=daemon.address) as loader:
        stream = iter(loader)
        seen = next(stream)["sample_id"].tolist()
        there.stop()
        try:

            def read_rest() -> None:
                for _ in range(num // 8 - 1):
                    seen.extend(next(stream)["sample_id"].tolist())

            with in_background(read_rest) as done:
                for other in ("tokens", "tars", "files"):
                    assert len(set(read(daemon, f"here {other}"))) == 16
                there.go_on()
            assert done.is_set()
            assert seen == wanted
        finally:
            there.go_on()


def test_a_scan_that_hangs_on_a_mount_taken_for_fast_holds_up_no_other(
    gyred: StartDaemon, there: FuseFolder
) -> None:
    """A process scans the shards of such a mount itself."""
    kinds = tables(there)
    daemon = gyred({"datasets": kinds | {"warm": kinds["there tokens"] | {"cache": False}}})

    def is_fast() -> bool:
        read(daemon, "warm", NUM_SEQUENCES // 8)  # out of the page cache, from the second time on
        return not any(mount.slow for mount in status(daemon).mounts if mount.path == where)

    where = str(there.path)
    until(is_fast)
    there.behave(delay_s=3600)
    try:
        index = ["index", "there tars", "--address", daemon.address]
        with in_background(lambda: main(index)) as done:
            until(lambda: hanging(daemon) == [where])
            for other in ("tokens", "tars", "files"):
                assert len(set(read(daemon, f"here {other}"))) == 16
            assert not done.is_set()
            assert daemon.stop() == 0
    finally:
        there.behave(delay_s=0)


def test_where_indexes_hang_datasets_elsewhere_are_indexed_without_them(
    gyred: StartDaemon, there: FuseFolder, capsys: pytest.CaptureFixture[str]
) -> None:
    home = {"XDG_CACHE_HOME": str(there.path)}
    daemon = gyred({"datasets": tables(there), "index_dir": ""}, home)
    there.stop()
    try:
        assert len(set(read(daemon, "here tars"))) == 16
        assert hanging(daemon) == [str(there.path)]
        assert len(set(read(daemon, "here files"))) == 16
        assert main(["index", "here tars", "--address", daemon.address]) == 1
        assert f"the mount {there.path} (fuse.test) does not answer" in capsys.readouterr().err
    finally:
        there.go_on()


def start_reading(daemon: Daemon, there: FuseFolder) -> Loader:
    """A job that has files of the mount open, which hangs now."""
    loader = Loader("there tokens", batch_size=8, seed=1, address=daemon.address)
    next(iter(loader))
    there.stop()
    return loader


def test_a_daemon_ends_while_a_mount_hangs(daemon: Daemon, there: FuseFolder) -> None:
    there.behave(has_flush=0)
    try:
        with (
            start_reading(daemon, there),
            in_background(lambda: read(daemon, "there files")),
        ):
            until(lambda: hanging(daemon) == [str(there.path)])
            assert daemon.stop() == 0
            daemon.restart()
            assert len(set(read(daemon, "here tars"))) == 16
            there.go_on()
    finally:
        there.go_on()


def test_where_the_kernel_keeps_a_daemon_that_ends_the_next_one_serves(
    daemon: Daemon, there: FuseFolder
) -> None:
    """A process cannot end before the files are closed that it had open, whatever it does."""
    first = daemon.process
    assert first
    try:
        with start_reading(daemon, there):
            first.send_signal(signal.SIGTERM)
            until(lambda: any(event["event"] == "stopped" for event in daemon.events()))
            daemon.restart()
            assert first.poll() is None
            assert len(set(read(daemon, "here tars"))) == 16
            there.go_on()
            assert first.wait(120) == 0
    finally:
        there.go_on()


def test_a_check_of_the_configuration_says_which_mount_hangs(
    gyred_command: GyredCommand, there: FuseFolder, tmp_path: Path
) -> None:
    config = tmp_path / "gyre.toml"
    lines = [f'listen = ["unix:{tmp_path}/run/gyre.sock"]', f'index_dir = "{tmp_path}/index"']
    for name, table in tables(there).items():
        lines.append(f'[datasets."{name}"]')
        lines += [f"{key} = {json.dumps(value)}" for key, value in table.items()]
    config.write_text("\n".join(lines))
    there.stop()
    try:
        ended = gyred_command("check-config", "--config", str(config))
        assert ended.returncode == 0
        told = [line for line in ended.stderr.splitlines() if "does not answer" in line]
        assert len(told) == 3
        assert all("there" in line and str(there.path) in line for line in told)
    finally:
        there.go_on()
