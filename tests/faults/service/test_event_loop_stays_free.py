"""Whatever clients and files bring, the daemon answers others, and can drop the work at once."""

import asyncio
import io
import itertools
import tarfile
import time
import tracemalloc
from collections.abc import AsyncIterator, Iterator
from contextlib import suppress
from functools import lru_cache
from pathlib import Path

import grpc
import numpy as np
import psutil
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from gyre_client import Loader
from gyre_daemon.datasets.formats.values import check_json, check_text
from gyre_daemon.fetching.prefetch import Prefetcher, Spec
from gyre_daemon.order.mixture import planner_for
from gyre_daemon.order.planner import BatchPlanner, Order
from gyre_daemon.runtime.threads import NO_JOB, FairExecutor
from gyre_protos.v1 import loader_pb2 as pb
from gyre_protos.v1 import loader_pb2_grpc as pb_grpc

from tests.channels import identified_channel
from tests.conftest import Daemon, StartDaemon
from tests.waiting import eventually

TOKENS = {"format": "tokens", "dtype": "uint16", "sequence_length": 8}
DEADLINE_S = 120.0
NUM_ENDLESS = 6


def write_tar(path: Path, num_samples: int) -> None:
    with tarfile.open(path, "w") as archive:
        for number in range(num_samples):
            info = tarfile.TarInfo(f"{number:06}.cls")
            info.size = 1
            archive.addfile(info, io.BytesIO(b"7"))


@pytest.fixture
def daemon(gyred: StartDaemon, tmp_path: Path) -> Daemon:
    """A daemon with tokens, a small tar set, and sets whose scan takes many minutes."""
    datasets: dict[str, object] = {}
    for name, num_samples in (("tiny", 64), ("small", 4000)):
        (tmp_path / name).mkdir()
        np.arange(8 * num_samples, dtype=np.uint16).tofile(tmp_path / name / "a.bin")
        datasets[name] = {"uri": str(tmp_path / name), **TOKENS}
    (tmp_path / "tar").mkdir()
    write_tar(tmp_path / "tar" / "a.tar", 20)
    datasets["tar"] = {"uri": str(tmp_path / "tar"), "format": "webdataset"}
    for number in range(NUM_ENDLESS):
        folder = tmp_path / f"endless-{number}"
        folder.mkdir()
        for shard in range(4):
            write_tar(folder / f"{shard}.tar", 1)
            with (folder / f"{shard}.tar").open("r+b") as file:
                file.truncate(1 << 40)  # zeros behind the end mark, all of which are read
        datasets[folder.name] = {"uri": str(folder), "format": "webdataset"}
    return gyred({"lease_s": 30.0, "datasets": datasets})


@pytest.fixture
def stub(daemon: Daemon) -> Iterator[pb_grpc.LoaderStub]:
    with identified_channel(daemon.address) as channel:
        yield pb_grpc.LoaderStub(channel)


def scanning(daemon: Daemon) -> list[psutil.Process]:
    """The processes that scan for a daemon, without the server that forks them."""
    assert daemon.process
    children = psutil.Process(daemon.process.pid).children(recursive=True)
    found = []
    for child in children:
        with suppress(psutil.NoSuchProcess):
            found += [child] if child.name() == "gyre-scan" else []
    return found


def reading(daemon: Daemon) -> list[psutil.Process]:
    """Those that have a shard open. One that ends before it has any work is replaced by another."""
    return [
        process
        for process in scanning(daemon)
        if any(file.path.endswith(".tar") for file in process.open_files())
    ]


def test_a_small_dataset_does_not_wait_behind_large_ones(
    daemon: Daemon, stub: pb_grpc.LoaderStub
) -> None:
    calls = [
        stub.IndexDataset(
            pb.IndexDatasetRequest(dataset=pb.DatasetRef(name=f"endless-{number}")),
            timeout=10 * DEADLINE_S,
        )
        for number in range(NUM_ENDLESS)
    ]
    assert eventually(lambda: len(scanning(daemon)) >= NUM_ENDLESS)
    small = pb.DescribeDatasetRequest(dataset=pb.DatasetRef(name="tar"))
    assert stub.DescribeDataset(small, timeout=DEADLINE_S).num_samples == 20
    with Loader("tiny", batch_size=8, address=daemon.address) as loader:
        assert len(next(iter(loader))["sample_id"]) == 8
    for call in calls:
        call.cancel()  # type: ignore[no-untyped-call]
    assert eventually(lambda: not scanning(daemon)), "nobody waits for these scans any more"
    # and what was cancelled can be asked for again
    again = stub.IndexDataset(
        pb.IndexDatasetRequest(dataset=pb.DatasetRef(name="endless-0")), timeout=10 * DEADLINE_S
    )
    assert eventually(lambda: bool(scanning(daemon)))
    again.cancel()  # type: ignore[no-untyped-call]
    assert eventually(lambda: not scanning(daemon))


