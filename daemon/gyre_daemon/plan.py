"""Which samples make a batch: a pure function of dataset size, order, seed, global batch size and step. Nothing here waits.

Position `p` of a stream lies in epoch `e = p // L` at place `q = p % L`, where L is the length of an epoch in positions: N
with the tail `wrap`, N rounded down to whole global batches with `drop`, rounded up with `pad`. The sample there is
`perm(key(seed, e), N)(q)`; padding places repeat the epoch's first samples and are masked. Global step `s` owns the positions
`[sG, (s+1)G)`, rank `r` of W their r-th contiguous part.
"""

from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt

from gyre_daemon.errors import InvalidRequest
from gyre_daemon.permutation import MAX_SAMPLES, Int64Array, Permutation, epoch_key

OrderMode = Literal["full"]
Tail = Literal["wrap", "drop", "pad"]

_MAX_EPOCHS_PER_BATCH = 4096  # each takes some 10 us, while all other sessions wait


@dataclass(frozen=True, slots=True)
class Order:
    """How a job goes through a dataset.

    Attributes:
        mode: `full`, a global shuffle.
        tail: what becomes of samples that do not fill a global batch.
        seed: in `[0, 2**64)`.
        global_batch_size: G, samples per step over all ranks.
    """

    mode: OrderMode
    tail: Tail
    seed: int
    global_batch_size: int


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


class Plan:
    """The batches of one order over one dataset size."""

    def __init__(self, order: Order, num_samples: int) -> None:
        """Check that the order can go through so many samples.

        Raises:
            InvalidRequest: the dataset is empty, G is not positive or thousands of times the dataset, or `drop` would leave no
                step.
        """
        if not 1 <= num_samples <= MAX_SAMPLES:
            raise InvalidRequest(f"a dataset must have 1 to 2**62 samples to be read, but has {num_samples}")
        if not 1 <= order.global_batch_size <= 1 << 32:
            raise InvalidRequest(f"the global batch size must be 1 to 2**32, but is {order.global_batch_size}")
        if order.tail == "wrap" and order.global_batch_size > _MAX_EPOCHS_PER_BATCH * num_samples:
            raise InvalidRequest(
                f"a global batch of {order.global_batch_size} goes through the {num_samples} samples of the dataset more than "
                f"{_MAX_EPOCHS_PER_BATCH} times; lower the batch size"
            )
        self.order = order
        self.num_samples = num_samples
        self.epoch_length = _epoch_length(order, num_samples)
        if self.epoch_length == 0:
            raise InvalidRequest(
                f"an epoch of {num_samples} samples has no whole batch of {order.global_batch_size}; with tail `drop` the "
                "global batch size must not exceed the dataset"
            )
        self._permutations: dict[int, Permutation] = {}

    def batch(self, step: int, rank: int = 0, world_size: int = 1) -> BatchPlan:
        """What a rank reads in a step; `world_size` divides G and `rank` is below it."""
        return self.batches(step, 1, rank, world_size)[0]

    def batches(self, first_step: int, num_steps: int, rank: int, world_size: int) -> list[BatchPlan]:
        """What a rank reads in successive steps: one evaluation of the permutation for all of them."""
        global_size = self.order.global_batch_size
        size = global_size // world_size
        first_epoch, first_place = divmod(first_step * global_size + rank * size, self.epoch_length)
        ahead = (np.arange(num_steps)[:, None] * global_size + np.arange(size)).reshape(
            -1
        )  # small numbers, however far the step
        epochs, places = np.divmod(first_place + ahead, self.epoch_length)
        mask = places < self.num_samples if self.order.tail == "pad" else None
        if mask is not None:
            places %= self.num_samples
        sample_ids = np.empty(len(places), np.int64)
        for epoch in range(int(epochs[-1]) + 1):
            of_epoch = slice(*np.searchsorted(epochs, (epoch, epoch + 1)).tolist())
            sample_ids[of_epoch] = self._permutation(first_epoch + epoch)(places[of_epoch])
        return [
            BatchPlan(
                first_step + index,
                (first_step + index) * global_size // self.epoch_length,
                sample_ids[index * size : (index + 1) * size],
                None if mask is None else mask[index * size : (index + 1) * size],
            )
            for index in range(num_steps)
        ]

    def num_steps(self, num_epochs: int) -> int:
        """Whole steps in so many epochs; what is left of the last one with `wrap` is not handed out."""
        return num_epochs * self.epoch_length // self.order.global_batch_size

    def _permutation(self, epoch: int) -> Permutation:
        if epoch not in self._permutations:
            if len(self._permutations) >= 2:  # a batch touches the epoch that ends and the one that begins
                self._permutations.clear()
            self._permutations[epoch] = Permutation(epoch_key(self.order.seed, epoch), self.num_samples)
        return self._permutations[epoch]


def check_ranks(order: Order, rank: int, world_size: int) -> None:
    """Refuse ranks that do not divide the global batch.

    Raises:
        InvalidRequest: names the numbers.
    """
    if world_size < 1 or not 0 <= rank < world_size:
        raise InvalidRequest(f"rank {rank} of world size {world_size} does not exist")
    if order.global_batch_size % world_size:
        raise InvalidRequest(
            f"the global batch size {order.global_batch_size} is not divisible by the world size {world_size}; every rank "
            "reads an equal part"
        )


def _epoch_length(order: Order, num_samples: int) -> int:
    size = order.global_batch_size
    match order.tail:
        case "wrap":
            return num_samples
        case "drop":
            return num_samples // size * size
        case "pad":
            return -(-num_samples // size) * size
