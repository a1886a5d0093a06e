"""How long a step takes at given rates, what tensor parallelism would cost, and what to choose.

Times are estimates: they leave out what the host spends on starting operators, and assume that all
communication is hidden that can be.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch

from gyre_trainer.accounting.baselines import Strategy
from gyre_trainer.accounting.depth import StepFigures
from gyre_trainer.accounting.live_bytes import Category
from gyre_trainer.training.config import TrainConfig

TENSOR_PARALLEL = "tensor parallel*"
# Of the memory that a rank has: an allocator's rounding and what libraries keep need some.
_USABLE = 0.9
# A smaller difference of peaks or times is not worth a change: the figures are no more exact.
_WORTH = 0.05
# Large enough for a matrix product's full rate, and for a copy that no cache holds.
_MATRIX_DIM, _COPY_BYTES, _NUM_TRIALS = 1024, 2**26, 5


@dataclass(frozen=True, slots=True)
class Rates:
    """What one rank's device and link do in a second.

    Attributes:
        operations_per_s: floating-point operations.
        bytes_per_s: bytes that it sends.
    """

    operations_per_s: float
    bytes_per_s: float


def measured_operations_per_s(dtype: torch.dtype) -> float:
    """The rate of a matrix product on this machine's device."""
    device = _device()
    matrix = torch.randn(_MATRIX_DIM, _MATRIX_DIM, dtype=dtype, device=device)
    return 2 * _MATRIX_DIM**3 / _seconds(lambda: matrix @ matrix)


def measured_bytes_per_s() -> float:
    """The rate of a copy in this machine's memory, which is a hop between ranks of one host."""
    source = torch.zeros(_COPY_BYTES, dtype=torch.uint8, device=_device())
    target = torch.empty_like(source)
    return _COPY_BYTES / _seconds(lambda: target.copy_(source))


def step_seconds(strategy: str, figures: StepFigures, rates: Rates) -> float:
    """The time of a step.

    Rotation and FSDP2 can hide all that they send. DDP sends in backward, which is two thirds of
    the operations. Tensor parallelism waits for what it sends.
    """
    computes_s = figures.operations / rates.operations_per_s
    sends_s = figures.sent_bytes / rates.bytes_per_s
    if strategy == TENSOR_PARALLEL:
        return computes_s + sends_s
    if strategy == Strategy.DDP:
        return max(computes_s, computes_s / 3 + sends_s)
    return max(computes_s, sends_s)


def tensor_parallel(
    ddp: StepFigures, config: TrainConfig, num_ranks: int, num_layers: int, dim: int
) -> StepFigures:
    """Tensor parallelism with sequence parallelism (arXiv 2205.05198), by formula.

    Each rank has 1/N of every parameter and takes part in all samples. Activations are cut along
    heads, hidden width or time, so a rank has as many as under DDP. Four times a layer (twice where
    nothing is recomputed in backward, and twice in backward), the residual stream of all samples
    is gathered, and as often its parts are added up.
    """
    width = getattr(torch, config.precision.compute_dtype).itemsize
    stream_bytes = config.data.batch_size * config.data.sequence_length * dim * width
    passes = 4 if config.memory.recompute == "none" else 6
    at_peak = {
        category: num_bytes // num_ranks
        if category in (Category.PARAMETERS, Category.GRADIENTS, Category.OPTIMIZER)
        else num_bytes
        for category, num_bytes in ddp.at_peak.items()
    }
    at_peak[Category.COMMUNICATION] = stream_bytes
    sent_bytes = 2 * passes * num_layers * stream_bytes * (num_ranks - 1) // num_ranks
    return StepFigures(at_peak, sent_bytes, ddp.operations)


def recommendation(
    figures: Mapping[Strategy, StepFigures], rates: Rates, memory_bytes: float | None
) -> str:
    """Which strategy to take, in a sentence or two; differences below 5 % are none.

    Args:
        figures: of each strategy that was counted.
        rates: of a rank.
        memory_bytes: what a rank has; None where nobody said.
    """
    seconds = {each: step_seconds(each, cost, rates) for each, cost in figures.items()}
    peaks = {each: float(cost.peak_bytes) for each, cost in figures.items()}
    if memory_bytes is None:
        return _advice(seconds, peaks)
    where = f"{memory_bytes / 2**30:.4g} GiB"
    fitting = [each for each in figures if peaks[each] <= _USABLE * memory_bytes]
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


def _advice(seconds: Mapping[Strategy, float], peaks: Mapping[Strategy, float]) -> str:
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


def _lowest(values: Mapping[Strategy, float]) -> list[Strategy]:
    """Those whose value is the lowest, or less than 5 % above it."""
    lowest = min(values.values())
    return [each for each, value in values.items() if value <= lowest * (1 + _WORTH)]


def _no_difference(alike: Sequence[Strategy]) -> str:
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
