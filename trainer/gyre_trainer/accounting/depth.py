"""The cost of a step of a deep model, from two and three of its layers, or three and four.

Each layer is like the others, so the peak of each phase of a step grows by as many bytes with each
layer more. The phase with the most bytes need not be the same at every depth.
"""

import dataclasses
import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from itertools import takewhile
from multiprocessing import get_context
from typing import Any, Self, TypeVar

import numpy as np
import numpy.typing as npt
import torch
from gyre_protos.program import die_with
from torch import nn

from gyre_trainer.accounting.baselines import Strategy
from gyre_trainer.accounting.counters import CATEGORIES, Category, Timeline
from gyre_trainer.accounting.dry_run import dry_run
from gyre_trainer.accounting.step_cost import STEP, StepCost
from gyre_trainer.training.build import blocks_of, plain
from gyre_trainer.training.config import TrainConfig
from gyre_trainer.training.gpt import GPTConfig

Result = TypeVar("Result")
Job = Callable[[], Result]
# A process has about 300 MB of its own; more processes than jobs of a plan would do nothing.
_MAX_PROCESSES = 8


def side_by_side(jobs: Sequence[Job[Any]]) -> list[Any]:
    """The result of each job, computed on the cores that this process may use.

    Jobs must not communicate or use a device: their processes share neither threads nor contexts
    with this one.

    Args:
        jobs: the computations; the first ones should be those that take longest.

    Raises:
        Exception: the error of the first job, in their order, that failed.
    """
    num_processes = min(_MAX_PROCESSES, len(jobs), len(os.sched_getaffinity(0)))
    if num_processes == 1:
        return [job() for job in jobs]
    with ProcessPoolExecutor(
        num_processes, get_context("fork"), _begin, (os.getpid(),)
    ) as processes:
        started = [processes.submit(job) for job in jobs]
        try:
            return [each.result() for each in started]
        finally:
            processes.shutdown(cancel_futures=True)


def _begin(parent: int) -> None:
    """End with the parent, whose pipes no one else reads, and do without the threads of torch.

    They were not forked; a process that waits for them would wait for ever.
    """
    die_with(parent)
    torch.set_num_threads(1)


# Layers of the deeper of the two models that are measured; the other one has one less. FSDP2
# gathers the layer after next while one computes, so only its fourth layer is like those that
# follow: from two and three layers, its peak came out up to 1.3 % too small or 8 % too large.
_MORE = 3
_MORE_OF = {Strategy.FSDP2_LAYER: 4}
# Leading layers of another kind, such as the dense ones before those with experts, are measured
# with the others. With more of them that would save little.
_MAX_LEADING = 4
_PHASES = (STEP, "forward", "backward", "clip", "update")


@dataclasses.dataclass(frozen=True, eq=False)
class StepFigures:
    """A step's cost in figures.

    Attributes:
        at_peak: live bytes at the moment with the most.
        sent_bytes: bytes that a rank sends.
        operations: floating-point operations of a rank.
        assumes_even_routing: as `gyre_trainer.accounting.step_cost.StepCost` has it.
        num_operators: that the host of a rank starts.
    """

    at_peak: dict[Category, int]
    sent_bytes: int
    operations: int
    assumes_even_routing: bool = False
    num_operators: int = 0

    @property
    def peak_bytes(self) -> int:
        """The most live bytes at any moment."""
        return sum(self.at_peak.values())


def figures(cost: StepCost) -> StepFigures:
    """The figures of a step that was measured."""
    return StepFigures(
        cost.timeline.peak(),
        cost.sent_bytes,
        cost.operations,
        cost.assumes_even_routing,
        cost.num_operators,
    )


