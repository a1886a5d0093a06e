"""A window is as long as its session's memory, which shrinks when another session needs some."""

import contextlib
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from gyre_client import Loader

from tests.conftest import Daemon, StartDaemon
from tests.daemons import status
from tests.object_server.process import ObjectServerProcess, object_server
from tests.object_server.script import Script

LENGTH, BATCH = 2048, 32  # a batch is 256 KiB and more


@pytest.fixture
def storage() -> Iterator[ObjectServerProcess]:
    """An object storage that takes a while for each answer."""
    with object_server() as server:
        samples = np.arange(2000, dtype="<u4")[:, None] + np.zeros(LENGTH, "<u4")
        server.put("/bucket/tokens.bin", samples.tobytes())
        server.follow(Script(first_byte_p50_s=0.05, first_byte_p99_s=0.06))
        yield server


@pytest.fixture
def daemon(gyred: StartDaemon, storage: ObjectServerProcess) -> Daemon:
    """A daemon that reads from object storage, with memory for two sessions of the largest size."""
    tokens = {
        "uri": "s3://bucket/tokens.bin",
        "format": "tokens",
        "dtype": "int32",
        "sequence_length": LENGTH,
    }
    return gyred(
        {
            "memory_budget": "180MiB",
            "cache_memory": 0,
            "datasets": {"tokens": {**tokens, "storage": dict(storage.storage_settings)}},
        }
    )


def right(batch: dict[str, torch.Tensor]) -> bool:
    ids = batch["sample_id"].numpy()
    return bool((batch["tokens"].numpy() == ids[:, None]).all())


def test_a_window_shrinks_for_others_and_no_batch_is_lost(daemon: Daemon) -> None:
    def loader(seed: int) -> Loader:
        return Loader("tokens", batch_size=BATCH, seed=seed, address=daemon.address, job=str(seed))

    with loader(1) as first:
        kept = [next(first)]
        (before,) = status(daemon).sessions
        others = [loader(seed) for seed in range(2, 10)]
        try:
            for _ in range(30):
                assert all(right(next(each)) for each in (first, *others))
                now = status(daemon)
                assert now.memory_reserved_bytes <= now.memory_budget_bytes
            windows = [session.window_batches for session in now.sessions]
            assert windows[0] < before.window_batches
            assert min(windows) >= 3
            assert right(kept[0])
        finally:
            for each in others:
                each.close()
    assert status(daemon).memory_reserved_bytes == 0


def test_window_that_was_asked_for_stays(daemon: Daemon) -> None:
    with Loader("tokens", batch_size=BATCH, prefetch_batches=2, address=daemon.address) as loader:
        for _ in range(40):
            assert right(next(iter(loader)))
        assert status(daemon).sessions[0].window_batches == 2


def test_groups_of_a_file_become_shorter_for_others(gyred: StartDaemon, tmp_path: Path) -> None:
    samples = np.arange(2000, dtype="<u4")[:, None] + np.zeros(LENGTH, "<u4")
    samples.tofile(tmp_path / "tokens.bin")
    tokens = {
        "uri": str(tmp_path / "tokens.bin"),
        "format": "tokens",
        "dtype": "int32",
        "sequence_length": LENGTH,
    }
    local = gyred({"memory_budget": "220MiB", "datasets": {"tokens": tokens}})
    with Loader("tokens", batch_size=BATCH, seed=1, address=local.address, job="first") as first:
        kept = []
        for _ in range(10):  # some of each batch group, which are longer than they will be
            batches = [next(first) for _ in range(100)]
            assert all(right(batch) for batch in batches)
            kept.append(batches[50])
        (before,) = status(local).sessions
        with contextlib.ExitStack() as stack:
            others = [
                stack.enter_context(
                    Loader(
                        "tokens", batch_size=BATCH, seed=seed, address=local.address, job=str(seed)
                    )
                )
                for seed in range(2, 8)
            ]
            for _ in range(100):
                assert all(right(next(each)) for each in (first, *others))
            now = status(local)
            assert now.sessions[0].window_batches < before.window_batches
            assert now.memory_reserved_bytes <= now.memory_budget_bytes
            assert all(right(batch) for batch in kept)
    assert status(local).memory_reserved_bytes == 0
