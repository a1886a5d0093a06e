"""The samples of a rank in one step, and in several successive ones. Plain values."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, overload

import numpy as np
import numpy.typing as npt

from gyre_daemon.order.shuffle.permutation import Int64Array


@dataclass(frozen=True, slots=True)
class BatchPlan:
    """The samples of one rank's part of one step.

    Attributes:
        step: the global step, counted as the planner counts.
        epoch: of the global batch's first position.
        sample_ids: int64 [B], in the order of positions.
        mask: bool [B], false at padding; None if the tail never pads.
    """

    step: int
    epoch: int
    sample_ids: Int64Array
    mask: npt.NDArray[np.bool_] | None


class Placed(NamedTuple):
    """The samples at n positions.

    Attributes:
        sample_ids: int64 [n].
        mask: bool [n], false at padding; None if the tail never pads.
        is_substitute: bool [n], which stand in for corrupt ones; None if none does.
    """

    sample_ids: Int64Array
    mask: npt.NDArray[np.bool_] | None
    is_substitute: npt.NDArray[np.bool_] | None


@dataclass(frozen=True, slots=True, eq=False)
class GroupPlan(Sequence[BatchPlan]):
    """One rank's parts of K successive steps: a sequence of batch plans.

    A slice of it is a group plan too.

    Attributes:
        first_step: the first global step.
        sample_ids: int64 [K, B].
        mask: bool [K, B]; see `BatchPlan`.
        epochs: int64 [K], in which each step begins.
        is_substitute: bool [K, B], which samples stand in for corrupt ones; None if none is.
    """

    first_step: int
    sample_ids: Int64Array
    mask: npt.NDArray[np.bool_] | None
    epochs: Int64Array
    is_substitute: npt.NDArray[np.bool_] | None = None

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
        if isinstance(index, slice):
            first_step = self.first_step + index.indices(len(self))[0]
            replaced = None if self.is_substitute is None else self.is_substitute[index]
            return GroupPlan(first_step, sample_ids, mask, self.epochs[index], replaced)
        step = self.first_step + range(len(self))[index]
        return BatchPlan(step, int(self.epochs[index]), sample_ids, mask)

    def __add__(self, later: "GroupPlan") -> "GroupPlan":
        return GroupPlan(
            self.first_step,
            np.concatenate((self.sample_ids, later.sample_ids)),
            _joined(self.mask, later.mask),
            np.concatenate((self.epochs, later.epochs)),
            _joined(self.is_substitute, later.is_substitute),
        )

    def rearranged(self, which: Int64Array) -> "GroupPlan":
        """Other samples of the same steps; `which` is int64 [K, n], their numbers in each batch."""

        def taken(values: npt.NDArray[np.bool_] | None) -> npt.NDArray[np.bool_] | None:
            return None if values is None else np.take_along_axis(values, which, axis=1)

        return GroupPlan(
            self.first_step,
            np.take_along_axis(self.sample_ids, which, axis=1),
            taken(self.mask),
            self.epochs,
            taken(self.is_substitute),
        )

    @property
    def num_substitutes(self) -> int:
        """How many samples stand in for corrupt ones; padding does not count."""
        if self.is_substitute is None:
            return 0
        counted = self.is_substitute if self.mask is None else self.is_substitute & self.mask
        return int(np.count_nonzero(counted))


def _joined(
    first: npt.NDArray[np.bool_] | None, later: npt.NDArray[np.bool_] | None
) -> npt.NDArray[np.bool_] | None:
    return None if first is None or later is None else np.concatenate((first, later))
