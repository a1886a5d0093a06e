"""How the slices' outputs make the module's output, and sums that many slices contribute to."""

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from gyre_trainer.errors import RotationError
from gyre_trainer.shards.sharded_parameters import has_sole_storage


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
        if (
            total is None
            or not self._owned
            or not total.is_contiguous()
            or not left.dtype == right.dtype == total.dtype
        ):
            self.add((left @ right).view(shape), owned=True)
        else:
            total.view(left.shape[0], right.shape[1]).addmm_(left, right)

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
