"""What a step of a deep model costs, from two and three of its layers, or three and four.

Each layer is like the others, so every moment of a step has as many bytes more for one more layer.
Moments are compared stretch by stretch, from one mark to the next: the last layers of one model
with the last ones of the other. The stretch with the most bytes need not be the same at every
depth.
"""

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import takewhile
from typing import Self, TypeVar

import numpy as np
import torch
from torch import nn

from gyre_trainer.accounting.baselines import Strategy
from gyre_trainer.accounting.dry_run import dry_run
from gyre_trainer.accounting.growth.few_experts import (
    FEW,
    MARKS,
    MORE,
    Live,
    grown,
    growth_of,
    has_lists,
    num_experts,
    with_all_experts,
    with_few_experts,
)
from gyre_trainer.accounting.live_bytes import CATEGORIES, Category, Timeline
from gyre_trainer.accounting.side_by_side import Job
from gyre_trainer.accounting.step_cost import BLOCK, STEP, StepCost
from gyre_trainer.errors import ConfigError
from gyre_trainer.training.build import blocks_of, plain
from gyre_trainer.training.config import TrainConfig
from gyre_trainer.training.models.gpt import GPTConfig

Result = TypeVar("Result")

# Layers of the deeper of the two models that are measured; the other one has one less. FSDP2
# gathers the layer after next while one computes, so only its fourth layer is like those that
# follow: from two and three layers, its peak came out up to 1.3 % too small or 8 % too large.
_MORE = 3
_MORE_OF = {Strategy.FSDP2_LAYER: 4}
# Leading layers of another kind, such as the dense ones before those with experts, are measured
# with the others. With more of them that would save little.
_MAX_LEADING = 4


@dataclasses.dataclass(frozen=True, eq=False)
class StepFigures:
    """A step's cost in figures.

    Attributes:
        at_peak: live bytes at the moment with the most.
        sent_bytes: bytes that a rank sends.
        operations: floating-point operations of a rank.
        assumes_even_routing: as `gyre_trainer.accounting.step_cost.StepCost` has it.
    """

    at_peak: dict[Category, int]
    sent_bytes: int
    operations: int
    assumes_even_routing: bool = False

    @property
    def peak_bytes(self) -> int:
        """The most live bytes at any moment."""
        return sum(self.at_peak.values())


def figures(cost: StepCost) -> StepFigures:
    """The figures of a step that was measured."""
    return StepFigures(
        cost.timeline.peak(), cost.sent_bytes, cost.operations, cost.assumes_even_routing
    )


@dataclasses.dataclass(frozen=True, slots=True)
class FigureJobs:
    """The dry runs that tell what one step costs rank 0, as `dry_run` would count it.

    A model whose layers differ, or that has few, is measured as it is.

    Attributes:
        config: of the run.
        num_layers: of the model; 0 where its last layers are not alike.
        num_leading: layers of another kind before those that are alike.
        num_experts: in each list of experts; 0 where all are measured.
    """

    config: TrainConfig
    num_layers: int
    num_leading: int = 0
    num_experts: int = 0

    @classmethod
    def of(cls, config: TrainConfig) -> Self:
        """The dry runs for a model.

        Raises:
            ConfigError: there is no such model.
        """
        is_long = num_experts(config) > 0
        # Thousands of modules take seconds to make, also on `meta`.
        built = with_few_experts(config, FEW)[0] if is_long else config
        with torch.device("meta"):
            model = plain(built.model)
        num_leading, num_alike = layer_kinds(model)
        num_layers = num_leading + num_alike if num_alike else 0
        is_told = is_long and has_lists(blocks_of(model), FEW)
        return cls(config, num_layers, num_leading, num_experts(config) if is_told else 0)

    def configs(self, strategy: Strategy = Strategy.GYRE) -> list[TrainConfig]:
        """The models that tell about one strategy, the deepest first, each with all its experts."""
        more = self._deepest(strategy)
        if self.num_layers <= more:
            return [self.config]
        return [_with_layers(self.config, depth) for depth in (more, more - 1)]

    def num_more_layers(self, strategy: Strategy = Strategy.GYRE) -> int:
        """The layers that the deepest of these models lacks."""
        return max(0, self.num_layers - self._deepest(strategy))

    def run(self, strategies: Sequence[Strategy], num_ranks: int) -> Iterator[Job[StepCost]]:
        """The dry runs of each strategy; those that take longest are first."""
        for strategy in strategies:
            for config in self.configs(strategy):
                if not self.num_experts:
                    yield partial(dry_run, config, strategy, num_ranks)
                    continue
                for num in (MORE, FEW):
                    fewer, experts = with_few_experts(config, num)
                    yield partial(dry_run, fewer, strategy, num_ranks, experts)

    def figures(self, strategy: Strategy, costs: Iterator[StepCost]) -> StepFigures:
        """What the next results of `run` say about one strategy."""
        first, *others = (self._cost(costs) for _ in self.configs(strategy))
        if not others:
            return figures(first)
        more, (few,) = first, others
        times = self.num_more_layers(strategy)
        at_peak = _extrapolated(few.timeline, more.timeline, times, self.num_leading)
        return StepFigures(
            dict(zip(CATEGORIES, at_peak.tolist(), strict=True)),
            more.sent_bytes + times * (more.sent_bytes - few.sent_bytes),
            more.operations + times * (more.operations - few.operations),
            more.assumes_even_routing,
        )

    def _deepest(self, strategy: Strategy) -> int:
        return self.num_leading + _MORE_OF.get(strategy, _MORE)

    def _cost(self, costs: Iterator[StepCost]) -> StepCost:
        """What the next results say about one of `configs`."""
        more = next(costs)
        return with_all_experts(next(costs), more, self.num_experts) if self.num_experts else more


