"""Floating-point operations, counted where operators are dispatched."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode, is_traceable_wrapper_subclass
from torch.utils.flop_counter import flop_registry

# In place, which torch's registry does not know: the product of these two arguments is added.
_ADDS_PRODUCT = (torch.ops.aten.addmm_, torch.ops.aten.baddbmm_)
_ATTENTION = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_ATTENTION_BACKWARD = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward


class Operations(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """A context that counts the operations of matrix products, convolutions and attention.

    A multiplication and the addition to its sum are two.

    Attributes:
        total: operations until now.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.total = 0

    def __torch_dispatch__(
        self,
        func: Any,
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Run an operator, and count what it computes."""
        if func is torch.ops.prim.device.default:  # half of all operators on fake tensors
            return args[0].fake_device
        if any(is_traceable_wrapper_subclass(argument) for argument in args):
            return NotImplemented
        result = func(*args, **kwargs or {})
        packet = func._overloadpacket
        if packet is _ATTENTION:
            self.total += 2 * _product(*args[:2])
        elif packet is _ATTENTION_BACKWARD:  # computes the scores again
            self.total += 5 * _product(*args[1:3])
        elif packet in _ADDS_PRODUCT:
            self.total += 2 * args[1].numel() * args[2].shape[-1]
        elif packet in flop_registry:
            self.total += flop_registry[packet](*args, **kwargs or {}, out_val=result)
        return result


def _product(query: torch.Tensor, key: torch.Tensor) -> int:
    """Operations of one product of all queries with all keys, the masked ones too."""
    return 2 * query.numel() * key.shape[-2]
