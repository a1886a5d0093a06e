"""Compares a run with an undisturbed one."""

from collections import Counter
from dataclasses import dataclass

from benchmarks.loader.samples.mixed.documents import (
    CHANGE_AT,
    FIRST,
    NUM_STEPS,
    G,
    Steps,
    Variant,
)


@dataclass(frozen=True)
class Counts:
    """Counts of documents.

    Attributes:
        num_repeated: documents that came again before all of their source had come.
        num_never: documents that never came, of sources of which as many were read as there are.
        num_unwanted: documents that the filter should have left out.
        share: of the second source, from the change of weights on.
    """

    num_repeated: int
    num_never: int
    num_unwanted: int
    share: float

    @classmethod
    def of(cls, steps: Steps, variant: Variant) -> "Counts":
        """Those of a run."""
        read = _in_order(steps)
        num_repeated = num_never = 0
        for source, first in enumerate(FIRST):
            wanted = set(variant.ids(source))
            stop = [*FIRST, 1 << 40][source + 1]
            own = [each for each in read if first <= each < stop]
            passed = own[: len(wanted)]
            num_repeated += len(passed) - len(set(passed))
            if len(own) >= len(wanted):
                num_never += len(wanted - set(own))
        later = [sample[0] >= FIRST[1] for step in steps[CHANGE_AT:] for sample in step if sample]
        share = sum(later) / max(1, len(later))
        return cls(num_repeated, num_never, sum(not variant.passes(each) for each in read), share)


def _in_order(steps: Steps) -> list[int]:
    """All documents; those of one step have no order, so rarer ones are taken first."""
    times: Counter[int] = Counter()
    read: list[int] = []
    for step in steps:
        own = sorted((each for sample in step for each in sample), key=times.__getitem__)
        times.update(own)
        read += own
    return read


def compared(found: Steps, straight: Steps, variant: Variant) -> str:
    """A run's result in words; the batches of all ranks are compared, in any order of ranks."""
    differ = sum(sorted(one) != sorted(two) for one, two in zip(found, straight, strict=True))
    counts = Counts.of(found, variant)
    words = ["same batches" if not differ else f"{differ} of {NUM_STEPS} batches differ"]
    if differ or (variant.is_changed and counts.num_repeated + counts.num_never):
        words.append(f"{counts.num_repeated} repeated, {counts.num_never} never")
    if counts.num_unwanted:
        words.append(f"{counts.num_unwanted} that the filter leaves out")
    if variant.is_changed:
        words.append(f"share {counts.share:.2f}")
    if any(len(step) != G for step in found):
        words.append("batches of other sizes")
    return "; ".join(words)


def described(straight: Steps, variant: Variant) -> str:
    """The result of an undisturbed run."""
    counts = Counts.of(straight, variant)
    return f"{counts.num_repeated} repeated, {counts.num_never} never"
