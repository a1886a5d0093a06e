"""A gradient's way home: every rank adds its part to the buffer that passes, and the owner adds the last one."""

from collections.abc import Sequence

import torch
from torch import Tensor

from gyre_trainer.layout import Layout
from gyre_trainer.ring import Arrival, Direction, Ring, Stream


class SliceGrad:
    """One slice's gradient while it is here.

    Whatever is added is scaled first. Parts of an empty one hold anything until something was added to them.
    """

    def __init__(self, parts: Sequence[Tensor], *, empty: bool, scale: float) -> None:
        self._parts = parts
        self._empty = [empty] * len(parts)
        self._scale = scale

    def add(self, place: int, grad: Tensor) -> None:
        """Add to part ``place``."""
        part = self._parts[place]
        if not self._empty[place]:
            part.add_(grad, alpha=self._scale)
        elif part.dtype == grad.dtype:
            torch.mul(grad, self._scale, out=part)
        else:
            part.copy_(grad).mul_(self._scale)
        self._empty[place] = False

    def add_product(self, place: int, left: Tensor, right: Tensor) -> None:
        """Add the product of two matrices to part ``place``, without memory for it where all have one dtype."""
        part = self._parts[place]
        if part.dtype != left.dtype or part.dtype != right.dtype:
            self.add(place, left @ right)
            return
        part.addmm_(left, right, beta=0 if self._empty[place] else 1, alpha=self._scale)
        self._empty[place] = False

    def close(self) -> None:
        """Parts that nothing was added to are zero."""
        for part, empty in zip(self._parts, self._empty, strict=True):
            if empty:
                part.zero_()


class Relay:
    """The gradients of one module's slices, each one step behind its weights, counter-clockwise.

    For each slice, rank+1 first and the own one last: `receive`, add to what it gives, then `send_on`, or `finish` for the
    own. What arrives is scaled already, by 1/size as the average wants it.
    """

    def __init__(self, ring: Ring, layout: Layout, dtype: torch.dtype, device: torch.device) -> None:
        self._ring = ring
        self._layout = layout
        self._dtype = dtype
        self._device = device
        self._index = ring.rank
        self._here: tuple[Tensor, SliceGrad] | None = None
        self._leaving: Tensor | None = None
        self._next: Arrival | None = None

    def receive(self, index: int) -> SliceGrad:
        """Slice ``index``'s gradient, as the ranks before left it; empty on the first rank of its way."""
        if self._next is None:
            buffer = self._own() if index == self._ring.rank else self._transient()
        else:
            self._next.hop.wait()
            assert self._leaving is not None
            self._ring.pool.put(self._leaving)
            buffer = self._next.buffer
        parts = self._layout.views(buffer[: self._layout.numel(index)], index)
        grad = SliceGrad(parts, empty=self._next is None, scale=1 / self._ring.size)
        self._index, self._here = index, (buffer, grad)
        return grad

    def send_on(self) -> None:
        """The slice that was received last goes to the next rank, and the one after it sets out for here."""
        buffer = self._closed()
        following = (self._index + 1) % self._ring.size
        room = self._own() if following == self._ring.rank else self._transient()
        outgoing, incoming = buffer[: self._layout.numel(self._index)], room[: self._layout.numel(following)]
        hop = self._ring.shift(outgoing, incoming, Direction.COUNTER_CLOCKWISE, Stream.GRADIENTS)
        self._next, self._leaving = Arrival(hop, room, incoming), buffer

    def finish(self) -> Tensor:
        """The own slice's gradient, complete, in memory that belongs to the caller."""
        return self._closed()

    def _closed(self) -> Tensor:
        assert self._here is not None
        buffer, grad = self._here
        grad.close()
        self._here = None
        return buffer

    def _transient(self) -> Tensor:
        return self._ring.pool.take(self._layout.numel(0), self._dtype, self._device)

    def _own(self) -> Tensor:
        return torch.empty(self._layout.numel(self._ring.rank), dtype=self._dtype, device=self._device)
