"""Steps that a job leaves out, and how the others are counted. Pure.

[Note: Steps and batches] A step of an order keeps its number and its samples, whatever is left out:
step s owns the positions `[sG, (s+1)G)`. A job that leaves steps out reads the others one after the
other, and its *batches* are counted without a gap. Streams, sessions and the protocol count
batches, under the name of steps; cursors, weights and people count the steps of the order. Where
nothing is left out, both numbers are equal.
"""

from collections.abc import Sequence
from itertools import pairwise

import numpy as np

from gyre_daemon.order.shuffle.permutation import Int64Array

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
