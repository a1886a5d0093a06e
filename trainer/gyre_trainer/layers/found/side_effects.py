"""What a call of a twin does beside what it returns: writes to its tensors, and to its arguments.

Slices run once for each rank, and with parts of what the whole module computes. So a module that
counts its calls, keeps statistics of them or writes to its weights is none that may be found.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from gyre_trainer.rotation.backward.module_attributes import BeforeCall, has_tensor

_READS = (
    *(Tensor.__bool__, Tensor.__float__, Tensor.__int__, Tensor.__index__, Tensor.__contains__),
    *(Tensor.item, Tensor.tolist, Tensor.numpy, Tensor.is_nonzero, torch.is_nonzero),
    *(Tensor.equal, torch.equal, Tensor.allclose, torch.allclose),
)


class SideEffects:
    """The tensors of a module, and of arguments, as they are before calls."""

    def __init__(self, module: nn.Module, arguments: Any = ()) -> None:
        self._module = module
        self._attributes = BeforeCall(module)
        self._parameters = [(each, _copied(each)) for each in module.parameters()]
        self._buffers = [(name, _copied(each)) for name, each in module.named_buffers()]
        given = (each for each in tree_leaves(arguments) if isinstance(each, Tensor))
        self._arguments = [(each, each._version) for each in given]

    def require_none_of_whole(self) -> None:
        """Refuse what the whole module may not do. Contents of buffers may be set, as of a cache.

        Raises:
            TypeError: it has written to a parameter or an argument, keeps a tensor as an attribute,
                or has written to one that it keeps.
        """
        if any(each._version != version for each, version in self._arguments):
            raise TypeError("writes to an argument")
        if not all(_are_equal(each, before) for each, before in self._parameters):
            raise TypeError("writes to a parameter")
        changed = (place for place, _ in self._attributes.changes() if has_tensor(place.value))
        name = next((place.name for place in changed), None) or self._attributes.overwritten()
        if name is not None:
            raise TypeError(f"keeps a tensor as {name}")

    def require_none_of_more_calls(self) -> None:
        """Refuse what more calls, of slices or of the whole module, may not do after a first one.

        Raises:
            TypeError: a buffer has other contents, or a number or a container has.
        """
        now = dict(self._module.named_buffers())
        is_same = [name for name, _ in self._buffers] == list(now) and all(
            _are_equal(now[name], before) for name, before in self._buffers
        )
        if not is_same or self._attributes.counts():
            raise TypeError("counts its calls, or keeps what it has seen")


class ReadsOfValues(TorchFunctionMode):
    """A context that notes whether a forward takes numbers out of tensors, to decide by them."""

    def __init__(self) -> None:
        super().__init__()
        self._found: str | None = None

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func in _READS:
            self._found = getattr(func, "__name__", str(func))
        return func(*args, **kwargs or {})

    def require_none(self) -> None:
        """Refuse a forward that does.

        Raises:
            TypeError: names the function.
        """
        if self._found is not None:
            raise TypeError(f"decides by the values of a tensor ({self._found})")


def _copied(tensor: Tensor) -> Tensor:
    return tensor.detach().clone()


def _are_equal(one: Tensor, other: Tensor) -> bool:
    """Whether two tensors have the same values; those on `meta` have none."""
    if one.is_meta or other.is_meta:
        return one.is_meta and other.is_meta
    if (one.shape, one.dtype) != (other.shape, other.dtype):
        return False
    return torch.equal(one, other) or torch.allclose(one, other, rtol=0, atol=0, equal_nan=True)
