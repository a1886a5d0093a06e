"""How fast an index of tar shards in object storage is built, and what bounds it.

`python -m benchmarks.loader.storage.indexing [--shards 1000] [--samples 10000] [--bytes 1024]
[--rounds 3]`

A server in another process has one archive under many names, so each name is a shard that is
scanned; its answers begin after 20 ms. A daemon builds the index of all of them. The ceiling is a
bare client that reads the same bytes from the same server in ranges of 4 MiB and drops them.
"""

import argparse
import asyncio
import io
import shutil
import statistics
import tarfile
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import uvloop
from gyre_client.transport.channel import parse_address
from gyre_client.transport.connection import Connection
from gyre_daemon.monitoring.metrics import Metrics
from gyre_daemon.runtime.threads import FairExecutor
from gyre_daemon.storage.engine.endpoint import EndpointOptions
from gyre_daemon.storage.location import parse_location
from gyre_daemon.storage.reads import Reads
from gyre_daemon.storage.sources.opener import StorageOpener
from gyre_protos.v1 import loader_pb2 as pb

from benchmarks.loader.processes import cpu_s, daemon, load_average
from tests.object_server.process import ObjectServerProcess, object_server
from tests.object_server.script import Script

FIRST_BYTE = Script(first_byte_p50_s=0.02, first_byte_p99_s=0.0201)
RANGE_BYTES, NUM_IN_FLIGHT = 4 << 20, 16


@dataclass(frozen=True)
class Turn:
    """One measurement.

    Attributes:
        seconds: of wall clock.
        cpu_s: of the daemon and its processes, or of the bare client.
        server_s: CPU time of the server.
        num_requests: that the server answered.
        most_in_flight: of these, at the same time.
    """

    seconds: float
    cpu_s: float
    server_s: float
    num_requests: int
    most_in_flight: int


def archive(num_samples: int, member_bytes: int) -> bytes:
    """A tar shard of an image and a class a sample."""
    file = io.BytesIO()
    with tarfile.open(fileobj=file, mode="w", format=tarfile.USTAR_FORMAT) as made:
        for number in range(num_samples):
            for extension, data in (("jpg", bytes(member_bytes)), ("cls", b"%d" % (number % 10))):
                member = tarfile.TarInfo(f"{number:08}.{extension}")
                member.size = len(data)
                made.addfile(member, io.BytesIO(data))
    return file.getvalue()


def index(server: ObjectServerProcess, folder: Path) -> Turn:
    """Build the index with a new daemon that knows nothing."""
    shutil.rmtree(folder / "index", ignore_errors=True)
    config = {"uri": "s3://data/", "format": "webdataset"}
    settings = {f"storage.{key}": value for key, value in server.storage_settings.items()}
    with daemon(folder, {"set": {**config, **settings}}) as serving:
        server.forget()
        before_s, server_before_s = cpu_s(serving.pids), cpu_s([server.pid])
        began, used_s = time.perf_counter(), 0.0
        with Connection(parse_address(serving.address)) as connection:
            for progress in connection.index(pb.DatasetRef(name="set")):
                if progress.shards_done >= progress.num_shards - 8:  # scan processes end with it
                    used_s = max(used_s, cpu_s(serving.pids) - before_s)
        elapsed_s = time.perf_counter() - began
        counts, server_s = server.counts(), cpu_s([server.pid]) - server_before_s
    return Turn(elapsed_s, used_s, server_s, counts["reads"], counts["most_in_flight"])


async def read_all(server: ObjectServerProcess) -> float:
    """Read all shards in ranges and drop the bytes; the seconds it took."""
    with ThreadPoolExecutor(2) as executor:
        terms = EndpointOptions(NUM_IN_FLIGHT, 60.0, hedges=False)
        opener = StorageOpener(FairExecutor(executor, 2), terms, Metrics())
        storage = await opener.open(parse_location("s3://data/"), server.storage_settings, "*.tar")
        ranges = iter(
            (shard, start)
            for shard, listed in enumerate(storage.shards)
            for start in range(0, listed.size_bytes, RANGE_BYTES)
        )
        server.forget()
        began = time.perf_counter()

        async def work() -> None:
            memory = np.empty(RANGE_BYTES, np.uint8)
            for shard, start in ranges:
                size = min(RANGE_BYTES, storage.shards[shard].size_bytes - start)
                await storage.read(Reads.into([memory[:size]], [shard], [start]))

        await asyncio.gather(*(work() for _ in range(NUM_IN_FLIGHT)))
        elapsed_s = time.perf_counter() - began
        opener.close()
    return elapsed_s


def ceiling(server: ObjectServerProcess) -> Turn:
    """The bare client's turn."""
    used_before_s, server_before_s = time.process_time(), cpu_s([server.pid])
    elapsed_s = uvloop.run(read_all(server))
    used_s, server_s = time.process_time() - used_before_s, cpu_s([server.pid]) - server_before_s
    counts = server.counts()
    return Turn(elapsed_s, used_s, server_s, counts["reads"], counts["most_in_flight"])


def row(label: str, turns: Sequence[Turn], num_samples: int) -> str:
    """A line of the table; the medians of all rounds."""

    def median(name: str) -> float:
        return float(statistics.median(getattr(turn, name) for turn in turns))

    return (
        f"| {label} | {median('seconds'):,.1f} | {num_samples / median('seconds'):,.0f} | "
        f"{median('cpu_s') / num_samples * 1e6:,.1f} | {median('server_s'):,.1f} | "
        f"{median('num_requests'):,.0f} | {median('most_in_flight'):,.0f} |"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shards", type=int, default=1000)
    parser.add_argument("--samples", type=int, default=10_000, help="in a shard")
    parser.add_argument("--bytes", type=int, default=1024, help="of an image")
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    data, load_before = archive(args.samples, args.bytes), load_average()
    with tempfile.TemporaryDirectory(prefix="gyre-indexing-") as name:
        folder = Path(name)
        bucket = folder / "objects" / "data"
        bucket.mkdir(parents=True)
        (bucket / "0000.tar").write_bytes(data)
        for number in range(1, args.shards):
            (bucket / f"{number:04}.tar").hardlink_to(bucket / "0000.tar")
        turns: list[tuple[Turn, Turn]] = []
        with object_server(folder / "objects") as server:
            server.follow(FIRST_BYTE)
            turns += ((index(server, folder), ceiling(server)) for _ in range(args.rounds))
    num_samples = args.shards * args.samples
    print("| | s | samples/s | CPU us a sample | server's CPU s | requests | in flight |")
    print("|---|---:|---:|---:|---:|---:|---:|")
    print(row("`gyre index`", [each for each, _ in turns], num_samples))
    print(row("bare client, all bytes", [each for _, each in turns], num_samples))
    ratio = statistics.median(bare.seconds / ours.seconds for ours, bare in turns)
    print(
        f"\n{args.shards:,} shards of {args.samples:,} samples, {len(data) / 1e6:,.1f} MB each; "
        f"first byte after 20 ms; medians of {args.rounds} rounds. `gyre index` has {ratio:.2f} of "
        f"the bare client's rate. Load average at the start: {load_before:.1f}."
    )


if __name__ == "__main__":
    main()
