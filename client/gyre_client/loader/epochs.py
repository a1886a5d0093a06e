"""The arithmetic of steps and epochs, the same as the daemon's. It is pure.

An epoch has L positions: N with the tail `wrap`, N rounded down to whole batches with `drop`, and N
rounded up with `pad`. Step s begins at position sG and belongs to the epoch of that position. So
with `wrap` an epoch has ceil(N/G) steps, or one less.
"""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Epochs:
    """The epochs of one stream.

    Attributes:
        length: L, the positions of an epoch; at least 1.
        batch_size: G, the positions of a step over all ranks.
    """

    length: int
    batch_size: int

    def max_steps(self, num_epochs: int) -> int:
        """Returns the most steps that begin in `num_epochs` successive epochs."""
        return -(-num_epochs * self.length // self.batch_size)

    def first_step(self, epoch: int) -> int:
        """Returns the first step that begins in this epoch or later."""
        return -(-epoch * self.length // self.batch_size)

    def epoch_of(self, step: int) -> int:
        """Returns the epoch in which a step begins."""
        return step * self.batch_size // self.length

    def stop_step(self, step: int, num_epochs: int) -> int:
        """Returns the step behind the last one of the iteration that `step` belongs to.

        Iterations of `num_epochs` epochs follow each other from epoch 0 on.
        """
        num_iterations = self.epoch_of(step) // num_epochs + 1
        return self.first_step(num_iterations * num_epochs)


def epochs_of(num_samples: int, batch_size: int, tail: str) -> Epochs:
    """Returns the epochs of N samples in batches of G, with the tail `wrap`, `drop` or `pad`."""
    match tail:
        case "drop":
            length = num_samples // batch_size * batch_size
        case "pad":
            length = -(-num_samples // batch_size) * batch_size
        case _:
            length = num_samples
    return Epochs(length, batch_size)
