"""The cost of the arena transport itself: `python -m benchmarks.loader.parts.transport`.

Large batches beside memcpy in the same run, and small ones by their number.
"""

import mmap
import statistics
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from gyre_client import Loader

from benchmarks.loader.data import write_tokens
from benchmarks.loader.markdown import table
from benchmarks.loader.parts.bare import bare_copy
from benchmarks.loader.processes import Daemon, cpu_s, daemon
from benchmarks.loader.readers import touch

BATCH_BYTES = 8 << 20
FILE_BYTES = 48 * BATCH_BYTES
TOKEN_BYTES = 4
SAMPLE_BYTES = {"whole": BATCH_BYTES, "gathered": 8 << 10, "small": 64}
WARM_TARGETS = 8  # memcpy's ring: as a daemon's slots, warm, and larger than a cache
NUM_ROUNDS = 5


@dataclass(frozen=True)
class Transport:
    """Medians over the rounds.

    Attributes:
        memcpy: bytes/s of one thread, from the mapped file into warm memory.
        bare: bytes/s, and processor seconds of the one that copies for each 10^9, of two processes
            that do nothing else.
        bulk: bytes/s through Gyre, by the samples of a batch of 8 MiB.
        daemon_s_per_gb: processor seconds of the daemon for each 10^9 bytes of them.
        descriptors_per_s: batches of one sample of 64 bytes.
        p50_s: half of these came within this time of being asked for.
        p99_s: all but one in a hundred.
    """

    memcpy: float
    bare: tuple[float, float]
    bulk: dict[str, float]
    daemon_s_per_gb: dict[str, float]
    descriptors_per_s: float
    p50_s: float
    p99_s: float

    def report(self) -> list[str]:
        """A table, as Markdown."""
        rows = [("memcpy, one thread", f"{self.memcpy / 1e9:.2f} GB/s", "1.00", "-")]
        rate, cpu = self.bare
        rows.append(
            (
                "a bare copy between two processes",
                f"{rate / 1e9:.2f} GB/s",
                f"{rate / self.memcpy:.2f}",
                f"{cpu:.3f}",
            )
        )
        abouts = {"whole": "one sample of 8 MiB", "gathered": "1,024 samples of 8 KiB"}
        for name, about in abouts.items():
            ratio, cpu = self.bulk[name] / self.memcpy, self.daemon_s_per_gb[name]
            rows.append(
                (
                    f"batches of {about}",
                    f"{self.bulk[name] / 1e9:.2f} GB/s",
                    f"{ratio:.2f}",
                    f"{cpu:.3f}",
                )
            )
        head = (
            "8 MiB at a time, a reader that touches every cache line",
            "rate",
            "to memcpy",
            "daemon CPU s/GB",
        )
        small = (
            f"Small batches (one sample of 64 bytes): {self.descriptors_per_s:,.0f}/s; "
            "`next(loader)` takes "
            f"{self.p50_s * 1e6:.0f} us in the median, {self.p99_s * 1e3:.2f} ms at p99."
        )
        return [*table(head, rows), "", small, ""]


def measure(server: Daemon, path: Path, duration_s: float) -> Transport:
    """Measure memcpy, large and small batches in turns."""
    copies: list[float] = []
    bare: list[tuple[float, float]] = []
    bulk: dict[str, list[tuple[float, float]]] = {"whole": [], "gathered": []}
    small: list[tuple[float, float, float]] = []
    for _ in range(NUM_ROUNDS):
        copies.append(_memcpy(path, duration_s / 2))
        bare.append(bare_copy(path, BATCH_BYTES, WARM_TARGETS, duration_s))
        for name, its in bulk.items():
            its.append(_bulk(server, name, duration_s))
        small.append(_small(server, duration_s))
    return Transport(
        statistics.median(copies),
        (statistics.median(rate for rate, _ in bare), statistics.median(cpu for _, cpu in bare)),
        {name: statistics.median(rate for rate, _ in its) for name, its in bulk.items()},
        {name: statistics.median(cpu for _, cpu in its) for name, its in bulk.items()},
        *(statistics.median(figures) for figures in zip(*small, strict=True)),
    )


def datasets(path: Path) -> dict[str, dict[str, object]]:
    """One file as datasets with samples of three sizes."""
    return {
        name: {
            "uri": str(path),
            "format": "tokens",
            "dtype": "int32",
            "sequence_length": size // TOKEN_BYTES,
        }
        for name, size in SAMPLE_BYTES.items()
    }


def _memcpy(path: Path, duration_s: float) -> float:
    with (
        path.open("rb") as file,
        mmap.mmap(
            file.fileno(), 0, flags=mmap.MAP_SHARED | mmap.MAP_POPULATE, prot=mmap.PROT_READ
        ) as mapping,
    ):
        source = np.frombuffer(mapping, np.uint8).reshape(-1, BATCH_BYTES)
        target = np.ones((WARM_TARGETS, BATCH_BYTES), np.uint8)
        order = np.random.default_rng(0).permutation(len(source)).tolist()
        num_copied, began = 0, time.perf_counter()
        while (elapsed_s := time.perf_counter() - began) < duration_s:
            np.copyto(target[num_copied % WARM_TARGETS], source[order[num_copied % len(source)]])
            num_copied += 1
        del source
    return num_copied * BATCH_BYTES / elapsed_s


def _bulk(server: Daemon, name: str, duration_s: float) -> tuple[float, float]:
    """Return bytes/s, and the daemon's CPU seconds per 10^9 bytes."""
    with Loader(
        name, batch_size=BATCH_BYTES // SAMPLE_BYTES[name], address=server.address
    ) as loader:
        for _ in range(16):
            touch(next(loader)["tokens"])
        cpu_before, num_batches, began = cpu_s(server.pids), 0, time.perf_counter()
        while (elapsed_s := time.perf_counter() - began) < duration_s:
            touch(next(loader)["tokens"])
            num_batches += 1
        num_bytes = num_batches * BATCH_BYTES
        return num_bytes / elapsed_s, (cpu_s(server.pids) - cpu_before) / num_bytes * 1e9


def _small(server: Daemon, duration_s: float) -> tuple[float, float, float]:
    """Return batches/s, and the wait for one: median and p99."""
    with Loader("small", batch_size=1, address=server.address) as loader:
        for _ in range(1000):
            next(loader)
        times: list[float] = []
        began = before = time.perf_counter()
        while before - began < duration_s:
            next(loader)
            now = time.perf_counter()
            times.append(now - before)
            before = now
        return (
            len(times) / (before - began),
            float(np.quantile(times, 0.5)),
            float(np.quantile(times, 0.99)),
        )


def main() -> None:
    """Print the table."""
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory(prefix="gyre-bench-") as name:
        path = Path(name) / "tokens.bin"
        write_tokens(path, FILE_BYTES // TOKEN_BYTES)
        with daemon(Path(name), datasets(path)) as server:
            print("\n".join(measure(server, path, 1.0).report()))


if __name__ == "__main__":
    main()
