"""Object storage over TLS beside plain HTTP: by client, and by the daemon as a whole.

`python -m benchmarks.loader.storage.tls [--rounds 3] [--full] [--in-flight 64]`

First the CPU time of a request, by the client that carries it: the daemon's engine drives all of
them, as in `clients`. Then a job that reads through a daemon, in the orders `full` and `block`. The
server is another process on the same cores; its answers begin late: p50 20 ms, p99 200 ms. So many
requests are in flight that these cores are the bound, or with `--in-flight 64` the storage is.
"""

import argparse
import asyncio
import statistics
import tempfile
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import uvloop
from gyre_daemon.monitoring.metrics import Metrics
from gyre_daemon.runtime.threads import FairExecutor
from gyre_daemon.storage.engine.endpoint import Endpoint, EndpointOptions, RemoteStorage
from gyre_daemon.storage.location import parse_location
from gyre_daemon.storage.response import Source
from gyre_daemon.storage.sources.object_source import ObjectSource, open_objects
from gyre_daemon.storage.sources.opener import StorageOpener

from benchmarks.loader.processes import load_average
from benchmarks.loader.storage import clients, objects
from benchmarks.loader.storage.clients import FIRST_BYTE, OBJECT_BYTES
from benchmarks.loader.storage.objectreport import Result
from benchmarks.loader.storage.objects import OBJECT_SAMPLES, SAMPLE_BYTES, Reader, Scale
from benchmarks.loader.storage.othersources import AiohttpSource, CurlSource, RangesSource
from tests.certificates import Authority
from tests.object_server.process import ObjectServerProcess, object_server

URI = "s3://data/x.bin"
NUM_IN_FLIGHT = 256


@dataclass(frozen=True)
class Place:
    """A server, and the file of the roots that it is trusted by; None without TLS."""

    server: ObjectServerProcess
    roots: Path | None

    @property
    def url(self) -> str:
        """Of the object."""
        return f"{self.server.url}/data/x.bin"

    @property
    def storage_settings(self) -> dict[str, str]:
        """The table `[datasets.NAME.storage]`."""
        roots = {"ca_file": str(self.roots)} if self.roots else {}
        return {**self.server.storage_settings, **roots}


MakeSource = Callable[[Place], Source]


def _obstore(place: Place) -> Source:
    roots = place.roots.read_text() if place.roots else ""
    return ObjectSource("s3", place.server.storage_settings, URI, roots)


def _obstore_ranges(place: Place) -> Source:
    roots = place.roots.read_text() if place.roots else ""
    filesystem = open_objects("s3", place.server.storage_settings, URI, roots, max_retries=0)
    return RangesSource(filesystem._construct_store("data"), "x.bin")


def _aiohttp(place: Place) -> Source:
    return AiohttpSource(place.url, NUM_IN_FLIGHT, str(place.roots) if place.roots else None)


def _libcurl(place: Place) -> Source:
    return CurlSource(place.url, NUM_IN_FLIGHT, str(place.roots) if place.roots else None)


SOURCES: dict[str, MakeSource | None] = {
    "Gyre's own": None,
    "libcurl, multi interface": _libcurl,
    "aiohttp": _aiohttp,
    "obstore": _obstore,
    "obstore, several ranges in a call": _obstore_ranges,
}


async def cpu_us(place: Place, make: MakeSource | None, num_requests: int) -> float:
    """Microseconds of CPU time of a request, of the engine and the client."""
    terms = EndpointOptions(NUM_IN_FLIGHT, 60.0, hedges=False)
    with ThreadPoolExecutor(2) as executor:
        opener = StorageOpener(FairExecutor(executor, 2), terms, Metrics())
        storage = await opener.open(parse_location(URI), place.storage_settings, "*.bin")
        source = make(place) if make else None
        if source:
            endpoint = Endpoint("measured", "s3", terms, Metrics())
            storage = RemoteStorage(source, endpoint, [URI], storage.shards)
        used_us, _ = await clients.cost_of(storage, NUM_IN_FLIGHT, num_requests)
        if source:
            source.close()
        opener.close()
        await asyncio.sleep(0.1)
    return used_us


