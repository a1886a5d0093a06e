"""The window grows while trainers wait, and shrinks when another session needs the memory."""

from collections.abc import Iterator
from pathlib import Path

import grpc
import numpy as np
import pytest
import torch
from gyre_client import Loader
from gyre_protos.v1 import loader_pb2 as pb
from gyre_protos.v1 import loader_pb2_grpc as pb_grpc

from tests.conftest import Daemon, StartDaemon
from tests.object_server.process import ObjectServerProcess, object_server
from tests.object_server.script import Script

LENGTH, BATCH = 2048, 32  # a batch is 256 KiB and more: a window of 31, and 70 slots


@pytest.fixture
def storage() -> Iterator[ObjectServerProcess]:
    """An object storage that takes 50 ms for each answer."""
    with object_server() as server:
        samples = np.arange(2000, dtype="<u4")[:, None] + np.zeros(LENGTH, "<u4")
        server.put("/bucket/tokens.bin", samples.tobytes())
        server.follow(Script(first_byte_p50_s=0.05, first_byte_p99_s=0.06))
        yield server


@pytest.fixture
def daemon(gyred: StartDaemon, storage: ObjectServerProcess) -> Daemon:
    """A daemon with memory for three sessions."""
    tokens = {"uri": "s3://bucket/tokens.bin", "format": "tokens", "dtype": "int32", "sequence_length": LENGTH}
    return gyred(
        {
            "memory_budget": "56MiB",
            "cache_memory": 0,
            "datasets": {"tokens": {**tokens, "storage": dict(storage.storage_settings)}},
        }
    )


def status(daemon: Daemon) -> pb.DaemonStatus:
    with grpc.insecure_channel(daemon.address) as channel:
        return pb_grpc.LoaderStub(channel).GetStatus(pb.GetStatusRequest(), timeout=5)


def right(batch: dict[str, torch.Tensor]) -> bool:
    ids = batch["sample_id"].numpy()
    return bool((batch["tokens"].numpy() == ids[:, None]).all())


def read_until_it_grows(daemon: Daemon, loader: Loader, before: pb.SessionState) -> pb.SessionState:
    """The only session's state, once its window is longer than before, or after many batches."""
    after = before
    for _ in range(600):
        assert all(right(next(iter(loader))) for _ in range(32))
        (after,) = status(daemon).sessions
        if after.prefetch_batches > before.prefetch_batches:
            break
    return after


def test_window_grows_while_the_trainer_waits_and_shrinks_for_another(daemon: Daemon) -> None:
    with Loader("tokens", batch_size=BATCH, seed=1, address=daemon.address, job="first") as first:
        assert right(next(iter(first)))
        (before,) = status(daemon).sessions
        after = read_until_it_grows(daemon, first, before)
        assert after.prefetch_batches > before.prefetch_batches
        assert status(daemon).memory_reserved_bytes > after.memory_limit_bytes
        others = [Loader("tokens", batch_size=BATCH, seed=seed, address=daemon.address, job=str(seed)) for seed in (2, 3)]
        try:
            for _ in range(150):  # what the first has not read yet still lies in what it gives back
                assert all(right(next(iter(loader))) for loader in (first, *others))
            now = status(daemon)
            assert now.sessions[0].prefetch_batches == before.prefetch_batches
            assert now.memory_reserved_bytes == sum(session.memory_limit_bytes for session in now.sessions)
        finally:
            for loader in others:
                loader.close()
    assert status(daemon).memory_reserved_bytes == 0


def test_window_that_was_asked_for_stays(daemon: Daemon) -> None:
    with Loader("tokens", batch_size=BATCH, prefetch_batches=2, address=daemon.address) as loader:
        for _ in range(40):
            assert right(next(iter(loader)))
        assert status(daemon).sessions[0].prefetch_batches == 2


@pytest.fixture
def local(gyred: StartDaemon, tmp_path: Path) -> Daemon:
    """A daemon that serves a file, with memory for three sessions: each has 66 MiB."""
    samples = np.arange(2000, dtype="<u4")[:, None] + np.zeros(LENGTH, "<u4")
    samples.tofile(tmp_path / "tokens.bin")
    tokens = {"uri": str(tmp_path / "tokens.bin"), "format": "tokens", "dtype": "int32", "sequence_length": LENGTH}
    return gyred({"memory_budget": "220MiB", "datasets": {"tokens": tokens}})


def test_strips_of_a_file_become_longer_while_the_trainer_waits_and_shorter_for_another(local: Daemon) -> None:
    with Loader("tokens", batch_size=BATCH, seed=1, address=local.address, job="first") as first:
        kept = [next(iter(first))]
        (before,) = status(local).sessions
        after = read_until_it_grows(local, first, before)
        assert after.prefetch_batches == 2 * before.prefetch_batches, "for a third, no other session would find its share"
        assert status(local).memory_reserved_bytes > 2 * before.memory_limit_bytes
        for _ in range(20):  # strips that are twice as long, two of them in use and some kept
            batches = [next(iter(first)) for _ in range(100)]
            assert all(right(batch) for batch in batches)
            kept.append(batches[50])
        with Loader("tokens", batch_size=BATCH, seed=2, address=local.address, job="second") as second:
            for _ in range(2000):
                assert right(next(iter(first)))
                assert right(next(iter(second)))
            assert status(local).sessions[0].prefetch_batches == before.prefetch_batches
            assert all(right(batch) for batch in kept)
    assert status(local).memory_reserved_bytes == 0
