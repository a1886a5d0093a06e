"""Where the epochs of a job begin, also where its dataset grows between two of them. Pure.

A *stage* is a run of epochs that have the same samples. A dataset that does not grow has one stage.
In one that grows by shards at its end, the sample ids `[0, N)` of a stage are the first ones of
every later stage too.
"""

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from gyre_protos.text import counted

from gyre_daemon.errors import InvalidRequest
from gyre_daemon.order.shuffle.permutation import MAX_SAMPLES, Int64Array

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
