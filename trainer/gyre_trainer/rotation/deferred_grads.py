"""Gradients of linear layers' weights, computed last.

A slice's gradient is still on its way here while the slice's backward begins. So a linear layer only notes what its weight's
gradient is the product of, and the product is formed when the buffer is here, straight into it: no weight's gradient ever
exists beside it, and the hop is hidden behind the rest of the slice's backward. Whatever forms its weight's gradient bit by bit
adds each bit to the buffer, and so waits for the hop.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.overrides import TorchFunctionMode

from gyre_trainer.rotation.output_reduction import Sum
from gyre_trainer.shards.gradient_ring import SliceGrad

_UNBIND = (torch.unbind, Tensor.unbind)
_Where = tuple[int, int | None]  # place and entry


@dataclass(frozen=True, slots=True)
class Product:
    """The gradient of a weight: the product of two matrices.

    Attributes:
        place: of the weight among the parts that take a gradient.
        entry: which of the matrices along that part's first dim the weight is; None where it is the whole part.
    """

    place: int
    left: Tensor
    right: Tensor
    entry: int | None = None


@dataclass(slots=True)
class Late:
    """What the slices' graphs of one call share, beside autograd.

    Attributes:
        sums: of the gradients of the call's inputs, by the inputs' ids; complete when all slices are through.
        places: of the weights of the slice whose graph is recorded, among those that take a gradient, by their ids.
        entries: place, entry and matrix of weights that were taken apart, by ids, which are the matrices' own while these live.
        products: that linear layers noted, of the slice whose backward runs; whoever forms them takes them out.
        slice_grad: waits for the gradient of the slice whose backward runs.
    """

    sums: Mapping[int, Sum]
    places: Mapping[int, int] = field(default_factory=dict)
    entries: dict[int, tuple[int, int, Tensor]] = field(default_factory=dict)
    products: list[Product] = field(default_factory=list)
    slice_grad: Callable[[], SliceGrad] | None = None

    def add_product(self, place: int, left: Tensor, right: Tensor) -> None:
        """Add the product of two matrices to the gradient of the weight at ``place``, now."""
        assert self.slice_grad is not None
        self.slice_grad().add_product(place, left, right)

    def take(self) -> list[Product]:
        """The products that were noted since the last time."""
        products = self.products[:]
        self.products.clear()
        return products


class LateGrads(TorchFunctionMode):
    """Inside, linear layers on one slice's weights, those in ``late.places``, work like that.

    So do those on the matrices that `unbind` takes such a weight apart into. Any other use of a weight gives its gradient as
    usual.
    """

    def __init__(self, late: Late) -> None:
        super().__init__()
        self._late = late

    def __torch_function__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        if func is F.linear:
            return self._linear(*args, **(kwargs or {}))
        result = func(*args, **(kwargs or {}))
        if func in _UNBIND and id(args[0]) in self._late.places:
            self._note_entries(self._late.places[id(args[0])], result)
        return result

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)  # type: ignore[no-untyped-call]
        self._late.entries.clear()

    def _note_entries(self, place: int, tensors: Sequence[Tensor]) -> None:
        if tensors and tensors[0].ndim == 2:
            self._late.entries.update({id(tensor): (place, entry, tensor) for entry, tensor in enumerate(tensors)})

    def _linear(self, input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Any:  # noqa: A002  # torch's name
        place, entry = self._late.places.get(id(weight)), None
        if place is None and id(weight) in self._late.entries:
            place, entry, _ = self._late.entries[id(weight)]
        if place is None or not torch.is_grad_enabled() or torch.is_autocast_enabled(input.device.type):
            return F.linear(input, weight, bias)
        return _Linear.apply(input, weight, bias, (place, entry), self._late)  # type: ignore[no-untyped-call]


class _Linear(torch.autograd.Function):
    """A linear layer that notes its weight's gradient, and adds its input's to the sum where there is one."""

    @staticmethod
    def forward(ctx: Any, input: Tensor, weight: Tensor, bias: Tensor | None, where: _Where, late: Late) -> Tensor:  # noqa: A002
        ctx.save_for_backward(input, weight)
        ctx.where, ctx.late, ctx.sum = where, late, late.sums.get(id(input))
        return F.linear(input, weight, bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor | None, ...]:
        source, weight = ctx.saved_tensors
        grad = _rows(grad_output)
        place, entry = ctx.where
        ctx.late.products.append(Product(place, grad.t(), _rows(source), entry))
        grad_source = grad_bias = None
        if ctx.needs_input_grad[0] and ctx.sum is None:
            grad_source = (grad @ weight).view(source.shape)
        elif ctx.needs_input_grad[0]:
            ctx.sum.add_product(grad, weight, source.shape)
        if ctx.needs_input_grad[2]:
            grad_bias = grad.sum(0)
        return grad_source, None, grad_bias, None, None


def _rows(tensor: Tensor) -> Tensor:
    """As a matrix of the last dim; also where that is empty, which `reshape` cannot guess the others for."""
    return tensor.unsqueeze(0) if tensor.ndim == 1 else tensor.flatten(0, -2)
