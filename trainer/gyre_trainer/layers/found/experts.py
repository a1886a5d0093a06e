"""Finds experts whose weights are stacked, and tries each finding on a small twin of the module.

Candidates are modules whose parameters all have the same number of experts along their first dim,
two or more of them a matrix for each expert. Which argument has the experts' numbers, and which one
their scores, shows the trial: nothing is concluded from names.
"""

import inspect
import math
from collections.abc import Iterator
from copy import deepcopy
from itertools import permutations
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from gyre_trainer.layers.experts.moe import ExpertsRule
from gyre_trainer.layers.found.calls import without_hooks
from gyre_trainer.layers.found.side_effects import SideEffects
from gyre_trainer.rotation.rule import swapped
from gyre_trainer.shards.layout import Layout

_TOKENS, _CHOICES = 7, 2
# Some experts take their activations in float32.
_TOLERANCE = 1e-4
# A twin whose widths have no common divisor is as wide as the module; above this it is not tried.
_MAX_NUMEL = 2**22


def find_experts_rule(module: nn.Module, num_slices: int) -> ExpertsRule | None:
    """The rule by which stacked experts rotate; None where none was found.

    Random numbers are drawn later as if none had been drawn here.
    """
    with torch.device("cpu"), torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.default_generator.manual_seed(0)  # no other device has the fork
        twin = _twin(module) if _is_stacked(module) else None
        if twin is None:
            return None
        return next((rule for rule in _rules(twin) if _fits(twin, rule, num_slices)), None)


def _is_stacked(module: nn.Module) -> bool:
    own = [parameter for parameter in module._parameters.values() if parameter is not None]
    return (
        len(own) == len(list(module.parameters()))
        and all(parameter.ndim in (2, 3) for parameter in own)
        and len({parameter.shape[0] for parameter in own}) == 1
        and sum(parameter.ndim == 3 for parameter in own) >= 2
        and own[0].shape[0] > _CHOICES
    )


def _twin(module: nn.Module) -> nn.Module | None:
    """A copy with as many experts and narrow matrices in float64; None where it would be large.

    Numbers among the module's own attributes that are widths of its parameters become narrow, too.
    """
    own = dict(module.named_parameters())
    num_experts = next(iter(own.values())).shape[0]
    widths = {size for parameter in own.values() for size in parameter.shape[1:]}
    divisor = math.gcd(*widths) if num_experts not in widths else 1
    narrow = {width: 2 * width // divisor if divisor > 2 else width for width in widths}
    shapes = {
        name: (num_experts, *(narrow[size] for size in parameter.shape[1:]))
        for name, parameter in own.items()
    }
    if sum(math.prod(shape) for shape in shapes.values()) > _MAX_NUMEL:
        return None
    instead: dict[int, Any] = {
        id(own[name]): nn.Parameter(torch.randn(shape, dtype=torch.float64) / shape[-1] ** 0.5)
        for name, shape in shapes.items()
    }
    if hasattr(module, "config"):
        instead[id(module.config)] = module.config
    twin = without_hooks(deepcopy(module, instead))
    for name, value in vars(twin).items():
        if type(value) is int:
            setattr(twin, name, narrow.get(value, value))
    return twin


def _rules(twin: nn.Module) -> Iterator[ExpertsRule]:
    names = tuple(name for name, _ in twin.named_parameters())
    arguments = tuple(inspect.signature(twin.forward).parameters)
    if len(arguments) not in (2, 3):  # the activations, and what the router said
        return
    for last in reversed([name for name in names if twin.get_parameter(name).ndim == 3]):
        linear = tuple(
            name
            for name in names
            if name == last or (name.startswith(last) and twin.get_parameter(name).ndim == 2)
        )
        for chosen, *scores in permutations(arguments[1:]):
            for score in (*scores, None):
                yield ExpertsRule(names, chosen, score, last=linear, arguments=arguments)


def _fits(twin: nn.Module, rule: ExpertsRule, num_slices: int) -> bool:
    """Whether slices make the output of all, with activations of one of the weights' widths."""
    widths = {size for parameter in twin.parameters() for size in parameter.shape[1:]}
    return any(_fits_width(twin, rule, num_slices, width) for width in sorted(widths))


def _fits_width(twin: nn.Module, rule: ExpertsRule, num_slices: int, width: int) -> bool:
    try:
        arguments = _arguments(twin, rule, width)
        return all(
            _sums_up(twin.train(training), rule, num_slices, arguments)
            for training in (True, False)
        )
    except Exception:  # foreign code, called with arguments that it may not take
        return False


def _sums_up(
    twin: nn.Module, rule: ExpertsRule, num_slices: int, arguments: dict[str, Any]
) -> bool:
    """Whether slices add up to the output, which is linear in the last layer and not random.

    Raises:
        TypeError: it writes to its tensors, or counts its calls.
    """
    state = torch.get_rng_state()
    first = SideEffects(twin, arguments)
    expected = _output(twin, arguments)
    first.require_none_of_whole()
    more = SideEffects(twin)
    layout = Layout(tuple(rule.cuts(twin, num_slices)), num_slices)
    found = torch.zeros_like(expected)
    for index in range(num_slices):
        start, stop = layout.bounds(layout.cuts[0], index)
        weights = {name: twin.get_parameter(name)[start:stop] for name in rule.weights}
        _, sliced = rule.arguments_of(start, stop, (), arguments)
        with swapped(twin, weights):
            found += _output(twin, sliced)
    more.require_none_of_more_calls()
    nothing = {name: torch.zeros_like(twin.get_parameter(name)) for name in rule.last}
    with swapped(twin, nothing):
        silent = not _output(twin, arguments).any()
    close = torch.allclose(found, expected, rtol=_TOLERANCE, atol=_TOLERANCE)
    return bool(close and silent and expected.any()) and torch.equal(torch.get_rng_state(), state)


def _output(twin: nn.Module, arguments: dict[str, Any]) -> Tensor:
    (output,) = [leaf for leaf in tree_leaves(twin(**arguments)) if isinstance(leaf, Tensor)]
    return output


def _arguments(twin: nn.Module, rule: ExpertsRule, width: int) -> dict[str, Any]:
    """Random activations, and for each token different experts with their scores."""
    num_experts = twin.get_parameter(rule.weights[0]).shape[0]
    scores = torch.rand(_TOKENS, num_experts, dtype=torch.float64)
    best, chosen = scores.topk(_CHOICES, dim=-1)
    activations, *others = rule.arguments
    values: dict[str, Any] = {
        activations: torch.randn(_TOKENS, width, dtype=torch.float64),
        str(rule.chosen): chosen,
    }
    if rule.scores is not None:
        values[str(rule.scores)] = torch.zeros_like(scores).scatter_(1, chosen, best)
    return dict.fromkeys(others, best) | values
