"""The cost of the daemon itself, without gRPC and without a client.

`python -m benchmarks.loader.parts.inside`

A session in this process is read as fast as possible: planned, laid out, gathered, written into
messages, released. The copies run in threads beside the event loop, as in a daemon.
"""

import asyncio
import socket
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from unittest import mock

import uvloop
from gyre_daemon.access.policy import ANONYMOUS, Limits, peer_principal
from gyre_daemon.config import DatasetConfig
from gyre_daemon.datasets.checks import CorruptReports
from gyre_daemon.datasets.indexing.catalog import Catalog
from gyre_daemon.datasets.indexing.unpacked import UnpackedShards
from gyre_daemon.datasets.sidecars import SidecarStore
from gyre_daemon.errors import GyreError
from gyre_daemon.memory.arenas import ArenaRegistry, Budget
from gyre_daemon.memory.sidechannel import Peer
from gyre_daemon.monitoring.metrics import Metrics
from gyre_daemon.order.cursor import Cursor
from gyre_daemon.order.planner import Order
from gyre_daemon.runtime.threads import FairExecutor
from gyre_daemon.service.methods import batches as batches_of
from gyre_daemon.sessions.session import Sent, Session
from gyre_daemon.sessions.session_request import Reader, Reservations, SessionRequest
from gyre_daemon.sessions.shared_stream import DaemonResources
from gyre_daemon.sessions.table import SessionTable
from gyre_daemon.storage.engine.endpoint import EndpointOptions
from gyre_daemon.storage.reads import Addresses, Sizes, gather
from gyre_daemon.storage.sources.opener import StorageOpener
from gyre_daemon.workers.compute_workers import ComputeServer

from benchmarks.loader.data import FULL, Workload, workloads
from benchmarks.loader.markdown import table

NUM_THREADS = 2
MEMORY_BYTES = 1 << 30
WARMUP_S, DURATION_S = 0.5, 3.0


@dataclass(frozen=True)
class Cost:
    """CPU time of one batch, in microseconds.

    Attributes:
        workload: its name.
        samples_per_s: that were ready.
        process_us: all threads.
        loop_us: the event loop's thread.
        copy_us: the system calls that copy samples, in whatever thread.
        per_message: batches that travel together.
    """

    workload: str
    samples_per_s: float
    process_us: float
    loop_us: float
    copy_us: float
    per_message: float


@contextmanager
def client_nearby() -> Iterator[Peer]:
    """A client on this machine that receives arenas and does nothing with them."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with theirs:
        peer = Peer(ours, peer_principal(ours))
        yield peer
        peer.hang_up()


class Copies:
    """Measures the calls that copy samples.

    Attributes:
        thread_s: CPU time of all calls so far.
    """

    def __init__(self) -> None:
        self.thread_s = 0.0

    def run(self, sources: Addresses, sizes: Sizes, targets: Addresses) -> int | None:
        """Copy as `gather` does, and add the time."""
        began = time.thread_time()
        failed = gather(sources, sizes, targets)
        # additions of two threads at once may get lost, rarely
        self.thread_s += time.thread_time() - began
        return failed


async def measure(workload: Workload, folder: Path) -> Cost:
    """Read one session for a while."""
    copies = Copies()
    workload.read_files()
    with (
        client_nearby() as client,
        ThreadPoolExecutor(NUM_THREADS) as executor,
        mock.patch("gyre_daemon.storage.sources.local.gather", copies.run),
    ):
        table_, session = await _open(workload, folder, FairExecutor(executor, NUM_THREADS))
        session.attach()
        assert session.share_arenas(client, on_gone=lambda: None)
        session.add_credit(session.max_queued)
        await _read(session, WARMUP_S)
        began, process, loop = time.perf_counter(), time.process_time(), time.thread_time()
        copies.thread_s = 0.0
        num_batches, num_messages = await _read(session, DURATION_S)
        elapsed_s, process_s, loop_s = (
            time.perf_counter() - began,
            time.process_time() - process,
            time.thread_time() - loop,
        )
        table_.close(session.session_id, GyreError("measured"))
    return Cost(
        workload.name,
        num_batches * workload.batch_size / elapsed_s,
        process_s / num_batches * 1e6,
        loop_s / num_batches * 1e6,
        copies.thread_s / num_batches * 1e6,
        num_batches / num_messages,
    )


async def _open(
    workload: Workload, folder: Path, workers: FairExecutor
) -> tuple[SessionTable, Session]:
    settings = dict(workload.config)
    config = DatasetConfig(str(settings.pop("uri")), str(settings.pop("format")), settings, {})
    metrics = Metrics()
    opener = StorageOpener(workers, EndpointOptions(64, 60.0), metrics)
    sidecars = SidecarStore(str(folder / "index"), folder / "index")
    catalog = Catalog(
        {workload.name: config},
        opener,
        sidecars,
        None,
        allow_ad_hoc=False,
        compute_server=ComputeServer(),
        unpacked=UnpackedShards(folder, 0),
        reports=CorruptReports(folder),
    )
    budget = Budget(MEMORY_BYTES)
    resources = DaemonResources(
        budget,
        ArenaRegistry(MEMORY_BYTES),
        workers,
        metrics,
        Reservations(budget, Limits(), MEMORY_BYTES // 4),
        30.0,
    )
    sessions = SessionTable(resources, {})
    dataset = await catalog.open(*catalog.resolve(workload.name))
    order = Order("full", "wrap", 1, workload.batch_size)
    start = Cursor(dataset.fingerprint, order, position=0)
    return sessions, await sessions.open(
        SessionRequest(ANONYMOUS, dataset, order, Reader("inside", 0, 1, 1, fence=""), 0, start, 0)
    )


async def _read(session: Session, duration_s: float) -> tuple[int, int]:
    """Return the numbers of batches and messages."""
    num_batches = num_messages = 0
    end = time.perf_counter() + duration_s
    while time.perf_counter() < end:
        first = await session.next_news()
        assert isinstance(first, Sent)
        message = batches_of(session, first)
        message.SerializeToString()
        num_sent = sum(len(group.cursors.own) for group in message.batches.groups)
        for group in message.batches.groups:
            session.release(group.first_step)
        session.add_credit(num_sent)
        num_batches += num_sent
        num_messages += 1
        await asyncio.sleep(0)
    return num_batches, num_messages


def report(costs: list[Cost]) -> list[str]:
    """A table, as Markdown."""
    rows = (
        (
            its.workload,
            f"{its.samples_per_s:,.0f}",
            f"{its.process_us:,.0f}",
            f"{its.loop_us:,.0f}",
            f"{its.copy_us:,.0f}",
            f"{its.process_us - its.loop_us - its.copy_us:,.0f}",
            f"{its.per_message:.1f}",
        )
        for its in costs
    )
    return list(
        table(
            (
                "",
                "samples/s",
                "CPU us per batch",
                "event loop",
                "copy",
                "else in threads",
                "batches per message",
            ),
            rows,
        )
    )


def main() -> None:
    """Print the table."""
    with tempfile.TemporaryDirectory(prefix="gyre-bench-") as name:
        sets = workloads(Path(name), FULL)
        print("\n".join(report([uvloop.run(measure(workload, Path(name))) for workload in sets])))


if __name__ == "__main__":
    main()
