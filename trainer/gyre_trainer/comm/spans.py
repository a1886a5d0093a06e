"""Names in a profiler's trace for what a rotation does; where no profiler runs, nothing but one look whether one does."""

from contextlib import AbstractContextManager, nullcontext
from weakref import WeakKeyDictionary

from torch import nn
from torch._C._autograd import _profiler_enabled
from torch.autograd.profiler import record_function

_NOTHING = nullcontext()
_PATHS: WeakKeyDictionary[nn.Module, str] = WeakKeyDictionary()


def name_modules(model: nn.Module) -> None:
    """From now on, ranges say which of the model's modules they belong to, not only of which class it is."""
    for path, module in model.named_modules():
        _PATHS[module] = path


def slice_span(module: nn.Module, phase: str, index: int, hop: int) -> AbstractContextManager[object]:
    """The range in which a rotated module computes with slice ``index``, which has made ``hop`` hops; 0 is the own slice."""
    if not _profiler_enabled():
        return _NOTHING
    return record_function(f"{_PATHS.get(module, type(module).__name__)} {phase}: slice {index}, hop {hop}")


def span(what: str) -> AbstractContextManager[object]:
    """A range of that name."""
    return record_function(what) if _profiler_enabled() else _NOTHING
