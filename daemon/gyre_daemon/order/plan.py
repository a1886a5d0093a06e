"""Which samples make a batch: a pure function of dataset, order, seed, global batch size and step. Nothing here waits.

Position `p` of a stream lies in epoch `e = p // L` at place `q = p % L`, where L is the length of an epoch in positions: N
with the tail `wrap`, N rounded down to whole global batches with `drop`, rounded up with `pad`. The sample there is
`perm(key(seed, e), N)(q)` in the order `full`, `BlockOrder` of the place in `block`, and `q` itself in `sequential`; padding
places repeat the epoch's first samples and are masked. Global step `s` owns the positions `[sG, (s+1)G)`, rank `r` of W their
r-th contiguous part.

A job that joins a running one begins at a position `(E, q0)` of that one, and each of its epochs goes round from there: its
epoch e is the running job's epoch E + e from place q0 to the end and then from the beginning to q0.
"""

import itertools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, Protocol

import numpy as np

from gyre_daemon.errors import InvalidRequest
from gyre_daemon.order.block_order import BlockOrder
from gyre_daemon.order.blocks import BlockTable
from gyre_daemon.order.epochs import EpochOrder, EpochOrders, Sequential
from gyre_daemon.order.permutation import MAX_SAMPLES, Int64Array, Permutation, epoch_key
from gyre_daemon.order.steps import BatchPlan, StripPlan

OrderMode = Literal["full", "block", "sequential"]
Tail = Literal["wrap", "drop", "pad"]

NEVER = (1 << 63) - 1  # a position that no job reaches
MAX_START_POSITION = 1 << 62

_MAX_EPOCHS_PER_BATCH = 4096  # each takes some 10 us, while all other sessions wait
_MAX_EPOCHS_AHEAD = 8  # in which a next use is looked for


@dataclass(frozen=True, slots=True)
class Order:
    """How a job goes through a dataset.

    Attributes:
        mode: `full`, a global shuffle; `block`, a shuffle of blocks, each mixed with those in a window around it; `sequential`,
            by sample id.
        tail: what becomes of samples that do not fill a global batch.
        seed: in `[0, 2**64)`.
        global_batch_size: G, samples per step over all ranks.
        io_block_bytes: about how long a block is; 0 but for `block`.
        window_blocks: how many blocks are mixed with each other; 0 but for `block`.
        start_position: of a running job of the same order that starts at 0, where this one begins; 0 for a job of its own.
    """

    mode: OrderMode
    tail: Tail
    seed: int
    global_batch_size: int
    io_block_bytes: int = 0
    window_blocks: int = 0
    start_position: int = 0


_Span = tuple[Int64Array, Int64Array]  # first place of each, and the one behind its last


