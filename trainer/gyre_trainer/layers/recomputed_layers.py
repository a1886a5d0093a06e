"""Finds the layers of a model that backward computes again: the items of its outermost lists."""

from collections.abc import Iterator
from typing import Any

from torch import nn
from torch.nn.utils.parametrize import is_parametrized

from gyre_trainer.layers.experts.lists import CallsEveryExpert
from gyre_trainer.rotation.backward.recomputed_layer import RecomputedLayer
from gyre_trainer.rotation.rotated_module import RotatedModule, mix_in

_LISTS = (nn.ModuleList, nn.ModuleDict, nn.Sequential)


def recompute_layers(model: nn.Module) -> None:
    """Let backward compute whole layers of a rotated model again, each from its input."""
    modules = dict(model.named_modules())
    for path in layers_of(modules):
        module: Any = modules[path]
        if not isinstance(module, RecomputedLayer):
            mix_in(module, RecomputedLayer, "Recomputed")
            module.has_experts = any(
                isinstance(each, CallsEveryExpert) for each in module.modules()
            )


def layers_of(modules: dict[str, nn.Module]) -> list[str]:
    """The paths of the layers among all modules of a model: the items of its outermost lists."""
    rotating = {
        outer
        for path, module in modules.items()
        if isinstance(module, RotatedModule) and module.rotation.rule.recompute_pays
        for outer in (path, *_around(path))
        if not (isinstance(modules[outer], RotatedModule) and modules[outer].rotates_whole)
    }
    found: set[str] = set()
    for path, module in modules.items():
        owner = modules[path.rpartition(".")[0]]
        is_item = bool(path) and isinstance(owner, _LISTS) and not isinstance(module, _LISTS)
        is_inside = any(outer in found for outer in _around(path))
        is_expert = any(isinstance(modules[outer], CallsEveryExpert) for outer in _around(path))
        can_repeat = not any(map(_changes, module.modules()))
        if is_item and path in rotating and can_repeat and not (is_inside or is_expert):
            found.add(path)
    return [path for path in modules if path in found]


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
