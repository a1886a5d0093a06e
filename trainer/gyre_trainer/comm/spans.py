"""Ranges in a profiler's trace for what a rotation does; without a profiler, one check each."""

from contextlib import AbstractContextManager, nullcontext
from weakref import WeakKeyDictionary

from torch import nn
from torch._C._autograd import _profiler_enabled
from torch.autograd.profiler import record_function

_NOTHING = nullcontext()
_PATHS: WeakKeyDictionary[nn.Module, str] = WeakKeyDictionary()


def name_modules(model: nn.Module) -> None:
    """Let the ranges of a profiler's trace name modules by their paths in ``model``.

    Without this call a range has the name of the module's class.

    Example:
        name_modules(model)
        with torch.profiler.profile() as profiler:
            model(x).sum().backward()  # ranges such as "blocks.0.mlp forward: slice 1, hop 1"
    """
    for path, module in model.named_modules():
        _PATHS[module] = path


def path_of(module: nn.Module) -> str:
    """The module's path in its model, or the name of its class where no path is known."""
    return _PATHS.get(module) or type(module).__name__


def slice_span(
    module: nn.Module, phase: str, index: int, hop: int
) -> AbstractContextManager[object]:
    """The range in which a rotated module computes with slice ``index``.

    The slice has made ``hop`` hops to reach this rank; 0 is the own slice.
    """
    if not _profiler_enabled():
        return _NOTHING
    return record_function(f"{path_of(module)} {phase}: slice {index}, hop {hop}")


def span(what: str) -> AbstractContextManager[object]:
    """A range of that name."""
    return record_function(what) if _profiler_enabled() else _NOTHING
