"""What experts of a list return, where it is only multiplied by weights and added up.

[Note: Weighted outputs]

A mixture of experts multiplies what an expert returned by a weight for each token. For the weight's
gradient, which is the dot product of a token's output and of its gradient, autograd would keep that
output: as many rows as tokens chose the expert. But the output is a sum over slices, or its slices
lie side by side, and so the dot product is a sum over slices, too. With recomputation backward
computes each slice's output again, and takes its part of the dot product there. So nobody keeps the
output, and nothing more is sent.

The product is found in the module's forward, while it runs: `Weighing` knows the last output of
an expert. An output that was used in another way before is as ever. One that is used again after
the product is refused in backward.
"""

from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any, Protocol
from weakref import ref

import torch
from torch import Tensor
from torch._C import DisableTorchFunction
from torch.autograd.function import once_differentiable

from gyre_trainer.errors import RotationError
from gyre_trainer.rotation.backward.recomputation import Recomputation, recomputable


class GradOfWeight:
    """The gradient of the weights of a call's output; all slices add to it.

    Attributes:
        grad: that of the weighted output.
        total: None before the first slice.
    """

    def __init__(self, grad: Tensor) -> None:
        self.grad = grad
        self.total: Tensor | None = None

    def add(self, grad: Tensor, output: Tensor) -> None:
        """Add the dot products of a slice's output and its part of ``grad``, along the last dim."""
        wide = torch.promote_types(output.dtype, torch.float32)
        part = (grad * output).sum(-1, keepdim=True, dtype=wide)
        self.total = part if self.total is None else self.total.add_(part)


class _Pass(Protocol):
    """A ring pass that computes slices again in backward."""

    is_weighted: bool

    def backward(
        self, grad_outputs: Sequence[Tensor | None], of_weight: GradOfWeight | None = None
    ) -> list[Tensor | None]:
        """The gradients of its inputs."""
        ...


@dataclass(frozen=True, slots=True)
class _Output:
    """An expert's output that may be weighted.

    Attributes:
        tensor: the output.
        version: of the tensor, and ``node`` where it came from, when it was returned. An operation
            in place changes one of them.
        ring_pass: what computed it; None where it stands for one that is not computed again.
        inputs: of the ring pass.
    """

    tensor: Tensor
    version: int
    node: Any
    ring_pass: _Pass | None
    inputs: Sequence[Tensor]

    @property
    def is_changed(self) -> bool:
        """Whether the tensor was written to."""
        return self.tensor._version != self.version or self.tensor.grad_fn is not self.node


@dataclass
class Weighing:
    """The experts' outputs in one forward of the module that has them.

    Attributes:
        owners: the rotations of the experts.
    """

    owners: Collection[object]
    _last: _Output | None = None
    _weighted: list["ref[Tensor]"] = field(default_factory=list)

    def note(
        self, outputs: Sequence[Tensor], ring_pass: _Pass | None, inputs: Sequence[Tensor]
    ) -> None:
        """An expert has returned ``outputs``."""
        self._last = None
        if len(outputs) == 1:
            (output,) = outputs
            self._last = _Output(output, output._version, output.grad_fn, ring_pass, inputs)

    def used(self, values: Iterable[Any]) -> None:
        """A function other than a product takes ``values``."""
        last = self._last
        if last is not None and any(each is last.tensor for each in values):
            self._last = None

    def require_not_weighted(self, tensor: Tensor) -> None:
        """Refuse to watch the gradient of an output that was weighted: it has none.

        Raises:
            RotationError: ``tensor`` is such an output.
        """
        if any(weighted() is tensor for weighted in self._weighted):
            raise RotationError(
                "a hook is registered for the gradient of what an expert returned, or retain_grad, "
                "after it was multiplied by weights. Do it before, or take "
                'RotationPolicy(recompute="none").'
            )

    def weighted(self, one: Any, other: Any) -> Tensor | None:
        """The product of the last output and its weights; None where they are something else."""
        last = self._last
        if last is None or not isinstance(one, Tensor) or not isinstance(other, Tensor):
            return None
        if one is not last.tensor and other is not last.tensor:
            return None
        weight = other if one is last.tensor else one
        self._last = None
        if last.is_changed or not _are_weights(weight, last.tensor):
            return None
        self._weighted.append(ref(last.tensor))
        weight, again = recomputable(weight)
        with DisableTorchFunction():  # it is not the layer that reads the output
            result: Tensor = _Weighted.apply(  # type: ignore[no-untyped-call]
                last.ring_pass, again, last.tensor.detach(), weight, *last.inputs
            )
        return result


def _are_weights(weight: Tensor, output: Tensor) -> bool:
    """Whether there is one number for each row of the output."""
    return (
        weight.is_floating_point()
        and weight.device == output.device
        and weight.shape == (*output.shape[:-1], 1)
    )


class _Weighted(torch.autograd.Function):
    """The product of a rotated module's output and weights; see the note above."""

    @staticmethod
    def forward(
        ctx: Any,
        ring_pass: _Pass | None,
        again: Recomputation | None,
        output: Tensor,
        weight: Tensor,
        *_inputs: Tensor,
    ) -> Tensor:
        if ring_pass is not None:
            ring_pass.is_weighted = True
        ctx.ring_pass = ring_pass
        ctx.again, ctx.dtypes = again, (output.dtype, weight.dtype)
        if again is None:
            ctx.save_for_backward(weight)
        ctx.set_materialize_grads(False)
        return output * weight

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor | None) -> tuple[Tensor | None, ...]:
        dtype, weight_dtype = ctx.dtypes
        if grad is None:
            return None, None, None, None, *ctx.ring_pass.backward((None,))
        again = ctx.again
        weight = ctx.saved_tensors[0] if again is None else again.compute_again({})
        of_weight = GradOfWeight(grad) if ctx.needs_input_grad[3] else None
        grads = ctx.ring_pass.backward(((grad * weight).to(dtype),), of_weight)
        total = None if of_weight is None else of_weight.total
        return None, None, None, None if total is None else total.to(weight_dtype), *grads


_WEIGHING: ContextVar[Weighing | None] = ContextVar("weighing", default=None)


def weighing() -> Weighing | None:
    """Of the module with a list of experts that computes now."""
    return _WEIGHING.get()


@contextmanager
def as_weighing(now: Weighing | None) -> Iterator[None]:
    """A context in which experts' outputs are noted in ``now``, or nowhere."""
    token = _WEIGHING.set(now)
    try:
        yield
    finally:
        _WEIGHING.reset(token)
