"""Torch's fused optimizers on DTensors, where torch does not support them.

Torch supports Adam and AdamW. SGD and Adagrad are elementwise too, and an optimizer's states are
cut as their parameters are.
"""

from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_map

from gyre_trainer.shards.sharded_parameters import local_of

_OPERATORS = (
    torch.ops.aten._fused_sgd_.default,
    torch.ops.aten._fused_sgd_.tensor_lr,
    torch.ops.aten._fused_adagrad_.default,
    torch.ops.aten._fused_adagrad_.tensor_lr,
)


def support_dtensors() -> None:
    """From now on these operators accept DTensors in this process.

    An operator that already has a handler keeps it.
    """
    for operator in _OPERATORS:
        DTensor._op_dispatcher._custom_op_handlers.setdefault(operator, _on_local_shards)


def _on_local_shards(
    op_call: OpOverload[..., Any], args: tuple[object, ...], kwargs: dict[str, object]
) -> Any:
    """Run the operator on this rank's shards; it writes to its arguments and returns no tensor."""
    local_args, local_kwargs = tree_map(_local, (args, kwargs))
    return op_call(*local_args, **local_kwargs)


def _local(leaf: object) -> object:
    return local_of(leaf) if isinstance(leaf, Tensor) else leaf
