"""Three ways of copying a batch to a GPU.

They are a plain copy, a copy through pinned memory on a stream of its own, and a copy from an arena
that is registered with CUDA.

    python -m benchmarks.loader.parts.device

All ways run in one process, interleaved; the results are medians. Each step copies a batch and
computes on the device for about as long as the plain copy takes. Without a GPU the script says so
and measures nothing.

Registering with CUDA pins the arena's pages. A private mapping cannot be registered: pinning it for
writing would give it copies of its pages, which the daemon never fills again. So the arena is
mapped a second time, shared and read-only, which its seals allow, and registered with
`cudaHostRegisterReadOnly`. If a driver cannot do that, its row reads `missing`.
"""

import fcntl
import mmap
import os
import statistics
import sys
import time
from collections.abc import Callable, Mapping

import numpy as np
import numpy.typing as npt
import torch
from gyre_client.batches.stream import CudaTransfer

SIZES_BYTES = (1 << 20, 8 << 20, 64 << 20)
NUM_SLOTS = 4
NUM_STEPS, NUM_ROUNDS = 40, 5
F_SEAL_FUTURE_WRITE = 0x10
CUDA_HOST_REGISTER_READ_ONLY = 8  # driver_types.h

Memory = npt.NDArray[np.uint8]
Way = Callable[[Memory], torch.Tensor]


def arena(num_bytes: int) -> tuple[list[Memory], list[Memory]]:
    """The slots of a sealed memory file, mapped privately as by a client, and shared read-only."""
    descriptor = os.memfd_create("gyre-benchmark", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.posix_fallocate(descriptor, 0, num_bytes * NUM_SLOTS)
    filling = mmap.mmap(descriptor, num_bytes * NUM_SLOTS)
    np.frombuffer(filling, np.uint8)[:] = 7
    fcntl.fcntl(
        descriptor, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | F_SEAL_FUTURE_WRITE
    )
    private = mmap.mmap(
        descriptor,
        num_bytes * NUM_SLOTS,
        flags=mmap.MAP_PRIVATE,
        prot=mmap.PROT_READ | mmap.PROT_WRITE,
    )
    shared = mmap.mmap(
        descriptor, num_bytes * NUM_SLOTS, flags=mmap.MAP_SHARED, prot=mmap.PROT_READ
    )
    os.close(descriptor)
    return slots(private, num_bytes), slots(shared, num_bytes)


def slots(mapping: mmap.mmap, num_bytes: int) -> list[Memory]:
    return [
        np.frombuffer(mapping, np.uint8, num_bytes, slot * num_bytes) for slot in range(NUM_SLOTS)
    ]


def register(memory: list[Memory]) -> str:
    """Pin the slots' pages for the device; return the driver's error, or nothing."""
    num_bytes = sum(map(len, memory))
    runtime = torch.cuda.cudart()  # type: ignore[no-untyped-call]
    outcome = runtime.cudaHostRegister(
        memory[0].ctypes.data, num_bytes, CUDA_HOST_REGISTER_READ_ONLY
    )
    return "" if int(outcome) == 0 else str(outcome)


def unregister(memory: list[Memory]) -> None:
    torch.cuda.cudart().cudaHostUnregister(memory[0].ctypes.data)  # type: ignore[no-untyped-call]


def plain(memory: Memory) -> torch.Tensor:
    return torch.from_numpy(memory).to("cuda")


def through_pinned(device: torch.device) -> Way:
    transfer = CudaTransfer(device)
    return lambda memory: transfer.begin(memory)()


def from_registered(device: torch.device) -> Way:
    stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def copy(memory: Memory) -> torch.Tensor:
        with torch.cuda.stream(stream):
            payload = torch.empty(len(memory), dtype=torch.uint8, device=device)
            payload.copy_(torch.from_numpy(memory), non_blocking=True)
        current = torch.cuda.current_stream(device)
        current.wait_stream(stream)
        payload.record_stream(current)
        return payload

    return copy


def run(way: Way, memory: list[Memory], compute: Callable[[], None]) -> float:
    """Return seconds per step; the next batch's copy begins before this one's computation."""
    torch.cuda.synchronize()
    began = time.perf_counter()
    following = way(memory[0])
    for step in range(1, NUM_STEPS + 1):
        batch, following = following, way(memory[step % NUM_SLOTS])
        batch.view(torch.int64)[:1024].sum()
        compute()
    torch.cuda.synchronize()
    return (time.perf_counter() - began) / NUM_STEPS


def compute_for(seconds: float) -> Callable[[], None]:
    """A computation on the device that takes about `seconds`."""
    matrix = torch.rand(2048, 2048, device="cuda")
    matrix @ matrix
    torch.cuda.synchronize()
    began = time.perf_counter()
    for _ in range(20):
        matrix @ matrix
    torch.cuda.synchronize()
    num_products = max(1, round(seconds * 20 / (time.perf_counter() - began)))

    def compute() -> None:
        for _ in range(num_products):
            matrix @ matrix

    return compute


def measure(num_bytes: int) -> Mapping[str, float | str]:
    """Return seconds per step of each way, or why it is missing."""
    device = torch.device("cuda", torch.cuda.current_device())
    private, shared = arena(num_bytes)
    copy_s = run(plain, private, lambda: None)
    compute = compute_for(copy_s)
    ways: dict[str, tuple[Way, list[Memory]]] = {
        "plain": (plain, private),
        "pinned": (through_pinned(device), private),
    }
    complaint = register(shared)
    if not complaint:
        ways["registered"] = (from_registered(device), shared)
    times: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(NUM_ROUNDS):
        for name, (way, memory) in ways.items():
            times[name].append(run(way, memory, compute))
    if not complaint:
        torch.cuda.synchronize()
        unregister(shared)
    medians: dict[str, float | str] = {
        name: statistics.median(seconds) for name, seconds in times.items()
    }
    return medians if not complaint else {**medians, "registered": complaint}


def main() -> int:
    if not torch.cuda.is_available():
        print("missing: torch sees no CUDA device here, so nothing was measured")
        return 1
    print(
        f"{torch.cuda.get_device_name()}, torch {torch.__version__}; ms per step of one copy and "
        "as much computation\n"
    )
    print(f"{'BATCH':>8}  {'WAY':<10}  {'MS':>8}  {'OF PLAIN':>8}")
    for num_bytes in SIZES_BYTES:
        found = measure(num_bytes)
        for name, seconds in found.items():
            if isinstance(seconds, str):
                print(f"{num_bytes >> 20:>4} MiB  {name:<10}  missing: {seconds}")
            else:
                print(
                    f"{num_bytes >> 20:>4} MiB  {name:<10}  {seconds * 1e3:>8.3f}  "
                    f"{seconds / float(found['plain']):>8.2f}"
                )
    return 0


if __name__ == "__main__":
    sys.exit(main())
