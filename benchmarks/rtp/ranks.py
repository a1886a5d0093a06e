"""Real ranks, one per core or per GPU, for a function that every rank runs."""

import datetime
import multiprocessing
import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

_TIMEOUT = datetime.timedelta(minutes=5)


def run_on_ranks(
    num_ranks: int, program: Callable[..., Any], *args: Any, device: str = "cpu"
) -> list[Any]:
    """The result of ``program(*args)`` on each rank.

    Each rank has one thread, on a core of its own as long as there are enough. With "cuda" it has
    a GPU of its own, and the ranks use NCCL instead of gloo.
    """
    with tempfile.TemporaryDirectory() as folder:
        context = multiprocessing.get_context("spawn")
        with context.Pool(num_ranks) as pool:
            tasks = [
                (rank, num_ranks, Path(folder) / "store", device, program, args)
                for rank in range(num_ranks)
            ]
            return pool.starmap(_serve, tasks, chunksize=1)


def _serve(
    rank: int,
    num_ranks: int,
    store: Path,
    device: str,
    program: Callable[..., Any],
    args: tuple[Any, ...],
) -> Any:
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {cores[rank % len(cores)]})
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    if device == "cuda":
        torch.cuda.set_device(rank)
    backend = "nccl" if device == "cuda" else "gloo"
    dist.init_process_group(
        backend, init_method=f"file://{store}", rank=rank, world_size=num_ranks, timeout=_TIMEOUT
    )
    try:
        return program(*args)
    finally:
        dist.destroy_process_group()
