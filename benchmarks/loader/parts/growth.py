"""The cost of more samples: `python -m benchmarks.loader.parts.growth`.

Token files are sparse, so 10^9 samples fit on any disk.
"""

import argparse
import statistics
import sys
import tarfile
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path

import numpy as np
import torch
from gyre_client import Loader
from gyre_daemon.order.permutation import Permutation, epoch_key

from benchmarks.loader.markdown import table
from benchmarks.loader.processes import daemon

BATCH_SIZE = 64
SAMPLE_TOKENS = 16  # uint16
NUM_BATCHES = 100
NUM_SESSIONS = 9
NUM_WARM = 3  # sessions that bring the measured ones' data into the page cache
NUM_PLACES = 65_536
BRIEF_SIZES = (10**5, 10**7, 10**9)
FULL_SIZES = (10**5, 10**6, 10**7, 10**8, 10**9)
TAR_SIZES = (10**3, 10**4, 10**5)


@dataclass(frozen=True)
class Size:
    """The cost of a dataset of one size.

    Attributes:
        num_samples: samples of the dataset.
        index_s: seconds until a new daemon has described it.
        first_batch_s: seconds to the first batch of a session; median.
        daemon_bytes: the daemon's own memory after some hundred batches, over that of an idle one.
        ns_per_position: of the permutation, computed in blocks.
    """

    num_samples: int
    index_s: float
    first_batch_s: float
    daemon_bytes: int
    ns_per_position: float


def report(sizes: Sequence[Size]) -> list[str]:
    """A table, as Markdown."""
    head = (
        "samples",
        "dataset opened in, ms",
        "first batch, ms",
        "daemon's memory over idle, MiB",
        "ns per position",
    )
    rows = [
        (
            f"{size.num_samples:,}",
            f"{size.index_s * 1e3:.1f}",
            f"{size.first_batch_s * 1e3:.1f}",
            f"{size.daemon_bytes / 2**20:.1f}",
            f"{size.ns_per_position:.0f}",
        )
        for size in sizes
    ]
    return [*table(head, rows), ""]


def grow_tokens(folder: Path, counts: Sequence[int]) -> list[Size]:
    """Measure `tokens` datasets of these sizes."""
    sizes = []
    for count in counts:
        path = folder / f"sparse-{count}.bin"
        with path.open("wb") as file:
            file.truncate(count * SAMPLE_TOKENS * 2)
        of_tokens = {"format": "tokens", "dtype": "uint16", "sequence_length": SAMPLE_TOKENS}
        sizes.append(_measure(folder, count, {"uri": str(path), **of_tokens}))
        path.unlink()
    return sizes


def grow_tars(folder: Path, counts: Sequence[int]) -> list[Size]:
    """Measure indexed `webdataset` datasets of these sizes: 100-byte samples in one shard."""
    sizes = []
    for count in counts:
        path = folder / f"small-{count}.tar"
        with tarfile.open(path, "w") as archive:
            for index in range(count):
                member = tarfile.TarInfo(f"{index:09}.bin")
                member.size = 100
                archive.addfile(member, BytesIO(bytes(100)))
        config: dict[str, object] = {"uri": str(path), "format": "webdataset"}
        _measure(folder, count, config)  # builds the index
        sizes.append(_measure(folder, count, config))
        path.unlink()
    return sizes


def _measure(folder: Path, num_samples: int, config: dict[str, object]) -> Size:
    with daemon(folder, {"it": config}) as server:
        idle = server.memory_bytes()
        began = time.perf_counter()
        with Loader(
            "it", batch_size=BATCH_SIZE, address=server.address, token_dtype="stored"
        ) as loader:
            index_s = time.perf_counter() - began
            for _ in range(NUM_BATCHES):
                next(loader)
            held = server.memory_bytes() - idle
        times = [_first_batch_s(server.address) for _ in range(NUM_WARM + NUM_SESSIONS)]
        first = statistics.median(times[NUM_WARM:])
    size = Size(num_samples, index_s, first, held, _ns_per_position(num_samples))
    print(
        f"  {config['format']}  {num_samples:,} samples  {first * 1e3:.1f} ms",
        file=sys.stderr,
        flush=True,
    )
    return size


def _first_batch_s(address: str) -> float:
    with Loader("it", batch_size=BATCH_SIZE, address=address, token_dtype="stored") as loader:
        began = time.perf_counter()
        next(loader)
        return time.perf_counter() - began


def _ns_per_position(num_samples: int) -> float:
    permutation = Permutation(epoch_key(1, 2), num_samples)
    places = np.arange(min(NUM_PLACES, num_samples))
    times = []
    for _ in range(9):
        began = time.perf_counter()
        permutation(places)
        times.append(time.perf_counter() - began)
    return statistics.median(times) / len(places) * 1e9


def main() -> None:
    """Print the tables."""
    parser = argparse.ArgumentParser(description="The cost of more samples.")
    parser.add_argument("--full", action="store_true", help="every power of ten, and tar shards")
    parsed = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory(prefix="gyre-bench-") as name:
        print(
            "\n".join(report(grow_tokens(Path(name), FULL_SIZES if parsed.full else BRIEF_SIZES)))
        )
        if parsed.full:
            print("\n".join(report(grow_tars(Path(name), TAR_SIZES))))


if __name__ == "__main__":
    main()
