"""Tensors that many slices contribute to."""

import torch
from torch import Tensor

from gyre_trainer.layout import Layout
from gyre_trainer.rule import Rule


class Sum:
    """A sum that grows; tensors that are added are never written to.

    Attributes:
        total: None until something was added.
        dtype: of the total.
    """

    def __init__(self, dtype: torch.dtype) -> None:
        self.total: Tensor | None = None
        self.dtype = dtype
        self._owned = False

    def add(self, tensor: Tensor | None) -> None:
        """Add a tensor, or nothing."""
        if tensor is None:
            return
        if self.total is None:
            self.total = tensor.to(self.dtype)
        elif self._owned:
            self.total += tensor
        else:
            self.total, self._owned = self.total + tensor, True


class Joined:
    """The module's output while slices add to it or fill it."""

    def __init__(self, rule: Rule, layout: Layout, dtype: torch.dtype) -> None:
        self._dim = rule.join_dim
        self._layout = layout
        self._sum = Sum(dtype)

    def add(self, index: int, output: Tensor) -> None:
        """The output of slice ``index``."""
        if self._dim is None:
            self._sum.add(output)
            return
        cut = self._layout.cuts[0]
        start, stop = self._layout.bounds(cut, index)
        if self._sum.total is None:
            shape = list(output.shape)
            shape[self._dim] = cut.shape[cut.dim]
            self._sum.total = output.new_empty(shape, dtype=self._sum.dtype)
        self._sum.total.narrow(self._dim, start, stop - start).copy_(output)

    def result(self) -> Tensor:
        """The whole output, when every slice was added."""
        assert self._sum.total is not None
        return self._sum.total
