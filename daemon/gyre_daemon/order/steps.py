"""What steps read, once a plan has decided it: of one step, and of several successive ones. Plain values."""

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
        step: global step.
        epoch: of the global batch's first position.
        sample_ids: int64 [B], in the order of positions.
        mask: bool [B], false where a position is padding; None where the tail never pads.
    """

    step: int
    epoch: int
    sample_ids: Int64Array
    mask: npt.NDArray[np.bool_] | None


@dataclass(frozen=True, slots=True, eq=False)
class StripPlan(Sequence[BatchPlan]):
    """One rank's parts of K successive steps: a sequence of batch plans, of which a slice is a strip plan again.

    Attributes:
        first_step: global step of the first.
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
    def __getitem__(self, index: slice) -> "StripPlan": ...

    def __getitem__(self, index: int | slice) -> "BatchPlan | StripPlan":
        if isinstance(index, slice):
            mask = None if self.mask is None else self.mask[index]
            first_step = self.first_step + index.indices(len(self))[0]
            return StripPlan(first_step, self.sample_ids[index], mask, self.global_batch_size, self.epoch_length)
        step = self.first_step + range(len(self))[index]
        epoch = step * self.global_batch_size // self.epoch_length
        return BatchPlan(step, epoch, self.sample_ids[index], None if self.mask is None else self.mask[index])

    def __add__(self, later: "StripPlan") -> "StripPlan":
        mask = None if self.mask is None or later.mask is None else np.concatenate((self.mask, later.mask))
        ids = np.concatenate((self.sample_ids, later.sample_ids))
        return StripPlan(self.first_step, ids, mask, self.global_batch_size, self.epoch_length)
