"""The most that two processes can do.

One copies batches of a file into shared memory, and the other reads them. The transport of large
batches is compared with this: no daemon can be faster on this machine at this moment.
"""

import contextlib
import mmap
import os
import socket
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import torch

from benchmarks.loader.processes import cpu_s
from benchmarks.loader.readers import touch

_WARMUP_BATCHES = 64


def bare_copy(
    path: Path, batch_bytes: int, num_slots: int, duration_s: float
) -> tuple[float, float]:
    """Return bytes/s, and CPU seconds of the copying process per 10^9 bytes."""
    ring = os.memfd_create("ring")
    os.ftruncate(ring, num_slots * batch_bytes)
    ours, theirs = socket.socketpair()
    arguments = [str(path), str(batch_bytes), str(num_slots), str(ring), str(theirs.fileno())]
    command = [sys.executable, "-m", "benchmarks.loader.parts.bare", *arguments]
    with (
        subprocess.Popen(command, pass_fds=[ring, theirs.fileno()]) as process,
        ours,
        mmap.mmap(ring, num_slots * batch_bytes) as mapping,
    ):
        theirs.close()
        os.close(ring)
        batches = torch.frombuffer(mapping, dtype=torch.int32).view(num_slots, -1)
        num_ready = num_read = 0
        began = cpu_before = 0.0
        while not began or time.perf_counter() - began < duration_s:
            while not num_ready:
                num_ready += len(ours.recv(num_slots))
            touch(batches[num_read % num_slots])
            ours.send(b"r")
            num_ready -= 1
            num_read += 1
            if num_read == _WARMUP_BATCHES and not began:
                num_read, cpu_before, began = 0, cpu_s([process.pid]), time.perf_counter()
        elapsed_s, cpu = time.perf_counter() - began, cpu_s([process.pid]) - cpu_before
        ours.shutdown(socket.SHUT_RDWR)
        del batches
    return num_read * batch_bytes / elapsed_s, cpu / (num_read * batch_bytes) * 1e9


def main() -> None:
    """Copy batch after batch, in some order, as slots become free, until the reader hangs up."""
    batch_bytes, num_slots, ring, connection = map(int, sys.argv[2:])
    with Path(sys.argv[1]).open("rb") as file:
        mapping = mmap.mmap(
            file.fileno(), 0, flags=mmap.MAP_SHARED | mmap.MAP_POPULATE, prot=mmap.PROT_READ
        )
    source = np.frombuffer(mapping, np.uint8).reshape(-1, batch_bytes)
    target = np.frombuffer(mmap.mmap(ring, num_slots * batch_bytes), np.uint8).reshape(
        num_slots, batch_bytes
    )
    order = np.random.default_rng(0).permutation(len(source)).tolist()
    num_free, num_copied = num_slots, 0
    with socket.socket(fileno=connection) as reader, contextlib.suppress(BrokenPipeError):
        while True:
            if not num_free:
                num_free = len(reader.recv(num_slots))
            if not num_free:
                return
            np.copyto(target[num_copied % num_slots], source[order[num_copied % len(source)]])
            reader.send(b"c")
            num_free -= 1
            num_copied += 1


if __name__ == "__main__":
    main()
