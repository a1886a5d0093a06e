"""What a step costs with many experts in each list, from two and three of them.

The experts of a list are alike, so each adds as much to every moment. Tokens still choose among all
experts: those that are measured get as many tokens as they would beside the others.
"""

import dataclasses
from collections.abc import Iterator, Sequence
from itertools import groupby

import numpy as np
import numpy.typing as npt
from torch import nn

from gyre_trainer.accounting.known_values import FewExperts
from gyre_trainer.accounting.live_bytes import Timeline
from gyre_trainer.accounting.step_cost import (
    BLOCK,
    EXPERT_BACKWARD,
    EXPERT_FORWARD,
    STEP,
    StepCost,
    expert_lists,
)
from gyre_trainer.training.config import TrainConfig
from gyre_trainer.training.models.gpt import GPTConfig

# Experts of the two models that are measured. The first and the last one differ from those between.
FEW, MORE = 2, 3
# Below, all experts take as long as two measurements with a few.
_MIN_EXPERTS = 6
MARKS = (STEP, "forward", "backward", "clip", "update", BLOCK)
_EXPERT = (EXPERT_FORWARD, EXPERT_BACKWARD)
Live = npt.NDArray[np.int64]
_Stretch = tuple[str, Live, Sequence[str]]


def num_experts(config: TrainConfig) -> int:
    """The number of experts that tokens choose from, if few of a list would tell the rest.

    0 where experts are few, and where tokens choose groups of experts first.
    """
    model = config.model
    if isinstance(model, GPTConfig) or model.has_expert_groups:
        return 0
    return model.num_experts if model.num_experts >= _MIN_EXPERTS else 0


def has_lists(blocks: Sequence[nn.Module], num: int) -> bool:
    """Whether the layers have lists of ``num`` experts, all of which are alike."""
    lists = [each for block in blocks for each in expert_lists(block)]
    return bool(lists) and all(len(each) == num and _are_alike(each) for each in lists)


def with_few_experts(config: TrainConfig, num: int) -> tuple[TrainConfig, FewExperts]:
    """The model with ``num`` experts in each list, and of how many tokens choose."""
    model = config.model
    assert not isinstance(model, GPTConfig)
    fewer = dataclasses.replace(config, model=model.with_experts(num))
    return fewer, FewExperts(num, model.num_experts)


def with_all_experts(few: StepCost, more: StepCost, num: int) -> StepCost:
    """What a step costs with ``num`` experts, from those with FEW and with MORE of them."""
    times = num - MORE
    return StepCost(
        _grown(few.timeline, more.timeline, times),
        more.sent_bytes + times * (more.sent_bytes - few.sent_bytes),
        more.operations + times * (more.operations - few.operations),
        more.assumes_even_routing,
    )


def growth_of(few: Live, more: Live) -> Live:
    """What one more adds, moment by moment; in all to the peak where moments differ."""
    if len(few) == len(more):
        return more - few
    return more[[more.sum(axis=1).argmax()]] - few[[few.sum(axis=1).argmax()]]


def grown(stretch: Live, growth: Live, times: int) -> Live:
    """The stretch with ``times`` more."""
    if len(growth) != len(stretch):
        growth = growth[[growth.sum(axis=1).argmax()]]
    return stretch + times * growth


def _are_alike(experts: nn.ModuleList) -> bool:
    kinds = {
        (type(each), *((name, weight.shape) for name, weight in each.named_parameters()))
        for each in experts
    }
    return len(kinds) == 1


def _grown(few: Timeline, more: Timeline, times: int) -> Timeline:
    """The timeline of ``more``, whose moments have the bytes of ``times`` more experts.

    Of the experts between the first and the last one, that in the middle stands for all. It grows
    as the last one does, which is the first one in backward.
    """
    events: list[str] = []
    live: list[Live] = []
    for one, other in zip(_runs(few), _runs(more), strict=True):
        name = other[0][0]
        paired = list(one)
        if name in _EXPERT and len(other) == len(one) + 1:
            paired.insert(1, one[0] if name == EXPERT_BACKWARD else one[-1])
            alike = [*other[:1], other[0 if name == EXPERT_BACKWARD else -1], *other[2:]]
        else:
            alike = list(other)
        for fewer, equal, stretch in zip(paired, alike, other, strict=True):
            events += stretch[2]
            live.append(grown(stretch[1], growth_of(fewer[1], equal[1]), times))
    return Timeline(events, np.concatenate(live))


def _runs(timeline: Timeline) -> list[list[_Stretch]]:
    """The stretches from mark to mark; those of experts that follow each other are together."""
    runs: list[list[_Stretch]] = []
    for name, stretches in groupby(_stretches(timeline), key=lambda stretch: stretch[0]):
        together = list(stretches)
        runs += [together] if name in _EXPERT else [[each] for each in together]
    return runs


def _stretches(timeline: Timeline) -> Iterator[_Stretch]:
    events = timeline.events
    bounds = [i for i, event in enumerate(events) if event in (*MARKS, *_EXPERT)]
    for start, stop in zip(bounds, [*bounds[1:], len(events)], strict=True):
        yield events[start], timeline.live[start:stop], events[start:stop]
