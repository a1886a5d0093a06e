"""torch's fused optimizers on DTensors, where torch itself does not know how: each rank steps on the parts that it has.

torch knows it of Adam and AdamW. The others are as elementwise, and an optimizer's states are cut as their parameter is.
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


def take_dtensors() -> None:
    """From now on they do, in this process; an operator that somebody else has taught stays as it is."""
    for operator in _OPERATORS:
        DTensor._op_dispatcher._custom_op_handlers.setdefault(operator, _on_parts)


def _on_parts(op_call: OpOverload[..., Any], args: tuple[object, ...], kwargs: dict[str, object]) -> Any:
    """The operator writes to its arguments and returns nothing that a DTensor would have to be made of."""
    own_args, own_kwargs = tree_map(_part, (args, kwargs))
    return op_call(*own_args, **own_kwargs)


def _part(leaf: object) -> object:
    return local_of(leaf) if isinstance(leaf, Tensor) else leaf
