"""Which samples make a batch: a pure function of dataset, order, seed, global batch size and step.

Position `p` of a stream lies in epoch `e = p // L` at place `q = p % L`. L is the length of an
epoch in positions: N with the tail `wrap`, N rounded down to whole global batches with `drop`,
rounded up with `pad`. The sample there is `Permutation(key(seed, e), N)` of q in the order `full`,
`BlockOrder` of q in `block`, and q itself in `sequential`. Padding places repeat the epoch's first
samples and are masked. Global step `s` owns the positions `[sG, (s+1)G)`; rank `r` of W owns the
r-th of W equal parts.

A job that joins a running one begins at a position `(E, q0)` of that one, and each of its epochs
goes round from there: its epoch e is the running job's epoch E + e from place q0 to the end, and
then from the beginning to q0.
"""

import itertools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, Protocol

import numpy as np
import numpy.typing as npt

from gyre_daemon.errors import InvalidRequest
from gyre_daemon.order.block_order import BlockOrder
from gyre_daemon.order.blocks import BlockTable
from gyre_daemon.order.epochs import EpochOrder, EpochOrders, Sequential
from gyre_daemon.order.permutation import MAX_SAMPLES, Int64Array, Permutation, epoch_key
from gyre_daemon.order.steps import BatchPlan, GroupPlan
from gyre_daemon.order.substitutes import NO_SAMPLES, Substitutes

OrderMode = Literal["full", "block", "sequential"]
Tail = Literal["wrap", "drop", "pad"]

NEVER = (1 << 63) - 1  # a position that no job reaches
MAX_START_POSITION = 1 << 62

# A batch that spans many epochs takes up to half a millisecond for each, in a thread.
_MAX_EPOCHS_PER_BATCH = 4096
# What one more epoch costs in a plan, as so many positions: its order must be made. In the order
# `block` this is 0.5 ms, and a position takes some 50 ns.
_EPOCH_IN_POSITIONS = 10_000
# Epochs in which a next use is looked for. `drop` may leave a sample out of several epochs in a
# row; one that is not read in any of these may as well be evicted.
_MAX_EPOCHS_AHEAD = 8


@dataclass(frozen=True, slots=True)
class Order:
    """How a job goes through a dataset.

    Attributes:
        mode: `full`, a global shuffle; `block`, a shuffle of blocks, each mixed with those in a
            window around it; `sequential`, by sample id.
        tail: how an epoch ends whose samples do not fill the last global batch.
        seed: in `[0, 2**64)`.
        global_batch_size: G, samples per step over all ranks.
        io_block_bytes: about the size of a block; 0 except in `block`.
        window_blocks: how many blocks are mixed with each other; 0 except in `block`.
        start_position: where this job begins, as a position of a running job of the same order that
            began at 0; 0 for a job that joins none.
    """

    mode: OrderMode
    tail: Tail
    seed: int
    global_batch_size: int
    io_block_bytes: int = 0
    window_blocks: int = 0
    start_position: int = 0


_Span = tuple[Int64Array, Int64Array]  # places [first, end)


