"""Local shards that are overwritten, damaged and put back while a daemon serves them.

Never a wrong byte.
"""

import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import webdataset
from gyre_client import Loader
from gyre_client.command.cli import main
from gyre_client.errors import CorruptSample

from tests.conftest import Daemon, StartDaemon

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


@pytest.fixture
def daemon(gyred: StartDaemon, folder: Path) -> Daemon:
    return gyred({"datasets": {"set": {"uri": str(folder), "format": "webdataset"}}})


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


def index(daemon: Daemon, capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    capsys.readouterr()
    assert main(["index", "set", "--json", "--address", daemon.address]) == 0
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
def test_a_shard_that_is_put_back_serves_again_once_it_is_indexed(
    daemon: Daemon, folder: Path, capsys: pytest.CaptureFixture[str], in_place: bool
) -> None:
    before = index(daemon, capsys)
    assert read(daemon) == ALL
    shard = folder / "1.tar"
    os.truncate(shard, 5000)
    with pytest.raises(CorruptSample, match=r"shard 1\.tar"):
        read(daemon)
    if not in_place:
        shard.unlink()
    shutil.copy2(folder.parent / "backup" / "1.tar", shard)
    with pytest.raises(CorruptSample, match=r"1\.tar has changed .*, or was only touched"):
        read(daemon)
    after = index(daemon, capsys)
    assert after["shards"] == {"0.tar": "kept", "1.tar": "changed", "2.tar": "kept"}
    assert after["fingerprint"] == before["fingerprint"], "cursors still fit"
    assert read(daemon, num_epochs=2) == 2 * ALL


def test_indexing_reports_how_each_shard_changed(
    daemon: Daemon, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    first = index(daemon, capsys)
    assert set(first["shards"].values()) <= {"indexed", "kept"}
    again = index(daemon, capsys)
    assert again["shards"] == dict.fromkeys(("0.tar", "1.tar", "2.tar"), "kept")
    assert again["fingerprint_before"] == again["fingerprint"] == first["fingerprint"]
    before = (folder / "1.tar").stat()
    write(folder, [1], version=1)
    set_back(folder / "1.tar", before)
    changed = index(daemon, capsys)
    assert changed["shards"] == {"0.tar": "kept", "1.tar": "changed", "2.tar": "kept"}
    assert changed["fingerprint_before"] == first["fingerprint"]
    assert changed["fingerprint"] != first["fingerprint"], (
        "the middle of each shard is in the fingerprint"
    )


def test_changes_while_no_daemon_ran_are_reported(
    daemon: Daemon, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    first = index(daemon, capsys)
    daemon.stop()
    write(folder, [1], version=1)
    write(folder, [3])
    (folder / "2.tar").unlink()
    daemon.restart()
    changed = index(daemon, capsys)
    assert changed["shards"]["1.tar"] == "changed"
    assert changed["shards"]["0.tar"] == "kept"
    assert changed["shards"]["2.tar"] == "removed"
    assert changed["shards"]["3.tar"] == "indexed"
    assert changed["fingerprint_before"] == first["fingerprint"] != changed["fingerprint"]
