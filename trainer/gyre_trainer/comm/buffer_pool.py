"""Transient buffers: what slices and their gradients travel in."""

from collections.abc import Callable

import torch
from torch import Tensor

Allocate = Callable[[int, torch.dtype, torch.device], Tensor]  # elements


class Pool:
    """Transient buffers for all rotations of one ring: as large as what travels, and none allocated once that is known.

    Attributes:
        unit: elements of the largest slice that can only travel as a whole; others follow it, in pieces no larger.
    """

    def __init__(self, allocate: Allocate) -> None:
        self.unit = 0
        self._allocate = allocate
        self._free: dict[tuple[torch.dtype, torch.device], list[Tensor]] = {}
        self._numel: dict[tuple[torch.dtype, torch.device], int] = {}

    def take(self, numel: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        """A flat buffer of at least ``numel`` elements that nobody else uses until it is put back."""
        key = (dtype, device)
        if numel > self._numel.get(key, -1):
            self._numel[key], self._free[key] = max(numel, self.unit), []
        if self._free[key]:
            return self._free[key].pop()
        with torch.inference_mode(mode=False):  # an inference tensor could not carry gradients later
            return self._allocate(self._numel[key], dtype, device)

    def put(self, buffer: Tensor) -> None:
        """Hand back what `take` gave."""
        key = (buffer.dtype, buffer.device)
        if buffer.numel() == self._numel[key]:  # those of the time before a larger slice came are dropped
            self._free[key].append(buffer)
