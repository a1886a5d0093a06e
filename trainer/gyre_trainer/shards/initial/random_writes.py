"""Random numbers written to shards by `nn.init`, which would be the same on each rank."""

from typing import Any

import torch
from torch._ops import OpOverload
from torch.distributed.tensor import DTensor

from gyre_trainer.errors import RotationError
from gyre_trainer.shards.sharded_parameters import lies_in_shards

_aten = torch.ops.aten
_DRAWS = (
    _aten.normal_.default,
    _aten.uniform_.default,
    _aten.bernoulli_.float,
    _aten.exponential_.default,
    _aten.log_normal_.default,
    _aten.cauchy_.default,
    _aten.geometric_.default,
    _aten.random_.default,
    getattr(_aten.random_, "from"),
    _aten.random_.to,
)


def refuse_random_writes() -> None:
    """From now on an error names `materialize` if random numbers are written to a shard.

    Each rank draws for its own rows, and all ranks have one seed. An operator that already has a
    handler keeps it.
    """
    # private: torch has no public way to register an operator of DTensors
    handlers = DTensor._op_dispatcher._custom_op_handlers
    for operator in _DRAWS:
        handlers.setdefault(operator, _drawn)


def _drawn(
    op_call: OpOverload[..., Any], args: tuple[Any, ...], kwargs: dict[str, object]
) -> object:
    target = args[0]
    if isinstance(target, DTensor) and lies_in_shards(target._local_tensor):
        raise RotationError(
            "a sharded parameter cannot be initialised by random numbers: each rank would draw the "
            f"same ones for other rows (got {op_call!s} of shape "
            f"{tuple(target.shape)}). Call materialize(model, seed=...), or initialise the model "
            "before it is rotated"
        )
    handlers = DTensor._op_dispatcher._custom_op_handlers
    handler = handlers.pop(op_call)
    try:
        return op_call(*args, **kwargs)
    finally:
        handlers[op_call] = handler
