"""Steps and epochs: their samples, where they begin, and which steps a job leaves out. Pure.

A *stage* is a run of epochs that have the same samples. A dataset that does not grow has one stage.
In one that grows by shards at its end, the sample ids `[0, N)` of a stage are the first ones of
every later stage too.

[Note: Steps and batches] A step of an order keeps its number and its samples, whatever is left out:
step s owns the positions `[sG, (s+1)G)`. A job that leaves steps out reads the others one after the
other, and its *batches* are counted without a gap. Streams, sessions and the protocol count
batches, under the name of steps; cursors, weights and people count the steps of the order. Where
nothing is left out, both numbers are equal.
"""

from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple, Protocol, overload

import numpy as np
import numpy.typing as npt
from gyre_protos.text import counted
from msgspec import Struct

from gyre_daemon.errors import InvalidRequest
from gyre_daemon.order.permutation import MAX_SAMPLES, BlockOrder, BlockTable, Int64Array

# Stages that a cursor has room for, in the 4 KiB that clients keep of one.
MAX_STAGES = 100
_MAX_EPOCH = 1 << 62
# A batch that spans many epochs takes up to half a millisecond for each, in a thread.
_MAX_EPOCHS_PER_BATCH = 4096


@dataclass(frozen=True, slots=True, order=True)
class Stage:
    """Epochs of a job with the same samples.

    Attributes:
        first_epoch: of the job. The stage ends where the next one begins.
        num_samples: N in these epochs.
    """

    first_epoch: int
    num_samples: int


def is_growth(stages: Sequence[Stage]) -> bool:
    """Whether a job can have these stages, at least one."""
    return (
        len(stages) <= MAX_STAGES
        and stages[0].first_epoch == 0 < stages[0].num_samples
        and stages[-1].first_epoch <= _MAX_EPOCH
        and stages[-1].num_samples <= MAX_SAMPLES
        and all(
            before.first_epoch < after.first_epoch and before.num_samples < after.num_samples
            for before, after in pairwise(stages)
        )
    )


