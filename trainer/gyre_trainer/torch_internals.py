"""The private names of torch that the trainer needs, each behind a name of ours, with its reason.

A name of torch that begins with an underscore may change in any version. Tests on other versions of
torch then fail here, and the rest of the trainer stays as it is.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from torch._C._autograd import _profiler_enabled
from torch._C._autograd import _top_saved_tensors_default_hooks as _top_hooks
from torch._compile import _disable_dynamo
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
    unset_fake_temporarily,
)
from torch.autograd import Variable
from torch.autograd.graph import GradientEdge, _engine_run_backward
from torch.distributed.tensor import DTensor

# The bases of tools that see operators; torch exports none.
from torch.utils._python_dispatch import TorchDispatchMode, is_traceable_wrapper_subclass

# Torch exports no functions for nested values that know the containers of libraries.
from torch.utils._pytree import TreeSpec, tree_flatten, tree_leaves, tree_map_only, tree_unflatten

# Names of torch that other modules import from here.
__all__ = [
    "DataDependentOutputException",
    "DynamicOutputShapeException",
    "FakeTensor",
    "FakeTensorMode",
    "TorchDispatchMode",
    "TreeSpec",
    "is_traceable_wrapper_subclass",
    "tree_flatten",
    "tree_leaves",
    "tree_map_only",
    "tree_unflatten",
    "unset_fake_temporarily",
]

DTensorSpec = Any  # how a DTensor is cut: its mesh, placements and shape; torch exports no name

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
    return id(tensor.untyped_storage())  # torch keeps the one object of a storage


def version_of(tensor: Tensor) -> int:
    """How often a tensor was written to; torch keeps the count for autograd alone.

    It counts no writes to a tensor of inference mode: 0.
    """
    return 0 if tensor.is_inference() else tensor._version


def parameters_of(module: nn.Module) -> dict[str, Any]:
    """A module's own parameters by name, in which other tensors may stand while it computes.

    `setattr` refuses a plain tensor where a parameter is.
    """
    return module._parameters


def child_of(module: nn.Module, name: str) -> nn.Module | None:
    """A module's child; `get_submodule` takes eight times as long."""
    return module._modules.get(name)


# The classes that dropouts, and norms with statistics of batches or items, derive from.
Dropout = (
    nn.Dropout,
    nn.Dropout1d,
    nn.Dropout2d,
    nn.Dropout3d,
    nn.AlphaDropout,
    nn.FeatureAlphaDropout,
)
BatchNorm = (
    nn.BatchNorm1d,
    nn.BatchNorm2d,
    nn.BatchNorm3d,
    nn.SyncBatchNorm,
    nn.InstanceNorm1d,
    nn.InstanceNorm2d,
    nn.InstanceNorm3d,
)

_HOOKS = "_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks"


def hooks_of(module: nn.Module) -> Iterator[Callable[..., Any]]:
    """All hooks of a module; torch only registers and removes them."""
    return chain.from_iterable(vars(module)[name].values() for name in _HOOKS)


def gradient_hooks_of(parameter: Tensor, *, accumulated: bool) -> list[Any]:
    """The hooks on a parameter's gradient of a backward, or on the ``accumulated`` one."""
    hooks = parameter._post_accumulate_grad_hooks if accumulated else parameter._backward_hooks
    return list((hooks or {}).values())


# Of a function that `torch.compile` must run as it is: hops, and all that decides about them. This
# one imports the compiler at the first call; that of `torch.compiler` would import it here.
uncompiled = _disable_dynamo


def base_of(tensor: Tensor) -> Tensor:
    """The tensor that this one is a view of, or the tensor itself."""
    return tensor if tensor._base is None else tensor._base


def saved_tensors_hooks_around() -> tuple[Callable[..., Any], Callable[..., Any]] | None:
    """Pack and unpack of the context around; an inner context would replace them."""
    hooks: Any = _top_hooks(False)
    return hooks or None


def gradients(
    edges: Sequence[GradientEdge], grads: Sequence[Tensor], leaves: Sequence[Tensor]
) -> Sequence[Tensor | None]:
    """As `torch.autograd.grad` with unused leaves, which takes as long again for checks."""
    found: Sequence[Tensor | None] = _engine_run_backward(
        tuple(edges), tuple(grads), False, False, tuple(leaves), True, accumulate_grad=False
    )
    return found


def shard_of(parameter: DTensor) -> Tensor:
    """This rank's part of a DTensor, outside of any graph; `to_local` adds a node."""
    return parameter._local_tensor


def spec_of(parameter: Tensor) -> DTensorSpec | None:
    """How a DTensor is cut, to make others alike without a check; None for a plain tensor."""
    return parameter._spec if isinstance(parameter, DTensor) else None


def dtensor_handlers() -> dict[Any, Any]:
    """By operators, what DTensors run instead; torch registers none publicly."""
    handlers: dict[Any, Any] = DTensor._op_dispatcher._custom_op_handlers
    return handlers
