"""What a rank reads in one step, and in several successive ones. Plain values."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import overload

import numpy as np
import numpy.typing as npt

from gyre_daemon.order.permutation import Int64Array


@dataclass(frozen=True, slots=True)
class BatchPlan:
    """The samples of one rank's part of one step.

    Attributes:
        step: the global step.
        epoch: of the global batch's first position.
        sample_ids: int64 [B], in the order of positions.
        mask: bool [B], false at padding; None if the tail never pads.
    """

    step: int
    epoch: int
    sample_ids: Int64Array
    mask: npt.NDArray[np.bool_] | None


@dataclass(frozen=True, slots=True, eq=False)
class GroupPlan(Sequence[BatchPlan]):
    """One rank's parts of K successive steps: a sequence of batch plans.

    A slice of it is a group plan too.

    Attributes:
        first_step: the first global step.
        sample_ids: int64 [K, B].
        mask: bool [K, B]; see `BatchPlan`.
        global_batch_size: G.
        epoch_length: in positions.
    """

    first_step: int
    sample_ids: Int64Array
    mask: npt.NDArray[np.bool_] | None
    global_batch_size: int
    epoch_length: int

    @property
    def stop_step(self) -> int:
        """The step behind the last."""
        return self.first_step + len(self.sample_ids)

    def __len__(self) -> int:
        return len(self.sample_ids)

    @overload
    def __getitem__(self, index: int) -> BatchPlan: ...

    @overload
    def __getitem__(self, index: slice) -> "GroupPlan": ...

    def __getitem__(self, index: int | slice) -> "BatchPlan | GroupPlan":
        sample_ids, mask = self.sample_ids[index], None if self.mask is None else self.mask[index]
        size, length = self.global_batch_size, self.epoch_length
        if isinstance(index, slice):
            first_step = self.first_step + index.indices(len(self))[0]
            return GroupPlan(first_step, sample_ids, mask, size, length)
        step = self.first_step + range(len(self))[index]
        return BatchPlan(step, step * size // length, sample_ids, mask)

    def __add__(self, later: "GroupPlan") -> "GroupPlan":
        mask = None
        if self.mask is not None and later.mask is not None:
            mask = np.concatenate((self.mask, later.mask))
        ids = np.concatenate((self.sample_ids, later.sample_ids))
        return GroupPlan(self.first_step, ids, mask, self.global_batch_size, self.epoch_length)
