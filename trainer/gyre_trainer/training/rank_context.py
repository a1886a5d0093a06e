"""One rank's part in a job: its device, its share of the machine, and the ring that it is on."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from gyre_trainer.errors import ConfigError, RingError
from gyre_trainer.rotate import make_mesh
from gyre_trainer.training.config import RunConfig


@dataclass(frozen=True, slots=True)
class RankContext:
    """The rank that this process is."""

    rank: int
    world_size: int
    device: torch.device
    mesh: DeviceMesh


@contextmanager
def join_job(run: RunConfig, *, tf32: bool = False) -> Iterator[RankContext]:
    """A context in which this rank is connected to the others.

    The environment names them (RANK, WORLD_SIZE, LOCAL_RANK, ...).

    Raises:
        ConfigError: the device that the configuration asks for does not exist.
        RingError: the other ranks cannot be reached.
    """
    device = _device(run.device)
    if device.type == "cuda":
        torch.cuda.set_device(device)
        if tf32:
            torch.set_float32_matmul_precision("high")
    else:
        torch.set_num_threads(run.threads or max(1, _num_cores() // _local_world_size()))
    try:
        dist.init_process_group(
            "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo",
            timeout=timedelta(seconds=run.timeout_s),
            # the communicator is made here, by all ranks, and not by the first that needs it
            device_id=device if device.type == "cuda" else None,
        )
    except (RuntimeError, ValueError, OSError) as error:
        raise RingError(
            f"rank {os.environ['RANK']} cannot join the other ranks at "
            f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}: {_first_line(error)}"
        ) from error
    mesh = make_mesh(device.type, replicate=run.replicas)
    yield RankContext(dist.get_rank(), dist.get_world_size(), device, mesh)
    dist.destroy_process_group()  # not after an exception: it would wait for ranks that are gone


def peak_memory_bytes(device: torch.device) -> int:
    """The most memory that this rank has held: in CUDA's allocator, or resident on the CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    # Not getrusage: its maximum is inherited from the process that started this one.
    status = Path("/proc/self/status").read_text(encoding="ascii")
    return next(
        int(line.split()[1]) * 1024 for line in status.splitlines() if line.startswith("VmHWM:")
    )


def _local_world_size() -> int:
    return int(os.environ.get("LOCAL_WORLD_SIZE", "1"))


def _first_line(error: Exception) -> str:
    """Torch's message, without the stack of its own functions."""
    return (str(error).splitlines() or [type(error).__name__])[0]


def _num_cores() -> int:
    return len(os.sched_getaffinity(0))


def _device(wanted: str) -> torch.device:
    num_devices = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if wanted == "cpu" or (wanted == "auto" and num_devices < _local_world_size()):
        return torch.device("cpu")
    if num_devices < _local_world_size():
        raise ConfigError(
            f"`run.device` is cuda, but {_local_world_size()} ranks share {num_devices} "
            "CUDA devices; each needs its own"
        )
    return torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
