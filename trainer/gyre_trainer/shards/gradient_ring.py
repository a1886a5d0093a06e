"""A gradient's way home: every rank adds its part to the buffer that passes, and the owner adds the last one."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from gyre_trainer.comm.ring import Direction, Hop, Ring, Stream
from gyre_trainer.shards.layout import Layout

_MAX_PRODUCT = 2**22  # elements of a product in another dtype than the sum that it is added to


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

    def add_product(self, place: int, left: Tensor, right: Tensor, entry: int | None = None) -> None:
        """Add the product of two matrices to part ``place``, or to one entry along that part's first dim.

        Little of it ever exists beside the part.
        """
        part, empty = self._parts[place], self._empty[place]
        self._empty[place] = False
        if entry is not None:
            if empty:
                part.zero_()
            part, empty = part[entry], False
        if part.dtype == left.dtype == right.dtype:
            part.addmm_(left, right, beta=0 if empty else 1, alpha=self._scale)
            return
        if empty:
            part.zero_()
        num_rows = max(1, _MAX_PRODUCT // max(1, part.shape[1]))
        for rows, of_rows in zip(torch.split(part, num_rows), torch.split(left, num_rows), strict=True):
            rows.add_(of_rows @ right, alpha=self._scale)

    def close(self) -> None:
        """Parts that nothing was added to are zero."""
        for part, empty in zip(self._parts, self._empty, strict=True):
            if empty:
                part.zero_()


@dataclass(frozen=True, slots=True)
class _Passing:
    """A piece's gradient here, or on its way here: ``flat`` is a part of the pool's ``buffer``, or of the own slice's."""

    piece: int
    flat: Tensor
    buffer: Tensor | None


class Relay:
    """The gradients of one module's slices, each one step behind its weights, counter-clockwise.

    For each piece of each round, rank+1's first and the own one last: `receive`, add to what it gives, then `pass_on`. What
    arrives is scaled already, by 1/size as the average wants it.
    """

    def __init__(self, ring: Ring, layout: Layout, dtype: torch.dtype, device: torch.device) -> None:
        self._ring = ring
        self._layout = layout
        self._dtype = dtype
        self._device = device
        self._here: tuple[_Passing, SliceGrad] | None = None
        self._under_way: tuple[Hop, _Passing, _Passing] | None = None  # what left and what comes
        self._own: Tensor | None = None

    def receive(self, piece: int) -> SliceGrad:
        """The gradient of ``piece``, as the ranks before left it; empty on the first rank of its way.

        The same one until it is passed on.
        """
        if self._here is None:
            empty = self._under_way is None
            passing = self._room(piece) if self._under_way is None else self._arrived(*self._under_way)
            self._under_way = None
            parts = self._layout.views(passing.flat, piece)
            self._here = passing, SliceGrad(parts, empty=empty, scale=1 / self._ring.size)
        return self._here[1]

    def pass_on(self) -> None:
        """What was received goes to the next rank while the piece after it sets out for here; the own one stays."""
        assert self._here is not None
        passing, grad = self._here
        grad.close()
        self._here = None
        round_, index = divmod(passing.piece, self._ring.size)
        if index != self._ring.rank:
            room = self._room(self._layout.piece((index + 1) % self._ring.size, round_))
            hop = self._ring.shift(passing.flat, room.flat, Direction.COUNTER_CLOCKWISE, Stream.GRADIENTS)
            self._under_way = hop, passing, room

    def finish(self) -> Tensor:
        """The own slice's gradient, complete, in memory that belongs to the caller."""
        assert self._own is not None
        return self._own

    def _arrived(self, hop: Hop, left: _Passing, arrived: _Passing) -> _Passing:
        hop.wait()
        assert left.buffer is not None
        self._ring.pool.put(left.buffer)
        return arrived

    def _room(self, piece: int) -> _Passing:
        if piece % self._ring.size != self._ring.rank:
            buffer = self._ring.pool.take(self._layout.numel(0), self._dtype, self._device)
            return _Passing(piece, buffer[: self._layout.numel(piece)], buffer)
        if self._own is None:
            numel = self._layout.in_rounds(1).numel(self._ring.rank)
            self._own = torch.empty(numel, dtype=self._dtype, device=self._device)
        return _Passing(piece, self._layout.within(self._own, piece), None)
