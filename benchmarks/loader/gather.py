"""Ways to copy samples out of a local file, one thread, page cache hot: `python -m benchmarks.loader.gather`."""

import mmap
import os
import statistics
import tempfile
import time
from collections.abc import Callable

import numpy as np
from gyre_daemon.storage.gather import gather

FILE_BYTES = 400 << 20
NUM_ROUNDS = 7


def main() -> None:
    """Print samples/s of each way, side by side."""
    with tempfile.NamedTemporaryFile(prefix="gyre-gather-") as file:
        np.random.default_rng(0).integers(0, 255, FILE_BYTES, dtype=np.uint8).tofile(file.name)
        mapping = mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ)
        print("bytes per sample   preadv each   process_vm_readv   ratio   np.take (unsafe)")
        for size in (512, 2048, 10 << 10, 100 << 10):
            one_by_one, by_kernel, by_numpy = compare(file.fileno(), np.frombuffer(mapping, np.uint8), size)
            ratio = by_kernel / one_by_one
            print(f"{size:16} {one_by_one / 1e3:12,.0f}k {by_kernel / 1e3:17,.0f}k {ratio:7.2f} {by_numpy / 1e3:17,.0f}k")


def compare(descriptor: int, source: np.ndarray[tuple[int], np.dtype[np.uint8]], size: int) -> list[float]:
    """Median samples/s of each way, rounds interleaved."""
    count = max(512, min(8192, (64 << 20) // size))
    starts = np.random.default_rng(1).integers(0, FILE_BYTES // size, count) * size
    target = np.zeros(count * size, np.uint8)
    places = np.arange(count) * size

    def one_by_one() -> None:
        memory = target.data
        for place, start in zip(places.tolist(), starts.tolist(), strict=True):
            os.preadv(descriptor, [memory[place : place + size]], start)

    def by_kernel() -> None:
        addresses = (source.ctypes.data + starts).astype(np.uint64), (target.ctypes.data + places).astype(np.uint64)
        assert gather(addresses[0], np.full(count, size), addresses[1]) is None

    def by_numpy() -> None:
        np.take(source[: FILE_BYTES // size * size].reshape(-1, size), starts // size, 0, target.reshape(count, size), "clip")

    times: dict[Callable[[], None], list[float]] = {one_by_one: [], by_kernel: [], by_numpy: []}
    for _ in range(NUM_ROUNDS):
        for way, its in times.items():
            began = time.perf_counter()
            way()
            its.append(time.perf_counter() - began)
    return [count / statistics.median(its) for its in times.values()]


if __name__ == "__main__":
    main()
