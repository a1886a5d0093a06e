"""Checks that batches equal those of a plain reader, bit for bit, and times the first batch.

`python -m benchmarks.loader.identical`
"""

import statistics
import tarfile
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from gyre_client import Loader
from gyre_daemon.order.planner import BatchPlanner, Order

from benchmarks.loader.data import SEQUENCE_LENGTH, SHORT, Workload, workloads
from benchmarks.loader.markdown import table
from benchmarks.loader.processes import Daemon, daemon

SEED = 20_261_121


@dataclass(frozen=True)
class Sameness:
    """The comparison on one workload.

    Attributes:
        workload: its name.
        num_batches: batches compared; all were equal in every tensor, byte by byte.
        num_bytes: bytes of these batches.
        first_batch_s: from `Loader(...)` to its first batch, the index being there; one per
            session.
    """

    workload: str
    num_batches: int
    num_bytes: int
    first_batch_s: list[float]

    @property
    def median_s(self) -> float:
        """The median time to the first batch."""
        return statistics.median(self.first_batch_s)


def report(results: list[Sameness]) -> list[str]:
    """A table, as Markdown."""
    rows = [
        (
            its.workload,
            f"{its.num_batches:,}",
            f"{its.num_bytes / 2**20:,.0f}",
            f"{its.median_s * 1e3:.1f}",
            f"{max(its.first_batch_s) * 1e3:.1f}",
        )
        for its in results
    ]
    return [
        *table(
            (
                "",
                "batches compared, all equal",
                "MiB",
                "open to first batch, ms, median",
                "slowest",
            ),
            rows,
        ),
        "",
    ]


def verify(workload: Workload, server: Daemon, num_batches: int, num_sessions: int) -> Sameness:
    """Compare batches from the stream's beginning on.

    Raises:
        AssertionError: a byte differs.
    """
    field = "tokens" if workload.is_tokens else "bin"
    num_bytes = 0
    workload.read_files()
    with Loader(
        workload.name, batch_size=workload.batch_size, seed=SEED, address=server.address
    ) as loader:
        for step, (ids, samples) in enumerate(_plain_reader(workload, num_batches)):
            batch = next(loader)
            assert batch["sample_id"].tolist() == ids, (
                f"{workload.name}, step {step}: other samples"
            )
            got = batch[field].numpy().tobytes()
            assert got == b"".join(samples), f"{workload.name}, step {step}: other bytes"
            if not workload.is_tokens:
                ends = np.concatenate(([0], np.cumsum([len(sample) for sample in samples])))
                assert batch[f"{field}.offsets"].tolist() == ends.tolist(), (
                    f"{workload.name}, step {step}: other offsets"
                )
            num_bytes += len(got)
    return Sameness(
        workload.name,
        num_batches,
        num_bytes,
        [_first_batch_s(workload, server) for _ in range(num_sessions)],
    )


def _plain_reader(workload: Workload, num_batches: int) -> Iterator[tuple[list[int], list[bytes]]]:
    """Yield the sample ids and the bytes of each batch.

    One thread reads one sample after another, in order.
    """
    plan = BatchPlanner(Order("full", "wrap", SEED, workload.batch_size), workload.num_samples)
    places = _places(workload)
    for step in range(num_batches):
        ids = plan.batches(step, 1, 0, 1)[0].sample_ids.tolist()
        samples = []
        for sample_id in ids:
            path, offset, size = places[sample_id]
            with path.open("rb") as file:
                file.seek(offset)
                samples.append(file.read(size))
        yield ids, samples


def _places(workload: Workload) -> list[tuple[Path, int, int]]:
    path = Path(str(workload.config["uri"]))
    if workload.is_tokens:
        size = SEQUENCE_LENGTH * 4
        return [(path, index * size, size) for index in range(workload.num_samples)]
    places = []
    for shard in sorted(path.glob("*.tar")):
        with tarfile.open(shard) as archive:
            places += [(shard, member.offset_data, member.size) for member in archive]
    return places


def _first_batch_s(workload: Workload, server: Daemon) -> float:
    began = time.perf_counter()
    with Loader(
        workload.name, batch_size=workload.batch_size, seed=SEED, address=server.address
    ) as loader:
        next(loader)
        return time.perf_counter() - began


def main() -> None:
    """Print the table."""
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory(prefix="gyre-bench-") as name:
        sets = workloads(Path(name), SHORT)
        with daemon(Path(name), {workload.name: workload.config for workload in sets}) as server:
            print("\n".join(report([verify(workload, server, 20, 10) for workload in sets])))


if __name__ == "__main__":
    main()
