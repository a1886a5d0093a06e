"""The figures of each rank's steps, gathered in one small collective for several steps."""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist
from torch import Tensor


@dataclass(frozen=True, slots=True)
class GlobalStep:
    """One step of the whole job.

    Attributes:
        loss: the mean over all targets, in nats.
        num_targets: targets of all ranks.
        elapsed_s: seconds since the end of the previous step, on rank 0.
        data_wait_s: seconds that the slowest rank waited for its batch.
        sample_ids: ids of the global batch, in the order of their positions, padding included.
        epoch: the epoch in which the step begins.
    """

    loss: float
    num_targets: int
    elapsed_s: float
    data_wait_s: float
    sample_ids: npt.NDArray[np.int64]
    epoch: int


@dataclass(frozen=True, slots=True)
class StepTimes:
    """How long one step took on one rank, and how much of that the rank waited for its batch."""

    elapsed_s: float
    data_wait_s: float


class StepStats:
    """The figures of one rank's steps since the last `gather`; as many steps on every rank."""

    def __init__(self) -> None:
        self._losses: list[Tensor] = []
        self._figures: list[list[float]] = []
        self._ids: list[Tensor] = []
        self._epochs: list[int] = []

    def add(
        self,
        loss_sum: Tensor,
        times: StepTimes,
        num_targets: int,
        batch: Mapping[str, Tensor],
        epoch: int,
    ) -> None:
        """Add a step of this rank.

        Args:
            loss_sum: a scalar on any device, summed over this rank's targets; this call does not
                wait for it.
            times: the times of this step on this rank.
            num_targets: the number of targets that the sum is over.
            batch: the loader's batch, on any device, of equal size on every rank.
            epoch: the epoch in which the step begins, the same on every rank.
        """
        self._epochs.append(epoch)
        self._losses.append(loss_sum.detach().double())
        self._figures.append([num_targets, times.elapsed_s, times.data_wait_s])
        self._ids.append(batch["sample_id"].long())

    def gather(self) -> list[GlobalStep]:
        """All ranks' figures, step by step; collective. Afterwards none are left here."""
        losses = _all_gather(torch.stack(self._losses).cpu())
        figures = _all_gather(torch.tensor(self._figures, dtype=torch.float64))
        ids = _all_gather(torch.stack(self._ids).cpu())
        epochs = self._epochs
        self._losses, self._figures, self._ids, self._epochs = [], [], [], []
        return [
            _combine(losses[:, step], figures[:, step], ids[:, step], epoch)
            for step, epoch in enumerate(epochs)
        ]


def _all_gather(mine: Tensor) -> Tensor:
    """The tensors of all ranks, stacked in the order of their ranks."""
    everyone = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
    dist.all_gather(everyone, mine)
    return torch.stack(everyone)


def _combine(losses: Tensor, figures: Tensor, ids: Tensor, epoch: int) -> GlobalStep:
    """One step from losses [W], figures [W, 3] and sample ids [W, B]."""
    counts, elapsed, waits = figures.unbind(1)
    return GlobalStep(
        loss=float(losses.sum() / counts.sum().clamp(min=1)),
        num_targets=int(counts.sum()),
        elapsed_s=float(elapsed[0]),
        data_wait_s=float(waits.max()),
        sample_ids=ids.numpy().reshape(-1),
        epoch=epoch,
    )