def test_an_open_that_is_given_up_stops_its_scan(daemon: Daemon, stub: pb_grpc.LoaderStub) -> None:
    request = pb.DescribeDatasetRequest(dataset=pb.DatasetRef(name="endless-0"))
    call = stub.DescribeDataset.future(request, timeout=10 * DEADLINE_S)
    assert eventually(lambda: bool(scanning(daemon)))
    call.cancel()  # type: ignore[no-untyped-call]
    assert eventually(lambda: not scanning(daemon))
    assert daemon.process
    assert daemon.stop() == 0


def test_a_scan_ends_with_its_daemon(daemon: Daemon, stub: pb_grpc.LoaderStub) -> None:
    request = pb.DescribeDatasetRequest(dataset=pb.DatasetRef(name="endless-0"))
    call = stub.DescribeDataset.future(request, timeout=10 * DEADLINE_S)
    assert eventually(lambda: bool(scanning(daemon)))
    processes = scanning(daemon)
    daemon.kill()
    call.cancel()  # type: ignore[no-untyped-call]
    gone, _ = psutil.wait_procs(processes, timeout=DEADLINE_S)
    assert len(gone) == len(processes)


def test_a_scan_that_is_killed_twice_is_an_error_and_the_next_one_works(
    daemon: Daemon, stub: pb_grpc.LoaderStub
) -> None:
    request = pb.DescribeDatasetRequest(dataset=pb.DatasetRef(name="endless-0"))
    call = stub.DescribeDataset.future(request, timeout=10 * DEADLINE_S)
    assert eventually(lambda: bool(reading(daemon)))
    (victim, *_) = reading(daemon)
    server = victim.parent()
    victim.kill()  # and the scan is repeated
    while not call.done():
        for again in reading(daemon):
            with suppress(psutil.NoSuchProcess):
                again.kill()
        time.sleep(0.05)
    with pytest.raises(grpc.RpcError) as caught:
        call.result()
    assert caught.value.code() == grpc.StatusCode.DATA_LOSS
    assert "the process that indexed it died" in str(caught.value.details())
    assert server
    server.kill()
    small = pb.DescribeDatasetRequest(dataset=pb.DatasetRef(name="tar"))
    assert stub.DescribeDataset(small, timeout=DEADLINE_S).num_samples == 20


# dataset, mode, tail, G, world size: each kept the event loop busy for seconds
COSTLY = [
    ("tiny", pb.ORDER_MODE_FULL, pb.TAIL_PAD, 1 << 32, (1 << 32) - 1),
    ("tiny", pb.ORDER_MODE_FULL, pb.TAIL_PAD, 64 << 12, 64 << 12),
    ("tiny", pb.ORDER_MODE_BLOCK, pb.TAIL_WRAP, 64, 1),
    ("tiny", pb.ORDER_MODE_BLOCK, pb.TAIL_WRAP, 64, 64),
    ("tiny", pb.ORDER_MODE_BLOCK, pb.TAIL_WRAP, 64 << 12, 64),
    ("small", pb.ORDER_MODE_BLOCK, pb.TAIL_WRAP, 4000, 4000),
    ("small", pb.ORDER_MODE_FULL, pb.TAIL_WRAP, 4000, 4000),
    ("small", pb.ORDER_MODE_FULL, pb.TAIL_WRAP, 4000 << 12, 4000 << 12),
]


