"""A core and its last layer as one: the forward of both, and a module that has both."""

from collections.abc import Callable
from copy import copy
from dataclasses import dataclass
from inspect import Signature, signature
from types import MethodType
from typing import Any

from torch import Tensor, nn

from gyre_trainer.layers.split.unfinished import with_first

LAST = "_last_layer"  # its name in the module that has both


class PartOfSplit:
    """The base of what is mixed in before the class of a core, and before that of a last layer.

    Attributes:
        around: the module that rotates, in a tuple, so that it is no module inside of this one.
    """

    around: tuple[Any]


def own_forward(module: nn.Module) -> Callable[..., Any]:
    """The forward of a module's class, as it was before the module was a part of a split block."""
    if isinstance(module, PartOfSplit):
        found: Callable[..., Any] = super(PartOfSplit, module).forward  # type: ignore[misc]
        return found
    return MethodType(type(module).forward, module)


@dataclass(frozen=True, eq=False)
class JoinedForward:
    """The core's forward, and then the last layer's on the first tensor that the core returns.

    Attributes:
        core: the module that computes what the last layer takes.
        last: the last layer.
    """

    core: nn.Module
    last: nn.Module

    @property
    def __signature__(self) -> Signature:
        return signature(own_forward(self.core))

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The block's output, in the form of the core's."""
        return with_first(own_forward(self.core)(*args, **kwargs), self._finish)

    def _finish(self, x: Tensor) -> Tensor:
        output: Tensor = own_forward(self.last)(x)
        return output


def joined(core: nn.Module, last: nn.Module) -> nn.Module:
    """A module that computes both, with the core's parameters and attributes, and the last layer.

    It shares parameters and modules with them, and a model does not have it.
    """
    found = copy(core)
    found._modules = {**core._modules, LAST: last}
    vars(found)["forward"] = JoinedForward(found, last)
    return found
