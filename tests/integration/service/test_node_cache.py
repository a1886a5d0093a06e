"""The node cache of a real daemon before a real S3 server.

What is read from it, and what happens to its folder.
"""

import itertools
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from gyre_client import Loader
from gyre_protos.v1 import loader_pb2 as pb
from gyre_protos.v1 import loader_pb2_grpc as pb_grpc

from tests.channels import identified_channel
from tests.conftest import Daemon, S3Server, StartDaemon

SEQUENCE = 512
NUM_SHARDS, SHARD_BYTES = 4, 1 << 20
NUM_SAMPLES = NUM_SHARDS * SHARD_BYTES // (2 * SEQUENCE)
NUM_BLOCKS = NUM_SHARDS * SHARD_BYTES // (256 << 10)
BATCH = 128
NUM_PROBES = NUM_SHARDS  # of the fingerprint, whenever the dataset is opened
NUM_HEADS = NUM_SHARDS  # once, and not by the next daemon

numbers = itertools.count()


@dataclass
class Objects:
    """Shards of tokens in a bucket; a sample's first two tokens are its number."""

    server: S3Server
    bucket: str

    @property
    def dataset(self) -> dict[str, Any]:
        return {
            "uri": f"s3://{self.bucket}/",
            "format": "tokens",
            "dtype": "uint16",
            "sequence_length": SEQUENCE,
            "storage": dict(self.server.storage_settings),
        }

    @property
    def num_gets(self) -> int:
        """The requests for shards; the caller subtracts those for headers and fingerprints."""
        return self.server.num_requests("GET", f"/{self.bucket}/shard")


@pytest.fixture
def objects(s3_server: S3Server) -> Objects:
    found = Objects(s3_server, f"cache-{os.getpid()}-{next(numbers)}")
    s3_server.make_bucket(found.bucket)
    for shard, data in enumerate(shards()):
        s3_server.put(found.bucket, f"shard-{shard}.bin", data)
    return found


def shards() -> list[bytes]:
    tokens = (
        np.random.default_rng(0).integers(0, 1 << 16, (NUM_SAMPLES, SEQUENCE)).astype(np.uint16)
    )
    tokens[:, 0], tokens[:, 1] = np.arange(NUM_SAMPLES) & 0xFFFF, np.arange(NUM_SAMPLES) >> 16
    return [part.tobytes() for part in np.split(tokens, NUM_SHARDS)]


WANTED: npt.NDArray[np.uint16] = np.frombuffer(b"".join(shards()), np.uint16).reshape(-1, SEQUENCE)


def read(
    daemon: Daemon,
    seed: int = 0,
    num_epochs: int = 1,
    wanted: npt.NDArray[np.uint16] = WANTED,
    **options: Any,
) -> None:
    """Read the data and compare every sample."""
    seen: list[int] = []
    where: dict[str, Any] = {"address": daemon.address, "epochs": num_epochs, "restart": True}
    with Loader("set", batch_size=BATCH, seed=seed, **where, **options) as loader:
        for batch in loader:
            ids = batch["sample_id"].numpy()
            assert np.array_equal(
                batch["tokens"].numpy(), wanted[ids].astype(batch["tokens"].numpy().dtype)
            )
            seen += ids.tolist()
    assert sorted(seen) == sorted(list(range(NUM_SAMPLES)) * num_epochs)


def cache_of(daemon: Daemon) -> pb.CacheCount:
    with identified_channel(daemon.address) as channel:
        return pb_grpc.LoaderStub(channel).GetStatus(pb.GetStatusRequest(), timeout=120).cache


def metrics_of(daemon: Daemon) -> dict[str, float]:
    with identified_channel(daemon.address) as channel:
        status = pb_grpc.LoaderStub(channel).GetStatus(pb.GetStatusRequest(), timeout=120)
        return {each.name: each.value for each in status.metrics}


def bytes_read(daemon: Daemon) -> int:
    with identified_channel(daemon.address) as channel:
        status = pb_grpc.LoaderStub(channel).GetStatus(pb.GetStatusRequest(), timeout=120)
    return sum(count.num_bytes for count in status.storage if count.kind == "read")


def warnings(daemon: Daemon) -> list[str]:
    return [event["event"] for event in daemon.events() if event["level"] in ("warning", "error")]


def wait_until(holds: Callable[[], bool], deadline_s: float = 30.0) -> None:
    deadline = time.monotonic() + deadline_s
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def num_stored(folder: Path) -> int:
    """The number of blocks in a daemon's folder."""
    digests = b"".join(path.read_bytes() for path in folder.glob("*.digests"))
    return sum(any(digests[begin : begin + 16]) for begin in range(0, len(digests), 16))