def test_costly_orders_take_nobody_s_lease(daemon: Daemon, stub: pb_grpc.LoaderStub) -> None:
    with (
        identified_channel(daemon.address) as channel,
        Loader("small", batch_size=40, job="bystander", address=daemon.address) as bystander,
    ):
        health = health_pb2_grpc.HealthStub(channel)
        batches = (batch for _ in itertools.count() for batch in bystander)
        next(batches)
        for number, (name, mode, tail, size, world_size) in enumerate(COSTLY):
            request = pb.OpenSessionRequest(
                dataset=pb.DatasetRef(name=name),
                order=pb.OrderSpec(mode=mode, tail=tail, global_batch_size=size),
                reader=pb.Reader(job=f"costly-{number}", world_size=world_size),
            )
            call = stub.OpenSession.future(request, timeout=DEADLINE_S)
            while not call.done():
                answer = health.Check(health_pb2.HealthCheckRequest(), timeout=DEADLINE_S)
                assert answer.status == health_pb2.HealthCheckResponse.SERVING
                next(batches)
            if call.code() != grpc.StatusCode.OK:
                assert call.code() in (
                    grpc.StatusCode.INVALID_ARGUMENT,
                    grpc.StatusCode.RESOURCE_EXHAUSTED,
                )
            else:
                closing = pb.CloseSessionRequest(session_id=call.result().session_id)
                stub.CloseSession(closing, timeout=DEADLINE_S)
        next(batches)
        opened = [event for event in daemon.events() if event["event"] == "session open"]
        assert [each["job"] for each in opened].count("bystander") == 1


class Index:
    """4000 samples of equal size in one shard."""

    num_samples = 4000
    fields = ()

    def blocks(self, io_block_bytes: int) -> object:
        from gyre_daemon.order.permutation import blocks_of_equal_samples

        return blocks_of_equal_samples(np.array([self.num_samples]), 16, io_block_bytes)


@pytest.mark.parametrize("mode", ["block", "full"])
@pytest.mark.parametrize("world_size", [4000, 1])
def test_few_epochs_are_planned_at_once(mode: str, world_size: int) -> None:
    """A plan that spans thousands of epochs took 8 s, on the event loop."""
    blocks = (1 << 20, 256) if mode == "block" else (0, 0)
    order = Order(mode, "wrap", 1, 4000, *blocks)  # type: ignore[arg-type]
    planner: BatchPlanner = planner_for(order, Index())  # type: ignore[arg-type]
    made: list[int] = []
    make = planner._make_epoch_order
    planner._epochs = lru_cache(3)(lambda epoch: made.append(epoch) or make(epoch))  # type: ignore[func-returns-value]
    from types import SimpleNamespace

    storage = SimpleNamespace(block_cache=None)
    dataset = SimpleNamespace(
        index=Index(),
        fields=(),
        served=(),
        storage=storage,
        num_samples=4000,
        packed=None,
        drawing=(),
    )
    share = SimpleNamespace(num_together=256, window_batches=768, batch_bytes=4096)
    spec = Spec(dataset, order, 0, world_size, planner, 0)  # type: ignore[arg-type]
    workers = FairExecutor.__new__(FairExecutor)
    prefetcher = Prefetcher(spec, share, 0, NO_JOB, workers)  # type: ignore[arg-type]
    sizes = prefetcher._sizes(None)
    planner.batches(0, sizes.num_planned, 0, world_size)
    assert 1 <= len(made) <= 8


def test_a_sample_of_millions_of_values_becomes_no_objects() -> None:
    lists = b"[" + b"[]," * 300_000 + b"NaN, -Infinity, 1]"
    deep = b"[" * 500_000
    text = "ä".encode() * 5_000_000
    tracemalloc.start()
    try:
        check_json(memoryview(lists))
        check_json(memoryview(lists * 10))  # too long to be parsed
        with pytest.raises(ValueError, match="deep"):
            check_json(memoryview(deep))
        with pytest.raises(ValueError, match="malformed"):
            check_json(memoryview(b"[" + b"[]," * 30_000 + b"]"))
        check_text(memoryview(text))
        with pytest.raises(ValueError, match="unexpected end of data"):
            check_text(memoryview(text)[:-1])
        peak_bytes = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak_bytes < 16 << 20


def test_a_scan_stream_that_fails_gives_the_storage_s_error() -> None:
    from gyre_daemon.datasets.formats.tfrecord import scan_records
    from gyre_daemon.datasets.scanning import Scanner, scan_workers
    from gyre_daemon.errors import CorruptSample, StorageUnavailable
    from gyre_daemon.workers.compute_workers import ComputeServer

    async def broken() -> AsyncIterator[bytes]:
        yield b"x" * 100_000
        raise StorageUnavailable("the storage does not answer")

    async def garbage() -> AsyncIterator[bytes]:
        while True:
            yield b"x" * 100_000

    async def scan() -> None:
        server = ComputeServer()
        try:
            process = Scanner(scan_workers(server))
            with pytest.raises(CorruptSample, match="shard a at byte"):
                await process.scan_stream(scan_records, "a", garbage())
            with pytest.raises(StorageUnavailable):
                await process.scan_stream(scan_records, "a", broken())
            process.kill()
        finally:
            server.close()

    asyncio.run(scan())
