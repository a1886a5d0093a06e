"""CPU time of the daemon for one request to object storage, by the client that sends it.

`python -m benchmarks.loader.storage.clients`

The daemon's own engine drives all clients (fair queue, adaptive limit, retries, hedges, placement
into memory), and its time is part of the figure. The server is another process. Its answers begin
late, so that many requests are in flight.
"""

import argparse
import asyncio
import resource
import statistics
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
import uvloop
from gyre_daemon.monitoring.metrics import Metrics
from gyre_daemon.runtime.threads import FairExecutor
from gyre_daemon.storage.engine.endpoint import Endpoint, EndpointOptions, RemoteStorage
from gyre_daemon.storage.location import parse_location
from gyre_daemon.storage.reads import Reads, Storage
from gyre_daemon.storage.response import Source
from gyre_daemon.storage.sources.fsspec_drivers import DriverSource
from gyre_daemon.storage.sources.object_source import ObjectSource
from gyre_daemon.storage.sources.opener import StorageOpener

from benchmarks.loader.processes import load_average
from tests.object_server.process import ObjectServerProcess, object_server
from tests.object_server.script import Script

SAMPLE_BYTES = 2048
OBJECT_BYTES = 8 << 20
FIRST_BYTE = Script(first_byte_p50_s=0.02, first_byte_p99_s=0.2)
IN_FLIGHT = (256, 512, 1024)


@dataclass(frozen=True)
class Client:
    """One client that carries requests.

    Attributes:
        label: its name in the table.
        uri: the object's URI, given the server's URL.
        source: instead of the one that the daemon would choose; given the storage's settings and
            the object's path.
    """

    label: str
    uri: Callable[[str], str]
    source: Callable[[ObjectServerProcess, str], Source] | None = None


def _obstore(server: ObjectServerProcess, path: str) -> Source:
    scheme = path.partition("://")[0]
    return ObjectSource(scheme, server.storage_settings if scheme == "s3" else {}, path)


def _aiohttp(server: ObjectServerProcess, path: str) -> Source:
    # Needs aiohttp, which Gyre does not.
    from fsspec.implementations.http import HTTPFileSystem  # noqa: PLC0415

    return DriverSource(HTTPFileSystem(asynchronous=True, skip_instance_cache=True))


CLIENTS = [
    Client("plain, s3:// with signed URLs", lambda url: "s3://data/x.bin"),
    Client("plain, http://", lambda url: f"{url}/data/x.bin"),
    Client("obstore, s3://", lambda url: "s3://data/x.bin", _obstore),
    Client("obstore, http://", lambda url: f"{url}/data/x.bin", _obstore),
    Client("aiohttp behind fsspec, http://", lambda url: f"{url}/data/x.bin", _aiohttp),
]


async def measure(
    client: Client, server: ObjectServerProcess, num_in_flight: int, num_requests: int
) -> tuple[float, float]:
    """Return microseconds of CPU time per request, and requests per second."""
    with ThreadPoolExecutor(2) as executor:
        terms = EndpointOptions(num_in_flight, 60.0)
        opener = StorageOpener(FairExecutor(executor, 2), terms, Metrics())
        uri = client.uri(server.url)
        settings = server.storage_settings if uri.startswith("s3") else {}
        storage: Storage = await opener.open(parse_location(uri), settings, "*.bin")
        if client.source:
            endpoint = Endpoint("measured", "http", terms, Metrics())
            storage = RemoteStorage(client.source(server, uri), endpoint, [uri], storage.shards)
        cost = await cost_of(storage, num_in_flight, num_requests)
        opener.close()
        await asyncio.sleep(0.01)
    return cost


async def cost_of(storage: Storage, num_in_flight: int, num_requests: int) -> tuple[float, float]:
    """Return microseconds of CPU time per request, and requests per second."""
    reads = _reads(num_requests)
    await storage.read(_reads(2 * num_in_flight))
    began, cpu_before = asyncio.get_running_loop().time(), _cpu_s()
    await storage.read(reads)
    cpu_s, elapsed_s = _cpu_s() - cpu_before, asyncio.get_running_loop().time() - began
    return cpu_s / num_requests * 1e6, num_requests / elapsed_s


def _reads(num: int) -> Reads:
    memory = np.empty((num, SAMPLE_BYTES), np.uint8)
    starts = np.random.default_rng(0).integers(OBJECT_BYTES // SAMPLE_BYTES, size=num)
    starts *= SAMPLE_BYTES
    return Reads.into(list(memory), [0] * num, starts.tolist())


def _cpu_s() -> float:
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


def report(num_rounds: int, num_requests: int) -> str:
    """A table in Markdown; the clients take turns in every round."""
    results: dict[tuple[str, int], list[tuple[float, float]]] = {}
    load_before = load_average()
    with object_server() as server:
        server.put("/data/x.bin", np.random.default_rng(0).bytes(OBJECT_BYTES))
        server.follow(FIRST_BYTE)
        for _ in range(num_rounds):
            for client in CLIENTS:
                for num_in_flight in IN_FLIGHT:
                    try:
                        result = uvloop.run(measure(client, server, num_in_flight, num_requests))
                    except ImportError:
                        continue  # aiohttp is not installed
                    results.setdefault((client.label, num_in_flight), []).append(result)
    about = (
        f"Requests of {SAMPLE_BYTES} bytes, first byte p50 20 ms, p99 200 ms; medians of "
        f"{num_rounds} interleaved rounds of "
        f"{num_requests} requests. Load average at the start: {load_before:.1f}."
    )
    lines = [
        about,
        "",
        "| client | "
        + " | ".join(f"CPU us per request, {num} in flight" for num in IN_FLIGHT)
        + " |",
        "|---|" + "---:|" * len(IN_FLIGHT),
    ]
    for client in CLIENTS:
        cells = [results.get((client.label, num)) for num in IN_FLIGHT]
        if all(cells):
            medians = [statistics.median(cpu_us for cpu_us, _ in cell or []) for cell in cells]
            lines.append(
                f"| {client.label} | " + " | ".join(f"{cpu_us:.0f}" for cpu_us in medians) + " |"
            )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--requests", type=int, default=4000)
    args = parser.parse_args()
    print(report(args.rounds, args.requests))


if __name__ == "__main__":
    main()
