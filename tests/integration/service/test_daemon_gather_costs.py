"""What a batch costs the interpreter: as many calls for a thousand samples as for sixty-four."""

import asyncio
import sys
import threading
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gyre_daemon.config import DatasetConfig
from gyre_daemon.datasets.checks import CorruptReports
from gyre_daemon.datasets.indexing.catalog import Catalog
from gyre_daemon.datasets.indexing.unpacked import UnpackedShards
from gyre_daemon.datasets.sidecars import SidecarStore
from gyre_daemon.fetching.fetch import Fetcher
from gyre_daemon.memory.arenas import Arena
from gyre_daemon.monitoring.metrics import Metrics
from gyre_daemon.order.planner import BatchPlanner, Order
from gyre_daemon.runtime.threads import NO_JOB, Claims, FairExecutor
from gyre_daemon.storage.engine.endpoint import EndpointOptions
from gyre_daemon.storage.sources.opener import StorageOpener
from gyre_daemon.workers.compute_workers import ComputeServer
from webdataset import TarWriter

NUM_SAMPLES = 1500


@pytest.fixture
def datasets(tmp_path: Path) -> Mapping[str, DatasetConfig]:
    np.arange(NUM_SAMPLES * 64, dtype="<u4").tofile(tmp_path / "tokens.bin")
    generator = np.random.default_rng(0)
    for shard in range(3):
        with TarWriter(str(tmp_path / f"{shard}.tar")) as writer:
            for n in range(NUM_SAMPLES // 3):
                writer.write(
                    {
                        "__key__": f"{shard}{n:03}",
                        "bin": generator.bytes(int(generator.integers(100, 500))),
                    }
                )
    return {
        "tokens": DatasetConfig(
            str(tmp_path / "tokens.bin"), "tokens", {"dtype": "uint32", "sequence_length": 64}
        ),
        "ragged": DatasetConfig(f"{tmp_path}/*.tar", "webdataset"),
    }


class Calls:
    """Counts calls of Python and C functions in this thread and in all that start meanwhile."""

    def __init__(self) -> None:
        self.num = 0

    def __enter__(self) -> "Calls":
        threading.setprofile(self._count)
        sys.setprofile(self._count)
        return self

    def __exit__(self, *exception: object) -> None:
        sys.setprofile(None)
        threading.setprofile(None)

    def _count(self, frame: Any, event: str, argument: Any) -> None:
        self.num += event in ("call", "c_call")


async def num_calls(name: str, config: DatasetConfig, folder: Path) -> list[int]:
    """Calls to lay out and fill a batch of 64 samples, and one of 1024.

    Each is filled once before.
    """
    counts = []
    with (
        Calls() as calls,
        ThreadPoolExecutor(2) as threads,
        closing(ComputeServer()) as compute_server,
    ):
        workers = FairExecutor(threads, 2)
        opener = StorageOpener(workers, EndpointOptions(16, 10.0, False), Metrics())
        catalog = Catalog(
            {name: config},
            opener,
            SidecarStore(str(folder), folder),
            None,
            allow_ad_hoc=False,
            compute_server=compute_server,
            unpacked=UnpackedShards(folder, 0),
            reports=CorruptReports(folder),
        )
        dataset = await catalog.open(name, config)
        for size in (64, 1024):
            fetcher, plan = (
                Fetcher(dataset, workers),
                BatchPlanner(Order("full", "wrap", 1, size), dataset.num_samples),
            )
            plans, arena = plan.batches(0, 2, 0, 1), Arena(2 << 20)
            for row in range(2):
                before = calls.num
                (fetch,) = fetcher.prepare(plans[row : row + 1], 1)
                slot = arena.take(fetch.layout.num_bytes)
                assert slot
                await fetcher.fill(fetch, slot, Claims(NO_JOB, row))
            counts.append(calls.num - before)
            arena.close()
        catalog.close()
    return counts


@pytest.mark.parametrize("name", ["tokens", "ragged"])
def test_no_call_per_sample(
    datasets: Mapping[str, DatasetConfig], name: str, tmp_path: Path
) -> None:
    few, many = asyncio.run(num_calls(name, datasets[name], tmp_path))
    assert many - few < 100, "960 samples more"
