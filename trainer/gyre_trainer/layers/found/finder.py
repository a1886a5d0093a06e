"""The blocks of one model: modules that are alike are tried once, as the experts of all layers."""

from collections.abc import Hashable, Iterator
from functools import partial
from typing import Any

import torch
from torch import nn

from gyre_trainer.layers.found.blocks import find_rule
from gyre_trainer.layers.found.experts import find_experts_rule
from gyre_trainer.rotation.rule import Rule

_PLAIN = (bool, int, float, str, type(None), torch.dtype)
_OF_EVERY_MODULE = frozenset(vars(nn.Module()))


class BlockFinder:
    """Finds by which rules a model's modules rotate as a whole.

    ``regrouped`` and ``drops_out`` are as of `find_rule`.
    """

    def __init__(
        self,
        model: nn.Module,
        num_slices: int,
        *,
        regrouped: bool = False,
        drops_out: bool = True,
    ) -> None:
        self._find = partial(
            find_rule, num_slices=num_slices, regrouped=regrouped, drops_out=drops_out
        )
        self._shares_caches = not any(map(_has_cache_of_its_own, model.modules()))
        self._tried: dict[Hashable, Rule | None] = {}

    def rule_of(self, module: nn.Module) -> Rule | None:
        """The rule that was found for a module; None where none was."""
        key = tuple(_likeness(module))
        if key not in self._tried:
            self._tried[key] = self._find(module)
        rule = self._tried[key]
        if rule is not None and rule.caches_heads and not self._shares_caches:
            return None
        return rule


def experts_rules(model: nn.Module, num_slices: int) -> dict[type[nn.Module] | str, Rule | None]:
    """The rules of stacked experts by their paths; all other blocks are left alone."""
    found: dict[type[nn.Module] | str, Rule | None] = {}
    tried: dict[Hashable, Rule | None] = {}
    for path, module in model.named_modules():
        key = tuple(_likeness(module)) if module._parameters else ()
        if key and key not in tried:
            tried[key] = find_experts_rule(module, num_slices)
        rule = tried.get(key)
        if rule is not None:
            found[path] = rule
    return found


def _has_cache_of_its_own(module: Any) -> bool:
    """Whether it is a model of `transformers` whose cache slices cannot share.

    Such a cache also has states of another kind, as those of Mamba or of convolutions.
    """
    supports = getattr(module, "_supports_default_dynamic_cache", None)
    return supports is not None and not supports()


def _likeness(module: nn.Module) -> Iterator[Hashable]:
    """What is equal for modules that compute alike: classes, shapes, attributes.

    Attributes that are objects must be the same one, such as a configuration.
    """
    for path, part in module.named_modules():
        yield path, type(part)
        for name, parameter in part.named_parameters(recurse=False):
            yield name, parameter.shape, parameter.dtype
        for name, buffer in part.named_buffers(recurse=False):
            yield name, buffer.shape, buffer.dtype
        for name, value in vars(part).items():
            if name not in _OF_EVERY_MODULE or name == "training":
                yield name, value if isinstance(value, _PLAIN) else id(value)
