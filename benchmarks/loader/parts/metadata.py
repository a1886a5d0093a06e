"""Memory of batch metadata: `python -m benchmarks.loader.parts.metadata`.

Many sessions read very small samples, whose metadata is largest: as many sessions as the budget
holds, a hundred at most. Each reads its window several times. The metadata is the daemon's own
memory without arenas and without its earlier memory.
"""

import tarfile
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path

import numpy as np
from gyre_client import GyreError, Loader
from gyre_client.transport.channel import parse_address
from gyre_client.transport.connection import Connection

from benchmarks.loader.markdown import table
from benchmarks.loader.processes import Daemon, arena_bytes, daemon

MAX_SESSIONS = 100
NUM_TURNS, TURN_BATCHES = 2, 600
_MIB = 1 << 20


@dataclass(frozen=True)
class _Crowd:
    dataset: str
    batch_size: int
    about: str


CROWDS = (
    _Crowd("tokens", 64, "tokens, 16 bytes, batch 64"),
    _Crowd("tokens", 1, "tokens, 16 bytes, batch 1"),
    _Crowd("tar", 1024, "tar, three fields of 8 bytes, batch 1,024"),
    _Crowd("tar", 64, "tar, three fields of 8 bytes, batch 64"),
    _Crowd("tar", 1, "tar, three fields of 8 bytes, batch 1"),
)


def main() -> None:
    """Print the table."""
    head = (
        "samples",
        "sessions",
        "arenas, MiB",
        "reserved for metadata, MiB",
        "metadata, MiB",
        "peak over the budget, MiB",
    )
    with tempfile.TemporaryDirectory(prefix="gyre-bench-") as name:
        datasets = _datasets(Path(name))
        rows = []
        for crowd in CROWDS:
            with daemon(Path(name), datasets) as server:
                rows.append((crowd.about, *_measured(crowd, server)))
    print("\n".join(table(head, rows)))


def _datasets(folder: Path) -> dict[str, dict[str, object]]:
    np.arange(4_000_000, dtype="<u4").tofile(folder / "tokens.bin")
    with tarfile.open(folder / "small.tar", "w") as tar:
        for number in range(20_000):
            for field in ("a.bin", "b.bin", "c.bin"):
                entry = tarfile.TarInfo(f"{number:06d}.{field}")
                entry.size = 8
                tar.addfile(entry, BytesIO(bytes(8)))
    tokens = {
        "uri": str(folder / "tokens.bin"),
        "format": "tokens",
        "dtype": "uint32",
        "sequence_length": 4,
    }
    return {"tokens": tokens, "tar": {"uri": str(folder / "small.tar"), "format": "webdataset"}}


def _measured(crowd: _Crowd, server: Daemon) -> tuple[str, ...]:
    before = server.memory_bytes()
    with ExitStack() as stack:
        loaders = list(_opened(crowd, server, stack))
        for _ in range(NUM_TURNS):
            for loader in loaders:
                for _ in range(TURN_BATCHES):
                    next(loader)
        with Connection(parse_address(server.address)) as connection:
            reserved = connection.status().memory_reserved_bytes
        arenas, grown = arena_bytes(server.pid), server.memory_bytes() - before
        sizes = (arenas, reserved - arenas, grown - arenas, server.peak_bytes - server.budget_bytes)
        return str(len(loaders)), *(f"{size / _MIB:,.0f}" for size in sizes)


def _opened(crowd: _Crowd, server: Daemon, stack: ExitStack) -> Iterator[Loader]:
    """Open as many sessions as there is memory for, each with an order of its own."""
    for seed in range(MAX_SESSIONS):
        loader = Loader(
            crowd.dataset,
            batch_size=crowd.batch_size,
            seed=seed,
            job=f"job {seed}",
            address=server.address,
            reattach_timeout_s=0.1,
        )
        try:
            next(loader)
        except GyreError:
            loader.close()
            return
        yield stack.enter_context(loader)


if __name__ == "__main__":
    main()
