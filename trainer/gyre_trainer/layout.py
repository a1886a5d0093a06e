"""How parameters are cut, and where the parts of one slice lie in the flat buffer that travels."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from math import prod

import torch
from torch import Tensor

from gyre_trainer.mesh import slice_bounds


@dataclass(frozen=True, slots=True)
class Cut:
    """One parameter and the tensor dim that it is cut along.

    Attributes:
        name: inside the rotated module.
        shape: of the whole parameter.
        dim: cut as `torch.chunk` cuts.
        padded: the slice's forward sees this one-dim parameter whole, zero outside the slice's part; so outputs that add up
            contain it once.
    """

    name: str
    shape: tuple[int, ...]
    dim: int
    padded: bool = False


@dataclass(frozen=True)
class Layout:
    """Where the parts of all parameters lie in the flat buffer of each slice."""

    cuts: tuple[Cut, ...]
    num_slices: int

    @property
    def shapes(self) -> list[tuple[tuple[int, ...], int]]:
        """What is cut and how, whatever the names."""
        return [(cut.shape, cut.dim) for cut in self.cuts]

    def bounds(self, cut: Cut, index: int) -> tuple[int, int]:
        """The half-open range of the cut dim that slice ``index`` holds."""
        return slice_bounds(cut.shape[cut.dim], index, self.num_slices)

    def all_bounds(self, cut: Cut) -> list[tuple[int, int]]:
        """Those of every slice."""
        return [self.bounds(cut, index) for index in range(self.num_slices)]

    def numel(self, index: int) -> int:
        """Elements of slice ``index``; slice 0 is the largest."""
        return self._numels[index]

    def views(self, flat: Tensor, index: int) -> list[Tensor]:
        """The parts in the buffer of slice ``index``, in the order of the cuts."""
        shapes = self._parts[index]
        return [part.view(shape) for part, shape in zip(torch.split(flat, [prod(s) for s in shapes]), shapes, strict=True)]

    def only(self, wanted: Sequence[bool]) -> "Layout":
        """The layout of the cuts whose flag is true."""
        return Layout(tuple(cut for cut, want in zip(self.cuts, wanted, strict=True) if want), self.num_slices)

    @cached_property
    def _parts(self) -> list[list[tuple[int, ...]]]:
        return [[self._part_shape(cut, index) for cut in self.cuts] for index in range(self.num_slices)]

    @cached_property
    def _numels(self) -> list[int]:
        return [sum(map(prod, shapes)) for shapes in self._parts]

    def _part_shape(self, cut: Cut, index: int) -> tuple[int, ...]:
        start, stop = self.bounds(cut, index)
        return (*cut.shape[: cut.dim], stop - start, *cut.shape[cut.dim + 1 :])
