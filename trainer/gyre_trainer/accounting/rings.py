"""Costs of a step on rings of other sizes: N ranks are R replicas of rings of N / R.

Two ring sizes are counted, and the others follow from them: of a rank's bytes and operations, a
part does not depend on the ring and the other is 1/n of something, while its operators grow with n.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from gyre_trainer.accounting.baselines import Strategy
from gyre_trainer.accounting.depth import StepFigures
from gyre_trainer.training.config import TrainConfig

# Matrix units of GPUs take tiles of 128 rows or columns, and thinner slices leave a part idle.
THIN_ROWS = 128


@dataclass(frozen=True)
class RingFigures:
    """The costs of rings of one size.

    Attributes:
        size: ranks of a ring.
        replicas: rings of the job.
        figures: of a rank, of its ring alone.
        averaged_bytes: that a rank sends to average its gradients over the replicas.
        is_counted: whether the figures were counted, not derived from others.
        is_configured: whether the configuration has rings of this size.
    """

    size: int
    replicas: int
    figures: StepFigures
    averaged_bytes: int
    is_counted: bool
    is_configured: bool

    @property
    def name(self) -> str:
        """Name in tables and recommendations."""
        own = str(Strategy.GYRE)
        return own if self.is_configured else f"{own}, rings of {self.size}"


def ring_sizes(num_ranks: int) -> list[int]:
    """The sizes of rings that the ranks can be divided into; a ring of one is DDP."""
    return [size for size in range(2, num_ranks + 1) if num_ranks % size == 0]


def on_rings_of(config: TrainConfig, size: int, num_ranks: int) -> TrainConfig:
    """The part of a step that one ring has: each rank has as many samples as before."""
    rows = config.data.batch_size // num_ranks * size
    return replace(
        config, run=replace(config.run, replicas=1), data=replace(config.data, batch_size=rows)
    )


def figures_of_rings(
    counted: Mapping[int, StepFigures], num_ranks: int, configured: int, gradient_bytes: int
) -> list[RingFigures]:
    """The costs of all sizes of rings, the smallest first.

    Args:
        counted: figures of one or two sizes.
        num_ranks: of the job.
        configured: the size that the configuration has.
        gradient_bytes: of all gradients that replicas average.
    """
    found = []
    for size in ring_sizes(num_ranks):
        figures = counted.get(size) or (_between(counted, size) if len(counted) == 2 else None)
        if figures is not None:
            replicas = num_ranks // size
            averaged = 2 * (replicas - 1) * gradient_bytes // size // replicas
            found.append(
                RingFigures(size, replicas, figures, averaged, size in counted, size == configured)
            )
    return found


def _between(counted: Mapping[int, StepFigures], size: int) -> StepFigures:
    (small, few), (large, many) = sorted(counted.items())

    def line(at: Callable[[int], float], one: float, other: float) -> int:
        share = (at(size) - at(small)) / (at(large) - at(small))
        return max(0, round(one + share * (other - one)))

    def inverse(n: int) -> float:
        return 1 / n

    return StepFigures(
        {each: line(inverse, value, many.at_peak[each]) for each, value in few.at_peak.items()},
        line(inverse, few.sent_bytes, many.sent_bytes),
        line(inverse, few.operations, many.operations),
        few.assumes_even_routing or many.assumes_even_routing,
        line(float, few.num_operators, many.num_operators),
    )
