"""The blocks of one model: modules that are alike are tried once, as the experts of all layers."""

from collections import Counter
from collections.abc import Collection, Hashable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from hashlib import blake2b
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn

from gyre_trainer.layers.found.blocks import find_rule
from gyre_trainer.layers.found.calls import is_invented
from gyre_trainer.layers.found.experts import find_experts_rule
from gyre_trainer.layers.found.split import find_split_rule
from gyre_trainer.layers.found.twin import reads_recorded
from gyre_trainer.rotation.rule import Rule

_PLAIN = (bool, int, float, str, type(None), torch.dtype)
_LISTS = nn.ModuleList, nn.ModuleDict, nn.Sequential
_OF_EVERY_MODULE = frozenset(vars(nn.Module()))
_HOOKS_OF_CALLS = "_forward_hooks", "_forward_pre_hooks"
_BACKWARD_HOOKS = "_backward_hooks", "_backward_pre_hooks"


@dataclass
class _Trial:
    """A trial of a module, which others with other numbers may share.

    Attributes:
        rule: what was found.
        numbers: attributes of the module that are whole numbers.
        read: names of attributes that the trial has read; None where this was not recorded.
    """

    rule: Rule | None
    numbers: dict[str, int]
    read: list[str] | None = None

    def holds_for(self, numbers: dict[str, int]) -> bool:
        """Whether a module that is alike but for ``numbers`` would be tried in the same way."""
        if self.read is None:
            return False
        # by `vars` any of them may have been read
        read = numbers if "__dict__" in self.read else self.read
        return all(value == self.numbers[name] for name, value in numbers.items() if name in read)


class BlockFinder:
    """Finds by which rules a model's modules rotate as a whole.

    Split blocks are found in modules of a list alone, such as layers. What is there once may be
    called by its own parts, and a split block's core by itself computes nothing. So
    nothing inside may have a parameter that another module has, too.

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
        self._num_slices = num_slices
        self._options = {"regrouped": regrouped, "drops_out": drops_out}
        self._shares_caches = not any(map(_has_cache_of_its_own, model.modules()))
        lists = (each for each in model.modules() if isinstance(each, _LISTS))
        self._repeated = {id(each) for one in lists for each in one.modules() if each is not one}
        self._num_places = _num_places(model)
        self._tried: dict[Hashable, Rule | None] = {}
        self._trials: dict[Hashable, _Trial] = {}

    def rule_of(self, module: nn.Module) -> Rule | None:
        """The rule that was found for a module; None where none was.

        Modules of which some parameters alone are tied rotate layer by layer.
        """
        repeats = id(module) in self._repeated and not self._shares_parts(module)
        key = (repeats, *_likeness(module))
        if key not in self._tried:
            self._tried[key] = self._found(module, repeats=repeats)
        rule = self._tried[key]
        if rule is None or (rule.caches_heads and not self._shares_caches):
            return None
        if rule.linear_in and self._is_tied_in_part(module):
            return None
        return rule

    def _found(self, module: nn.Module, *, repeats: bool) -> Rule | None:
        """The rule of a module that is like no other, but perhaps for numbers that no call reads.

        The layers of a model differ in such a number, their place in the list. The second one of
        them is tried with its reads recorded; further ones compute as it did.
        """
        numbers = _numbers_of(module)
        if not numbers:
            return self._search(module, repeats=repeats)
        key = (repeats, *_likeness(module, numbers))
        trial = self._trials.get(key)
        if trial is not None and trial.holds_for(numbers):
            return trial.rule
        if trial is not None and trial.read is None:
            with suppress(TypeError), reads_recorded(module) as names:  # its class may be fixed
                if self._search(module, repeats=repeats) == trial.rule:
                    trial.numbers, trial.read = numbers, names
                    return trial.rule
        rule = self._search(module, repeats=repeats)
        self._trials.setdefault(key, _Trial(rule, numbers))
        return rule

    def _search(self, module: nn.Module, *, repeats: bool) -> Rule | None:
        rule = find_rule(module, self._num_slices, **self._options)
        if rule is None and repeats:
            rule = find_split_rule(module, self._num_slices, **self._options)
        return rule

    def _is_tied_in_part(self, module: nn.Module) -> bool:
        return len({self._num_places[id(each)] for each in module.parameters()}) > 1

    def _shares_parts(self, module: nn.Module) -> bool:
        inside = (each for each in module.modules() if each is not module)
        parts = chain(inside, module.parameters())
        return any(self._num_places[id(part)] > 1 for part in parts)


def _num_places(model: nn.Module) -> Counter[int]:
    """How many modules have each parameter, and each module with parameters, by its id."""
    found: Counter[int] = Counter()
    for module in model.modules():
        modules = {
            id(each) for each in module.children() if next(each.parameters(), None) is not None
        }
        found.update(modules | {id(each) for each in module._parameters.values()})
    return found


def _has_parameters(module: nn.Module) -> bool:
    return next(module.parameters(), None) is not None


def block_rules(
    model: nn.Module, num_slices: int, *, regrouped: bool = False
) -> dict[type[nn.Module] | str, Rule | None]:
    """The rules of a model's blocks by their paths, as `rotate_all` finds them."""
    finder = BlockFinder(model, num_slices, regrouped=regrouped)
    found: dict[type[nn.Module] | str, Rule | None] = {}
    taken: set[str] = set()
    for path, module in model.named_modules():  # from the outside to the inside
        rule = None if _is_in(path, taken) else finder.rule_of(module)
        if rule is None:
            continue
        found[path] = rule
        if rule.core:
            names = (rule.core, *(name.rpartition(".")[0] for name in rule.linear_in))
            taken |= {f"{path}.{name}" for name in names}
        else:
            taken.add(path)
    return found


