"""Local shards that are overwritten, damaged and put back while a daemon serves them.

Never a wrong byte.
"""

import json
import os
import shutil
from pathlib import Path
from typing import Any

import psutil
import pytest
import webdataset
from gyre_client import Loader
from gyre_client.command.cli import main
from gyre_client.errors import CorruptSample

from tests.conftest import Daemon, StartDaemon
from tests.waiting import until

NUM_SHARDS, NUM_SAMPLES, SAMPLE_BYTES = 3, 40, 3000


def content(sample: int, version: int = 0) -> bytes:
    return bytes([sample, version]) * (SAMPLE_BYTES // 2)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Tar shards, and beside them a backup that `cp -p` made."""
    folder = tmp_path / "set"
    folder.mkdir()
    write(folder, range(NUM_SHARDS))
    shutil.copytree(folder, tmp_path / "backup")
    return folder


def write(folder: Path, shards: Any, version: int = 0) -> None:
    for shard in shards:
        with webdataset.TarWriter(str(folder / f"{shard}.tar"), mtime=0) as writer:
            for index in range(NUM_SAMPLES):
                sample = shard * NUM_SAMPLES + index
                writer.write({"__key__": f"{sample:05}", "bin": content(sample, version)})


@pytest.fixture(params=["taken by it", "taken before"])
def daemon(
    gyred: StartDaemon,
    folder: Path,
    request: pytest.FixtureRequest,
    capsys: pytest.CaptureFixture[str],
) -> Daemon:
    """It has all checksums: it took them, or the daemon before it did."""
    daemon = gyred({"datasets": {"set": {"uri": str(folder), "format": "webdataset"}}})
    assert main(["index", "set", "--checksums", "--address", daemon.address]) == 0
    capsys.readouterr()
    if request.param == "taken before":
        daemon.stop()
        daemon.restart()
    return daemon


def read(daemon: Daemon, num_epochs: int = 1) -> int:
    """Every sample is what was written first; gives how many there were."""
    seen = 0
    with Loader("set", batch_size=8, seed=1, epochs=num_epochs, address=daemon.address) as loader:
        for batch in loader:
            offsets = batch["bin.offsets"].tolist()
            for place, sample in enumerate(batch["sample_id"].tolist()):
                assert batch["bin"][
                    offsets[place] : offsets[place + 1]
                ].numpy().tobytes() == content(sample)
                seen += 1
    return seen


def index(daemon: Daemon, capsys: pytest.CaptureFixture[str], *more: str) -> dict[str, Any]:
    capsys.readouterr()
    assert main(["index", "set", "--json", "--address", daemon.address, *more]) == 0
    indexed: dict[str, Any] = json.loads(capsys.readouterr().out)
    return indexed


def set_back(path: Path, times: os.stat_result) -> None:
    os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))


ALL = NUM_SHARDS * NUM_SAMPLES


def test_a_shard_overwritten_in_place_with_its_time_set_back_is_never_served(
    daemon: Daemon, folder: Path
) -> None:
    assert read(daemon) == ALL
    before = (folder / "1.tar").stat()
    write(folder, [1], version=1)
    set_back(folder / "1.tar", before)
    assert (folder / "1.tar").stat().st_mtime_ns == before.st_mtime_ns
    assert (folder / "1.tar").stat().st_size == before.st_size
    for _ in range(3):
        with pytest.raises(
            CorruptSample, match=r"shard 1\.tar has changed since the dataset was opened"
        ):
            read(daemon, num_epochs=3)


def test_a_running_job_gets_the_error_too(daemon: Daemon, folder: Path) -> None:
    with Loader("set", batch_size=8, seed=1, address=daemon.address) as loader:
        next(iter(loader))
        before = (folder / "1.tar").stat()
        write(folder, [1], version=1)
        set_back(folder / "1.tar", before)
        with pytest.raises(CorruptSample, match=r"shard 1\.tar has changed"):
            for _ in range(10_000):
                next(iter(loader))