def test_two_jobs_read_each_byte_once_and_the_next_epochs_none(
    gyred: StartDaemon, objects: Objects
) -> None:
    daemon = gyred({"hedge": False, "datasets": {"set": objects.dataset}})
    with ThreadPoolExecutor(2) as executor:
        list(executor.map(lambda seed: read(daemon, seed), (1, 2)))
    assert objects.num_gets == NUM_BLOCKS + NUM_PROBES + NUM_HEADS
    assert bytes_read(daemon) == NUM_SHARDS * (SHARD_BYTES + 2 * 4096)
    read(daemon, seed=3, num_epochs=2)
    assert objects.num_gets == NUM_BLOCKS + NUM_PROBES + NUM_HEADS
    cache = cache_of(daemon)
    assert (cache.num_blocks_fetched, cache.num_past, cache.num_evicted, cache.num_corrupt) == (
        NUM_BLOCKS,
        0,
        0,
        0,
    )
    assert cache.num_hits + cache.num_misses + cache.num_joined == 4 * NUM_SAMPLES
    assert (cache.memory_bytes, cache.disk_bytes) == (NUM_SHARDS * SHARD_BYTES, 0)
    shown = subprocess.run(
        [sys.executable, "-m", "gyre_client", "status", "--address", daemon.address],
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    assert "4.0 MiB in memory, 0 B on disk" in shown
    assert warnings(daemon) == []


def test_a_dataset_may_bypass_the_cache(gyred: StartDaemon, objects: Objects) -> None:
    for config in (
        {"cache_memory": 0, "datasets": {"set": objects.dataset}},
        {"datasets": {"set": {**objects.dataset, "cache": False}}},
    ):
        daemon = gyred({"hedge": False, **config})
        before = objects.num_gets
        with Loader("set", batch_size=16, address=daemon.address, prefetch_batches=1) as loader:
            next(iter(loader))
        assert objects.num_gets - before >= 16
        assert cache_of(daemon).num_misses == 0


def test_a_small_cache_serves_what_it_holds_and_the_rest_is_read_by_the_sample(
    gyred: StartDaemon, objects: Objects
) -> None:
    """Nothing that was read is read again within the epoch, and nothing ever goes.

    The job would need it.
    """
    daemon = gyred(
        {"hedge": False, "cache_memory": 3 * SHARD_BYTES, "datasets": {"set": objects.dataset}}
    )
    read(daemon)
    assert bytes_read(daemon) == NUM_SHARDS * (SHARD_BYTES + 2 * 4096)
    cache = cache_of(daemon)
    assert cache.memory_bytes == 3 * SHARD_BYTES
    assert (cache.num_blocks_fetched, cache.num_past, cache.num_evicted) == (
        12,
        NUM_SAMPLES // 4,
        0,
    )


def test_blocks_of_the_order_block_are_one_request_each(
    gyred: StartDaemon, objects: Objects
) -> None:
    """In a cache that holds its window and not the data.

    What is read out goes, and what is still wanted stays.
    """
    daemon = gyred({"hedge": False, "cache_memory": 2 << 20, "datasets": {"set": objects.dataset}})
    order: dict[str, Any] = {"order": "block", "io_block_bytes": 64 << 10, "window_blocks": 8}
    read(daemon, **order)
    num_blocks = NUM_SHARDS * SHARD_BYTES // (64 << 10)
    assert objects.num_gets == num_blocks + NUM_PROBES + NUM_HEADS
    assert bytes_read(daemon) == NUM_SHARDS * (SHARD_BYTES + 2 * 4096)
    read(daemon, num_epochs=2, **order)
    assert objects.num_gets < 3 * num_blocks + NUM_PROBES
    cache = cache_of(daemon)
    assert cache.num_past == 0
    assert cache.num_evicted > 0
    assert cache.memory_bytes <= 2 << 20


class TestOnDisk:
    """Blocks that an earlier daemon left."""

    @pytest.fixture
    def folder(self, tmp_path: Path) -> Path:
        return tmp_path / "cache"

    @pytest.fixture
    def filled(self, gyred: StartDaemon, objects: Objects, folder: Path) -> Daemon:
        """A daemon that has read the data, stored all of it, and was killed."""
        daemon = gyred(
            {"hedge": False, "cache_dir": str(folder), "datasets": {"set": objects.dataset}}
        )
        read(daemon)
        wait_until(lambda: num_stored(folder) == NUM_BLOCKS)
        assert cache_of(daemon).disk_bytes == NUM_SHARDS * SHARD_BYTES
        daemon.kill()
        return daemon

    def test_the_next_daemon_reads_no_object(self, filled: Daemon, objects: Objects) -> None:
        before = objects.num_gets
        filled.restart()
        read(filled, seed=5, num_epochs=2)
        assert objects.num_gets - before == NUM_PROBES
        assert cache_of(filled).num_hits == 2 * NUM_SAMPLES
        assert warnings(filled) == []

    def test_damaged_blocks_are_fetched_again(
        self, filled: Daemon, objects: Objects, folder: Path
    ) -> None:
        (path,) = folder.glob("*.blocks")
        with path.open("r+b") as file:
            for block in (0, 7):
                file.seek(block * (256 << 10) + 1000)
                file.write(b"\xff\x00" * 8)
        before = objects.num_gets
        filled.restart()
        read(filled, seed=6)
        cache = cache_of(filled)
        assert cache.num_corrupt == 2
        assert objects.num_gets - before >= NUM_PROBES + 2
        assert set(warnings(filled)) == {"cached blocks damaged"}
        wait_until(lambda: cache_of(filled).disk_bytes == NUM_SHARDS * SHARD_BYTES)
        before = objects.num_gets
        read(filled, seed=7)
        assert objects.num_gets == before

    def test_a_changed_object_is_another_dataset(self, filled: Daemon, objects: Objects) -> None:
        replaced = WANTED.copy()
        replaced[:, 5] ^= 1
        for shard, part in enumerate(np.split(replaced, NUM_SHARDS)):
            objects.server.put(objects.bucket, f"shard-{shard}.bin", part.tobytes())
        filled.restart()
        read(filled, wanted=replaced)
        assert cache_of(filled).num_blocks_fetched == NUM_BLOCKS

    def test_a_smaller_limit_is_kept(self, filled: Daemon, folder: Path) -> None:
        filled.config_path.write_text(
            f"cache_disk = {SHARD_BYTES}\n" + filled.config_path.read_text()
        )
        filled.restart()
        read(filled)
        assert cache_of(filled).disk_bytes == SHARD_BYTES
        (path,) = folder.glob("*.blocks")
        wait_until(lambda: path.stat().st_blocks * 512 <= SHARD_BYTES + 65_536)

    def test_a_second_daemon_works_without_the_folder(
        self, gyred: StartDaemon, filled: Daemon, objects: Objects, folder: Path
    ) -> None:
        filled.restart()
        second = gyred({"cache_dir": str(folder), "datasets": {"set": objects.dataset}})
        assert warnings(second) == ["no disk cache"]
        read(second)
        assert cache_of(second).disk_bytes == 0
        read(filled)
        assert warnings(filled) == []

    def test_killed_again_and_again_while_it_fills(
        self, gyred: StartDaemon, objects: Objects, folder: Path
    ) -> None:
        daemon = gyred(
            {"hedge": False, "cache_dir": str(folder), "datasets": {"set": objects.dataset}}
        )
        for num_blocks in (1, 5, 11):
            options: dict[str, Any] = {"batch_size": 16, "epochs": None}
            with Loader("set", seed=num_blocks, address=daemon.address, **options) as loader:
                batches = iter(loader)
                while num_stored(folder) < num_blocks:
                    next(batches)  # of epochs without end: the disk may be slow
                daemon.kill()
            daemon.restart()
        read(daemon)
        assert cache_of(daemon).num_corrupt == 0
        assert cache_of(daemon).num_blocks_fetched <= NUM_BLOCKS - 11


@pytest.mark.parametrize("folder", ["file", "file/cache", "/proc/cache"])
def test_a_daemon_works_without_a_folder_it_cannot_write(
    gyred: StartDaemon, objects: Objects, tmp_path: Path, folder: str
) -> None:
    (tmp_path / "file").write_text("")
    daemon = gyred({"cache_dir": str(tmp_path / folder), "datasets": {"set": objects.dataset}})
    read(daemon)
    assert warnings(daemon) == ["no disk cache"]
    assert metrics_of(daemon)["gyre_cache_disk_failing"] == 1
    assert cache_of(daemon).memory_bytes == NUM_SHARDS * SHARD_BYTES


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 2 MiB."""
    folder = tmp_path / "small"
    folder.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=2m,mode=700", "none", folder],
        capture_output=True,
        check=False,
    )
    if mounted.returncode:
        pytest.skip("only root may mount a file system")
    yield folder
    subprocess.run(["umount", "-l", folder], check=True)


def test_a_full_disk_only_limits_the_cache(
    gyred: StartDaemon, objects: Objects, small_disk: Path
) -> None:
    daemon = gyred(
        {
            "cache_dir": str(small_disk / "cache"),
            "cache_memory": "1MiB",
            "datasets": {"set": objects.dataset},
        }
    )
    # A short window: a second epoch that is fetched beside the first finds no block at rest.
    short: dict[str, Any] = {"prefetch_batches": 2, "order": "block", "io_block_bytes": 256 << 10}
    read(daemon, num_epochs=2, window_blocks=2, **short)
    assert warnings(daemon) == ["cache disk fails"]
    assert metrics_of(daemon)["gyre_cache_disk_failures_total"] > 0
    cache = cache_of(daemon)
    assert 0 < cache.disk_bytes < 2 << 20
    assert cache.num_hits > 0
    assert cache.num_corrupt == 0
