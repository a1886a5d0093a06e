"""How the slices' outputs make the module's output, and sums that many slices contribute to.

Weight gradients of linear layers, computed last in a slice's backward.

A slice's gradient is still in flight to this rank while the slice's backward begins. So a linear
layer only records the two matrices whose product is its weight's gradient. The product is formed
when the gradient's buffer has arrived, straight into it: no weight's gradient exists next to the
buffer, and the hop is hidden behind the rest of the slice's backward. An operator that forms its
weight's gradient in parts adds each part to the buffer at once, and so waits for the hop earlier.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

from gyre_trainer.errors import RotationError
from gyre_trainer.shards.sharded_parameters import has_sole_storage
from gyre_trainer.shards.travel import SliceGrad, add_wide_product, takes_wide_product


class RunningSum:
    """A sum that grows in float32 or better, and is rounded once, to its dtype.

    Sums of bfloat16 would be rounded after each of N slices, so the error would grow with N.
    """

    def __init__(self, dtype: torch.dtype) -> None:
        self._dtype = dtype
        self._wide = torch.promote_types(dtype, torch.float32)
        self._total: Tensor | None = None
        self._owned = False

    def add(self, tensor: Tensor | None, *, owned: bool = False) -> None:
        """Add a tensor, or nothing for None.

        Only an ``owned`` tensor, which no one else reads, may be written to later.
        """
        if tensor is None:
            return
        if self._total is None:
            self._total = tensor.to(self._wide)
            self._owned = owned or self._total is not tensor
        elif self._owned:
            self._total += tensor
        else:
            self._total, self._owned = self._total + tensor, True

    def writable(self, like: Tensor) -> Tensor:
        """The sum so far, in its own memory, so that the caller may add to parts of it.

        It is zero, shaped as ``like``, where nothing was added.
        """
        if self._total is None:
            self._total = torch.zeros(like.shape, dtype=self._wide, device=like.device)
        elif not self._owned:
            self._total = self._total.clone()
        self._owned = True
        return self._total

    def add_product(self, left: Tensor, right: Tensor, shape: Sequence[int]) -> None:
        """Add the product of two matrices, viewed in ``shape``.

        Where all three have one dtype, the product takes no memory of its own.
        """
        total = self._total
        if total is None or not self._owned or not total.is_contiguous():
            self.add((left @ right).view(shape), owned=True)
        elif left.dtype == right.dtype == total.dtype:
            total.view(left.shape[0], right.shape[1]).addmm_(left, right)
        elif takes_wide_product(total, left, right):
            add_wide_product(total.view(left.shape[0], right.shape[1]), left, right)
        else:
            self.add((left @ right).view(shape), owned=True)

    def result(self) -> Tensor | None:
        """The sum in its dtype; None if nothing was added. Nothing is kept."""
        total, self._total = self._total, None
        return None if total is None else total.to(self._dtype)


class OutputReduction(Protocol):
    """How the slices' outputs of one call make the module's output."""

    def add(self, index: int, output: Tensor) -> None:
        """Add the output of slice ``index``."""
        ...

    def result(self) -> Tensor:
        """The module's output after every slice's was added. The reduction does not keep it."""
        ...

    def grad_of_slice(self, index: int, grad: Tensor) -> Tensor:
        """The gradient of slice ``index``'s output, given the gradient of the module's output."""
        ...


class SumOfOutputs:
    """The module's output is the sum of the slices' outputs."""

    def __init__(self, dtype: torch.dtype) -> None:
        self._sum = RunningSum(dtype)

    def add(self, index: int, output: Tensor) -> None:
        """Add the output of slice ``index``."""
        self._sum.add(output, owned=has_sole_storage(output))

    def result(self) -> Tensor:
        """The module's output."""
        total = self._sum.result()
        assert total is not None
        return total

    def grad_of_slice(self, index: int, grad: Tensor) -> Tensor:
        """All of ``grad``."""
        return grad


class ConcatenatedOutputs:
    """The slices' outputs lie side by side along one dim."""

    def __init__(
        self, dim: int, bounds: Sequence[tuple[int, int]], name: str, dtype: torch.dtype
    ) -> None:
        """``bounds`` are the slices' half-open ranges along ``dim``, from parameter ``name``."""
        self._dim = dim
        self._name = name
        self._bounds = bounds
        self._dtype = dtype
        self._whole: Tensor | None = None

    def add(self, index: int, output: Tensor) -> None:
        """Copy the output of slice ``index`` to its range."""
        start, stop = self._bounds[index]
        if output.shape[self._dim] != stop - start:
            raise RotationError(
                f"a slice's output of shape {tuple(output.shape)} does not fit the others': "
                f"it has to be {stop - start} wide along dim {self._dim}, "
                f"as the slice of {self._name} is"
            )
        if self._whole is None:
            shape = list(output.shape)
            shape[self._dim] = max(stop for _, stop in self._bounds)
            self._whole = output.new_empty(shape, dtype=self._dtype)
        self._whole.narrow(self._dim, start, stop - start).copy_(output)

    def result(self) -> Tensor:
        """The module's output."""
        whole, self._whole = self._whole, None
        assert whole is not None
        return whole

    def grad_of_slice(self, index: int, grad: Tensor) -> Tensor:
        """The slice's own range of ``grad``."""
        start, stop = self._bounds[index]
        return grad.narrow(self._dim, start, stop - start)