@pytest.mark.parametrize("in_place", [True, False])
def test_a_shard_that_is_put_back_serves_again_without_an_operator(
    daemon: Daemon, folder: Path, in_place: bool
) -> None:
    assert read(daemon) == ALL
    shard = folder / "1.tar"
    for _ in range(2):
        os.truncate(shard, 5000)
        with pytest.raises(CorruptSample, match=r"shard 1\.tar"):
            read(daemon)
        if not in_place:
            shard.unlink()
        shutil.copy2(folder.parent / "backup" / "1.tar", shard)
        assert read(daemon, num_epochs=2) == 2 * ALL


def test_shards_that_are_only_touched_stay_served(daemon: Daemon, folder: Path) -> None:
    assert read(daemon) == ALL
    for shard in folder.glob("*.tar"):
        shard.chmod(0o600)
        shard.with_name(shard.name + ".link").hardlink_to(shard)
    assert read(daemon, num_epochs=2) == 2 * ALL


def test_indexing_reports_how_each_shard_changed(
    daemon: Daemon, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    first = index(daemon, capsys, "--checksums")
    assert set(first["shards"].values()) <= {"indexed", "kept"}
    again = index(daemon, capsys)
    assert again["shards"] == dict.fromkeys(("0.tar", "1.tar", "2.tar"), "kept")
    assert again["fingerprint_before"] == again["fingerprint"] == first["fingerprint"]
    (folder / "0.tar").unlink()
    shutil.copy2(folder.parent / "backup" / "0.tar", folder / "0.tar")
    before = (folder / "1.tar").stat()
    write(folder, [1], version=1)
    set_back(folder / "1.tar", before)
    changed = index(daemon, capsys)
    assert changed["shards"] == {"0.tar": "restored", "1.tar": "changed", "2.tar": "kept"}
    assert changed["fingerprint_before"] == first["fingerprint"]
    assert changed["fingerprint"] != first["fingerprint"], (
        "the middle of each shard is in the fingerprint"
    )
    write(folder, [2], version=0)
    assert main(["index", "set", "--address", daemon.address]) == 0
    text = capsys.readouterr().out
    assert "3: 2 kept, 1 restored" in text
    assert "2.tar  touched or put back, with the bytes that it had" in text
    assert "all fit as before" in text


def test_changes_while_no_daemon_ran_are_reported(
    daemon: Daemon, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    first = index(daemon, capsys, "--checksums")
    daemon.stop()
    shutil.copy2(folder.parent / "backup" / "0.tar", folder / "0.tar")
    write(folder, [1], version=1)
    write(folder, [3])
    (folder / "2.tar").unlink()
    daemon.restart()
    changed = index(daemon, capsys)
    assert changed["shards"]["1.tar"] == "changed"
    assert changed["shards"]["0.tar"] == "restored"
    assert changed["shards"]["2.tar"] == "removed"
    assert changed["shards"]["3.tar"] == "indexed"
    assert changed["fingerprint_before"] == first["fingerprint"] != changed["fingerprint"]


def test_a_touched_shard_without_checksums_is_refused_with_the_reason(
    gyred: StartDaemon, folder: Path
) -> None:
    daemon = gyred({"datasets": {"set": {"uri": str(folder), "format": "webdataset"}}})
    assert read(daemon) == ALL
    (folder / "1.tar").chmod(0o600)
    with pytest.raises(
        CorruptSample, match=r"1\.tar has changed .*, or was only touched: .* no checksums .* index"
    ):
        read(daemon)
    assert main(["index", "set", "--address", daemon.address]) == 0
    assert read(daemon) == ALL


def test_files_of_an_earlier_index_are_closed(daemon: Daemon, folder: Path) -> None:
    """Once no session reads them, however often the dataset is indexed."""
    assert daemon.process
    process = psutil.Process(daemon.process.pid)
    shutil.copy2(folder.parent / "backup" / "1.tar", folder / "1.tar")
    read(daemon)
    before = process.num_fds()
    for _ in range(4):
        shutil.copy2(folder.parent / "backup" / "1.tar", folder / "1.tar")
        assert main(["index", "set", "--checksums", "--address", daemon.address]) == 0
        read(daemon)
    assert main(["index", "set", "--checksums", "--address", daemon.address]) == 0
    until(lambda: process.num_fds() <= before)
