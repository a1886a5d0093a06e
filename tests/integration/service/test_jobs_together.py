"""Jobs that want different things of one daemon.

What they get, what they wait for, and what they may take.
"""

import contextlib
import threading
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gyre_client import Loader
from gyre_protos.v1 import loader_pb2 as pb
from gyre_protos.v1 import loader_pb2_grpc as pb_grpc

from tests.arenas import mapped_arena_bytes
from tests.channels import identified_channel
from tests.conftest import Daemon, StartDaemon, to_toml
from tests.daemons import status
from tests.object_server.process import ObjectServerProcess, object_server
from tests.object_server.script import Rule, Script
from tests.waiting import until

# The local dataset: a batch is 256 KiB and more.
LENGTH, BATCH = (2048, 32)
# Batches of the remote dataset under way: more than a reader on a busy core falls behind.
PREFETCH = 64


@pytest.fixture
def storage() -> Iterator[ObjectServerProcess]:
    with object_server() as server:
        server.put("/bucket/tokens.bin", np.arange(32000, dtype="<u2").tobytes())
        yield server


def remote(storage: ObjectServerProcess) -> dict[str, Any]:
    """A dataset of 4000 samples, each of which is a request."""
    uri = {
        "uri": "s3://bucket/tokens.bin",
        "format": "tokens",
        "dtype": "uint16",
        "sequence_length": 8,
        "cache": False,
    }
    return {"tokens": {**uri, "storage": dict(storage.storage_settings)}}


def shares(loaders: Mapping[str, Loader], num_batches: int) -> Mapping[str, int]:
    """How many of `num_batches` batches each job gets while all read as fast as they can."""
    counts: Counter[str] = Counter()
    settling = num_batches // 2  # what was ready at the start was not fetched in competition

    def read(job: str) -> None:
        for _ in range(PREFETCH):
            next(loaders[job])
        together.wait()
        while counts.total() < settling:
            next(loaders[job])
            counts[job] += 1
        at_the_start.setdefault(job, counts[job])
        while counts.total() < settling + num_batches:
            next(loaders[job])
            counts[job] += 1

    at_the_start: dict[str, int] = {}
    together = threading.Barrier(len(loaders))
    threads = [threading.Thread(target=read, args=(job,)) for job in loaders]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return {job: counts[job] - at_the_start[job] for job in loaders}


def test_what_is_scarce_goes_to_jobs_by_their_weights(
    gyred: StartDaemon, storage: ObjectServerProcess
) -> None:
    storage.follow(Script(first_byte_p50_s=0.01, first_byte_p99_s=0.011))
    config = {"max_requests": 4, "hedge": False, "datasets": remote(storage)}
    daemon = gyred({**config, "job_weights": {"prod-*": 3}})

    def loader(job: str, seed: int) -> Loader:
        return Loader(
            "tokens",
            batch_size=4,
            seed=seed,
            prefetch_batches=PREFETCH,
            job=job,
            address=daemon.address,
        )

    with loader("prod-a", 1) as heavy, loader("probe", 2) as light:
        loaders = {"prod-a": heavy, "probe": light}
        counts = shares(loaders, 400)
        assert 2 < counts["prod-a"] / counts["probe"] < 4.5
        event = daemon.reconfigure(
            to_toml({**config, "listen": [daemon.address], "job_weights": {"probe": 3}})
        )
        assert (event["event"], event["rules"]) == ("reloaded", ["job_weights"])
        counts = shares(loaders, 400)
        assert 2 < counts["probe"] / counts["prod-a"] < 4.5


