"""Finds split blocks: modules in which one computes heads or a hidden width, and another goes on.

Shapes say which modules could be cores, and which linear layers beside them the last ones. A copy
of the module on `meta` is called then, in which each core returns an `Unfinished`. So nothing but
the one layer that is given it can use what the core returns, and the call tells which layer that
is. Core and last layer as one module are tried as any other block.
"""

from collections.abc import Iterator
from contextlib import suppress
from copy import deepcopy
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map_only

from gyre_trainer.layers.found.blocks import (
    first_that_fits,
    has_plain_layers,
    rules_by_shape,
    trying,
)
from gyre_trainer.layers.found.calls import (
    MASK,
    other_arguments,
    plain_arguments,
)
from gyre_trainer.layers.found.linears import is_projection
from gyre_trainer.layers.found.needed import needed_arguments, times_of
from gyre_trainer.layers.found.twin import BlockRule
from gyre_trainer.layers.mlp import MLPRule
from gyre_trainer.layers.projections import features_of
from gyre_trainer.layers.split.joined import LAST, joined, own_forward
from gyre_trainer.layers.split.unfinished import Unfinished, with_first
from gyre_trainer.rotation.rule import Rule

_CONTAINERS = nn.ModuleList, nn.ModuleDict


class _Tried(Unfinished):
    """An `Unfinished` that a forward may not tell from a tensor either, as `isinstance` does."""

    __slots__ = ()

    @property  # type: ignore[misc]
    def __class__(self) -> Any:
        raise TypeError("its class decides what is computed")


def find_split_rule(
    module: nn.Module, num_slices: int, *, regrouped: bool = False, drops_out: bool = True
) -> Rule | None:
    """The rule by which a core and a last layer in ``module`` rotate as one; None without these.

    Args:
        module: that around both; it may be on `meta`.
        num_slices: the size of the ring.
        regrouped: as `find_rule` has it.
        drops_out: as `find_rule` has it.
    """
    own = module.parameters(recurse=False)
    if isinstance(module, _CONTAINERS) or any(each.ndim > 1 for each in own):
        return None
    for core in _cores(module):
        lasts = [
            path
            for path in _layers_beside(module, core)
            if any(_rules(module, core, path, num_slices, regrouped))
        ]
        with trying():
            last = _taker(module, core, lasts) if lasts else None
            if last is None:
                continue
            both = joined(module.get_submodule(core), module.get_submodule(last))
            rules = _rules(module, core, last, num_slices, regrouped)
            rule = first_that_fits(both, rules, num_slices, drops_out=drops_out)
        if rule is not None:
            return _in_place(rule, core, last)
    return None


def _cores(module: nn.Module) -> Iterator[str]:
    """The names of modules directly inside that have linear layers of their own, and no others.

    A hook would not get what such a module returns.
    """
    for name, child in module.named_children():
        is_core = has_plain_layers(child)
        hooks = child._forward_hooks, child._backward_hooks, child._backward_pre_hooks
        is_free = "forward" not in vars(child) and not any(hooks)
        if is_core and is_free and not is_projection(child):
            yield name


def _layers_beside(module: nn.Module, core: str) -> Iterator[str]:
    """The paths of linear layers directly in the module, and in those beside the core.

    A hook would not get what such a layer is given, nor its gradient.
    """
    for name, child in module.named_children():
        if is_projection(child):
            found = {name: child}
        elif name != core:
            found = {f"{name}.{last}": each for last, each in child.named_children()}
        else:
            continue
        for path, each in found.items():
            hooks = each._forward_pre_hooks, each._backward_hooks, each._backward_pre_hooks
            if is_projection(each) and not any(hooks):
                yield path


def _rules(
    module: nn.Module, core: str, last: str, num_slices: int, regrouped: bool
) -> Iterator[BlockRule]:
    """The rules that the shapes allow, for the module of `joined`."""
    both = joined(module.get_submodule(core), module.get_submodule(last))
    for rule in rules_by_shape(both, num_slices, regrouped=regrouped):
        if _last_of(rule) == LAST:
            yield rule


