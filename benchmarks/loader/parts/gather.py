"""Ways to copy samples from a local file, one thread, page cache hot.

`python -m benchmarks.loader.parts.gather`

Samples begin where members of a tar archive do and differ in length. They are copied back to back
into shared memory, to several places in turn, as into the slots of a session. So no way finds its
source or its target in a processor cache.

A file that was written with long calls may be stored in huge pages and is mapped by them. A file
that was written piece by piece, as archives are, is stored in small ones. The ways differ in how
they profit from that.
"""

import ctypes
import mmap
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import cycle
from pathlib import Path

import numpy as np
import numpy.typing as npt
from gyre_daemon.storage.reads import gather
from gyre_daemon.workers.copy_workers import Ranges

FILE_BYTES, JOB_BYTES = 400 << 20, 4 << 20
PIECES = {"one long call": FILE_BYTES, "pieces of 10 KiB": 10 << 10}
SAMPLE_BYTES = (512, 2048, 10 << 10, 100 << 10)
BATCH_OFFSET_BYTES = 2048  # of the samples: their ids lie before them
NUM_ROUNDS, NUM_SLOTS, MAX_RANGES = 32, 8, 1024

Bytes = npt.NDArray[np.uint8]

_libc = ctypes.CDLL(None)
for _call in (_libc.process_vm_readv, _libc.process_vm_writev):
    _call.restype = ctypes.c_ssize_t
    _call.argtypes = [
        ctypes.c_int,
        ctypes.c_void_p,
        ctypes.c_ulong,
        ctypes.c_void_p,
        ctypes.c_ulong,
        ctypes.c_ulong,
    ]


@dataclass(frozen=True)
class Job:
    """Samples to copy: int64 [n] starts in the file, sizes, and starts in the target."""

    descriptor: int
    source: Bytes
    target: Bytes
    starts: npt.NDArray[np.int64]
    sizes: npt.NDArray[np.int64]
    places: npt.NDArray[np.int64]

    @property
    def addresses(self) -> tuple[npt.NDArray[np.uint64], npt.NDArray[np.uint64]]:
        """The addresses of both sides."""
        return tuple((memory.ctypes.data + at).astype(np.uint64) for memory, at in self._sides)  # type: ignore[return-value]

    @property
    def triples(self) -> list[tuple[int, int, int]]:
        """The same as Python integers: place, start, size."""
        return list(
            zip(self.places.tolist(), self.starts.tolist(), self.sizes.tolist(), strict=True)
        )

    @property
    def _sides(self) -> tuple[tuple[Bytes, npt.NDArray[np.int64]], ...]:
        return (self.source, self.starts), (self.target, self.places)


def by_preadv(job: Job) -> None:
    """A system call for each sample."""
    memory = job.target.data
    for place, start, size in job.triples:
        os.preadv(job.descriptor, [memory[place : place + size]], start)


def by_readv(job: Job) -> None:
    """One call pins the pages read."""
    for out_of, into in _ranges(job):
        _libc.process_vm_readv(
            os.getpid(), into.ctypes.data, len(into), out_of.ctypes.data, len(out_of), 0
        )


def by_writev(job: Job) -> None:
    """One call pins the pages written."""
    for out_of, into in _ranges(job):
        _libc.process_vm_writev(
            os.getpid(), out_of.ctypes.data, len(out_of), into.ctypes.data, len(into), 0
        )


def _ranges(job: Job) -> Iterator[tuple[npt.NDArray[np.uint64], npt.NDArray[np.uint64]]]:
    """Both sides of each call, uint64 [n, 2] of address and size; the target is one range."""
    out_of, into = (
        np.column_stack((begins, job.sizes)).astype(np.uint64) for begins in job.addresses
    )
    for begin in range(0, len(out_of), MAX_RANGES):
        some = out_of[begin : begin + MAX_RANGES]
        yield some, np.array([[into[begin, 0], some[:, 1].sum()]], np.uint64)