def epoch_length(tail: str, global_batch_size: int, num_samples: int) -> int:
    """L, the positions of an epoch of N samples in batches of G, with the tail of an order.

    Raises:
        InvalidRequest: there is no sample, G is not positive or thousands of times N, or `drop`
            would leave no step.
    """
    if not 1 <= num_samples <= MAX_SAMPLES:
        raise InvalidRequest(
            f"a dataset must have 1 to 2**62 samples to be read, but has {num_samples}"
        )
    if not 1 <= global_batch_size <= 1 << 32:
        raise InvalidRequest(
            f"the global batch size must be 1 to 2**32, but is {global_batch_size}"
        )
    if tail == "drop" and num_samples < global_batch_size:
        raise InvalidRequest(
            f"an epoch of {counted(num_samples, 'sample')} has no whole batch of "
            f"{global_batch_size}; with tail `drop` the global batch size must not exceed the "
            "dataset"
        )
    if tail != "drop" and global_batch_size > _MAX_EPOCHS_PER_BATCH * num_samples:
        raise InvalidRequest(
            f"a global batch of {global_batch_size} goes through the "
            f"{counted(num_samples, 'sample')} of the dataset more than "
            f"{_MAX_EPOCHS_PER_BATCH} times; lower the batch size"
        )
    num_whole = num_samples // global_batch_size * global_batch_size
    num_filled = -(-num_samples // global_batch_size) * global_batch_size
    return {"wrap": num_samples, "drop": num_whole, "pad": num_filled}[tail]


class Stages:
    """The stages of one job, and where they begin in its positions."""

    def __init__(self, stages: Sequence[Stage], lengths: Sequence[int]) -> None:
        """Add up where each stage begins.

        Args:
            stages: S of them, for which `is_growth` is true.
            lengths: S lengths of an epoch in positions, at least 1.
        """
        self.all = tuple(stages)
        self._lengths = lengths
        self._epochs = [stage.first_epoch for stage in stages]
        self._positions = [0]
        for number in range(1, len(stages)):
            num_epochs = self._epochs[number] - self._epochs[number - 1]
            self._positions.append(self._positions[-1] + num_epochs * lengths[number - 1])

    def at(self, position: int) -> tuple[int, int]:
        """The epoch of a position, and its place there."""
        number = bisect_right(self._positions, position) - 1
        passed, place = divmod(position - self._positions[number], self._lengths[number])
        return self._epochs[number] + passed, place

    def epochs(self, position: int, ahead: Int64Array) -> Int64Array:
        """The epochs of the positions `position + ahead`; `ahead` is int64 [n], ascending."""
        if not len(ahead):
            return ahead
        number = bisect_right(self._positions, position + int(ahead[-1])) - 1
        if position >= self._positions[number]:
            epoch, place = self.at(position)
            epochs: Int64Array = epoch + (place + ahead) // self._lengths[number]
            return epochs
        return np.array([self.at(position + each)[0] for each in ahead.tolist()], np.int64)

    def begin(self, epoch: int) -> int:
        """The first position of an epoch."""
        number = self.number(epoch)
        return self._positions[number] + (epoch - self._epochs[number]) * self._lengths[number]

    def length(self, epoch: int) -> int:
        """The positions of an epoch."""
        return self._lengths[self.number(epoch)]

    def num_samples(self, epoch: int) -> int:
        """N in an epoch."""
        return self.all[self.number(epoch)].num_samples

    def number(self, epoch: int) -> int:
        """Which stage an epoch belongs to."""
        return bisect_right(self._epochs, epoch) - 1

    def before(self, epoch: int) -> Iterator[tuple[int, int, int]]:
        """Each stage that begins before an epoch: its number, its epochs until then, their length.

        The stage that the epoch itself belongs to is the last; it may have no epoch before it.
        """
        for number in range(self.number(epoch) + 1):
            end = epoch if number + 1 == len(self._epochs) else self._epochs[number + 1]
            yield number, min(end, epoch) - self._epochs[number], self._lengths[number]

    def grown(self, position: int, num_samples: int) -> tuple[Stage, ...]:
        """The stages of a job that goes on at a position, where there are more samples now.

        The epoch of the position keeps its samples; the next one to begin has all.
        """
        epoch, place = self.at(position)
        first_epoch = epoch if place == 0 else epoch + 1
        kept = tuple(stage for stage in self.all if stage.first_epoch < first_epoch)
        if kept and kept[-1].num_samples == num_samples:
            return kept
        return (*kept, Stage(first_epoch, num_samples))


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


EpochOrders = Callable[[int], EpochOrder]  # the orders of all epochs of a job; any thread may ask

NEVER = (1 << 63) - 1  # a position that no job reaches
# Epochs in which a next use is looked for. `drop` may leave a sample out of several epochs in a
# row; one that none of these reads may as well be evicted.
_MAX_EPOCHS_AHEAD = 8

_Span = tuple[Int64Array, Int64Array]  # places [first, end)


class NextUses:
    """Looks for samples and blocks in the epochs to come of one job."""

    def __init__(self, stages: Stages, epochs: EpochOrders) -> None:
        """Look at nothing yet.

        Args:
            stages: of the job.
            epochs: the orders of its epochs.
        """
        self._stages = stages
        self._epochs = epochs

    def of_samples(self, sample_ids: Int64Array, position: int) -> Int64Array:
        """See `BatchPlanner.next_use`."""

        def span(epoch: EpochOrder, which: Int64Array) -> _Span:
            places = epoch.inverse(sample_ids[which])
            return places, places + 1

        return self._in_spans(sample_ids, position, span)

    def of_blocks(self, table: BlockTable, blocks: Int64Array, position: int) -> Int64Array:
        """As `of_samples`, for the blocks of the order `block`.

        It is the first position of the stretch which reads a block, or `position` if that has
        begun.
        """

        def span(epoch: EpochOrder, which: Int64Array) -> _Span:
            assert isinstance(epoch, BlockOrder)
            return epoch.span(blocks[which])

        return self._in_spans(table.first_sample(blocks), position, span)

    def _in_spans(
        self,
        sample_ids: Int64Array,
        position: int,
        span: Callable[[EpochOrder, Int64Array], _Span],
    ) -> Int64Array:
        """The first position at or after `position` in the span of each of n items.

        Args:
            sample_ids: int64 [n], a sample of each item; an epoch that lacks it has no span of it.
            position: where to begin.
            span: takes an epoch's order and numbers of items, and returns their spans of places.
        """
        found = np.full(len(sample_ids), NEVER)
        first_epoch = self._stages.at(position)[0]
        for epoch in range(first_epoch, first_epoch + _MAX_EPOCHS_AHEAD):
            left = np.flatnonzero(found == NEVER)
            if not left.size:
                break
            left = left[sample_ids[left] < self._stages.num_samples(epoch)]
            if left.size:
                spans = span(self._epochs(epoch), left)
                after = position - self._stages.begin(epoch)
                found[left] = self._first_in_epoch(spans, epoch, after)
        return found

    def _first_in_epoch(self, span: _Span, epoch: int, after: int) -> Int64Array:
        """The first position of an epoch in each span of places, or NEVER.

        Args:
            span: places of the epoch.
            epoch: of the job.
            after: the least place.
        """
        first = np.full(len(span[0]), NEVER)
        length = self._stages.length(epoch)
        position, num_samples = self._stages.begin(epoch), self._stages.num_samples(epoch)
        for padding in range(0, length, num_samples):  # padding reads samples again
            low = np.maximum(span[0] + padding, max(after, 0))
            usable = low < np.minimum(span[1] + padding, length)
            first[usable] = np.minimum(first[usable], position + low[usable])
            if (first != NEVER).all():  # later padding is read later
                break
        return first


# Ranges that a job may leave out; a cursor has room for about as many.
MAX_SKIPPED = 100
_MAX_STEP = 1 << 62

SkippedSteps = tuple[tuple[int, int], ...]  # ranges [first, stop) of steps, rising, with gaps


def are_skipped(ranges: Sequence[Sequence[int]]) -> bool:
    """Whether a job can leave these ranges of steps out: they rise, with steps between them."""
    return (
        len(ranges) <= MAX_SKIPPED
        and all(len(each) == 2 and all(type(step) is int for step in each) for each in ranges)
        and all(0 <= first < stop <= _MAX_STEP for first, stop in ranges)
        and all(before[1] < after[0] for before, after in pairwise(ranges))
    )


def step_of(skipped: SkippedSteps, batch: int) -> int:
    """The step of the order that a job's batch with this number is."""
    for first, stop in skipped:
        if batch < first:
            break
        batch += stop - first
    return batch


def batch_of(skipped: SkippedSteps, step: int) -> int:
    """How many batches a job reads before a step of the order."""
    return step - sum(max(0, min(step, stop) - first) for first, stop in skipped)


def steps_of(skipped: SkippedSteps, first_batch: int, num_batches: int) -> Int64Array:
    """Int64 [num_batches], the steps of successive batches."""
    steps = np.arange(first_batch, first_batch + num_batches)
    for first, stop in skipped:
        steps[steps >= first] += stop - first
    return steps


def before(skipped: SkippedSteps, step: int) -> SkippedSteps:
    """The steps left out before a step."""
    return tuple((first, min(stop, step)) for first, stop in skipped if first < step)


def contains(skipped: SkippedSteps, others: SkippedSteps) -> bool:
    """Whether all of the others are left out too."""
    return all(
        any(first <= begin and end <= stop for first, stop in skipped) for begin, end in others
    )


def in_words(skipped: SkippedSteps) -> str:
    """The ranges for people, as `skip_steps` takes them."""
    return f"[{', '.join(f'({first}, {stop})' for first, stop in skipped)}]"


class Phase(Struct, frozen=True):
    """Steps of a job on a mixture in which the sources have the same weights.

    Attributes:
        first_step: global; the phase ends where the next one begins.
        weights: of each source, a whole number of at least 0; only their ratios count.
    """

    first_step: int
    weights: tuple[int, ...]


class BatchPlan(Struct, frozen=True):
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
