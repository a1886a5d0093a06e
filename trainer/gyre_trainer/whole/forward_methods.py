"""Methods of a rotated model that run as its forward does, such as `encode`."""

from collections.abc import Callable
from typing import Any

from torch import nn

from gyre_trainer.errors import RotationError
from gyre_trainer.rotation.guard import own_class
from gyre_trainer.rotation.rotated_module import RotatedModule, uncompiled
from gyre_trainer.whole.replicated import ReplicatedModule


def register_forward_method(model: nn.Module, name: str) -> None:
    """Let a method of a rotated model read the model's own parameters, as its forward does.

    Outside a forward they are DTensors, which torch refuses beside plain tensors. A method that
    only calls modules inside needs no registration.

    Args:
        model: a rotated model, or a replicated module inside.
        name: of a method of its class; it is called as before.

    Raises:
        RotationError: the model was not rotated, or has no such method, or rotates as one block.

    Example:
        rotate_all(model, mesh=mesh)
        register_forward_method(model, "encode")
        loss = contrast(model.encode(images), model.encode(texts))
    """
    kind, method = own_class(model).__name__, getattr(model, name, None)
    if not callable(method):
        raise RotationError(f"{kind} has no method {name!r}")
    if isinstance(model, RotatedModule):
        raise RotationError(
            f"{kind} rotates as one block, and slices run its forward alone. Keep it from that by "
            "rotate_all(find_blocks=False), or call its forward"
        )
    if not hasattr(model, "grad_averaging") and not isinstance(model, ReplicatedModule):
        raise RotationError(f"{kind} is not rotated. First call rotate_all")
    setattr(model, name, _InForward(model, name, method))


class _InForward:
    """A method, called between the hooks of the module's forward."""

    def __init__(self, module: nn.Module, name: str, method: Callable[..., Any]) -> None:
        self.__name__ = name
        self.__doc__ = method.__doc__
        self._module, self._method = module, method

    @uncompiled
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        module: Any = self._module
        before = vars(module).get("forward")
        module.forward = self._run  # called by the module, after its hooks before a forward
        try:
            return module(*args, **kwargs)
        finally:
            del module.forward
            if before is not None:
                module.forward = before

    def _run(self, *args: Any, **kwargs: Any) -> Any:
        if isinstance(self._module, ReplicatedModule):
            return self._module.run_plain(self._method, args, kwargs)
        return self._method(*args, **kwargs)