def _last_of(rule: BlockRule) -> str:
    return rule.down if isinstance(rule, MLPRule) else rule.output


def _in_place(rule: BlockRule, core: str, last: str) -> BlockRule:
    """A rule for the module of `joined` as one for the module around."""

    def paths(names: tuple[str, ...]) -> tuple[str, ...]:
        return tuple(f"{core}.{name}" for name in names)

    if isinstance(rule, MLPRule):
        ups, dropouts = paths(rule.ups), paths(rule.dropouts)
        return replace(rule, core=core, ups=ups, down=last, dropouts=dropouts)
    inputs, tables = paths(rule.inputs), paths(rule.tables)
    return replace(rule, core=core, inputs=inputs, output=last, tables=tables)


def _taker(module: nn.Module, core: str, lasts: list[str]) -> str | None:
    """The one among ``lasts`` that is given what the core returns; None where it is not the only.

    It must be the same in training and in evaluation, and both take gradients or none does.
    """
    found: set[str] = set()
    for training in (True, False):
        try:
            copied = _on_meta(module).train(training)
            arguments = _arguments(copied, core)
        except Exception:  # foreign code: it has something that cannot be copied, or called
            return None
        taken = _watched(copied, core, lasts)
        if not (_finishes(copied, arguments) and taken):
            return None
        found |= set(taken)
    return found.pop() if len(found) == 1 else None


def _finishes(module: nn.Module, calls: list[dict[str, Any]]) -> bool:
    """Whether the first call that succeeds returns no `Unfinished`."""
    for arguments in calls:
        # foreign code, called with arguments that it may not take
        with suppress(Exception), torch.enable_grad():
            output = module(**arguments)
            return not any(isinstance(leaf, Unfinished) for leaf in tree_leaves(output))
    return False


def _on_meta(module: nn.Module) -> nn.Module:
    """A copy whose parameters and buffers have no values, and that calls no hooks."""
    instead: dict[int, Any] = {
        id(each): nn.Parameter(torch.empty(each.shape, dtype=torch.float64, device="meta"))
        for each in module.parameters()
    }
    instead |= {id(each): each.to("meta") for each in module.buffers()}
    for each in module.modules():
        if hasattr(each, "config"):
            instead[id(each.config)] = each.config
    copied = deepcopy(module, instead)
    for each in copied.modules():
        each._forward_hooks.clear()
        each._forward_pre_hooks.clear()
    return copied


def _watched(module: Any, core: str, lasts: list[str]) -> list[str]:
    """The paths of layers that take what the core returns, complete after a call."""
    taken: list[str] = []
    begins = module.get_submodule(core)
    begins.forward = lambda *args, **kwargs: with_first(
        own_forward(begins)(*args, **kwargs), _Tried
    )
    for path in lasts:
        module.get_submodule(path).forward = _taking(module.get_submodule(path), path, taken)
    return taken


def _taking(layer: nn.Module, path: str, taken: list[str]) -> Any:
    forward = own_forward(layer)

    def take(x: Any) -> Tensor:
        if isinstance(x, Unfinished):
            taken.append(path)
            x = x.take()
        output: Tensor = forward(x)
        return output

    return take


def _arguments(module: nn.Module, core: str) -> list[dict[str, Any]]:
    """Arguments of calls that may succeed: without a mask, and with one.

    ``module`` is on `meta`.
    """
    layers = filter(is_projection, module.get_submodule(core).children())
    width, _ = features_of(next(layers))
    for time in times_of(module):
        arguments = plain_arguments(
            module, attends=False, width=width, time=time, others_are_none=True
        )
        needed = needed_arguments(module, arguments)
        if needed is not None:
            arguments |= needed
            masks = other_arguments(module, arguments)
            calls = [arguments]
            if MASK in masks and arguments.get(MASK) is None:
                calls.append(arguments | {MASK: masks[MASK]})
            on_meta: list[dict[str, Any]] = tree_map_only(Tensor, lambda x: x.to("meta"), calls)
            return on_meta
    return []
