"""Finds the layers of a model that backward computes again: the items of its outermost lists.

Also here:

* Norms under recomputation keep only their input, and the modules after them keep nothing.

Layers that keep only their input: torch's checkpoint around each.

Backward runs a layer's forward again, up to the last tensor that it needs, so slices of what comes
before travel once more. A checkpoint does so when backward asks for a tensor that it saved. Which
module asks first depends on the tokens of a rank where experts are listed: one without tokens may
ask for none. So the gradient of the layer's output asks, before anything of the layer travels, and
all ranks make the same hops in the same order.
"""

import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.parametrize import is_parametrized
from torch.utils.checkpoint import checkpoint

from gyre_trainer.comm.identity import path_of
from gyre_trainer.errors import RotationError
from gyre_trainer.layers.experts import CallsEveryExpert
from gyre_trainer.layers.known_blocks import has_code_of, is_trained
from gyre_trainer.rotation.call import Arguments, is_constant
from gyre_trainer.rotation.recomputation import recomputation_of, recomputed
from gyre_trainer.rotation.rotated_module import RotatedModule, behaviours_of, mix_in, own_class
from gyre_trainer.rotation.rule import swapped
from gyre_trainer.shards.layout import local_of
from gyre_trainer.torch_internals import (
    BatchNorm,
    parameters_of,
    tree_leaves,
    uncompiled,
    version_of,
)
from gyre_trainer.whole.replicated import ReplicatedModule

_NORMS = (nn.LayerNorm, nn.RMSNorm, nn.GroupNorm)


class RecomputedNorm:
    """Mixed in before the class of a norm of known code; backward computes its output again."""

    @uncompiled
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The module's output, as without recomputation."""
        assert isinstance(self, nn.Module)
        weights = [
            local_of(parameter)
            for parameter in parameters_of(self).values()
            if parameter is not None
        ]
        if kwargs or len(args) != 1 or not _is_recorded([*args, *weights]):
            return super().forward(*args, **kwargs)  # type: ignore[misc]
        return recomputed(self._compute, *args, *weights)

    def _compute(self, x: Tensor, *weights: Tensor) -> Tensor:
        assert isinstance(self, nn.Module)
        names = [name for name, parameter in parameters_of(self).items() if parameter is not None]
        with swapped(self, dict(zip(names, weights, strict=True))):
            output: Tensor = super().forward(x)  # type: ignore[misc]
        return output


def _is_recorded(tensors: list[Any]) -> bool:
    """Whether all of these are tensors through which a backward may follow."""
    are_tensors = all(isinstance(tensor, Tensor) for tensor in tensors)
    return (
        torch.is_grad_enabled() and are_tensors and any(tensor.requires_grad for tensor in tensors)
    )


def recompute_norms(model: nn.Module) -> None:
    """Let norms in a rotated model keep their inputs alone for backward.

    Norms inside of rotated modules are left as they are, and so are those of unknown code, which
    might draw random numbers or count its calls.
    """
    inside = {
        id(module.get_submodule(name.rpartition(".")[0]))
        for module in model.modules()
        if isinstance(module, RotatedModule)
        for name in module.rotation.replicated
    }
    for module in model.modules():
        if (
            id(module) not in inside
            and not isinstance(module, RecomputedNorm | RotatedModule)
            and _keeps_its_input(module)
        ):
            mix_in(module, RecomputedNorm, "Recomputed")


def _keeps_its_input(module: nn.Module) -> bool:
    """Whether a module is a norm of known code: one of torch, or of a library, that was trained."""
    others = [
        *module.children(),
        *module.buffers(),
        *(parameter for parameter in module.parameters() if parameter.ndim > 1),
    ]
    if others:
        return False
    has_weights = next(module.parameters(), None) is not None
    is_of_torch = any(isinstance(module, norm) and has_code_of(module, norm) for norm in _NORMS)
    return is_of_torch or (has_weights and is_trained(module))


# Those of every module: parameters, buffers and modules inside, hooks, and `training`.
_OF_EVERY_MODULE = frozenset(vars(nn.Module()))
_Attributes = dict[tuple[int, str], tuple[object, int]]


def _attributes_of(module: nn.Module) -> _Attributes:
    """Buffers and attributes of a module and of those inside: by place and name, with a count.

    The count is that of the entries of a list, dict or set, and of the writes to a tensor.
    """
    found: _Attributes = {}
    for place, each in enumerate(module.modules()):
        others = _OF_EVERY_MODULE | _kept_by(each)
        for name, value in (vars(each) | dict(each.named_buffers(recurse=False))).items():
            if name not in others:
                found[place, name] = value, _count_of(value)
    return found


def _count_of(value: object) -> int:
    if isinstance(value, Tensor):
        return version_of(value)
    return len(value) if isinstance(value, list | dict | set) else 0


def _changed(before: _Attributes, now: _Attributes) -> str | None:
    """The name of an attribute that is another one now; None without one."""
    absent = object(), 0
    for place in before.keys() | now.keys():
        (one, count), (other, number) = before.get(place, absent), now.get(place, absent)
        if one is not other or count != number:
            return place[1]
    return None


