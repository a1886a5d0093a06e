"""Floating-point operations, counted where operators are dispatched."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import flop_registry

from gyre_trainer.accounting.dispatched import Dispatched
from gyre_trainer.layers.head.alike_chunks import multiplicity

# In place, which torch's registry does not know: the product of these two arguments is added.
_ADDS_PRODUCT = (torch.ops.aten.addmm_, torch.ops.aten.baddbmm_)
_ATTENTION = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_ATTENTION_BACKWARD = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward


class Operations(Dispatched):  # type: ignore[no-untyped-call]
    """A context that counts the operations of matrix products, convolutions and attention.

    A multiplication and the addition to its sum are two.

    Attributes:
        total: operations until now.
        num_operators: operators until now, which the host started.
    """

    def __init__(self) -> None:
        super().__init__()
        self.total = 0
        self.num_operators = 0

    def saw(
        self,
        func: Any,
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        given: Sequence[Tensor],
        result: Any,
    ) -> None:
        """Count what the operator computed, and all that it stands for."""
        self.num_operators += multiplicity()
        self.total += multiplicity() * _operations(func._overloadpacket, args, kwargs, result)


def _operations(packet: Any, args: Sequence[Any], kwargs: Mapping[str, Any], result: Any) -> int:
    if packet is _ATTENTION:
        return 2 * _product(*args[:2])
    if packet is _ATTENTION_BACKWARD:  # computes the scores again
        return 5 * _product(*args[1:3])
    if packet in _ADDS_PRODUCT:
        return int(2 * args[1].numel() * args[2].shape[-1])
    if packet in flop_registry:
        return int(flop_registry[packet](*args, **kwargs, out_val=result))
    return 0


def _product(query: Tensor, key: Tensor) -> int:
    """Operations of one product of all queries with all keys, the masked ones too."""
    return 2 * query.numel() * key.shape[-2]