def _is_in(path: str, taken: Collection[str]) -> bool:
    """Whether a module is one of ``taken``, or inside of one."""
    parts = path.split(".")
    return any(".".join(parts[:length]) in taken for length in range(1, len(parts) + 1))


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


def _numbers_of(module: nn.Module) -> dict[str, int]:
    """Its own attributes that are whole numbers."""
    attributes = vars(module).items()
    return {name: value for name, value in attributes if type(value) is int}


def _likeness(module: nn.Module, but: Collection[str] = ()) -> Iterator[Hashable]:
    """What is equal for modules that compute alike: classes, shapes, attributes.

    Attributes that are objects must be the same one, such as a configuration; tuples of plain
    values must be equal, and so must buffers of which trials take the values. Of the module's own
    attributes those named ``but`` may have any value.
    """
    for path, part in module.named_modules():
        attributes = vars(part)
        hooks = any(map(attributes.get, _HOOKS_OF_CALLS)), any(map(attributes.get, _BACKWARD_HOOKS))
        yield path, type(part), part.training, hooks
        for name, tensor in (*part._parameters.items(), *part._buffers.items()):
            yield name, tensor if tensor is None else (tensor.shape, tensor.dtype)
        for tensor in part._buffers.values():
            if type(tensor) is Tensor and not is_invented(tensor):  # fake ones have no values
                yield _digest(tensor)
        for name, value in attributes.items():
            if name in _OF_EVERY_MODULE:
                continue
            if part is module and name in but:
                yield name
            else:
                yield name, type(value), value if _is_plain(value) else id(value)


def _digest(tensor: Tensor) -> bytes:
    """A checksum of a tensor's values, also where tensors that are made are fake."""
    with torch._C._DisableTorchDispatch():
        values = tensor.detach().cpu().contiguous().flatten().view(torch.uint8)
        return blake2b(values.numpy().tobytes(), digest_size=16).digest()


def _is_plain(value: Any) -> bool:
    return isinstance(value, _PLAIN) or (isinstance(value, tuple) and all(map(_is_plain, value)))
