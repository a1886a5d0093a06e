"""Fake tensors for dry runs: torch's, with a shorter description of what an operator is given."""

from types import NoneType
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

# What is described by its type and itself: 1 and 1.0 are equal, but lead to other dtypes.
_VALUES = (int, float, bool, str, NoneType, torch.dtype, torch.device, torch.layout)


class QuickFakeTensorMode(FakeTensorMode):  # type: ignore[no-untyped-call]
    """A `FakeTensorMode` that takes two thirds of its time.

    That mode keeps the results of operators by what these are given, and most of its time goes into
    describing that: seventeen properties of each tensor. Ten of them tell strided tensors apart,
    and the others follow. Two of these say where a tensor lies in its storage, which matters to
    views alone: without them all rows of a chunk are alike. What this mode does not know is
    described as torch describes it. If torch describes nothing by this method any longer, this mode
    is as torch's own.
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
    """What the result of ``func`` depends on; only a view depends on where its tensor lies."""
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