def by_gather(job: Job) -> None:
    """Copy as the daemon does without copy workers."""
    sources, targets = job.addresses
    assert gather(sources, job.sizes, targets) is None


def by_copy_worker(job: Job) -> None:
    """Copy as a copy worker does.

    Each sample is one copy from the mapping, which dies of SIGBUS if the file was truncated.
    """
    Ranges(np.zeros(1, np.int64), job.starts, job.sizes, job.places).copy(
        {0: job.source.data}, job.target.data
    )


def by_rows(job: Job) -> None:
    """Copy as a copy worker does if all samples are rows of a matrix.

    Here these are as many samples of the mean size, at about the same places of the file.
    """
    size = np.full(1, int(job.sizes.mean()), np.int64)
    starts, places = (
        job.starts // size * size,
        BATCH_OFFSET_BYTES + np.arange(len(job.starts)) * size,
    )
    Ranges(np.zeros(1, np.int64), starts, size, places).copy({0: job.source.data}, job.target.data)


WAYS: dict[str, Callable[[Job], None]] = {
    "preadv each": by_preadv,
    "process_vm_readv": by_readv,
    "process_vm_writev": by_writev,
    "gather": by_gather,
    "copy_worker": by_copy_worker,
    "copy worker, rows": by_rows,
}


def main() -> None:
    """Print samples/s of each way, side by side."""
    with tempfile.TemporaryDirectory(prefix="gyre-gather-") as folder:
        slots = _slots()
        for how, piece_bytes in PIECES.items():
            path = Path(folder) / "samples"
            _write(path, piece_bytes)
            print(f"written with {how}\nbytes per sample" + "".join(f"{name:>22}" for name in WAYS))
            with (
                path.open("rb") as file,
                mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ) as mapping,
            ):
                for size in SAMPLE_BYTES:
                    rates = _compare(file.fileno(), np.frombuffer(mapping, np.uint8), slots, size)
                    print(f"{size:16}" + "".join(f"{rate / 1e3:>21,.0f}k" for rate in rates))


def _compare(descriptor: int, source: Bytes, slots: list[Bytes], size: int) -> list[float]:
    """Return the median samples/s of each way, over interleaved rounds of different samples."""
    source[:: mmap.PAGESIZE].sum()  # every page is mapped
    generator, turns = np.random.default_rng(1), cycle(slots)
    count = JOB_BYTES // size
    times: dict[str, list[float]] = {name: [] for name in WAYS}
    for _ in range(NUM_ROUNDS):
        for name, way in WAYS.items():
            starts = generator.integers(0, (FILE_BYTES - 2 * size) // 512, count) * 512
            sizes = generator.integers(size * 4 // 5, size * 6 // 5, count)
            job = Job(
                descriptor,
                source,
                next(turns),
                starts,
                sizes,
                BATCH_OFFSET_BYTES + np.cumsum(sizes) - sizes,
            )
            began = time.perf_counter()
            way(job)
            times[name].append(time.perf_counter() - began)
    return [count / statistics.median(its) for its in times.values()]


def _write(path: Path, piece_bytes: int) -> None:
    data = np.random.default_rng(0).integers(0, 255, FILE_BYTES, dtype=np.uint8).data
    with path.open("wb", buffering=0) as file:
        for begin in range(0, FILE_BYTES, piece_bytes):
            file.write(data[begin : begin + piece_bytes])


def _slots() -> list[Bytes]:
    """Parts of one memory file, all of whose pages are allocated."""
    slot_bytes = 2 * JOB_BYTES
    descriptor = os.memfd_create("slots")
    os.ftruncate(descriptor, NUM_SLOTS * slot_bytes)
    memory = np.frombuffer(mmap.mmap(descriptor, NUM_SLOTS * slot_bytes), np.uint8)
    os.close(descriptor)
    memory[:] = 0
    return [memory[slot * slot_bytes : (slot + 1) * slot_bytes] for slot in range(NUM_SLOTS)]


if __name__ == "__main__":
    main()
