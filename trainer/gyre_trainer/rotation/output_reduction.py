"""Tensors that many slices contribute to."""

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from gyre_trainer.errors import RotationError
from gyre_trainer.shards.sharded_parameters import has_sole_storage


class Sum:
    """A sum that grows.

    Attributes:
        total: None until something was added.
        dtype: of the total.
    """

    def __init__(self, dtype: torch.dtype) -> None:
        self.total: Tensor | None = None
        self.dtype = dtype
        self._owned = False

    def add(self, tensor: Tensor | None, *, owned: bool = False) -> None:
        """Add a tensor, or nothing; it is written to later only where it is ``owned``: where nobody else reads it."""
        if tensor is None:
            return
        if self.total is None:
            self.total = tensor.to(self.dtype)
            self._owned = owned or self.total is not tensor
        elif self._owned:
            self.total += tensor
        else:
            self.total, self._owned = self.total + tensor, True

    def room(self, like: Tensor) -> Tensor:
        """The total, in memory that belongs to it, for whoever adds to parts of it; zero where nothing was added."""
        if self.total is None:
            self.total, self._owned = torch.zeros(like.shape, dtype=self.dtype, device=like.device), True
        elif not self._owned:
            self.total, self._owned = self.total.clone(), True
        return self.total

    def within(self, part: Tensor) -> "Sum":
        """A sum that grows in ``part``, a view of this one's `room`."""
        inner = Sum(self.dtype)
        inner.total, inner._owned = part, True
        return inner

    def add_product(self, left: Tensor, right: Tensor, shape: Sequence[int]) -> None:
        """Add the product of two matrices, seen in a shape; without memory for it where all have one dtype."""
        total = self.total
        if total is None or not self._owned or not total.is_contiguous() or not left.dtype == right.dtype == total.dtype:
            self.add((left @ right).view(shape), owned=True)
        else:
            total.view(left.shape[0], right.shape[1]).addmm_(left, right)


class Join(Protocol):
    """How the slices' outputs of one call make the module's, and what of its gradient belongs to each of them."""

    def add(self, index: int, output: Tensor) -> None:
        """The output of slice ``index``."""
        ...

    def result(self) -> Tensor:
        """The module's output, when every slice's was added; it is not kept here."""
        ...

    def share(self, index: int, grad: Tensor) -> Tensor:
        """The gradient of slice ``index``'s output, for the gradient of the module's."""
        ...


class Added:
    """Outputs that add up."""

    def __init__(self, dtype: torch.dtype) -> None:
        self._sum = Sum(dtype)

    def add(self, index: int, output: Tensor) -> None:
        """See `Join`."""
        self._sum.add(output, owned=has_sole_storage(output))

    def result(self) -> Tensor:
        """See `Join`."""
        total, self._sum.total = self._sum.total, None
        assert total is not None
        return total

    def share(self, index: int, grad: Tensor) -> Tensor:
        """The whole of it."""
        return grad


class Beside:
    """Outputs that lie side by side along one dim."""

    def __init__(self, dim: int, bounds: Sequence[tuple[int, int]], name: str, dtype: torch.dtype) -> None:
        """``bounds`` are the slices' half-open ranges along ``dim``, those of the parameter of this name."""
        self._dim = dim
        self._name = name
        self._bounds = bounds
        self._dtype = dtype
        self._whole: Tensor | None = None

    def add(self, index: int, output: Tensor) -> None:
        """See `Join`."""
        start, stop = self._bounds[index]
        if output.shape[self._dim] != stop - start:
            raise RotationError(
                f"a slice's output of shape {tuple(output.shape)} cannot lie beside the others': "
                f"it has to be {stop - start} wide along dim {self._dim}, as the slice of {self._name} is"
            )
        if self._whole is None:
            shape = list(output.shape)
            shape[self._dim] = max(stop for _, stop in self._bounds)
            self._whole = output.new_empty(shape, dtype=self._dtype)
        self._whole.narrow(self._dim, start, stop - start).copy_(output)

    def result(self) -> Tensor:
        """See `Join`."""
        whole, self._whole = self._whole, None
        assert whole is not None
        return whole

    def share(self, index: int, grad: Tensor) -> Tensor:
        """The slice's own place in it."""
        start, stop = self._bounds[index]
        return grad.narrow(self._dim, start, stop - start)