@contextmanager
def places(root: Path | None = None) -> Iterator[dict[str, Place]]:
    """A server without TLS and one with."""
    with tempfile.TemporaryDirectory(prefix="gyre-tls-") as folder:
        authority = Authority(Path(folder))
        pair = authority.sign("server")
        tls = pair.certificate, pair.key
        with object_server(root) as plain, object_server(root, tls=tls) as secure:
            yield {"plain": Place(plain, None), "TLS": Place(secure, authority.path)}


def by_client(num_rounds: int, num_requests: int) -> str:
    """A table in Markdown; all take turns in every round."""
    found: dict[tuple[str, str], list[float]] = {}
    with places() as both:
        for place in both.values():
            place.server.put("/data/x.bin", np.random.default_rng(0).bytes(OBJECT_BYTES))
            place.server.follow(FIRST_BYTE)
        for _ in range(num_rounds):
            for label, make in SOURCES.items():
                for kind, place in both.items():
                    used = uvloop.run(cpu_us(place, make, num_requests))
                    found.setdefault((label, kind), []).append(used)
    lines = ["| client | plain, CPU us | TLS, CPU us | ratio |", "|---|---:|---:|---:|"]
    for label in SOURCES:
        plain, secure = (statistics.median(found[label, kind]) for kind in ("plain", "TLS"))
        lines.append(f"| {label} | {plain:.0f} | {secure:.0f} | {secure / plain:.2f} |")
    return "\n".join(lines)


def by_daemon(num_rounds: int, folder: Path, scale: Scale, max_requests: int) -> str:
    """A table in Markdown of a job's rate, and of the CPU time of its daemon and of the server.

    The ratios are the medians of those of the rounds.
    """
    objects.write_objects(folder / "objects", scale.num_samples)
    found: dict[tuple[str, str], list[Result]] = {}
    orders = {"full": Reader("full"), "block": Reader("block", "block")}
    with places(folder / "objects") as both:
        for place in both.values():
            place.server.follow(FIRST_BYTE)
        for seed in range(num_rounds):
            for order, reader in orders.items():
                for kind, place in both.items():
                    storage = {"ca_file": str(place.roots)} if place.roots else {}
                    result = objects.read(
                        reader, place.server, folder, scale, seed, storage, max_requests
                    )
                    found.setdefault((order, kind), []).append(result)
    names = {
        "samples_per_s": "samples/s",
        "steady_samples_per_s": "samples/s after the first quarter",
        "daemon_us_per_sample": "daemon's CPU us a sample",
        "cpu_us_per_sample": "CPU us a sample, daemon and job",
        "connections": "connections",
        "requests_per_sample": "requests a sample",
        "server_us_per_request": "server's CPU us a request",
    }
    lines = ["| order | | plain | TLS | ratio |", "|---|---|---:|---:|---:|"]
    for order in orders:
        for key, name in names.items():
            values = [
                [float(each[key]) for each in found[order, kind]] for kind in ("plain", "TLS")
            ]
            plain, secure = map(statistics.median, values)
            ratio = statistics.median(its / other for other, its in zip(*values, strict=True))
            lines.append(f"| {order} | {name} | {plain:,.4g} | {secure:,.4g} | {ratio:.2f} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--full", action="store_true", help="ten times the requests")
    parser.add_argument(
        "--in-flight", type=int, default=0, help="of the daemon's requests; 0 for its default"
    )
    parser.add_argument("--only-daemon", action="store_true", help="without the other clients")
    args = parser.parse_args()
    num_requests, num_batches = (20_000, 160) if args.full else (4_000, 40)
    load_before = load_average()
    if not args.only_daemon:
        print(by_client(args.rounds, num_requests))
    scale = Scale(num_batches * 512, SAMPLE_BYTES, OBJECT_SAMPLES, 256, num_batches, args.rounds)
    with tempfile.TemporaryDirectory(prefix="gyre-tls-") as folder:
        print("\n" + by_daemon(args.rounds, Path(folder), scale, args.in_flight))
    print(
        f"\nMedians of {args.rounds} interleaved rounds; {num_requests:,} requests of "
        f"{SAMPLE_BYTES} bytes with {NUM_IN_FLIGHT} in flight, and {num_batches} batches of 256 "
        f"samples. Load average at the start: {load_before:.1f}."
    )


if __name__ == "__main__":
    main()
