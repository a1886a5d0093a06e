"""Finds the parts of a model that are computed again in backward: modules with rotating layers.

Such a part is the smallest module around two or more layers that rotate by themselves, such as an
attention with adapters, or a state-space mixer. A model has many of its kind, in a list. A whole
layer of the model is what the outermost list has, with all its blocks.
"""

from collections.abc import Iterator
from typing import Any

from torch import nn
from torch.nn.utils.parametrize import is_parametrized

from gyre_trainer.layers.experts.lists import CallsEveryExpert, recomputes_experts
from gyre_trainer.layers.split.block import rotates_whole
from gyre_trainer.rotation.backward.recomputed_part import RecomputedLayer, RecomputedPart
from gyre_trainer.rotation.guard import own_class
from gyre_trainer.rotation.rotated_module import RotatedModule, mix_in

_LISTS = (nn.ModuleList, nn.ModuleDict, nn.Sequential)
_LAYER = {"weight", "bias"}


def recompute_parts(model: nn.Module) -> None:
    """Let backward compute the parts of a rotated model again, but for what their layers return."""
    modules = dict(model.named_modules())
    for path in parts_of(modules):
        if not isinstance(modules[path], RecomputedPart):
            mix_in(modules[path], RecomputedPart, "Recomputed")
            _note_experts(modules[path])


def recompute_layers(model: nn.Module) -> None:
    """Let backward compute whole layers of a rotated model again, each from its input."""
    modules = dict(model.named_modules())
    for path in layers_of(modules):
        if not isinstance(modules[path], RecomputedPart):
            mix_in(modules[path], RecomputedLayer, "Recomputed")
            _note_experts(modules[path])


def _note_experts(module: Any) -> None:
    module.has_experts = any(isinstance(each, CallsEveryExpert) for each in module.modules())


def layers_of(modules: dict[str, nn.Module]) -> list[str]:
    """The paths of the layers among all modules of a model: the items of its outermost lists.

    Layers with a list of experts are none if these do not rotate as a whole: then backward needs
    what their layers return.
    """
    rotating = {
        outer
        for path, module in modules.items()
        if isinstance(module, RotatedModule) and module.rotation.rule.recompute_pays
        for outer in (path, *_around(path))
        if not rotates_whole(modules[outer])
    }
    found: set[str] = set()
    for path, module in modules.items():
        owner = modules[path.rpartition(".")[0]]
        is_item = bool(path) and isinstance(owner, _LISTS) and not isinstance(module, _LISTS)
        is_inside = any(outer in found for outer in _around(path))
        is_expert = any(isinstance(modules[outer], CallsEveryExpert) for outer in _around(path))
        is_whole = not is_expert and all(
            recomputes_experts(each)
            for each in module.modules()
            if isinstance(each, CallsEveryExpert)
        )
        if is_item and not is_inside and path in rotating and is_whole and _repeats(path, modules):
            found.add(path)
    return [path for path in modules if path in found]


def parts_of(modules: dict[str, nn.Module]) -> list[str]:
    """The paths of the parts among all modules of a model."""
    owners: dict[str, int] = {}
    for path, module in modules.items():
        if _is_layer(module):
            for outer in _around(path):
                owners[outer] = owners.get(outer, 0) + 1
    several = {path for path, number in owners.items() if number > 1}
    called = {path for path in several if _is_called(modules[path])}
    around = {each for path in called for each in _around(path)}
    return [
        path
        for path in modules
        if path in called - around
        and _repeats(path, modules)
        and not any(isinstance(modules[outer], RecomputedPart) for outer in _around(path))
    ]


def _is_layer(module: nn.Module) -> bool:
    """Whether a module is a layer that rotates by itself, and that recomputation pays for."""
    return (
        isinstance(module, RotatedModule)
        and module.rotation.rule.recompute_pays
        and {cut.name for cut in module.rotation.layout.cuts} <= _LAYER
    )


def _is_called(module: nn.Module) -> bool:
    return own_class(module).forward is not nn.ModuleList.forward  # type: ignore[attr-defined]


def _repeats(path: str, modules: dict[str, nn.Module]) -> bool:
    """Whether a part is in a list, and computing it again changes nothing but memory."""
    module = modules[path]
    return (
        any(isinstance(modules[outer], _LISTS) for outer in _around(path))
        and not any(rotates_whole(modules[each]) for each in (path, *_around(path)))
        and not any(map(_changes, module.modules()))
    )


def _changes(module: nn.Module) -> bool:
    """Whether a call changes a module."""
    return (
        isinstance(module, nn.modules.batchnorm._NormBase) and module.track_running_stats
    ) or is_parametrized(module)


def _around(path: str) -> Iterator[str]:
    """The paths of the modules around one, from the nearest to the model itself."""
    while path:
        path = path.rpartition(".")[0]
        yield path
