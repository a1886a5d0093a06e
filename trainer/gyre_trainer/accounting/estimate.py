"""Time of a step at given rates, and a recommendation.

Times are estimates: they take the host's time to start operators as that of additions, and assume
that all communication is hidden where it can be.

Costs of a step on rings of other sizes: N ranks are R replicas of rings of N / R.

Two ring sizes are counted, and the others follow from them: of a rank's bytes and operations, a
part does not depend on the ring and the other is 1/n of something, while its operators grow with n.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from gyre_trainer.accounting.baselines import Strategy
from gyre_trainer.accounting.depth import StepFigures
from gyre_trainer.errors import ConfigError
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


# Of the memory that a rank has: an allocator's rounding and what libraries keep need some.
_USABLE = 0.9
# A smaller difference of peaks or times is not worth a change: the figures are no more exact.
_WORTH = 0.05
# Large enough for a matrix product's full rate, and for a copy that no cache holds.
_MATRIX_DIM, _COPY_BYTES, _NUM_TRIALS, _NUM_OPERATORS = 1024, 2**26, 5, 1000


@dataclass(frozen=True, slots=True)
class Rates:
    """The speeds of one rank's device, host and links; 0 where one is to be measured.

    Attributes:
        operations_per_s: floating-point operations.
        bytes_per_s: bytes that it sends to a rank of its host.
        bytes_per_s_between: bytes that a host sends to another one; None for one host.
        ranks_per_host: ranks that share a host and its link.
        operator_s: seconds of the host to start an operator.
        sources: where the first two are from.
    """

    operations_per_s: float = 0.0
    bytes_per_s: float = 0.0
    bytes_per_s_between: float | None = None
    ranks_per_host: int = 8
    operator_s: float = 0.0
    sources: tuple[str, str] = ("given", "given")

    def completed(self, dtype: torch.dtype, num_ranks: int) -> "Rates":
        """The same with missing rates measured on this machine.

        Raises:
            ConfigError: there are several hosts, but no rate of the link between them.
        """
        if num_ranks > self.ranks_per_host and self.bytes_per_s_between is None:
            raise ConfigError(
                f"{num_ranks} ranks are on several hosts ({self.ranks_per_host} on each). Give "
                "--bytes-per-s-between, the bytes that a host sends to another one in a second, or "
                "--ranks-per-host"
            )
        return replace(
            self,
            operations_per_s=self.operations_per_s or _measured_operations_per_s(dtype),
            bytes_per_s=self.bytes_per_s or _measured_bytes_per_s(),
            operator_s=_measured_operator_s(),
            sources=(
                "given" if self.operations_per_s else "measured here: a matrix product",
                "given" if self.bytes_per_s else "measured here: a copy in memory",
            ),
        )

    def described(self) -> str:
        """The rates and their sources, for the end of a table."""
        lines = [
            f"{self.operations_per_s:.2e} operations/s of a rank ({self.sources[0]})",
            f"{self.bytes_per_s:.2e} bytes/s inside a host ({self.sources[1]})",
        ]
        if self.bytes_per_s_between is not None:
            lines.append(
                f"{self.bytes_per_s_between:.2e} bytes/s between hosts of {self.ranks_per_host} "
                "ranks, by one link a host (given)"
            )
        lines.append(
            f"{self.operator_s * 1e6:.1f} us of the host for an operator (measured here: an "
            "addition; a real step takes more)"
        )
        return "\n".join(lines)

    def of_ring(self, num_ranks: int) -> float:
        """Bytes per second of a ring of ranks; it crosses the link of each host once."""
        if self.bytes_per_s_between is None or num_ranks <= self.ranks_per_host:
            return self.bytes_per_s
        return min(self.bytes_per_s, self.bytes_per_s_between)

    def between_replicas(self, size: int, num_ranks: int) -> float:
        """Bytes per second of the rings across replicas; those of one host share its link."""
        if self.bytes_per_s_between is None or num_ranks <= self.ranks_per_host:
            return self.bytes_per_s
        return self.bytes_per_s_between / min(size, self.ranks_per_host)


def _measured_operations_per_s(dtype: torch.dtype) -> float:
    """The rate of a matrix product on this machine's device."""
    device = _device()
    matrix = torch.randn(_MATRIX_DIM, _MATRIX_DIM, dtype=dtype, device=device)
    return 2 * _MATRIX_DIM**3 / _seconds(lambda: matrix @ matrix)


def _measured_bytes_per_s() -> float:
    """The rate of a copy in this machine's memory, which is a hop between ranks of one host."""
    source = torch.zeros(_COPY_BYTES, dtype=torch.uint8, device=_device())
    target = torch.empty_like(source)
    return _COPY_BYTES / _seconds(lambda: target.copy_(source))


