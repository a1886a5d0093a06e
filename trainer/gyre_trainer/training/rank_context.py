"""One rank's part in a job: its device, its share of the machine, and the ring that it is on.

This rank's part of the data, and whether all ranks read the same.
"""

import hashlib
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from gyre_client import Loader
from torch.distributed.device_mesh import DeviceMesh

from gyre_trainer.comm.ring import collective
from gyre_trainer.errors import ConfigError, DataRejected, RingError
from gyre_trainer.rotate import make_mesh
from gyre_trainer.training.config import RunConfig, TrainConfig


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
        num_cores = len(os.sched_getaffinity(0))
        torch.set_num_threads(run.threads or max(1, num_cores // _local_world_size()))
    try:
        dist.init_process_group(
            "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo",
            timeout=timedelta(seconds=run.timeout_s),
            # the communicator is made here, by all ranks, and not by the first that needs it
            device_id=device if device.type == "cuda" else None,
        )
    except (RuntimeError, ValueError, OSError) as error:
        told, *_ = f"{error}\n".splitlines()  # without the stack of torch's own functions
        raise RingError(
            f"rank {os.environ['RANK']} cannot join the other ranks at "
            f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}: {told}"
        ) from error
    mesh = make_mesh(device.type, replicate=run.replicas)
    yield RankContext(dist.get_rank(), dist.get_world_size(), device, mesh)
    dist.destroy_process_group()  # not after an exception: it would wait for lost ranks


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


def require_one_place(cursor: bytes) -> None:
    """Check that all ranks read the same order of the same data, from the same place. Collective.

    Ranks of several nodes may have one daemon each, whose shards differ.

    Raises:
        DataRejected: on every rank: the cursor of some rank is another one; the message names the
            ranks that differ from most.
    """
    everyone = [b""] * dist.get_world_size()
    with collective("the places of all ranks in the data"):
        dist.all_gather_object(everyone, cursor)
    usual = max(everyone, key=everyone.count)
    others = [str(rank) for rank, each in enumerate(everyone) if each != usual]
    if others:
        raise DataRejected(
            f"{'rank' if len(others) == 1 else 'ranks'} {', '.join(others)} would read other data, "
            "or from another place, than most ranks: their daemons have other shards of the "
            "dataset, or another configuration of it. Compare `gyre describe` at their addresses."
        )


def open_loader(
    config: TrainConfig,
    context: RankContext,
    dataset: str,
    seed: int,
    *,
    is_evaluation: bool = False,
    order: str = "full",
) -> Loader:
    """This rank's part of a stream of global batches.

    An evaluation is a job of its own: it may read the training dataset. Batches are in
    the host's memory, so that checks of them do not wait for a device.
    """
    data, out = config.data, Path(config.run.out).absolute()
    of_what = ":evaluation" if is_evaluation else ""
    identity = f"{socket.gethostname()}:{out}:{dataset}:{seed}{of_what}"
    digest = hashlib.sha256(identity.encode()).hexdigest()[:8]
    return Loader(
        dataset,
        batch_size=data.batch_size,
        seed=seed,
        rank=context.rank,
        world_size=context.world_size,
        address=data.address or None,
        tail=data.tail,
        order=order,
        # of a resumed run that of the run before, so the daemon ends its open sessions
        job=f"{out.name}-{digest}",
        prefetch_batches=data.prefetch_batches,
        format=data.format or None,
        options=data.options or None,
        skip_steps=None if is_evaluation else data.skip_steps,
        weights=None if is_evaluation else data.weights or None,
    )