def test_a_stall_is_told_while_it_lasts(gyred: StartDaemon, storage: ObjectServerProcess) -> None:
    daemon = gyred({"hedge": False, "datasets": remote(storage)})
    with Loader("tokens", batch_size=4, address=daemon.address) as loader:
        storage.follow(Script(rules=[Rule("delay", delay_s=2.0)]))
        began = time.monotonic()
        reading = threading.Thread(target=next, args=(loader,))
        reading.start()
        until(lambda: any(session.trainer_waited_s > 0.6 for session in status(daemon).sessions))
        (session,) = status(daemon).sessions
        assert session.num_batches_sent == 0
        assert reading.is_alive()
        reading.join()
        until(lambda: status(daemon).sessions[0].trainer_waited_s > 1.5)
        assert status(daemon).sessions[0].trainer_waited_s < time.monotonic() - began, (
            "nothing was told twice"
        )


def arena_bytes(daemon: Daemon) -> int:
    """The memory of batches that the daemon's process has, also of sessions that have ended."""
    assert daemon.process
    return mapped_arena_bytes(daemon.process.pid)


@contextlib.contextmanager
def read_slowly(loader: Loader) -> Iterator[None]:
    """Inside, a thread reads about fifty batches a second."""
    stopping = threading.Event()

    def read() -> None:
        while not stopping.wait(0.02):
            next(loader)

    reading = threading.Thread(target=read)
    reading.start()
    try:
        yield
    finally:
        stopping.set()
        reading.join()


def test_memory_beyond_the_first_arena_comes_after_the_first_batch(
    gyred: StartDaemon, tmp_path: Path
) -> None:
    """To make it earlier would only take the processor away from that batch."""
    np.zeros(16 << 18, "<u4").tofile(tmp_path / "tokens.bin")
    tokens = {
        "uri": str(tmp_path / "tokens.bin"),
        "format": "tokens",
        "dtype": "int32",
        "sequence_length": 1 << 18,
    }
    daemon = gyred({"datasets": {"tokens": tokens}})
    with identified_channel(daemon.address) as channel:
        request = pb.OpenSessionRequest(
            dataset=pb.DatasetRef(name="tokens"),
            order=pb.OrderSpec(global_batch_size=4),
            reader=pb.Reader(job="first", world_size=1),
        )
        pb_grpc.LoaderStub(channel).OpenSession(request, timeout=120)
        until(lambda: status(daemon).sessions[0].num_ready == 2)  # those that come alone
        first_bytes = arena_bytes(daemon)
        time.sleep(0.2)
        assert arena_bytes(daemon) == first_bytes
        with Loader("tokens", batch_size=4, job="second", address=daemon.address) as loader:
            next(loader)  # from the same shared stream
            until(lambda: arena_bytes(daemon) > first_bytes)


def test_memory_stays_within_the_budget_beside_slow_and_stopped_jobs(
    gyred: StartDaemon, tmp_path: Path
) -> None:
    np.zeros(2000 * LENGTH, "<u4").tofile(tmp_path / "tokens.bin")
    tokens = {
        "uri": str(tmp_path / "tokens.bin"),
        "format": "tokens",
        "dtype": "int32",
        "sequence_length": LENGTH,
    }
    daemon = gyred({"memory_budget": "64MiB", "datasets": {"tokens": tokens}})

    def loader(job: str, seed: int) -> Loader:
        return Loader("tokens", batch_size=BATCH, seed=seed, job=job, address=daemon.address)

    with loader("stopped", 1) as stopped, loader("slow", 1) as slow, read_slowly(slow):
        held = [next(stopped) for _ in range(5)]
        most = 0
        for seed in (1, 2, 3, 1):  # along with those two, and apart from them
            with loader("fast", seed) as fast:
                for _ in range(20):
                    for _ in range(10):
                        next(fast)
                    now = status(daemon)
                    assert now.memory_reserved_bytes <= now.memory_budget_bytes == 64 << 20
                    assert arena_bytes(daemon) <= now.memory_budget_bytes
                    most = max(most, arena_bytes(daemon))
        assert len(held) == 5
    assert most > 20 << 20, "there was something to bound"
    until(lambda: arena_bytes(daemon) == 0)
    assert status(daemon).memory_reserved_bytes == 0
