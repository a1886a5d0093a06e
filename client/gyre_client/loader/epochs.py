"""The arithmetic of steps and epochs, the same as the daemon's. It is pure.

An epoch has L positions: N with the tail `wrap`, N rounded down to whole batches with `drop`, and N
rounded up with `pad`. Step s begins at position sG and belongs to the epoch of that position. So
with `wrap` an epoch has ceil(N/G) steps, or one less.

A dataset may grow between two epochs. A *stage* is a run of epochs with the same N.

A job may leave steps out. Its *batches* are counted without them, and a session knows them by these
numbers; a step of the order keeps its own.
"""

from bisect import bisect_right
from collections.abc import Sequence


class Epochs:
    """The epochs of one stream."""

    def __init__(
        self,
        stages: Sequence[tuple[int, int]],
        batch_size: int,
        skipped: Sequence[tuple[int, int]] = (),
    ) -> None:
        """Adds up where each stage begins.

        Args:
            stages: For each, its first epoch, and L, the positions of an epoch, at least 1. The
                first begins with epoch 0; both numbers rise.
            batch_size: G, the positions of a step over all ranks.
            skipped: Ranges of steps to leave out; they rise and do not touch.
        """
        self._batch_size = batch_size
        self.skipped = tuple(skipped)
        self._first = [first for first, _ in stages]
        self._lengths = [length for _, length in stages]
        self._positions = [0]
        for number in range(1, len(stages)):
            num_epochs = self._first[number] - self._first[number - 1]
            self._positions.append(self._positions[-1] + num_epochs * self._lengths[number - 1])

    def max_steps(self, num_epochs: int) -> int:
        """Returns the most steps that begin in `num_epochs` successive epochs of the order."""
        return -(-num_epochs * self._lengths[-1] // self._batch_size)

    def step_of(self, batch: int) -> int:
        """Returns the step of the order that the batch with this number is."""
        for first, stop in self.skipped:
            if batch < first:
                break
            batch += stop - first
        return batch

    def batch_of(self, step: int) -> int:
        """Returns how many batches come before a step of the order."""
        return step - sum(max(0, min(step, stop) - first) for first, stop in self.skipped)

    def first_batch(self, epoch: int) -> int:
        """Returns the first batch that begins in this epoch or later."""
        stage = bisect_right(self._first, epoch) - 1
        passed = (epoch - self._first[stage]) * self._lengths[stage]
        return self.batch_of(-(-(self._positions[stage] + passed) // self._batch_size))

    def epoch_of(self, batch: int) -> int:
        """Returns the epoch in which a batch begins."""
        stage, passed = self._place(batch)
        return self._first[stage] + passed // self._lengths[stage]

    def epochs_before(self, batch: int) -> float:
        """Returns the number of epochs of the order before a batch, as a fraction."""
        stage, passed = self._place(batch)
        return self._first[stage] + passed / self._lengths[stage]

    def _place(self, batch: int) -> tuple[int, int]:
        """Returns the stage in which a batch begins, and the positions in it that passed before."""
        position = self.step_of(batch) * self._batch_size
        stage = bisect_right(self._positions, position) - 1
        return stage, position - self._positions[stage]

    def stop(self, batch: int, num_epochs: int) -> int:
        """Returns the batch behind the last one of the iteration that `batch` belongs to.

        Iterations of `num_epochs` epochs follow each other from epoch 0 on.
        """
        num_iterations = self.epoch_of(batch) // num_epochs + 1
        return self.first_batch(num_iterations * num_epochs)


def epochs_of(
    stages: Sequence[tuple[int, int]],
    batch_size: int,
    tail: str,
    skipped: Sequence[tuple[int, int]] = (),
) -> Epochs:
    """Returns the epochs of batches of G, with the tail `wrap`, `drop` or `pad`.

    Args:
        stages: For each, its first epoch, and N, the samples of an epoch; see `Epochs`.
        batch_size: G.
        tail: How to use samples that do not fill an epoch's last batch.
        skipped: See `Epochs`.
    """
    lengths = [(first, _length(num_samples, batch_size, tail)) for first, num_samples in stages]
    return Epochs(lengths, batch_size, skipped)


def _length(num_samples: int, batch_size: int, tail: str) -> int:
    match tail:
        case "drop":
            return num_samples // batch_size * batch_size
        case "pad":
            return -(-num_samples // batch_size) * batch_size
        case _:
            return num_samples