def step_figures(config: TrainConfig, strategy: Strategy, num_ranks: int) -> StepFigures:
    """What one step costs rank 0.

    Raises:
        ConfigError, RotationError: as of `dry_run`.
    """

    def measured(jobs: FigureJobs) -> StepFigures:
        return jobs.figures(strategy, (job() for job in jobs.run([strategy], num_ranks)))

    return with_jobs(config, measured)


def with_jobs(config: TrainConfig, measure: Callable[[FigureJobs], Result]) -> Result:
    """What ``measure`` makes of the dry runs for a model, with all experts where few fail.

    DeepSeek-V2 counts the tokens of each expert in a table that has only the experts of the list.

    Raises:
        ConfigError, RotationError: as of ``measure``.
    """
    jobs = FigureJobs.of(config)
    try:
        return measure(jobs)
    except ConfigError:
        if not jobs.num_experts:
            raise
    return measure(dataclasses.replace(jobs, num_experts=0))


def layer_kinds(model: nn.Module) -> tuple[int, int]:
    """The number of leading layers of another kind, and of the layers that are alike after them.

    The second is 0 where the last layers are not alike, or too many are of another kind. Leading
    layers differ only in a causal model: an encoder's are followed by a decoder's.
    """
    kinds = [
        (type(block), tuple((name, each.shape) for name, each in block.named_parameters()))
        for block in blocks_of(model)
    ]
    num_alike = len(list(takewhile(lambda kind: kind == kinds[-1], reversed(kinds))))
    num_leading = len(kinds) - num_alike
    causal = not getattr(getattr(model, "config", None), "is_encoder_decoder", False)
    if num_leading and (num_leading > _MAX_LEADING or num_alike <= num_leading or not causal):
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


def _extrapolated(few: Timeline, more: Timeline, times: int, num_leading: int) -> Live:
    """Bytes by category at the peak of a step with ``times`` layers more than in ``more``."""
    live = np.concatenate(
        [
            moments
            for (name, fewer), (_, stretches) in zip(_phases(few), _phases(more), strict=True)
            for moments in _grown(name, fewer, stretches, times, num_leading)
        ]
    )
    at_peak: Live = live[live.sum(axis=1).argmax()]
    return at_peak


def _grown(
    phase: str, few: Sequence[Live], more: Sequence[Live], times: int, num_leading: int
) -> Iterator[Live]:
    """The stretches of one phase with ``times`` layers more.

    Of the layers between the first and the last one, the one next to the last one has the most
    bytes alive. It stands for all of them, and grows as the last one does, which is the first one
    in backward.
    """
    has_layers = len(more) > len(few)
    place = 2 if phase == "backward" else 2 + num_leading
    alike = [*more[:place], *more[place + 1 :]] if has_layers else more
    growths = [growth_of(*pair) for pair in zip(few, alike, strict=True)]
    if has_layers:
        growths.insert(place, growths[1] if phase == "backward" else growths[-1])
    for stretch, growth in zip(more, growths, strict=True):
        yield grown(stretch, growth, times)


def _phases(timeline: Timeline) -> Iterator[tuple[str, Sequence[Live]]]:
    """Each phase of the step by its name, with bytes [moments, categories] of each stretch."""
    bounds = [i for i, event in enumerate(timeline.events) if event in MARKS]
    name, stretches = STEP, list[Live]()
    for start, stop in zip(bounds, [*bounds[1:], len(timeline.events)], strict=True):
        event = timeline.events[start]
        if event not in (BLOCK, STEP):
            yield name, stretches
            name, stretches = event, []
        stretches.append(timeline.live[start:stop])
    yield name, stretches
