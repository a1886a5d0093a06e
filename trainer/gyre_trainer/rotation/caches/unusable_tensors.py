"""Tensors of which only the shape, the dtype and the device may be asked for."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._C import DisableTorchFunctionSubclass
from torch.utils._pytree import tree_leaves

from gyre_trainer.errors import RotationError

# What a cache reads of keys to tell how long they are. None of it takes part in a gradient.
_ALLOWED = frozenset(
    (
        *(Tensor.size, Tensor.dim, Tensor.ndimension, Tensor.numel, Tensor.nelement),
        *(Tensor.__len__, Tensor.is_floating_point, Tensor.get_device, torch.numel),
        *(getattr(Tensor, name).__get__ for name in ("shape", "ndim", "dtype", "device", "layout")),
    )
)


class UnusableTensor(Tensor):
    """A tensor that tells its shape, dtype and device; any other use raises an error."""

    refusal: str

    @classmethod
    def of(cls, tensor: Tensor, refusal: str) -> "UnusableTensor":
        """One of the form of ``tensor``; ``refusal`` is the text of the `RotationError`."""
        unusable = tensor.detach().as_subclass(cls)
        unusable.refusal = refusal
        return unusable

    @classmethod
    def __torch_function__(
        cls,
        func: Any,
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        if func in _ALLOWED:
            with DisableTorchFunctionSubclass():
                return func(*args, **(kwargs or {}))
        leaves = tree_leaves((args, kwargs))
        raise RotationError(next(leaf.refusal for leaf in leaves if isinstance(leaf, cls)))
