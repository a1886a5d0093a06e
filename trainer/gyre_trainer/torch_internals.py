"""The private names of torch that the trainer needs, each behind a name of ours, with its reason.

A name of torch that begins with an underscore may change in any version. Tests on other versions of
torch then fail here, and the rest of the trainer stays as it is.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, nn
from torch._C._autograd import _profiler_enabled
from torch._subclasses.fake_tensor import FakeTensor
from torch.autograd import Variable

# Torch exports no functions for nested values that know the containers of libraries.
from torch.utils._pytree import (
    TreeSpec,
    tree_flatten,
    tree_leaves,
    tree_map,
    tree_map_only,
    tree_unflatten,
)

__all__ = [
    "TreeSpec",
    "at_end_of_backward",
    "buffers_of",
    "is_fake",
    "number_of_backward",
    "parameters_of",
    "profiler_enabled",
    "storage_number",
    "tree_flatten",
    "tree_leaves",
    "tree_map",
    "tree_map_only",
    "tree_unflatten",
    "version_of",
    "without_dispatch",
]

# A check that costs nothing without a trace; torch has no public one.
profiler_enabled: Callable[[], bool] = _profiler_enabled


def is_fake(tensor: Tensor) -> bool:
    """Whether a tensor is of a dry run, without values. Torch exports no class to ask for."""
    return isinstance(tensor, FakeTensor)


def without_dispatch() -> AbstractContextManager[object]:
    """A context whose operators no `TorchDispatchMode` sees, such as a counter or fake tensors.

    Torch's own context takes modes off one by one, in Python.
    """
    context: AbstractContextManager[object] = torch._C._DisableTorchDispatch()
    return context


def number_of_backward() -> int:
    """The number of the backward that runs in this thread; -1 outside. Hooks are not told."""
    return torch._C._current_graph_task_id()


def at_end_of_backward(function: Callable[[], None]) -> None:
    """Call a function when the present backward ends, as DDP and FSDP2 of torch do."""
    Variable._execution_engine.queue_callback(function)


def storage_number(tensor: Tensor) -> int:
    """A number that no other storage has while this one lives.

    `data_ptr()` is 0 for empty and for fake tensors.
    """
    return int(tensor.untyped_storage()._cdata)


def version_of(tensor: Tensor) -> int:
    """How often a tensor was written to; torch keeps the count for autograd alone."""
    return tensor._version


def parameters_of(module: nn.Module) -> dict[str, Any]:
    """A module's own parameters by name, in which other tensors may stand while it computes.

    `setattr` refuses a plain tensor where a parameter is.
    """
    return module._parameters


def buffers_of(module: nn.Module) -> dict[str, Tensor | None]:
    """A module's own buffers by name, to replace one; `named_buffers` leaves out those of None."""
    return module._buffers