class BatchPlanner:
    """Plans the batches of one order over one dataset."""

    def __init__(
        self,
        order: Order,
        num_samples: int,
        blocks: BlockTable | None = None,
        corrupt: Int64Array = NO_SAMPLES,
    ) -> None:
        """Check that the order fits the dataset.

        Args:
            order: how the job goes through the dataset.
            num_samples: N.
            blocks: the dataset's blocks; only for the order `block`, which needs them.
            corrupt: int64 [C], ids of the samples that others replace, in rising order.

        Raises:
            InvalidRequest: the dataset is empty, G is not positive or thousands of times the
                dataset, or `drop` would leave no step.
        """
        if not 1 <= num_samples <= MAX_SAMPLES:
            raise InvalidRequest(
                f"a dataset must have 1 to 2**62 samples to be read, but has {num_samples}"
            )
        if not 1 <= order.global_batch_size <= 1 << 32:
            raise InvalidRequest(
                f"the global batch size must be 1 to 2**32, but is {order.global_batch_size}"
            )
        if order.tail != "drop" and order.global_batch_size > _MAX_EPOCHS_PER_BATCH * num_samples:
            raise InvalidRequest(
                f"a global batch of {order.global_batch_size} goes through the {num_samples} "
                f"samples of the dataset more than {_MAX_EPOCHS_PER_BATCH} times; lower the batch "
                "size"
            )
        self.order = order
        self.num_samples = num_samples
        self.epoch_length = _epoch_length(order, num_samples)
        if self.epoch_length == 0:
            raise InvalidRequest(
                f"an epoch of {num_samples} samples has no whole batch of "
                f"{order.global_batch_size}; with tail `drop` the global batch size must not "
                "exceed the dataset"
            )
        self._blocks = blocks
        self._substitutes = (
            Substitutes(corrupt, num_samples, order.seed, self._places_of) if len(corrupt) else None
        )
        self._start_epoch, self._start_place = divmod(order.start_position, self.epoch_length)
        self._epochs = EpochOrders(lambda epoch: self._make_epoch_order(self._start_epoch + epoch))

    def batch(self, step: int, rank: int = 0, world_size: int = 1) -> BatchPlan:
        """What a rank reads in a step; see `check_ranks` for its number."""
        return self.batches(step, 1, rank, world_size)[0]

    def batches(self, first_step: int, num_steps: int, rank: int, world_size: int) -> GroupPlan:
        """What a rank reads in `num_steps` successive steps, with one call of the permutation."""
        global_size = self.order.global_batch_size
        size = global_size // world_size
        first_epoch, first_place = divmod(first_step * global_size + rank * size, self.epoch_length)
        # relative to the first epoch, so that no product overflows
        ahead = np.arange(num_steps)[:, None] * global_size + np.arange(size if num_steps else 0)
        places, bounds = self._by_epoch(first_place + ahead.reshape(-1))
        mask = places < self.num_samples if self.order.tail == "pad" else None
        if mask is not None:
            places %= self.num_samples
        sample_ids = np.empty(len(places), np.int64)
        is_substitute = np.zeros(len(places), np.bool_) if self._substitutes else None
        for epoch, (begin, end) in enumerate(itertools.pairwise(bounds), first_epoch):
            if begin < end:
                sample_ids[begin:end] = self._epochs.of(epoch)(places[begin:end])
                if is_substitute is not None:
                    self._replace(epoch, sample_ids[begin:end], is_substitute[begin:end])
        return GroupPlan(
            first_step,
            sample_ids.reshape(num_steps, size),
            None if mask is None else mask.reshape(num_steps, size),
            global_size,
            self.epoch_length,
            None if is_substitute is None else is_substitute.reshape(num_steps, size),
        )

    def _replace(
        self, epoch: int, sample_ids: Int64Array, is_substitute: npt.NDArray[np.bool_]
    ) -> None:
        """Put substitutes in the places of corrupt samples of one epoch."""
        assert self._substitutes
        which = self._substitutes.where(sample_ids)
        if len(which):
            is_substitute[which] = True
            running = self._start_epoch + epoch
            sample_ids[which] = self._substitutes.of(sample_ids[which], running)

    def num_substitutes(self, position: int) -> int:
        """How many corrupt samples the job replaced at positions before this one.

        It follows from the position alone, so that all ranks say the same: see
        `Substitutes.num_before`. Padding does not count.
        """
        if self._substitutes is None:
            return 0
        return self._substitutes.num_before(*divmod(position, self.epoch_length), self.epoch_length)

    def _places_of(self, epoch: int, sample_ids: Int64Array) -> Int64Array:
        """Where in an epoch of this job samples are read, without those that the tail drops."""
        places = self._epochs.of(epoch).inverse(sample_ids)
        return (places[places < self.epoch_length] - self._start_place) % self.epoch_length

    def cost_of(self, num_steps: int, world_size: int) -> int:
        """What it takes to plan a rank's parts of `num_steps`, as a number of positions."""
        size = self.order.global_batch_size
        num_positions = num_steps * (size // world_size)
        num_epochs = min(num_steps * size // self.epoch_length, num_positions)
        return num_positions + num_epochs * _EPOCH_IN_POSITIONS

    def _by_epoch(self, places: Int64Array) -> tuple[Int64Array, list[int]]:
        """Split ascending places, counted from an epoch's beginning, into epochs.

        Returns:
            The places in their epochs, as those of the running job, and the bounds of each epoch.
        """
        num_epochs = int(places[-1]) // self.epoch_length + 1 if len(places) else 0
        bounds = [0, len(places)]
        if num_epochs > 1:
            epochs, places = np.divmod(places, self.epoch_length)
            bounds = np.searchsorted(epochs, np.arange(num_epochs + 1)).tolist()
        if self._start_place:
            places = (places + self._start_place) % self.epoch_length
        return places, bounds

    def num_steps(self, num_epochs: int) -> int:
        """How many steps begin in `num_epochs`; with `wrap` the last may end in the next epoch."""
        return -(-num_epochs * self.epoch_length // self.order.global_batch_size)

    def sample_ids_at(self, places: Int64Array) -> Int64Array:
        """The samples at places `[0, N)` of the first epoch, regardless of tail and start."""
        return self._epochs.of(0)(places)

    def running_position(self, step: int) -> int:
        """Where a step begins, as a position of a job that started at 0.

        A job that joins there reads the same samples.
        """
        epoch, place = divmod(step * self.order.global_batch_size, self.epoch_length)
        place = (place + self._start_place) % self.epoch_length
        return (self._start_epoch + epoch) * self.epoch_length + place

    def first_place(self, step: int, rank: int, world_size: int) -> int:
        """The place in the running job's epoch at which a rank's part of a step begins."""
        part = rank * (self.order.global_batch_size // world_size)
        return (self.running_position(step) % self.epoch_length + part) % self.epoch_length

    def next_use(self, sample_ids: Int64Array, position: int) -> Int64Array:
        """The first position at or after `position` at which each sample is read.

        NEVER if it is not read within some epochs.
        """

        def span(epoch: EpochOrder, which: Int64Array) -> _Span:
            places = epoch.inverse(sample_ids[which])
            return places, places + 1

        return self._next_in_span(len(sample_ids), position, span)

    def next_use_of_blocks(
        self, table: BlockTable, blocks: Int64Array, position: int
    ) -> Int64Array:
        """The first position at or after `position` at which any sample of each block is read.

        For the order's own blocks it may be too early, by some runs of the window at most, because
        it is found without a look at every sample.
        """
        if not len(blocks):
            return np.empty(0, np.int64)
        if table is self._blocks:

            def span(epoch: EpochOrder, which: Int64Array) -> _Span:
                assert isinstance(epoch, BlockOrder)
                return epoch.span(blocks[which])

            found = self._next_in_span(len(blocks), position, span)
            in_window = found == position
            return np.where(in_window, self._next_in_window(table, blocks, position), found)
        sizes = table.sizes(blocks)
        begins = np.cumsum(sizes) - sizes
        ids = np.arange(sizes.sum()) + np.repeat(table.first_sample(blocks) - begins, sizes)
        return np.minimum.reduceat(self.next_use(ids, position), begins)

    def _next_in_window(self, table: BlockTable, blocks: Int64Array, position: int) -> Int64Array:
        """The next use of blocks in the window: a run has one sample of each; look at two runs."""
        size = self.order.global_batch_size
        num_ahead = min(2 * self.order.window_blocks, self.num_samples)
        first_step, skipped = divmod(position, size)
        batches = self.batches(first_step, -(-(skipped + num_ahead) // size), 0, 1)
        upcoming = table.block_of(batches.sample_ids.reshape(-1)[skipped:])
        found, ahead = np.unique(upcoming, return_index=True)
        at = np.minimum(np.searchsorted(found, blocks), len(found) - 1)
        return position + np.where(found[at] == blocks, ahead[at], len(upcoming))

    def _next_in_span(
        self, count: int, position: int, span: Callable[[EpochOrder, Int64Array], _Span]
    ) -> Int64Array:
        """The first position at or after `position` in the span of each of `count` items.

        Args:
            count: how many items there are.
            position: where to begin.
            span: takes an epoch's order and numbers of items, and returns their spans of places.
        """
        found = np.full(count, NEVER)
        first_epoch = position // self.epoch_length
        for epoch in range(first_epoch, first_epoch + _MAX_EPOCHS_AHEAD):
            left = np.flatnonzero(found == NEVER)
            if not left.size:
                break
            spans = span(self._epochs.of(epoch), left)
            found[left] = self._first_in_epoch(spans, epoch, position - epoch * self.epoch_length)
        return found

    def _first_in_epoch(self, span: _Span, epoch: int, after: int) -> Int64Array:
        """The first position of an epoch in each span of places, or NEVER.

        Args:
            span: places of the running job's epoch.
            epoch: of this job.
            after: the least place of this job's epoch.
        """
        first = np.full(len(span[0]), NEVER)
        length, start = self.epoch_length, self._start_place
        for padding in range(0, length, self.num_samples):  # padding reads samples again
            for begin, end, moved in ((start, length, -start), (0, start, length - start)):
                low = np.maximum(np.maximum(span[0] + padding, begin) + moved, after)
                high = np.minimum(span[1] + padding, end) + moved
                usable = low < high
                first[usable] = np.minimum(first[usable], epoch * length + low[usable])
            if not start and (first != NEVER).all():  # what follows lies behind
                break
        return first

    def _make_epoch_order(self, epoch: int) -> EpochOrder:
        order = self.order
        if order.mode == "sequential":
            return Sequential()
        if order.mode == "full":
            return Permutation(epoch_key(order.seed, epoch), self.num_samples)
        assert self._blocks is not None
        return BlockOrder(order.seed, epoch, self._blocks, order.window_blocks)


class BlockIndex(Protocol):
    """What an order needs to know about a dataset."""

    @property
    def num_samples(self) -> int:
        """N."""

    def blocks(self, io_block_bytes: int) -> BlockTable:
        """The samples cut into blocks of about `io_block_bytes`, each within one shard."""


def planner_for(order: Order, index: BlockIndex, corrupt: Int64Array = NO_SAMPLES) -> BatchPlanner:
    """The planner of an order over a dataset, whose corrupt samples are replaced by others.

    With the order `block`, it may look at every sample to make the table of blocks.

    Raises:
        InvalidRequest: see `BatchPlanner`.
    """
    has_blocks = order.mode == "block" and index.num_samples > 0
    blocks = index.blocks(order.io_block_bytes) if has_blocks else None
    return BatchPlanner(order, index.num_samples, blocks, corrupt)


def check_ranks(order: Order, rank: int, world_size: int) -> None:
    """Refuse ranks that do not divide the global batch.

    Raises:
        InvalidRequest: the rank does not exist, or the parts would differ.
    """
    if world_size < 1 or not 0 <= rank < world_size:
        raise InvalidRequest(f"rank {rank} of world size {world_size} does not exist")
    if order.global_batch_size % world_size:
        raise InvalidRequest(
            f"the global batch size {order.global_batch_size} is not divisible by the world size "
            f"{world_size}; every rank reads an equal part"
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
