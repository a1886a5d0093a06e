"""Layers of which only the input is kept: torch's checkpoint around each.

Backward runs a layer's forward again, up to the last tensor that it needs, so slices of what comes
before travel once more.
"""

import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from gyre_trainer.comm.spans import path_of
from gyre_trainer.errors import RotationError
from gyre_trainer.rotation.backward.module_attributes import BeforeCall, Place, as_before
from gyre_trainer.rotation.backward.recomputation import recomputation_of
from gyre_trainer.rotation.backward.replay import Replay
from gyre_trainer.rotation.call import is_constant
from gyre_trainer.rotation.form import Arguments
from gyre_trainer.rotation.guard import own_class
from gyre_trainer.rotation.rotated_module import uncompiled


class RecomputedLayer:
    """Mixed in before the class of a layer of which backward computes all again from its input.

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
            _warn_of(self, changing)
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


def _checkpointed(module: Any, forward: Callable[..., Any], arguments: Arguments) -> Any:
    """The output of a layer, which backward computes again."""
    tensors = [
        tensor if recomputation_of(tensor) is None else _Entered.apply(tensor)  # type: ignore[no-untyped-call]
        for tensor in arguments.take_tensors()
    ]
    # Plain tensors may stand in the place of parameters while the model runs.
    parameters, replay = list(_parameters_of(module)), Replay()
    changes: list[tuple[Place, Any]] = []

    def compute(*given: Tensor) -> Any:
        args, kwargs = arguments.call(arguments.leaves, given)
        if not replay.began:
            with replay.running():
                return forward(*args, **kwargs)
        with _in_place(parameters), as_before(changes), replay.running():
            return forward(*args, **kwargs)

    written = [*tensors, *module.buffers()]
    versions, before = [each._version for each in written], BeforeCall(module)
    output = checkpoint(
        compute,
        *tensors,
        use_reentrant=False,
        # which tensor is the last that backward needs depends on a rank's tokens
        early_stop=not module.has_experts,
    )
    changes += before.changes()
    overwritten = before.overwritten()
    if overwritten is not None or versions != [each._version for each in written]:
        what = f"its attribute {overwritten}" if overwritten else "one of its buffers"
        raise RotationError(
            f"{path_of(module)} ({own_class(module).__name__}) writes to an argument or to {what}, "
            'so backward cannot compute it again; take RotationPolicy(recompute="block")'
        )
    return output


def _warn_of(module: nn.Module, argument: object) -> None:
    kind = type(argument).__name__
    warnings.warn(
        f"{own_class(module).__name__} is called with a {kind}, which computing it again in "
        "backward would change, so its activations are kept; call the model without it "
        "(use_cache=False for a cache of keys and values)",
        stacklevel=2,
    )


def _parameters_of(module: nn.Module) -> Iterator[tuple[dict[str, Any], str, Any]]:
    for each in module.modules():
        parameters: dict[str, Any] = each._parameters
        for name, parameter in parameters.items():
            yield parameters, name, parameter


@contextmanager
def _in_place(places: Sequence[tuple[dict[str, Any], str, Any]]) -> Iterator[None]:
    """A context in which modules have these parameters, as they had them in forward."""
    now = [(parameters, name, parameters.get(name)) for parameters, name, _ in places]
    for parameters, name, parameter in places:
        parameters[name] = parameter
    try:
        yield
    finally:
        for parameters, name, parameter in now:
            parameters[name] = parameter
