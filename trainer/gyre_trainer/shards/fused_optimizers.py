"""Torch's fused optimizers and its gradient scaling on DTensors, where torch does not support them.

Of the fused optimizers, torch supports Adam and AdamW. SGD and Adagrad are elementwise too, and an
optimizer's states are cut as their parameters are.

A `torch.amp.GradScaler` skips a step whose gradients are infinite. Torch lets the ranks agree on
that by the placement of the first gradient: where that is of a replicated parameter, such as a
norm's, each rank would decide by its own shards of all others.

The gradient of a sharded parameter's `full_tensor()` is averaged over the ranks, as others are.
"""

from collections.abc import Callable, Sequence
from functools import wraps
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.distributed.tensor import DTensor, Partial, Placement
from torch.utils._pytree import tree_map

from gyre_trainer.errors import RotationError
from gyre_trainer.shards.local_shards import local_of
from gyre_trainer.shards.sharded_parameters import sharded_parameters_of

_OPERATORS = (
    torch.ops.aten._fused_sgd_.default,
    torch.ops.aten._fused_sgd_.tensor_lr,
    torch.ops.aten._fused_adagrad_.default,
    torch.ops.aten._fused_adagrad_.tensor_lr,
)
_VIEW = torch.ops.aten.view.default
_UNSCALE = torch.ops.aten._amp_foreach_non_finite_check_and_unscale_.default


def support_dtensors() -> None:
    """From now on these operators accept DTensors in this process.

    An operator that already has a handler keeps it.
    """
    handlers = DTensor._op_dispatcher._custom_op_handlers
    for operator in _OPERATORS:
        handlers.setdefault(operator, _on_local_shards)
    handlers.setdefault(_VIEW, _View())
    of_torch = handlers[_UNSCALE]
    if not isinstance(of_torch, _ShardsFirst):
        handlers[_UNSCALE] = _ShardsFirst(of_torch)
    if DTensor.full_tensor is not _full_tensor:
        DTensor.full_tensor = _full_tensor  # type: ignore[method-assign]


_of_torch = DTensor.full_tensor


@wraps(_of_torch)
def _full_tensor(
    self: DTensor, *, grad_placements: Sequence[Placement] | None = None
) -> torch.Tensor:
    # Torch takes the gradient of one rank for that of all. Where ranks compute with other parts of
    # a batch, the parameter would train wrongly, and nothing would tell.
    trains = self.requires_grad and torch.is_grad_enabled() and grad_placements is None
    if trains and sharded_parameters_of(self) is not None:  # type: ignore[arg-type]
        grad_placements = [Partial("avg")] * self.device_mesh.ndim
    return _of_torch(self, grad_placements=grad_placements)


class _View:
    """Torch's own view, whose refusal of uneven shards names functions that take them."""

    def __call__(
        self, op_call: OpOverload[..., Any], args: tuple[Any, ...], kwargs: dict[str, object]
    ) -> object:
        """View a DTensor.

        Raises:
            RotationError: uneven shards have no view of that shape.
        """
        handlers = DTensor._op_dispatcher._custom_op_handlers
        handlers.pop(op_call, None)  # so that torch's own way is taken
        try:
            return op_call(*args, **kwargs)
        except RuntimeError as error:
            if "unevenly sharded" not in str(error):
                raise
            shape, ranks = tuple(args[0].shape), args[0].device_mesh.size()
            raise RotationError(
                f"a parameter or gradient of shape {shape} is cut unevenly over {ranks} ranks and "
                "cannot be flattened. Take an optimizer of gyre_trainer.rotate (Adafactor, "
                "AdamW8bit, Muon) or torch's AdamW; in trainers, "
                "gyre_trainer.frameworks.huggingface.ShardedTrainer or "
                "gyre_trainer.frameworks.accelerate.prepare"
            ) from error
        finally:
            handlers[op_call] = self


class _ShardsFirst:
    """Torch's handler, called with the shards before the replicated gradients."""

    def __init__(self, of_torch: Callable[..., object]) -> None:
        self._of_torch = of_torch

    def __call__(
        self, op_call: OpOverload[..., Any], args: tuple[Any, ...], kwargs: dict[str, object]
    ) -> object:
        """Unscale the gradients in place, and note whether one of any rank is infinite."""
        grads, *others = args
        ordered = sorted(grads, key=lambda grad: not any(map(Placement.is_shard, grad.placements)))
        return self._of_torch(op_call, (ordered, *others), kwargs)


def _on_local_shards(
    op_call: OpOverload[..., Any], args: tuple[object, ...], kwargs: dict[str, object]
) -> Any:
    """Run the operator on this rank's shards; it writes to its arguments and returns no tensor."""
    local_args, local_kwargs = tree_map(_local, (args, kwargs))
    return op_call(*local_args, **local_kwargs)


def _local(leaf: object) -> object:
    return local_of(leaf) if isinstance(leaf, Tensor) else leaf
