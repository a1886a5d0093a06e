"""Transient buffers that slices and their gradients travel in."""

from collections.abc import Callable

import torch
from torch import Tensor

Allocate = Callable[[int, torch.dtype, torch.device], Tensor]
"""Makes a flat tensor: the number of its elements, its dtype, its device."""


class BufferPool:
    """Transient buffers of one ring, all as large as the largest that was asked for.

    Nothing is allocated once that size is known.

    Attributes:
        largest_whole_numel: elements of the largest slice that cannot be divided. Larger slices
            that can be divided travel in pieces of about this size, so that they do not enlarge
            every buffer.
    """

    def __init__(self, allocate: Allocate) -> None:
        self.largest_whole_numel = 0
        self._allocate = allocate
        self._free: dict[tuple[torch.dtype, torch.device], list[Tensor]] = {}
        self._numel: dict[tuple[torch.dtype, torch.device], int] = {}

    def take(self, numel: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        """A flat buffer of at least ``numel`` elements, which belongs to the caller until `put`."""
        key = (dtype, device)
        if numel > self._numel.get(key, -1):
            self._numel[key], self._free[key] = max(numel, self.largest_whole_numel), []
        if self._free[key]:
            return self._free[key].pop()
        # an inference tensor could not carry gradients later
        with torch.inference_mode(mode=False):
            return self._allocate(self._numel[key], dtype, device)

    def put(self, buffer: Tensor) -> None:
        """Give back a buffer of `take`. One that is smaller than buffers are now is dropped."""
        key = (buffer.dtype, buffer.device)
        if buffer.numel() == self._numel[key]:
            self._free[key].append(buffer)