@dataclasses.dataclass(frozen=True, slots=True)
class FigureJobs:
    """The dry runs that tell the cost of one step for rank 0, as `dry_run` would count it.

    A model whose layers differ, or that has few, is measured as it is.

    Attributes:
        config: of the run.
        num_layers: of the model; 0 where its last layers are not alike.
        num_leading: layers of another kind before those that are alike.
        num_weights: elements of all parameters.
    """

    config: TrainConfig
    num_layers: int
    num_leading: int = 0
    num_weights: int = 0

    @classmethod
    def of(cls, config: TrainConfig) -> Self:
        """The dry runs for a model.

        Raises:
            ConfigError: there is no such model.
        """
        with torch.device("meta"):
            model = plain(config.model)
        num_leading, num_alike = layer_kinds(model)
        num_weights = sum(each.numel() for each in model.parameters())
        num_layers = num_leading + num_alike if num_alike else 0
        return cls(config, num_layers, num_leading, num_weights)

    def configs(self, strategy: Strategy = Strategy.GYRE) -> list[TrainConfig]:
        """The models that tell about one strategy, the deepest first."""
        more = self._deepest(strategy)
        if self.num_layers <= more:
            return [self.config]
        return [_with_layers(self.config, depth) for depth in (more, more - 1)]

    def run(self, strategies: Sequence[Strategy], num_ranks: int) -> Iterator[Job[StepCost]]:
        """The dry runs of each strategy; those that take longest are first."""
        for strategy in strategies:
            for config in self.configs(strategy):
                yield partial(dry_run, config, strategy, num_ranks)

    def figures(self, strategy: Strategy, costs: Iterator[StepCost]) -> StepFigures:
        """What the next results of `run` say about one strategy."""
        more, *others = (next(costs) for _ in self.configs(strategy))
        if not others:
            return figures(more)
        (few,) = others
        times = self.num_layers - self._deepest(strategy)
        peaks = _phase_peaks(more.timeline)
        peaks += times * (peaks - _phase_peaks(few.timeline))
        at_peak = peaks[peaks.sum(axis=1).argmax()].tolist()
        return StepFigures(
            dict(zip(CATEGORIES, at_peak, strict=True)),
            more.sent_bytes + times * (more.sent_bytes - few.sent_bytes),
            more.operations + times * (more.operations - few.operations),
            more.assumes_even_routing,
            more.num_operators + times * (more.num_operators - few.num_operators),
        )

    def _deepest(self, strategy: Strategy) -> int:
        return self.num_leading + _MORE_OF.get(strategy, _MORE)


def step_figures(config: TrainConfig, strategy: Strategy, num_ranks: int) -> StepFigures:
    """The cost of one step for rank 0.

    Raises:
        ConfigError, RotationError: as of `dry_run`.
    """
    jobs = FigureJobs.of(config)
    return jobs.figures(strategy, (job() for job in jobs.run([strategy], num_ranks)))


def layer_kinds(model: nn.Module) -> tuple[int, int]:
    """The number of leading layers of another kind, and of the layers that are alike after them.

    The second is 0 where the last layers are not alike, or too many are of another kind.
    """
    kinds = [
        (type(block), tuple((name, each.shape) for name, each in block.named_parameters()))
        for block in blocks_of(model)
    ]
    num_alike = len(list(takewhile(lambda kind: kind == kinds[-1], reversed(kinds))))
    num_leading = len(kinds) - num_alike
    if num_leading and (num_leading > _MAX_LEADING or num_alike <= num_leading):
        return 0, 0
    return num_leading, num_alike


def _with_layers(config: TrainConfig, num_layers: int) -> TrainConfig:
    model = config.model
    fewer = (
        dataclasses.replace(model, num_layers=num_layers)
        if isinstance(model, GPTConfig)
        else model.with_layers(num_layers)
    )
    return dataclasses.replace(config, model=fewer)


def _phase_peaks(timeline: Timeline) -> npt.NDArray[np.int64]:
    """Bytes [phases, categories] at the moment of each phase with the most."""
    bounds = [i for i, event in enumerate(timeline.events) if event in _PHASES]
    phases = np.split(timeline.live, bounds[1:])
    return np.stack([live[live.sum(axis=1).argmax()] for live in phases])
