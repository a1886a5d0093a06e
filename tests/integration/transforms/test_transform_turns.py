"""Transformed samples that several jobs wait for are made at the first of their turns."""

import asyncio
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gyre_daemon.config import DatasetConfig
from gyre_daemon.datasets.checks import CorruptReports
from gyre_daemon.datasets.indexing.catalog import Catalog
from gyre_daemon.datasets.indexing.unpacked import UnpackedShards
from gyre_daemon.datasets.sidecars import SidecarStore
from gyre_daemon.fetching.transformed import keep_records
from gyre_daemon.monitoring.metrics import CacheCounts, Metrics, TransformCounts
from gyre_daemon.runtime.threads import FairExecutor, Flow
from gyre_daemon.storage.cache.node import NodeCache
from gyre_daemon.storage.engine.endpoint import EndpointOptions
from gyre_daemon.storage.reads import Reads, Storage
from gyre_daemon.storage.sources.opener import StorageOpener
from gyre_daemon.transforms.declared import TransformedDataset, Transforms, TransformWorkers
from gyre_daemon.workers.compute_workers import ComputeServer

from tests.contract.storage.engine import until
from tests.probe_transforms import install

NUM_SAMPLES, LENGTH = 64, 4  # of uint16
RECORD_BYTES = 2 * LENGTH
LIGHT, HEAVY = Flow("light"), Flow("heavy", weight=8.0)
WANTED = range(40, 48)


async def read(storage: Storage, samples: range, flow: Flow) -> list[int]:
    """The first tokens of records."""
    memories = [np.zeros(RECORD_BYTES, np.uint8) for _ in samples]
    starts = [sample * RECORD_BYTES for sample in samples]
    reads = Reads.into(memories, [0] * len(starts), starts)
    await storage.read(replace(reads, flow=flow))
    return [int(memory.view(np.uint16)[0]) for memory in memories]


async def of_one_shape(prefix: TransformedDataset, is_last: bool) -> TransformedDataset:
    """What is made before `cache`; nothing of it need be measured."""
    assert is_last
    return prefix


async def scene(folder: Path, threads: FairExecutor) -> list[int]:
    """Which samples one process makes, one after the other, for two jobs."""
    tokens = np.repeat(np.arange(NUM_SAMPLES, dtype=np.uint16), LENGTH)
    tokens.tofile(folder / "a.bin")
    made, awaited = folder / "made", folder / "awaited"
    metrics = Metrics()
    options = {"dtype": "uint16", "sequence_length": LENGTH}
    config = DatasetConfig(str(folder / "a.bin"), "tokens", options)
    opener = StorageOpener(threads, EndpointOptions(16, 10.0, False), metrics)
    sidecars = SidecarStore(str(folder), folder)
    server = ComputeServer()
    catalog = Catalog(
        {"set": config},
        opener,
        sidecars,
        None,
        allow_ad_hoc=False,
        compute_server=server,
        unpacked=UnpackedShards(folder, 0),
        reports=CorruptReports(folder),
    )
    cache = NodeCache(1 << 20, None, threads, CacheCounts())
    workers = TransformWorkers(server, 1, 300.0, TransformCounts())
    keep = partial(keep_records, cache, threads)
    transforms = Transforms(workers, (), keep, allow_modules=True)
    told = {"name": "probe_transforms:Told", "file": str(made), "awaited": str(awaited)}
    try:
        dataset = await catalog.open("set", config)
        chain: list[dict[str, Any]] = [{**told, "waiting": 0}, {"name": "cache"}]
        kept = await transforms.apply(dataset, chain, of_one_shape, by_client=True, height=0)
        light = asyncio.create_task(read(kept.storage, range(NUM_SAMPLES), LIGHT))
        await until(lambda: workers._workers.line.num_waiting == NUM_SAMPLES - 1)
        heavy = asyncio.create_task(read(kept.storage, WANTED, HEAVY))
        await until(lambda: cache._counts.num_joined == len(WANTED))
        awaited.touch()
        assert await heavy == list(WANTED)
        assert await light == list(range(NUM_SAMPLES))
        await until(lambda: not workers._workers.line.num_taken and threads.is_idle)
    finally:
        await cache.close()
        transforms.close()
        catalog.close()
        server.close()
    return [int(line) for line in made.read_text().split()]


def test_a_heavy_job_need_not_wait_for_the_turns_of_the_job_that_asked_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A job of weight 1 waits for all samples.

    A job of weight 8 that comes to need some of them has 8 made for each one of the others.
    """
    monkeypatch.setenv("PYTHONPATH", str(install(tmp_path / "packages")))
    with ThreadPoolExecutor(1) as executor:  # two would bring the second sample first, at times
        made = asyncio.run(asyncio.wait_for(scene(tmp_path, FairExecutor(executor, 1)), 240))
    assert sorted(made) == list(range(NUM_SAMPLES)), "each is made once"
    its_last = max(made.index(sample) for sample in WANTED)
    assert its_last <= 1 + len(WANTED), "after the one in hand, and one turn of the other job"
