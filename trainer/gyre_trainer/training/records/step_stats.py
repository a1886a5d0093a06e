"""What each rank noted of its steps, brought together on all ranks: one small collective per several steps."""

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
        loss: mean over all targets.
        elapsed_s: on rank 0.
        data_wait_s: of the rank that waited longest.
        sample_ids: of the global batch, in the order of their positions, padding included.
        is_padding: of each; padding repeats samples for the sake of equal shapes.
    """

    loss: float
    num_targets: int
    elapsed_s: float
    data_wait_s: float
    sample_ids: npt.NDArray[np.int64]
    is_padding: npt.NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class StepTimes:
    """Of one step on one rank: how long it took, and how much of that went by waiting for its batch."""

    elapsed_s: float
    data_wait_s: float


class StepStats:
    """Notes of one rank since the last gathering; the same number of steps on every rank."""

    def __init__(self) -> None:
        self._losses: list[Tensor] = []
        self._figures: list[list[float]] = []
        self._ids: list[Tensor] = []

    def add(self, loss_sum: Tensor, times: StepTimes, num_targets: int, batch: Mapping[str, Tensor]) -> None:
        """Note a step of this rank.

        Args:
            loss_sum: a scalar on any device, summed over this rank's targets; it is not waited for here.
            times: on this rank.
            num_targets: that the sum is over.
            batch: as the loader gave it, on any device, of equal size on every rank.
        """
        mask = batch.get("mask")
        padding = torch.zeros_like(batch["sample_id"]) if mask is None else ~mask
        self._losses.append(loss_sum.detach().double())
        self._figures.append([num_targets, times.elapsed_s, times.data_wait_s])
        self._ids.append(torch.stack([batch["sample_id"].long(), padding.long()]))

    def gather(self) -> list[GlobalStep]:
        """All ranks' notes, step by step; collective. Nothing is left noted."""
        losses = _all_gather(torch.stack(self._losses).cpu())
        figures = _all_gather(torch.tensor(self._figures, dtype=torch.float64))
        ids = _all_gather(torch.stack(self._ids).cpu())
        self._losses, self._figures, self._ids = [], [], []
        return [_combine(losses[:, step], figures[:, step], ids[:, step]) for step in range(losses.shape[1])]


def _all_gather(mine: Tensor) -> Tensor:
    """The tensors of all ranks, stacked in the order of their ranks."""
    everyone = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
    dist.all_gather(everyone, mine)
    return torch.stack(everyone)


def _combine(losses: Tensor, figures: Tensor, ids_and_padding: Tensor) -> GlobalStep:
    """One step of losses [W], figures [W, 3], and ids with their padding [W, 2, B]."""
    counts, elapsed, waits = figures.unbind(1)
    ids = ids_and_padding.numpy()
    return GlobalStep(
        loss=float(losses.sum() / counts.sum().clamp(min=1)),
        num_targets=int(counts.sum()),
        elapsed_s=float(elapsed[0]),
        data_wait_s=float(waits.max()),
        sample_ids=ids[:, 0].reshape(-1),
        is_padding=ids[:, 1].reshape(-1).astype(bool),
    )
