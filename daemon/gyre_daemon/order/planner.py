"""Which samples make a batch: a pure function of dataset, order, seed, global batch size and step.

Position `p` of a stream is in epoch `e = p // L` at place `q = p % L`. L is the length of an
epoch in positions: N with the tail `wrap`, N rounded down to whole global batches with `drop`,
rounded up with `pad`. The sample there is `Permutation(key(seed, e), N)` of q in the order `full`,
`BlockOrder` of q in `block`, and q itself in `sequential`. Padding places repeat the epoch's first
samples and are masked. Global step `s` owns the positions `[sG, (s+1)G)`; rank `r` of W owns the
r-th of W equal parts.

Where a dataset grows, L and N are those of the epoch: see `steps`.

With `bucket`, the order of an epoch is sorted by length within windows: see `buckets`.

The k-th of C corrupt samples has, in each epoch, the k-th sample of a keyed permutation of the good
ones in its place. So the substitute follows from the seed, the epoch and the position alone: every
rank, every daemon and every rerun agrees, no position is left out, and no sample stands in for two
others of one epoch.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

import numpy as np
import numpy.typing as npt
from gyre_protos.text import counted

from gyre_daemon.errors import InvalidRequest
from gyre_daemon.order.balance import Balance, BucketedOrder, BucketRule, LengthsOf
from gyre_daemon.order.permutation import (
    BlockOrder,
    BlockTable,
    Int64Array,
    Permutation,
    epoch_key,
    key_of,
)
from gyre_daemon.order.steps import (
    BatchPlan,
    EpochOrder,
    EpochOrders,
    GroupPlan,
    NextUses,
    Phase,
    Placed,
    Sequential,
    SkippedSteps,
    Stage,
    Stages,
    batch_of,
    epoch_length,
    step_of,
    steps_of,
)

# Orders and substitutes of this many epochs are kept. A batch may span the epoch that ends and the
# one that begins, and a sample's next use may be in the one after. A table of the order `block` is
# some MiB for irregular blocks, so no more are kept.
_MAX_KEPT = 3
NO_SAMPLES = np.empty(0, np.int64)


class Substitutes:
    """Replaces the corrupt samples of a job in all its stages; any thread may ask.

    It is false where there is nothing to replace.
    """

    def __init__(self, corrupt: Int64Array, seed: int, stages: Stages, epochs: EpochOrders) -> None:
        """Compute nothing yet.

        Args:
            corrupt: int64 [C], ids in rising order.
            seed: of the order.
            stages: of the job.
            epochs: the orders of the job's epochs.

        Raises:
            InvalidRequest: more than half of the samples of a stage are corrupt.
        """
        self._seed, self._stages, self._epochs = seed, stages, epochs
        self._by_stage = [
            corrupt[: np.searchsorted(corrupt, stage.num_samples)] for stage in stages.all
        ]
        for its, stage in zip(self._by_stage, stages.all, strict=True):
            if 2 * len(its) > stage.num_samples:
                raise InvalidRequest(
                    f"{len(its)} of the first {stage.num_samples} samples are corrupt: more than "
                    "half"
                )
        self._of_epoch = lru_cache(_MAX_KEPT)(self._draw)
        self._places = lru_cache(_MAX_KEPT)(self._find_places)

    def __bool__(self) -> bool:
        return any(map(len, self._by_stage))

    def replace(
        self, epoch: int, sample_ids: Int64Array, is_substitute: npt.NDArray[np.bool_]
    ) -> None:
        """Put substitutes in the places of corrupt samples of one epoch, and note which they are.

        Args:
            epoch: of the job.
            sample_ids: int64 [n], changed in place.
            is_substitute: bool [n], true afterwards where a sample was replaced.
        """
        corrupt = self._corrupt(epoch)
        if not len(corrupt):
            return
        number = np.searchsorted(corrupt, sample_ids)
        found = corrupt[np.minimum(number, len(corrupt) - 1)] == sample_ids
        if found.any():
            is_substitute[found] = True
            sample_ids[found] = self._of_epoch(epoch)[number[found]]

    def num_before(self, position: int) -> int:
        """How many corrupt samples the job replaced at positions before this one.

        All count in a whole epoch, also those that the tail `drop` leaves out: to know these would
        take a look at every epoch.
        """
        if not self:
            return 0
        epoch, place = self._stages.at(position)
        count = sum(
            num_epochs * min(len(self._by_stage[number]), length)
            for number, num_epochs, length in self._stages.before(epoch)
        )
        if not len(self._corrupt(epoch)):
            return count
        places, order = self._places(epoch), self._epochs(epoch)
        count += int(np.searchsorted(places, place))
        if isinstance(order, BucketedOrder):
            count += order.more_before(place, places)
        return count

    def _corrupt(self, epoch: int) -> Int64Array:
        return self._by_stage[self._stages.number(epoch)]

    def _draw(self, epoch: int) -> Int64Array:
        """Int64 [C], the substitute of each corrupt sample in an epoch."""
        corrupt = self._corrupt(epoch)
        num_good = self._stages.num_samples(epoch) - len(corrupt)
        drawn = Permutation(key_of(b"gyre.substitutes", self._seed, epoch), num_good)(
            np.arange(len(corrupt))
        )
        # the g-th good sample has as many corrupt ones before it as have at most g good ones before
        num_good_before = corrupt - np.arange(len(corrupt))
        return drawn + np.searchsorted(num_good_before, drawn, side="right")

    def _find_places(self, epoch: int) -> Int64Array:
        """Where in an epoch corrupt samples are read, rising, without those that the tail drops.

        With buckets, these are places before windows are sorted: else all would have to be.
        """
        length, order = self._stages.length(epoch), self._epochs(epoch)
        inner = order.inner if isinstance(order, BucketedOrder) else order
        places = np.sort(inner.inverse(self._corrupt(epoch)))
        return places[places < length]


OrderMode = Literal["full", "block", "sequential"]
Tail = Literal["wrap", "drop", "pad"]

MAX_POSITION = 1 << 62

# The cost of one epoch's permutation in a plan, in positions. In the order `block` this is 0.5 ms,
# and a position takes some 50 ns.
_EPOCH_IN_POSITIONS = 10_000
# The cost to sort one position of a window by length, and to share out one of a batch.
_SORTED_IN_POSITIONS, _SHARED_OUT_IN_POSITIONS = 4, 32
# Positions of whole global batches planned together, where a rank's part depends on all.
# Each takes about 100 bytes meanwhile.
_LOOKED_AT_ONCE = 1 << 20


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
        skipped: steps that the job leaves out; see [Note: Steps and batches] in `steps`.
        bucket: makes batches of samples of similar lengths; None for samples as they come.
    """

    mode: OrderMode
    tail: Tail
    seed: int
    global_batch_size: int
    io_block_bytes: int = 0
    window_blocks: int = 0
    skipped: SkippedSteps = ()
    bucket: BucketRule | None = None

    def step_of(self, batch: int) -> int:
        """The step that a job's batch with this number is."""
        return step_of(self.skipped, batch)

    def batch_of(self, step: int) -> int:
        """How many batches a job reads before a step."""
        return batch_of(self.skipped, step)

    def position_of(self, batch: int) -> int:
        """Where a job's batch with this number begins."""
        return self.step_of(batch) * self.global_batch_size

    def position_behind(self, batch: int) -> int:
        """Where a job's batch with this number ends."""
        return (self.step_of(batch) + 1) * self.global_batch_size


