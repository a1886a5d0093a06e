"""What a position costs: `python -m benchmarks.loader.order`."""

import statistics
import time

import numpy as np
from gyre_daemon.permutation import Permutation, epoch_key

NUM_ROUNDS = 15


def main() -> None:
    """Print ns per position for blocks of several lengths."""
    for num_samples in (10**6, 10**9, 10**12):
        permutation = Permutation(epoch_key(1, 2), num_samples)
        for length in (64, 4096, 65536):
            places = np.arange(length)
            times = []
            for _ in range(NUM_ROUNDS):
                began = time.perf_counter()
                permutation(places)
                times.append(time.perf_counter() - began)
            print(f"N = {num_samples:<16,} block {length:<8,} {statistics.median(times) / length * 1e9:9.1f} ns per position")


if __name__ == "__main__":
    main()
