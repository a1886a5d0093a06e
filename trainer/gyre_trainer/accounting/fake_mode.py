"""Fake tensors for dry runs: torch's, with a shorter key of its cache of results."""

from types import NoneType
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

# Described by type and value: 1 and 1.0 are equal, but lead to other dtypes.
_VALUES = (int, float, bool, str, NoneType, torch.dtype, torch.device, torch.layout)


class QuickFakeTensorMode(FakeTensorMode):  # type: ignore[no-untyped-call]
    """A `FakeTensorMode` that takes two thirds of its time.

    That mode caches the results of operators by their arguments, and most of its time goes into the
    key: seventeen properties of each tensor. Ten of them tell strided tensors apart, and the others
    follow. Offset and size of the storage matter to views alone: without them all rows of a chunk
    share a key. Other arguments are described as torch does. Torch has no public way to choose the
    key. If it stops calling this method, this mode is as torch's own.
    """

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """No, as in `gyre_trainer.accounting.dispatched.Together`."""
        return False

    __torch_dispatch__ = FakeTensorMode.__torch_dispatch__.__wrapped__  # type: ignore[attr-defined]

    def _prep_args_for_hash(
        self, result: list[object], args: Any, state: Any, id_hashed_objects: list[object]
    ) -> None:
        """Append the description of the arguments to ``result``."""
        if isinstance(args, dict):
            result += (dict, *args)
            args = tuple(args.values())
        elif not isinstance(args, (list, tuple)):
            super()._prep_args_for_hash(result, args, state, id_hashed_objects)
            return
        result += (type(args), len(args))
        for arg in args:
            kind = type(arg)
            if kind is FakeTensor and self._is_plain(arg):
                result.append(_description(arg, result[0]))
            elif kind in _VALUES:
                result += (kind, arg)
            elif kind in (list, tuple):
                self._prep_args_for_hash(result, arg, state, id_hashed_objects)
            else:
                super()._prep_args_for_hash(result, (arg,), state, id_hashed_objects)

    def _is_plain(self, tensor: FakeTensor) -> bool:
        return (
            tensor.fake_mode is self
            and tensor.constant is None
            and tensor.layout is torch.strided
            and not tensor._has_symbolic_sizes_strides
        )


def _description(tensor: FakeTensor, func: Any) -> tuple[object, ...]:
    """The properties that the result of ``func`` depends on; the offset is for views alone."""
    has_place = getattr(func, "namespace", None) != "aten" or func.is_view
    return (
        tensor.dtype,
        tensor.shape,
        tensor.stride(),
        tensor.storage_offset() if has_place else None,
        tensor.untyped_storage().nbytes() if has_place else None,
        tensor.fake_device,
        tensor.requires_grad,
        tensor.is_conj(),
        tensor.is_neg(),
        tensor.is_inference(),
    )
