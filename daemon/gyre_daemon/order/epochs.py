"""The order of each epoch of a job, made when needed and kept while it may be needed again."""

from collections.abc import Callable
from typing import Protocol

from gyre_daemon.order.shuffle.permutation import Int64Array

# A batch may span the epoch that ends and the one that begins, and a sample's next use may be in
# the one after. A table of the order `block` is some MiB for irregular blocks, so no more are kept.
_MAX_KEPT = 3


class EpochOrder(Protocol):
    """A bijection from the places of one epoch to sample ids."""

    def __call__(self, places: Int64Array) -> Int64Array:
        """Sample ids at places; both int64 [n], in `[0, N)`."""

    def inverse(self, sample_ids: Int64Array) -> Int64Array:
        """Places of sample ids; both int64 [n], in `[0, N)`."""


class Sequential:
    """The order by sample id."""

    def __call__(self, places: Int64Array) -> Int64Array:
        """See `EpochOrder`."""
        return places

    def inverse(self, sample_ids: Int64Array) -> Int64Array:
        """See `EpochOrder.inverse`."""
        return sample_ids


class EpochOrders:
    """The orders of all epochs of a job; any thread may ask for one."""

    def __init__(self, make: Callable[[int], EpochOrder]) -> None:
        self._make = make
        self._kept: dict[int, EpochOrder] = {}

    def __len__(self) -> int:
        """How many are kept."""
        return len(self._kept)

    def of(self, epoch: int) -> EpochOrder:
        """The order of an epoch."""
        order = self._kept.get(epoch)
        if order is None:
            order = self._make(epoch)
            others = sorted(self._kept.items())[-(_MAX_KEPT - 1) :]
            self._kept = {**dict(others), epoch: order}  # one assignment: threads may do the same
        return order
