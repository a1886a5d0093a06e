"""The arithmetic of steps and epochs, the same as the daemon's. It is pure.

An epoch has L positions: N with the tail `wrap`, N rounded down to whole batches with `drop`, and N
rounded up with `pad`. Step s begins at position sG and belongs to the epoch of that position. So
with `wrap` an epoch has ceil(N/G) steps, or one less.

A dataset may grow between two epochs. A *stage* is a run of epochs with the same N.
"""

from bisect import bisect_right
from collections.abc import Sequence


class Epochs:
    """The epochs of one stream."""

    def __init__(self, stages: Sequence[tuple[int, int]], batch_size: int) -> None:
        """Adds up where each stage begins.

        Args:
            stages: Of each, its first epoch, and L, the positions of an epoch, at least 1. The
                first begins with epoch 0; both numbers rise.
            batch_size: G, the positions of a step over all ranks.
        """
        self._batch_size = batch_size
        self._first = [first for first, _ in stages]
        self._lengths = [length for _, length in stages]
        self._positions = [0]
        for number in range(1, len(stages)):
            num_epochs = self._first[number] - self._first[number - 1]
            self._positions.append(self._positions[-1] + num_epochs * self._lengths[number - 1])

    def max_steps(self, num_epochs: int) -> int:
        """Returns the most steps that begin in `num_epochs` successive epochs."""
        return -(-num_epochs * self._lengths[-1] // self._batch_size)

    def first_step(self, epoch: int) -> int:
        """Returns the first step that begins in this epoch or later."""
        stage = bisect_right(self._first, epoch) - 1
        passed = (epoch - self._first[stage]) * self._lengths[stage]
        return -(-(self._positions[stage] + passed) // self._batch_size)

    def epoch_of(self, step: int) -> int:
        """Returns the epoch in which a step begins."""
        stage, passed = self._place(step)
        return self._first[stage] + passed // self._lengths[stage]

    def epochs_before(self, step: int) -> float:
        """Returns how many epochs lie before a step, as a fraction."""
        stage, passed = self._place(step)
        return self._first[stage] + passed / self._lengths[stage]

    def _place(self, step: int) -> tuple[int, int]:
        """Returns the stage in which a step begins, and the positions that passed in it before."""
        position = step * self._batch_size
        stage = bisect_right(self._positions, position) - 1
        return stage, position - self._positions[stage]

    def stop_step(self, step: int, num_epochs: int) -> int:
        """Returns the step behind the last one of the iteration that `step` belongs to.

        Iterations of `num_epochs` epochs follow each other from epoch 0 on.
        """
        num_iterations = self.epoch_of(step) // num_epochs + 1
        return self.first_step(num_iterations * num_epochs)


def epochs_of(stages: Sequence[tuple[int, int]], batch_size: int, tail: str) -> Epochs:
    """Returns the epochs of batches of G, with the tail `wrap`, `drop` or `pad`.

    Args:
        stages: Of each, its first epoch, and N, the samples of an epoch; see `Epochs`.
        batch_size: G.
        tail: What happens to samples that do not fill an epoch's last batch.
    """
    lengths = [(first, _length(num_samples, batch_size, tail)) for first, num_samples in stages]
    return Epochs(lengths, batch_size)


def _length(num_samples: int, batch_size: int, tail: str) -> int:
    match tail:
        case "drop":
            return num_samples // batch_size * batch_size
        case "pad":
            return -(-num_samples // batch_size) * batch_size
        case _:
            return num_samples