_UNBIND = (torch.unbind, Tensor.unbind)


class WeightGradProduct(NamedTuple):
    """The gradient of a weight as the product of two matrices.

    Attributes:
        position: the weight's index among the shards that take a gradient.
        entry: which of the matrices along that shard's first dim the weight is; None where it is
            the whole shard.
    """

    position: int
    left: Tensor
    right: Tensor
    entry: int | None = None


@dataclass(slots=True)
class DeferredGrads:
    """What the slices' graphs of one call share next to autograd.

    Attributes:
        sums: sums of the gradients of the call's inputs, by the inputs' ids. They are complete
            after the backward of the last slice.
        positions: the weights of the slice whose graph is recorded, by their ids: their index among
            the shards that take a gradient.
        entries: position, entry and matrix of weights that were unbound, by the matrices' ids.
            Keeping the matrices here keeps their ids from being reused.
        products: recorded by linear layers of the slice whose backward runs; `take_products`
            empties it.
        slice_grad: waits for the gradient of the slice whose backward runs, and returns it.
    """

    sums: Mapping[int, RunningSum]
    positions: Mapping[int, int] = field(default_factory=dict)
    entries: dict[int, tuple[int, int, Tensor]] = field(default_factory=dict)
    products: list[WeightGradProduct] = field(default_factory=list)
    slice_grad: Callable[[], SliceGrad] | None = None

    def add_product(self, position: int, left: Tensor, right: Tensor) -> None:
        """Add the product of two matrices to the gradient of the weight at ``position`` at once."""
        assert self.slice_grad is not None
        self.slice_grad().add_product(position, left, right)

    def take_products(self) -> list[WeightGradProduct]:
        """The products that were recorded since the last call."""
        products = self.products[:]
        self.products.clear()
        return products


class DeferWeightGrads(TorchFunctionMode):
    """A context: linear layers on the weights in ``deferred.positions`` record gradients.

    The same holds for the matrices that `unbind` takes out of such a weight.
    Any other use of a weight gives its gradient as usual.
    """

    def __init__(self, deferred: DeferredGrads) -> None:
        super().__init__()
        self._deferred = deferred

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func is F.linear:
            return self._linear(*args, **(kwargs or {}))
        result = func(*args, **(kwargs or {}))
        if not args:  # by keywords, which no known layer does
            return result
        if func in _UNBIND and id(args[0]) in self._deferred.positions:
            self._note_entries(self._deferred.positions[id(args[0])], result)
        return result

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)  # type: ignore[no-untyped-call]
        self._deferred.entries.clear()

    def _note_entries(self, position: int, tensors: Sequence[Tensor]) -> None:
        if tensors and tensors[0].ndim == 2:
            self._deferred.entries.update(
                {id(tensor): (position, entry, tensor) for entry, tensor in enumerate(tensors)}
            )

    def _linear(
        self,
        input: Tensor,  # noqa: A002  # torch's name
        weight: Tensor,
        bias: Tensor | None = None,
    ) -> Any:
        position, entry = self._deferred.positions.get(id(weight)), None
        if position is None and id(weight) in self._deferred.entries:
            position, entry, _ = self._deferred.entries[id(weight)]
        if (
            position is None
            or not torch.is_grad_enabled()
            or torch.is_autocast_enabled(input.device.type)
        ):
            return F.linear(input, weight, bias)
        return _Linear.apply(input, weight, bias, (position, entry), self._deferred)  # type: ignore[no-untyped-call]


class _Linear(torch.autograd.Function):
    """A linear layer that records its weight's gradient and adds its input's to a sum."""

    @staticmethod
    def forward(
        ctx: Any,
        source: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        where: tuple[int, int | None],
        deferred: DeferredGrads,
    ) -> Tensor:
        ctx.save_for_backward(source, weight)
        ctx.where, ctx.deferred, ctx.sum = where, deferred, deferred.sums.get(id(source))
        output = F.linear(source, weight, bias)
        # With a bias and three dims or more it is a view, which nothing may write to in place.
        return torch.ops.aten._unsafe_view(output, output.shape) if output._is_view() else output

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor | None, ...]:
        # Only the backward of a ring pass comes here, and it records no graph.
        source, weight = ctx.saved_tensors
        grad = _rows(grad_output)
        position, entry = ctx.where
        product = WeightGradProduct(position, grad.t(), _rows(source), entry)
        ctx.deferred.products.append(product)
        grad_source = grad_bias = None
        if ctx.needs_input_grad[0] and ctx.sum is None:
            grad_source = (grad @ weight).view(source.shape)
        elif ctx.needs_input_grad[0]:
            ctx.sum.add_product(grad, weight, source.shape)
        if ctx.needs_input_grad[2]:
            grad_bias = grad.sum(0)
        return grad_source, None, grad_bias, None, None


def _rows(tensor: Tensor) -> Tensor:
    """The tensor as a matrix of its last dim; `reshape` cannot do this where that dim is empty."""
    return tensor.unsqueeze(0) if tensor.ndim == 1 else tensor.flatten(0, -2)
