"""This rank's part of the data, and whether all ranks read the same."""

import hashlib
import socket
from pathlib import Path

import torch.distributed as dist
from gyre_client import Loader

from gyre_trainer.comm.ring_registry import collective
from gyre_trainer.errors import DataRejected
from gyre_trainer.training.config import TrainConfig
from gyre_trainer.training.rank_context import RankContext


def require_one_place(cursor: bytes) -> None:
    """Check that all ranks read the same order of the same data, from the same place. Collective.

    Ranks of several nodes may have daemons of their own, whose shards differ.

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

    An evaluation is a job of its own: it may read the dataset that is trained on.
    """
    data = config.data
    return Loader(
        dataset,
        batch_size=data.batch_size,
        seed=seed,
        rank=context.rank,
        world_size=context.world_size,
        address=data.address or None,
        tail=data.tail,
        order=order,
        job=job_name(config.run.out, dataset, seed, is_evaluation=is_evaluation),
        prefetch_batches=data.prefetch_batches,
        device=context.device,
        format=data.format or None,
        options=data.options or None,
        skip_steps=None if is_evaluation else data.skip_steps,
        weights=None if is_evaluation else data.weights or None,
    )


def job_name(out: str, dataset: str, seed: int, *, is_evaluation: bool = False) -> str:
    """The job name for the daemon: the run directory's name, and a digest that sets it apart.

    A resumed run has the name of the run before, so that the daemon ends what is left of its
    sessions.
    """
    path = Path(out).absolute()
    identity = f"{socket.gethostname()}:{path}:{dataset}:{seed}"
    if is_evaluation:
        identity += ":evaluation"
    return f"{path.name}-{hashlib.sha256(identity.encode()).hexdigest()[:8]}"