def _kept_by(module: nn.Module) -> set[str]:
    """The names of attributes that rotation itself keeps with a module."""
    classes = (cls for behaviour in behaviours_of(module) for cls in behaviour.__mro__)
    return {name for cls in classes for name in (*vars(cls), *vars(cls).get("__annotations__", ()))}


class RecomputedLayer:
    """Mixed in before the class of a layer that backward computes again from its input.

    A call with an object that computing again would change, such as a cache of keys and values,
    keeps its activations.

    Attributes:
        has_experts: whether a list of experts is inside, of which each rank calls other ones with
            tokens.
    """

    has_experts: bool = False

    @uncompiled
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The module's output, as without recomputation.

        Raises:
            RotationError: the module writes to one of its buffers, or to an argument.
        """
        assert isinstance(self, nn.Module)
        forward = super().forward  # type: ignore[misc]
        if not torch.is_grad_enabled():
            return forward(*args, **kwargs)
        arguments = Arguments(args, kwargs)
        changing = next((leaf for leaf in arguments.leaves if not is_constant(leaf)), None)
        if changing is not None:
            warnings.warn(
                f"{own_class(self).__name__} is called with a {type(changing).__name__}, which "
                "computing it again in backward would change, so its activations are kept; call "
                "the model without it (use_cache=False for a cache of keys and values)",
                stacklevel=1,
            )
            return forward(*args, **kwargs)
        return _checkpointed(self, forward, arguments)


class _Entered(torch.autograd.Function):
    """The same tensor, which no node before it can compute again.

    Else a module inside of a layer would ask the layer before for the input of its last norm, and
    that would compute it too early.
    """

    @staticmethod
    def forward(ctx: Any, tensor: Tensor) -> Tensor:
        return tensor.detach()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad


class _Saved(torch.autograd.Function):
    """A node that saves a tensor, which a checkpoint around it must compute again."""

    @staticmethod
    def forward(ctx: Any, anchor: Tensor) -> Tensor:
        ctx.save_for_backward(anchor)
        return anchor.clone()


def _checkpointed(module: Any, forward: Callable[..., Any], arguments: Arguments) -> Any:
    """The output of a layer, which backward computes again."""
    tensors = [
        tensor if recomputation_of(tensor) is None else _Entered.apply(tensor)  # type: ignore[no-untyped-call]
        for tensor in arguments.take_tensors()
    ]
    # Plain tensors may stand in the place of parameters while the model runs.
    parameters = {
        f"{path}.{name}".removeprefix("."): parameter
        for path, each in module.named_modules()
        for name, parameter in parameters_of(each).items()
    }
    num_runs = 0

    def compute(*given: Tensor) -> tuple[Any, Any]:
        """The output, and a node of the layer; the checkpoint keeps this function, so not that."""
        nonlocal num_runs
        num_runs += 1
        node = _Saved.apply(torch.empty(0, requires_grad=True)).grad_fn  # type: ignore[no-untyped-call]
        args, kwargs = arguments.call(given)
        with swapped(module, parameters if num_runs > 1 else {}):
            return forward(*args, **kwargs), node

    versions, before = [version_of(each) for each in tensors], _attributes_of(module)
    output, node = checkpoint(
        compute,
        *tensors,
        use_reentrant=False,
        # which tensor is the last that backward needs depends on a rank's tokens
        early_stop=not module.has_experts,
    )
    changed = _changed(before, _attributes_of(module))
    if changed is not None or versions != [version_of(each) for each in tensors]:
        what = "an argument" if changed is None else f"its attribute {changed}"
        raise RotationError(
            f"{path_of(module)} ({own_class(module).__name__}) writes to {what}, "
            'so backward cannot compute it again; take RotationPolicy(recompute="block")'
        )

    def run_again(_grad: Tensor) -> None:
        nonlocal node
        if num_runs == 1:
            _ = node.saved_tensors
        node = None  # it holds the inputs of the layer

    for leaf in tree_leaves(output):
        if isinstance(leaf, Tensor) and leaf.requires_grad:
            leaf.register_hook(run_again)  # type: ignore[no-untyped-call]
    return output


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
        if _is_sharded(module)
        for outer in (path, *_around(path))
        if not isinstance(modules[outer], RotatedModule)
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


def _is_sharded(module: nn.Module) -> bool:
    """Whether a module rotates or is gathered on use, and keeps activations for backward."""
    if isinstance(module, RotatedModule):
        return module.rotation.rule.recompute_pays
    return isinstance(module, ReplicatedModule) and bool(module.gathered)


def _changes(module: nn.Module) -> bool:
    """Whether a call changes a module."""
    return (isinstance(module, BatchNorm) and module.track_running_stats) or is_parametrized(module)


def _around(path: str) -> Iterator[str]:
    """The paths of the modules around one, from the nearest to the model itself."""
    while path:
        path = path.rpartition(".")[0]
        yield path