def _measured_operator_s() -> float:
    """The time that this host takes to start one small operator of torch."""
    tensor = torch.zeros(1, device=_device())

    def start() -> None:
        for _ in range(_NUM_OPERATORS):
            tensor.add_(1)

    return _seconds(start) / _NUM_OPERATORS


def step_seconds(strategy: str, figures: StepFigures, rates: Rates, num_ranks: int) -> float:
    """The time of a step.

    Rotation and FSDP2 can hide all that they send. DDP sends in backward, which is two thirds of
    the operations. No step is shorter than its host takes to start the operators.
    """
    computes_s = figures.operations / rates.operations_per_s
    sends_s = figures.sent_bytes / rates.of_ring(num_ranks)
    starts_s = host_seconds(figures, rates)
    if strategy == Strategy.DDP:
        return max(computes_s, computes_s / 3 + sends_s, starts_s)
    return max(computes_s, sends_s, starts_s)


def host_seconds(figures: StepFigures, rates: Rates) -> float:
    """The time that the host of a rank takes to start all operators of a step."""
    return figures.num_operators * rates.operator_s


def ring_seconds(ring: RingFigures, rates: Rates, num_ranks: int) -> float:
    """The time of a step on rings of one size; gradients are averaged during backward."""
    averages_s = ring.averaged_bytes / rates.between_replicas(ring.size, num_ranks)
    alone_s = step_seconds(Strategy.GYRE, ring.figures, rates, ring.size)
    computes_s = ring.figures.operations / rates.operations_per_s
    return max(alone_s, computes_s / 3 + averages_s)


def recommendation(
    peaks: Mapping[str, float], seconds: Mapping[str, float], memory_bytes: float | None
) -> str:
    """Which strategy to take, in a sentence or two; differences below 5 % are none.

    Args:
        peaks: bytes of a rank, of each strategy and each size of rings.
        seconds: of a step, of the same.
        memory_bytes: a rank's memory; None if it is not given.
    """
    if memory_bytes is None:
        return _advice(seconds, peaks)
    where = f"{memory_bytes / 2**30:.4g} GiB"
    fitting = [each for each in peaks if peaks[each] <= _USABLE * memory_bytes]
    if not fitting:
        return (
            f"Nothing fits into {_USABLE:.0%} of {where}; {min(peaks, key=peaks.__getitem__)} is "
            "the smallest. Use more ranks, fewer tokens per rank, bfloat16 or recomputation."
        )
    fast = _lowest({each: seconds[each] for each in fitting})
    best = _lowest({each: peaks[each] for each in fast})
    if len(best) > 1:
        return f"{_no_difference(best)} They fit into {where}."
    if len(fast) > 1:
        return f"Take {best[0]}: the smallest of those that fit into {where} and are as fast."
    return f"Take {best[0]}: the fastest of those that fit into {where}."


def _advice(seconds: Mapping[str, float], peaks: Mapping[str, float]) -> str:
    """The default if no memory size was given for a rank."""
    fast, small = _lowest(seconds), _lowest(peaks)
    best = [each for each in fast if each in small]
    if len(best) > 1:
        return _no_difference(best)
    if best:
        return f"Take {best[0]}: nothing is smaller or faster by {_WORTH:.0%}."
    fastest = min(fast, key=peaks.__getitem__)
    least = peaks[fastest] / _USABLE / 2**30
    return (
        f"Take {fastest} where a rank has {least:.3g} GiB or more; otherwise "
        f"{min(small, key=seconds.__getitem__)}, the smallest.\n--memory GIB decides for a device."
    )


def _lowest(values: Mapping[str, float]) -> list[str]:
    """Those whose value is the lowest, or less than 5 % above it."""
    lowest = min(values.values())
    return [each for each, value in values.items() if value <= lowest * (1 + _WORTH)]


def _no_difference(alike: Sequence[str]) -> str:
    *others, last = alike
    return (
        f"{', '.join(others)} and {last} differ by less than {_WORTH:.0%} in memory and time, "
        "which is not worth a change: keep the one that you have."
    )


def _seconds(work: Callable[[], object]) -> float:
    """The shortest time of a few trials."""
    trials = []
    for _ in range(_NUM_TRIALS):
        _wait()
        began_s = time.perf_counter()
        work()
        _wait()
        trials.append(time.perf_counter() - began_s)
    return min(trials)


def _wait() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def _device() -> str:
    return "cuda" if torch.cuda.is_available() else "cpu"
