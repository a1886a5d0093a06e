"""Whole epochs from object storage through the node cache.

Order `block`, a warm disk cache, and two jobs at once.
"""

import sys
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gyre_client import Loader
from gyre_client.transport.channel import parse_address
from gyre_client.transport.connection import Connection
from gyre_protos.v1 import loader_pb2 as pb

from benchmarks.loader.processes import Daemon, cpu_s, daemon
from tests.object_server.process import ObjectServerProcess
from tests.object_server.script import Script

BATCH_SIZE = 256
DISK_ROUNDS = 5

Figures = dict[str, float]


@dataclass(frozen=True)
class Place:
    """Where T is stored.

    Attributes:
        server: has it, with a latency of its own.
        folder: the same objects as files.
        options: of the dataset's configuration, beside its URI.
        num_samples: samples of the dataset.
        sample_bytes: bytes of each sample.
        latency: the server's latency.
    """

    server: ObjectServerProcess
    folder: Path
    options: Mapping[str, object]
    num_samples: int
    sample_bytes: int
    latency: Script

    @property
    def remote(self) -> dict[str, object]:
        """The dataset on the server."""
        last = len(list(self.folder.iterdir())) - 1
        return {"uri": f"{self.server.url}/data/{{0000..{last:04}}}.bin", **self.options}

    @property
    def local(self) -> dict[str, object]:
        """The dataset on this machine's disk."""
        return {"uri": f"{self.folder}/*.bin", **self.options}

    @property
    def num_bytes(self) -> int:
        """Bytes of all samples."""
        return self.num_samples * self.sample_bytes


def measure(place: Place, num_rounds: int) -> dict[str, list[Figures]]:
    """Return one set of figures for every round and row of the tables."""
    found: dict[str, list[Figures]] = {
        "block": [],
        "two jobs, full": [],
        "two jobs, block": [],
        "local": [],
        "disk cache": [],
    }
    with tempfile.TemporaryDirectory(prefix="gyre-orders-") as folder:
        for seed in range(num_rounds):
            print(f"orders, round {seed + 1}", file=sys.stderr, flush=True)
            place.server.follow(place.latency)
            found["block"].append(_cold(place, Path(folder), [seed], order="block"))
            found["two jobs, full"].append(_cold(place, Path(folder), [seed, seed + 1000]))
            found["two jobs, block"].append(
                _cold(place, Path(folder), [seed, seed + 1000], order="block")
            )
        for local, warm in _warm(place, Path(folder)):
            found["local"].append(local)
            found["disk cache"].append(warm)
    return found


def _cold(place: Place, folder: Path, seeds: Sequence[int], **options: Any) -> Figures:
    """Measure an epoch of several jobs at once, with an empty cache."""
    with daemon(folder, {"T": place.remote}) as serving:
        before = _status(serving)
        cpu_before_s = cpu_s(serving.pids)
        figures: list[Figures] = []

        def run(seed: int) -> None:
            figures.append(_epoch(serving, "T", seed, **options))

        jobs = [threading.Thread(target=run, args=(seed,)) for seed in seeds]
        for job in jobs:
            job.start()
        for job in jobs:
            job.join()
        after = _status(serving)
        num_read = len(seeds) * place.num_samples
        return {
            "samples_per_s": min(each["samples_per_s"] for each in figures),
            "first_batch_s": max(each["first_batch_s"] for each in figures),
            "quality": min(each["quality"] for each in figures),
            "requests": after["requests"] - before["requests"],
            "blocks": after["blocks"] - before["blocks"],
            "past": after["past"] - before["past"],
            "bytes_to_data": (after["bytes"] - before["bytes"]) / place.num_bytes,
            "cpu_us_per_sample": (cpu_s(serving.pids) - cpu_before_s) / num_read * 1e6,
        }


def _warm(place: Place, folder: Path) -> list[tuple[Figures, Figures]]:
    """Epochs of local files and of a full disk cache in turn; the daemon has little memory."""
    place.server.follow(Script())
    more = [f'cache_dir = "{folder}/cache"', f"cache_memory = {64 << 20}"]
    with daemon(folder, {"remote": place.remote, "local": place.local}, more=more) as serving:
        seed = 100
        while _status(serving)["disk_bytes"] < place.num_bytes:
            _epoch(serving, "remote", seed)
            time.sleep(0.5)
            seed += 1
            if seed == 120:
                raise RuntimeError("the disk cache does not fill")
        pairs = [
            (_epoch(serving, "local", round_), _epoch(serving, "remote", round_))
            for round_ in range(DISK_ROUNDS + 1)
        ]
    return pairs[1:]


def _epoch(serving: Daemon, dataset: str, seed: int, **options: Any) -> Figures:
    began, first_batch_s, num_samples = time.perf_counter(), 0.0, 0
    # nothing is read beyond the epoch
    where: dict[str, Any] = {"address": serving.address, "restart": True}
    with Loader(
        dataset, batch_size=BATCH_SIZE, seed=seed, tail="drop", **where, **options
    ) as loader:
        for batch in loader:
            batch["tokens"].sum()
            first_batch_s = first_batch_s or time.perf_counter() - began
            num_samples += BATCH_SIZE
        elapsed_s = time.perf_counter() - began
    quality = _quality(
        serving, dataset, seed, "block" if options.get("order") == "block" else "full"
    )
    return {
        "samples_per_s": num_samples / elapsed_s,
        "first_batch_s": first_batch_s,
        "quality": quality,
    }


def _quality(serving: Daemon, dataset: str, seed: int, order: str) -> float:
    """The worst of displacement, spread and mixing that an order has, where 1.0 is uniform."""
    spec = pb.OrderSpec(global_batch_size=BATCH_SIZE, seed=seed, mode=pb.ORDER_MODE_BLOCK)
    request = pb.PlanCostRequest(dataset=pb.DatasetRef(name=dataset), order=spec)
    with Connection(parse_address(serving.address)) as connection:
        answer = connection.plan_cost(request)
    quality = {each.order: each.quality for each in answer.estimates}[order]
    return min(quality.displacement, quality.spread, quality.mixing)


def _status(serving: Daemon) -> Figures:
    with Connection(parse_address(serving.address)) as connection:
        status = connection.status()
    reads = [count for count in status.storage if count.kind == "read"]
    return {
        "requests": sum(count.num_requests for count in reads),
        "bytes": sum(count.num_bytes for count in reads),
        "blocks": status.cache.num_blocks_fetched,
        "past": status.cache.num_past,
        "disk_bytes": status.cache.disk_bytes,
    }
