"""A chain is described although a process has ended, and takes only a fair part of the turns."""

import asyncio
import os
import signal
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
from gyre_daemon.config import DatasetConfig
from gyre_daemon.datasets.checks import CorruptReports
from gyre_daemon.datasets.indexing.catalog import Catalog
from gyre_daemon.datasets.indexing.unpacked import UnpackedShards
from gyre_daemon.datasets.sidecars import SidecarStore
from gyre_daemon.monitoring.metrics import Metrics, TransformCounts
from gyre_daemon.runtime.threads import NO_JOB, FairExecutor, Flow
from gyre_daemon.storage.engine.endpoint import EndpointOptions
from gyre_daemon.storage.sources.opener import StorageOpener
from gyre_daemon.transforms.declared import TransformedDataset, Transforms, TransformWorkers
from gyre_daemon.transforms.recipes import ENCODER, Recipe
from gyre_daemon.workers.compute_workers import ComputeServer

CHAINS = [{"name": "cast", "field": "tokens", "dtype": dtype} for dtype in ("float32", "float16")]


async def unchanged(prefix: TransformedDataset, _is_last: bool) -> TransformedDataset:
    return prefix


async def described(folder: Path, threads: FairExecutor) -> tuple[list[str], int]:
    """The dtypes that two chains make, and how many processes were replaced between them."""
    np.arange(64, dtype=np.uint16).tofile(folder / "a.bin")
    options = {"dtype": "uint16", "sequence_length": 4}
    config = DatasetConfig(str(folder / "a.bin"), "tokens", options)
    opener = StorageOpener(threads, EndpointOptions(16, 10.0, False), Metrics())
    server = ComputeServer()
    catalog = Catalog(
        {"set": config},
        opener,
        SidecarStore(str(folder), folder),
        None,
        allow_ad_hoc=False,
        compute_server=server,
        unpacked=UnpackedShards(folder, 0),
        reports=CorruptReports(folder),
    )
    counts = TransformCounts()
    workers = TransformWorkers(server, 1, 300.0, counts)
    transforms = Transforms(workers, (), None, allow_modules=False)
    made = []
    try:
        dataset = await catalog.open("set", config)
        for chain in CHAINS:
            for worker in workers._workers.idle:
                os.kill(worker.pid, signal.SIGKILL)
            found = await transforms.apply(dataset, [chain], unchanged, by_client=True, height=0)
            made += [str(each.dtype) for each in found.fields if each.name == "tokens"]
    finally:
        transforms.close()
        catalog.close()
        server.close()
    return made, counts.num_replaced


def test_a_chain_is_described_by_another_process_where_one_has_ended(tmp_path: Path) -> None:
    with ThreadPoolExecutor(1) as executor:
        scene = described(tmp_path, FairExecutor(executor, 1))
        assert asyncio.run(asyncio.wait_for(scene, 240)) == (["float32", "float16"], 1)


async def turns(num: int) -> list[str]:
    """Whose chains are described, in their order; one job asks behind many that ask before it."""
    server = ComputeServer()
    workers = TransformWorkers(server, 1, 300.0, TransformCounts())
    order: list[str] = []

    async def ask(flow: Flow) -> None:
        assert not (await workers.describe(recipe, flow)).error
        order.append(flow.user)

    recipe = ENCODER.encode(Recipe([], []))
    try:
        async with asyncio.TaskGroup() as group:
            for flow in [NO_JOB] * num + [Flow("train", "bob")]:
                group.create_task(ask(flow))
                await asyncio.sleep(0)
    finally:
        workers.close()
        server.close()
    return order


def test_who_has_many_chains_described_does_not_hold_up_a_job() -> None:
    order = asyncio.run(asyncio.wait_for(turns(12), 240))
    assert order.index("bob") <= 1, "behind the one in hand"
