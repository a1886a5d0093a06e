"""The window grows while trainers wait, and shrinks when another session needs the memory."""

from collections.abc import Callable, Iterator
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
FIRST_DELAY_S = 0.05


@pytest.fixture
def storage() -> Iterator[ObjectServerProcess]:
    """An object storage that takes a while for each answer."""
    with object_server() as server:
        samples = np.arange(2000, dtype="<u4")[:, None] + np.zeros(LENGTH, "<u4")
        server.put("/bucket/tokens.bin", samples.tobytes())
        server.follow(answering_after(FIRST_DELAY_S))
        yield server


def answering_after(delay_s: float) -> Script:
    return Script(first_byte_p50_s=delay_s, first_byte_p99_s=1.2 * delay_s)


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
        return pb_grpc.LoaderStub(channel).GetStatus(pb.GetStatusRequest(), timeout=120)


def right(batch: dict[str, torch.Tensor]) -> bool:
    ids = batch["sample_id"].numpy()
    return bool((batch["tokens"].numpy() == ids[:, None]).all())


def begins_right(batch: dict[str, torch.Tensor]) -> bool:
    """The first token of each sample, which costs a trainer little: it shall be the one that waits."""
    return bool((batch["tokens"][:, 0].numpy() == batch["sample_id"].numpy()).all())


def read_until_it_grows(
    daemon: Daemon, loader: Loader, before: pb.SessionState, slow_down: Callable[[int], None]
) -> pb.SessionState:
    """The only session's state, once its window is longer than before, or after many batches.

    Args:
        daemon: of the session.
        loader: which reads.
        before: the state to compare with.
        slow_down: makes the storage slower, the more the greater the number; else a slow trainer would never wait for it.
    """
    after = before
    for turn in range(600):
        slow_down(turn)
        assert all(begins_right(next(iter(loader))) for _ in range(32))
        (after,) = status(daemon).sessions
        if after.prefetch_batches > before.prefetch_batches:
            break
    return after


def has_shrunk(now: pb.DaemonStatus, before: pb.SessionState) -> bool:
    """The first session has the window from before, and no session has more memory than its share."""
    reserved = sum(session.memory_limit_bytes for session in now.sessions)
    return now.sessions[0].prefetch_batches == before.prefetch_batches and now.memory_reserved_bytes == reserved


def test_window_grows_while_the_trainer_waits_and_shrinks_for_another(daemon: Daemon, storage: ObjectServerProcess) -> None:
    def slow_down(turn: int) -> None:
        if turn % 8 == 0:
            storage.follow(answering_after(min(4.0, FIRST_DELAY_S * 2 ** (turn // 8))))

    with Loader("tokens", batch_size=BATCH, seed=1, address=daemon.address, job="first") as first:
        assert right(next(iter(first)))
        (before,) = status(daemon).sessions
        after = read_until_it_grows(daemon, first, before, slow_down)
        assert after.prefetch_batches > before.prefetch_batches
        assert status(daemon).memory_reserved_bytes > after.memory_limit_bytes
        storage.follow(answering_after(FIRST_DELAY_S))
        asked = before.prefetch_batches  # for so many, and no more: theirs do not grow where they began with less
        others = [
            Loader("tokens", batch_size=BATCH, seed=seed, prefetch_batches=asked, address=daemon.address, job=str(seed))
            for seed in (2, 3)
        ]
        try:
            for _ in range(20):  # what the first has not read yet still lies in what it gives back
                for _ in range(50):
                    assert all(right(next(iter(loader))) for loader in (first, *others))
                now = status(daemon)
                if has_shrunk(now, before):
                    break
            assert has_shrunk(now, before), str(now)
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
        after = read_until_it_grows(local, first, before, lambda _: None)
        assert after.prefetch_batches == 2 * before.prefetch_batches, "for a third, no other session would find its share"
        assert status(local).memory_reserved_bytes > 2 * before.memory_limit_bytes
        for _ in range(20):  # strips that are twice as long, two of them in use and some kept
            batches = [next(iter(first)) for _ in range(100)]
            assert all(right(batch) for batch in batches)
            kept.append(batches[50])
        with Loader("tokens", batch_size=BATCH, seed=2, address=local.address, job="second") as second:
            for _ in range(200):
                for _ in range(100):
                    assert right(next(iter(first)))
                    assert right(next(iter(second)))
                now = status(local)
                if now.sessions[0].prefetch_batches == before.prefetch_batches:
                    break
            assert now.sessions[0].prefetch_batches == before.prefetch_batches
            assert all(right(batch) for batch in kept)
    assert status(local).memory_reserved_bytes == 0