class BatchPlanner:
    """Plans the batches of one order over one dataset.

    Its steps are counted without those that the order leaves out: see [Note: Steps and batches] in
    `steps`. Positions are the order's.

    Attributes:
        order: how the job goes through the dataset.
        stages: the job's.
        num_samples: N of the dataset; a stage may have less.
        epoch_length: in positions, of the first epoch; no other is shorter.
        phases: of a mixture, see `mixture`; empty for a plain dataset.
    """

    phases: tuple[Phase, ...] = ()

    def __init__(
        self,
        order: Order,
        num_samples: int,
        blocks: BlockTable | None = None,
        corrupt: Int64Array = NO_SAMPLES,
        stages: Sequence[Stage] = (),
        balance: Balance | None = None,
        lengths_of: LengthsOf | None = None,
    ) -> None:
        """Check that the order fits the dataset.

        Args:
            order: how the job goes through the dataset.
            num_samples: N.
            blocks: the dataset's blocks; only for the order `block`, which needs them.
            corrupt: int64 [C], ids of the samples that others replace, in rising order.
            stages: the job's, none with more than N samples; empty where all epochs have N.
            balance: shares out each global batch; None for the parts in the order of positions.
            lengths_of: the lengths of samples; only an order with buckets needs them.

        Raises:
            InvalidRequest: the dataset is empty, G is not positive or thousands of times the
                dataset, `drop` would leave no step, or stages or buckets do not fit.
        """
        if order.bucket:
            order.bucket.check(order.mode, order.tail, order.global_batch_size)
            if lengths_of is None:
                raise InvalidRequest("lengths are not looked at here; ask without `bucket`")
        stages = stages or (Stage(0, num_samples),)
        self.stages = stages_of(order, stages)
        if stages[-1].num_samples > num_samples:
            raise InvalidRequest(
                f"the job has {counted(stages[-1].num_samples, 'sample')} and its "
                f"dataset {num_samples}"
            )
        self.order = order
        self.num_samples = num_samples
        self.epoch_length = self.stages.length(0)
        self._blocks = blocks
        self._balance = balance
        self._lengths_of = lengths_of
        self._tables = [blocks and blocks.of_first(stage.num_samples) for stage in stages]
        self._epochs = lru_cache(_MAX_KEPT)(self._make_epoch_order)
        self._substitutes = Substitutes(corrupt, order.seed, self.stages, self._epochs)
        self._uses = NextUses(self.stages, self._epochs)

    def batch(self, step: int, rank: int = 0, world_size: int = 1) -> BatchPlan:
        """The samples of a rank in a step; see `check_ranks` for its number."""
        return self.batches(step, 1, rank, world_size)[0]

    def batches(self, first_step: int, num_steps: int, rank: int, world_size: int) -> GroupPlan:
        """The samples of a rank in `num_steps` successive steps, with one permutation an epoch."""
        if self._balance and world_size > 1 and num_steps:
            parts = self._in_parts(first_step, num_steps)
            if len(parts) > 1:
                first, *later = (self.batches(*part, rank, world_size) for part in parts)
                return sum(later, start=first)
            whole = self.batches(first_step, num_steps, 0, 1)
            return self._balance.part(whole, rank, world_size)
        position, shaped = self._positions(first_step, num_steps, rank, world_size)
        shape, found = shaped.shape, self.samples_at(position, shaped.reshape(-1))
        replaced = found.is_substitute
        return GroupPlan(
            first_step,
            found.sample_ids.reshape(shape),
            None if found.mask is None else found.mask.reshape(shape),
            self.stages.epochs(self.order.position_of(first_step), shaped[:, 0]),
            None if replaced is None else replaced.reshape(shape),
        )

    def _in_parts(self, first_step: int, num_steps: int) -> list[tuple[int, int]]:
        """First step and number of steps, such that whole global batches of them fit in memory."""
        most, stop = max(1, _LOOKED_AT_ONCE // self.order.global_batch_size), first_step + num_steps
        return [(begin, min(most, stop - begin)) for begin in range(first_step, stop, most)]

    def positions_of(self, num_steps: int, world_size: int) -> int:
        """How many positions are planned for a rank's parts of `num_steps`."""
        size = self.order.global_batch_size
        return num_steps * (size if self._balance else size // world_size)

    def spread(self, step: int, world_size: int) -> float | None:
        """By how much the most expensive rank of a step exceeds the mean; None without balance."""
        if self._balance is None:
            return None
        return self._balance.spread(self.batch(step).sample_ids, world_size)

    def samples_at(self, position: int, ahead: Int64Array) -> Placed:
        """The samples at the positions `position + ahead`; `ahead` is int64 [n], ascending."""
        sample_ids = np.empty(len(ahead), np.int64)
        mask = np.empty(len(ahead), np.bool_) if self.order.tail == "pad" else None
        is_substitute = np.zeros(len(ahead), np.bool_) if self._substitutes else None
        for epoch, part, places in self._by_epoch(position, ahead):
            if mask is not None:
                num_samples = self.stages.num_samples(epoch)
                mask[part] = places < num_samples
                np.remainder(places, num_samples, out=places)
            sample_ids[part] = self._epochs(epoch)(places)
            if is_substitute is not None:
                self._substitutes.replace(epoch, sample_ids[part], is_substitute[part])
        return Placed(sample_ids, mask, is_substitute)

    def _positions(
        self, first_step: int, num_steps: int, rank: int, world_size: int
    ) -> tuple[int, Int64Array]:
        """The first position of a rank's parts of steps, and int64 [num_steps, B] all behind it."""
        order = self.order
        size = order.global_batch_size // world_size
        # relative to the first position, so that no product overflows
        steps = np.arange(num_steps)
        if order.skipped and num_steps:
            steps = steps_of(order.skipped, first_step, num_steps)
            steps -= steps[0]
        ahead = steps[:, None] * order.global_batch_size + np.arange(size)
        return order.position_of(first_step) + rank * size, ahead

    def _by_epoch(
        self, position: int, ahead: Int64Array
    ) -> Iterator[tuple[int, slice, Int64Array]]:
        """Split the positions `position + ahead`, which ascend, into epochs.

        Yields:
            An epoch, its slice of the positions, and their places in the epoch.
        """
        begin = 0
        while begin < len(ahead):
            first = int(ahead[begin])
            epoch, place = self.stages.at(position + first)
            length = self.stages.length(epoch)
            end = int(np.searchsorted(ahead, first + length - place))
            places = ahead[begin:end] + (place - first)
            yield epoch, slice(begin, end), places
            begin = end

    def epochs(self, first_step: int, num_steps: int, rank: int, world_size: int) -> Int64Array:
        """The epoch of each sample of `batches`, int64 [num_steps, B]."""
        if self._balance and world_size > 1 and num_steps:
            parts = self._in_parts(first_step, num_steps)
            if len(parts) > 1:
                return np.concatenate([self.epochs(*part, rank, world_size) for part in parts])
            ids = self.batches(first_step, num_steps, 0, 1).sample_ids
            which = self._balance.arrangement(ids, rank, world_size)
            return np.take_along_axis(self.epochs(first_step, num_steps, 0, 1), which, axis=1)
        position, ahead = self._positions(first_step, num_steps, rank, world_size)
        return self.epochs_at(position, ahead.reshape(-1)).reshape(ahead.shape)

    def epochs_at(self, position: int, ahead: Int64Array) -> Int64Array:
        """The epochs of the samples of `samples_at`, int64 [n]."""
        return self.stages.epochs(position, ahead)

    def num_substitutes(self, position: int) -> int:
        """How many corrupt samples the job replaced at positions before this one.

        It follows from the position alone, so that all ranks say the same. Padding does not count;
        steps left out do.
        """
        return self._substitutes.num_before(position)

    def cost_of(self, num_steps: int, world_size: int) -> int:
        """The cost to plan a rank's parts of `num_steps`, as a number of positions."""
        size = self.order.global_batch_size
        num_positions = self.positions_of(num_steps, world_size)
        if self._balance:
            num_positions += _SHARED_OUT_IN_POSITIONS * num_steps * size
        if bucket := self.order.bucket:  # a window is sorted as a whole
            num_windows = num_steps // bucket.window_batches + 2
            num_positions += _SORTED_IN_POSITIONS * num_windows * bucket.window_batches * size
        num_epochs = min(num_steps * size // self.epoch_length, num_positions)
        return num_positions + num_epochs * _EPOCH_IN_POSITIONS

    def num_steps(self, num_epochs: int) -> int:
        """How many steps begin in `num_epochs`; with `wrap` the last may end in the next epoch."""
        return self.order.batch_of(
            -(-self.stages.begin(num_epochs) // self.order.global_batch_size)
        )

    def iteration_stop(self, batch: int, num_epochs: int) -> int:
        """The batch behind the iteration of `num_epochs` epochs that a batch belongs to.

        Iterations follow each other from epoch 0 on.
        """
        epoch, _ = self.stages.at(self.order.position_of(batch))
        return self.num_steps((epoch // num_epochs + 1) * num_epochs)

    def sample_ids_at(self, places: Int64Array) -> Int64Array:
        """The samples at places `[0, N)` of the first epoch, regardless of the tail."""
        return self._epochs(0)(places)

    def next_use(self, sample_ids: Int64Array, position: int) -> Int64Array:
        """The first position at or after `position` at which each sample is read.

        NEVER if it is not read within some epochs.
        """
        return self._uses.of_samples(sample_ids, position)

    def next_use_of_blocks(
        self, table: BlockTable, blocks: Int64Array, position: int
    ) -> Int64Array:
        """The first position at or after `position` at which any sample of each block is read.

        For the order's own blocks it may be too early, by some runs of the window at most, because
        it is found without a look at every sample.
        """
        if not len(blocks):
            return np.empty(0, np.int64)
        if table is not self._blocks:
            sizes = table.sizes(blocks)
            begins = np.cumsum(sizes) - sizes
            ids = np.arange(sizes.sum()) + np.repeat(table.first_sample(blocks) - begins, sizes)
            return np.minimum.reduceat(self.next_use(ids, position), begins)
        found = self._uses.of_blocks(table, blocks, position)
        in_window = found == position
        return np.where(in_window, self._next_in_window(table, blocks, position), found)

    def _next_in_window(self, table: BlockTable, blocks: Int64Array, position: int) -> Int64Array:
        """The next use of blocks in the window: a run has one sample of each; look at two runs."""
        size = self.order.global_batch_size
        num_ahead = min(2 * self.order.window_blocks, self.num_samples)
        first_step, passed = divmod(position, size)
        first = self.order.batch_of(first_step)
        batches = self.batches(first, -(-(passed + num_ahead) // size), 0, 1)
        upcoming = table.block_of(batches.sample_ids.reshape(-1)[passed:])
        found, ahead = np.unique(upcoming, return_index=True)
        at = np.minimum(np.searchsorted(found, blocks), len(found) - 1)
        return position + np.where(found[at] == blocks, ahead[at], len(upcoming))

    def _make_epoch_order(self, epoch: int) -> EpochOrder:
        order = self.order
        if order.mode == "block":
            table = self._tables[self.stages.number(epoch)]
            assert table is not None
            return BlockOrder(order.seed, epoch, table, order.window_blocks)
        num_samples, plain = self.stages.num_samples(epoch), order.mode == "sequential"
        key = epoch_key(order.seed, epoch)
        inner: EpochOrder = Sequential() if plain else Permutation(key, num_samples)
        if order.bucket is None or self._lengths_of is None:
            return inner
        shape = order.bucket.window_batches, order.global_batch_size
        return BucketedOrder(inner, num_samples, shape, self._lengths_of, (order.seed, epoch))


def stages_of(order: Order, stages: Sequence[Stage]) -> Stages:
    """Where the stages of a job begin; see `Stages` for their conditions.

    Raises:
        InvalidRequest: the order does not fit one of them; see `BatchPlanner`.
    """
    size = order.global_batch_size
    return Stages(stages, [epoch_length(order.tail, size, each.num_samples) for each in stages])


# How much is looked at. These bound the time to some milliseconds; with a quarter of it the numbers
# would vary by several percent from one look to the next.
_MAX_BATCH_SAMPLES = 1024  # of a batch
_NUM_BATCHES = 64  # of an order


@dataclass(frozen=True, slots=True)
class ShuffleQuality:
    """How well an order shuffles: 1.0 is a uniform shuffle, 0.0 the order by sample id.

    There are three numbers, since each sees a fault that the others do not:

    * *displacement*: how far samples are from their places in the dataset, on average. A shuffle
      buffer moves them by its size.
    * *mixing*: how far apart in the dataset two samples of one batch are, on average. Reading whole
      shards leaves neighbours together.
    * *spread*: from how many different neighbourhoods a batch comes, relative to its number of
      samples. Reading a run of samples from each of a few random places displaces and mixes well,
      but its batches know few places.
    """

    displacement: float
    spread: float
    mixing: float

    @property
    def worst(self) -> float:
        """The least of the three, by which an order is judged."""
        return min(self.displacement, self.spread, self.mixing)


def batch_quality(sample_ids: Int64Array, places: Int64Array, num_samples: int) -> ShuffleQuality:
    """The quality of one batch, not yet cut off at 1; only averages over batches are meaningful.

    Args:
        sample_ids: int64 [n], n and num_samples at least 2.
        places: int64 [n], where in their epoch the samples come.
        num_samples: N.
    """
    n = len(sample_ids)
    uniform_distance = num_samples / 3  # of two random samples, on average
    displacement = float(np.abs(sample_ids - places).mean()) / uniform_distance
    ranked = np.sort(sample_ids).astype(np.float64)
    distances = float(((2 * np.arange(n) - n + 1) * ranked).sum())  # of all pairs
    mixing = distances / (n * (n - 1) / 2) / uniform_distance
    num_cells = min(n, num_samples)
    cells = (ranked * (num_cells / num_samples)).astype(np.int64)  # they rise, too
    uniform_cells = num_cells * (1 - (1 - 1 / num_cells) ** n)
    spread = int(np.count_nonzero(np.diff(cells))) / (uniform_cells - 1)
    return ShuffleQuality(displacement, spread, mixing)


def expected_quality(planner: BatchPlanner) -> ShuffleQuality:
    """The quality of an order, from batches spread evenly over its first epoch.

    A batch of one sample has nothing to shuffle, so at least two successive positions are taken. A
    dataset of one sample has the quality 1.
    """
    num_samples = planner.stages.num_samples(0)
    size = max(planner.order.global_batch_size, 2)
    num_taken = min(size, _MAX_BATCH_SAMPLES, num_samples)
    if num_taken < 2:
        return ShuffleQuality(1.0, 1.0, 1.0)
    last = max(0, num_samples - size)
    firsts = np.unique(np.linspace(0, last, _NUM_BATCHES).astype(np.int64))
    taken = np.linspace(0, min(size, num_samples) - 1, num_taken).astype(np.int64)
    places = firsts[:, None] + taken
    ids = planner.sample_ids_at(places.reshape(-1)).reshape(places.shape)
    return average([batch_quality(*batch, num_samples) for batch in zip(ids, places, strict=True)])


def average(qualities: Sequence[ShuffleQuality]) -> ShuffleQuality:
    """The average over batches, or over the ranks of a job; there is at least one."""
    values = np.array([(each.displacement, each.spread, each.mixing) for each in qualities])
    displacement, spread, mixing = np.clip(values.mean(axis=0), 0.0, 1.0).tolist()
    return ShuffleQuality(displacement, spread, mixing)
