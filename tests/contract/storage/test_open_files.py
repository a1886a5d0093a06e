"""How many shards several datasets may have open at once."""

import gc
import os
import time
from pathlib import Path

from gyre_daemon.runtime.limits import descriptor_shares
from gyre_daemon.storage.beneath import LocalFile
from gyre_daemon.storage.listing import stat_shard
from gyre_daemon.storage.open_shards import OpenFiles, OpenShards


def num_open(path: Path) -> int:
    """Descriptors of this process that are files in a folder."""
    links = (f"/proc/self/fd/{number}" for number in os.listdir("/proc/self/fd"))  # noqa: PTH208
    return sum(os.path.realpath(link).startswith(f"{path}/") for link in links)


def wait_until_open(path: Path, expected: int) -> None:
    """Wait for the threads that close files; a folder keeps `expected` descriptors."""
    deadline = time.monotonic() + 30
    while (found := num_open(path)) != expected:
        assert time.monotonic() < deadline, f"{found} descriptors are open, {expected} expected"
        time.sleep(0.01)


def dataset(folder: Path, num_shards: int, together: OpenFiles) -> OpenShards:
    folder.mkdir()
    paths = [folder / f"{number}.bin" for number in range(num_shards)]
    for path in paths:
        path.write_bytes(b"x" * 10)
    files = [LocalFile.of(path) for path in paths]
    return OpenShards(files, [stat_shard(file, file.name) for file in files], open_files=together)


def test_datasets_divide_the_open_files(tmp_path: Path, few_descriptors: int) -> None:
    together, num_shards = OpenFiles(), few_descriptors
    most = descriptor_shares().shards
    assert 0 < most < num_shards // 4
    datasets = []
    for number in range(5):
        datasets.append(dataset(tmp_path / str(number), num_shards, together))
        assert datasets[-1].max_open == max(2, most // (number + 1))
        for shard in range(num_shards):
            datasets[-1].get(shard)
        assert num_open(tmp_path) <= 2 * max(most, 2 * len(datasets)), (
            "each takes two: a mapping has its own"
        )
    del datasets[1:]
    gc.collect()
    assert datasets[0].max_open == most, "what is closed makes room"


def test_shards_that_nobody_reads_are_closed_and_open_again(tmp_path: Path) -> None:
    together = OpenFiles()
    idle, busy = (dataset(tmp_path / name, 5, together) for name in ("idle", "busy"))
    for shard in range(5):
        idle.get(shard)
    kept = busy.get(0)
    together.close_idle()
    assert num_open(tmp_path) == 12, "they were read a moment ago"
    together.expire()
    busy.get(1)
    together.close_idle()
    wait_until_open(tmp_path / "idle", 0)
    assert num_open(tmp_path / "busy") == 4
    together.expire()
    together.close_idle()
    wait_until_open(tmp_path / "busy", 2)  # one is being read
    assert kept.is_at_its_path
    assert idle.get(3).is_at_its_path