class Plan:
    """The batches of one order over one dataset."""

    def __init__(self, order: Order, num_samples: int, blocks: BlockTable | None = None) -> None:
        """Check that the order can go through so many samples.

        Args:
            order: how to go.
            num_samples: N.
            blocks: which samples lie together; needed by the order `block`, and by no other.

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
        self._blocks = blocks
        self._start_epoch, self._start_place = divmod(order.start_position, self.epoch_length)
        self._epochs = EpochOrders(lambda epoch: self._make_epoch_order(self._start_epoch + epoch))

    def batch(self, step: int, rank: int = 0, world_size: int = 1) -> BatchPlan:
        """What a rank reads in a step; `world_size` divides G and `rank` is below it."""
        return self.batches(step, 1, rank, world_size)[0]

    def batches(self, first_step: int, num_steps: int, rank: int, world_size: int) -> StripPlan:
        """What a rank reads in successive steps, maybe none: one evaluation of the permutation for all of them."""
        global_size = self.order.global_batch_size
        size = global_size // world_size
        first_epoch, first_place = divmod(first_step * global_size + rank * size, self.epoch_length)
        ahead = np.arange(num_steps)[:, None] * global_size + np.arange(size)  # small numbers, however far the step
        places, bounds = self._by_epoch(first_place + ahead.reshape(-1))
        mask = places < self.num_samples if self.order.tail == "pad" else None
        if mask is not None:
            places %= self.num_samples
        sample_ids = np.empty(len(places), np.int64)
        for epoch, (begin, end) in enumerate(itertools.pairwise(bounds), first_epoch):
            sample_ids[begin:end] = self._epochs.of(epoch)(places[begin:end])
        mask = None if mask is None else mask.reshape(num_steps, size)
        return StripPlan(first_step, sample_ids.reshape(num_steps, size), mask, global_size, self.epoch_length)

    def _by_epoch(self, places: Int64Array) -> tuple[Int64Array, list[int]]:
        """Rising places from an epoch's beginning on, as the running order's, and where each epoch's begin and end."""
        num_epochs = int(places[-1]) // self.epoch_length + 1 if len(places) else 0
        bounds = [0, len(places)]
        if num_epochs > 1:
            epochs, places = np.divmod(places, self.epoch_length)
            bounds = np.searchsorted(epochs, np.arange(num_epochs + 1)).tolist()
        if self._start_place:
            places = (places + self._start_place) % self.epoch_length
        return places, bounds

    def num_steps(self, num_epochs: int) -> int:
        """How many steps begin in so many epochs; with `wrap` the last of them may run on into the next epoch."""
        return -(-num_epochs * self.epoch_length // self.order.global_batch_size)

    def sample_ids_at(self, places: Int64Array) -> Int64Array:
        """The samples at places of the first epoch, in `[0, N)`, of the running order: without ranks, tails or a start."""
        return self._epochs.of(0)(places)

    def running_position(self, step: int) -> int:
        """Where a step begins, as a position of a job that started at 0: whoever joins there reads the same samples."""
        epoch, place = divmod(step * self.order.global_batch_size, self.epoch_length)
        return (self._start_epoch + epoch) * self.epoch_length + (place + self._start_place) % self.epoch_length

    def first_place(self, step: int, rank: int, world_size: int) -> int:
        """Where in the running order's epoch a rank's part of a step begins."""
        part = rank * (self.order.global_batch_size // world_size)
        return (self.running_position(step) % self.epoch_length + part) % self.epoch_length

    def next_use(self, sample_ids: Int64Array, position: int) -> Int64Array:
        """The first position at or after `position` at which each sample is read; NEVER if that is not within some epochs."""

        def span(epoch: int, which: Int64Array) -> _Span:
            places = self._epochs.of(epoch).inverse(sample_ids[which])
            return places, places + 1

        return self._next_in_span(len(sample_ids), position, span)

    def next_use_of_blocks(self, table: BlockTable, blocks: Int64Array, position: int) -> Int64Array:
        """The first position at or after `position` at which any sample of each block is read; see `next_use`.

        In the order `block`, of its own blocks, it may be too early, by some runs of the window at most: it is found without a
        look at every sample.
        """
        if not len(blocks):
            return np.empty(0, np.int64)
        if table is self._blocks:
            in_window = self._next_in_span(
                len(blocks), position, lambda epoch, which: self._epochs.blocks_of(epoch).span(blocks[which])
            )
            return np.where(in_window == position, self._next_draw(table, blocks, position), in_window)
        sizes = table.sizes(blocks)
        begins = np.cumsum(sizes) - sizes
        ids = np.arange(sizes.sum()) + np.repeat(table.first_sample(blocks) - begins, sizes)
        return np.minimum.reduceat(self.next_use(ids, position), begins)

    def _next_draw(self, table: BlockTable, blocks: Int64Array, position: int) -> Int64Array:
        """The next use of blocks in the window, from each of which one sample of a run comes; two runs are looked at."""
        size, num_ahead = self.order.global_batch_size, min(2 * self.order.window_blocks, self.num_samples)
        first_step, skipped = divmod(position, size)
        batches = self.batches(first_step, -(-(skipped + num_ahead) // size), 0, 1)
        drawn = table.block_of(batches.sample_ids.reshape(-1)[skipped:])
        found, ahead = np.unique(drawn, return_index=True)
        at = np.minimum(np.searchsorted(found, blocks), len(found) - 1)
        return position + np.where(found[at] == blocks, ahead[at], len(drawn))

    def _next_in_span(self, count: int, position: int, span: Callable[[int, Int64Array], _Span]) -> Int64Array:
        """The first position at or after `position` that lies in the span of places that each of `count` things has."""
        found = np.full(count, NEVER)
        first_epoch = position // self.epoch_length
        for epoch in range(first_epoch, first_epoch + _MAX_EPOCHS_AHEAD):
            left = np.flatnonzero(found == NEVER)
            if not left.size:
                break
            places = span(epoch, left)
            found[left] = self._first_in_epoch(places, epoch, position - epoch * self.epoch_length)
        return found

    def _first_in_epoch(self, span: _Span, epoch: int, after: int) -> Int64Array:
        """The first position in an epoch, at least `after` places from its beginning, in each span of the running order's."""
        first = np.full(len(span[0]), NEVER)
        length, start = self.epoch_length, self._start_place
        for padding in range(0, length, self.num_samples):  # padding reads samples again
            for begin, end, moved in ((start, length, -start), (0, start, length - start)):
                low = np.maximum(np.maximum(span[0] + padding, begin) + moved, after)
                high = np.minimum(span[1] + padding, end) + moved
                usable = low < high
                first[usable] = np.minimum(first[usable], epoch * length + low[usable])
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
    """What an order needs to know of a dataset."""

    @property
    def num_samples(self) -> int:
        """N."""

    def blocks(self, io_block_bytes: int) -> BlockTable:
        """Runs of successive samples of one shard, about `io_block_bytes` long."""


def plan_of(order: Order, index: BlockIndex) -> Plan:
    """The batches of an order over a dataset; looks at every sample the first time that blocks of this size are wanted.

    Raises:
        InvalidRequest: see `Plan`.
    """
    blocks = index.blocks(order.io_block_bytes) if order.mode == "block" and index.num_samples else None
    return Plan(order, index.num_samples, blocks)


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
