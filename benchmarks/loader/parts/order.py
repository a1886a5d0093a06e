"""The cost of a position: `python -m benchmarks.loader.parts.order`."""

import statistics
import time
from collections.abc import Callable

import numpy as np
import numpy.typing as npt
from gyre_daemon.order.permutation import (
    BlockOrder,
    Permutation,
    blocks_of_equal_samples,
    epoch_key,
)

NUM_ROUNDS = 15
SHARD_SAMPLES, SAMPLE_BYTES = 10**5 + 3, 2048


def main() -> None:
    """Print CPU time per position of a global shuffle and of blocks, by the length of runs."""
    for num_samples in (10**6, 10**9, 10**12):
        num_shards, rest = divmod(num_samples, SHARD_SAMPLES if num_samples < 10**12 else 10**9)
        counts = np.array([(num_samples - rest) // num_shards] * num_shards + [rest])
        full = Permutation(epoch_key(1, 2), num_samples)
        began = time.perf_counter()
        block = BlockOrder(1, 2, blocks_of_equal_samples(counts, SAMPLE_BYTES, 1 << 20), 1024)
        print(
            f"N = {num_samples:,}: {(time.perf_counter() - began) * 1e3:.1f} ms to prepare an "
            "epoch in blocks"
        )
        for length in (64, 4096, 65536):
            places = np.arange(length)
            rounds = [(_time(full, places), _time(block, places)) for _ in range(NUM_ROUNDS)]
            of_full, of_block = (
                statistics.median(times) / length * 1e9 for times in zip(*rounds, strict=True)
            )
            print(
                f"  {length:>6,} positions: full {of_full:8.1f} ns each, block {of_block:8.1f} "
                "ns each"
            )


def _time(order: Callable[[npt.NDArray[np.int64]], object], places: npt.NDArray[np.int64]) -> float:
    began = time.process_time()
    order(places)
    return time.process_time() - began


if __name__ == "__main__":
    main()
