"""How the slices' outputs make the module's output, and sums that many slices contribute to."""

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from gyre_trainer.errors import RotationError
from gyre_trainer.shards.sharded_parameters import has_sole_storage


class RunningSum:
    """A sum that grows.

    Attributes:
        total: None until something was added.
        dtype: the dtype of ``total``.
    """

    def __init__(self, dtype: torch.dtype) -> None:
        self.total: Tensor | None = None
        self.dtype = dtype
        self._owned = False

    def add(self, tensor: Tensor | None, *, owned: bool = False) -> None:
        """Add a tensor, or nothing for None.

        Only an ``owned`` tensor, which no one else reads, may be written to later.
        """
        if tensor is None:
            return
        if self.total is None:
            self.total = tensor.to(self.dtype)
            self._owned = owned or self.total is not tensor
        elif self._owned:
            self.total += tensor
        else:
            self.total, self._owned = self.total + tensor, True

    def writable(self, like: Tensor) -> Tensor:
        """The total in memory of its own, so that the caller may add to parts of it.

        It is zero, shaped as ``like``, where nothing was added.
        """
        if self.total is None:
            self.total, self._owned = (
                torch.zeros(like.shape, dtype=self.dtype, device=like.device),
                True,
            )
        elif not self._owned:
            self.total, self._owned = self.total.clone(), True
        return self.total

    def add_product(self, left: Tensor, right: Tensor, shape: Sequence[int]) -> None:
        """Add the product of two matrices, viewed in ``shape``.

        Where all three have one dtype, the product takes no memory of its own.
        """
        total = self.total
        if (
            total is None
            or not self._owned
            or not total.is_contiguous()
            or not left.dtype == right.dtype == total.dtype
        ):
            self.add((left @ right).view(shape), owned=True)
        else:
            total.view(left.shape[0], right.shape[1]).addmm_(left, right)


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
        total, self._sum.total = self._sum.total, None
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
                f"a slice's output of shape {tuple(output.shape)} cannot lie beside the others': "
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


class EqualParts:
    """The slices' outputs are equally large and lie side by side along one dim."""

    def __init__(self, dim: int, num_slices: int, dtype: torch.dtype) -> None:
        self._dim = dim
        self._num_slices = num_slices
        self._dtype = dtype
        self._whole: Tensor | None = None

    def add(self, index: int, output: Tensor) -> None:
        """Copy the output of slice ``index`` to its place."""
        if self._whole is None:
            shape = list(output.shape)
            shape[self._dim] *= self._num_slices
            self._whole = output.new_empty(shape, dtype=self._dtype)
        self.grad_of_slice(index, self._whole).copy_(output)

    def result(self) -> Tensor:
        """The module's output."""
        whole, self._whole = self._whole, None
        assert whole is not None
        return whole

    def grad_of_slice(self, index: int, grad: Tensor) -> Tensor:
        """The slice's own part of ``grad``."""
        return grad.chunk(self._num_slices, self._dim)[index]
