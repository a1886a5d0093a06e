"""The slices of the other ranks: the next one is in flight while the caller uses this one.

Also here:

* How a slice's gradient reaches its owner: each rank adds its contribution and sends it on.

Add products of bfloat16 or float16 matrices in float32, on CUDA.
"""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from gyre_trainer.comm.identity import HopIdentity, digest_of_names, with_room
from gyre_trainer.comm.ring import Direction, Hop, Ring, Stream
from gyre_trainer.shards.layout import Layout

_HALVES = (torch.bfloat16, torch.float16)
_IS_THERE = hasattr(torch.ops.aten.addmm, "dtype_out")


def takes_wide_product(total: Tensor, left: Tensor, right: Tensor) -> bool:
    """Whether torch adds this product to ``total`` without memory for it."""
    is_wide = total.dtype == torch.float32 and left.dtype == right.dtype and left.dtype in _HALVES
    return total.is_cuda and is_wide and _IS_THERE


def add_wide_product(
    total: Tensor, left: Tensor, right: Tensor, *, beta: float = 1, alpha: float = 1
) -> None:
    """``total = beta * total + alpha * left @ right``; ``total`` is unread if ``beta`` is 0."""
    torch.addmm(total, left, right, out_dtype=torch.float32, beta=beta, alpha=alpha, out=total)


class _Incoming(NamedTuple):
    """A slice in flight to this rank: it fills ``flat``, the beginning of the pool's ``buffer``."""

    hop: Hop
    buffer: Tensor
    flat: Tensor


class RemoteSlices:
    """The other ranks' slices, one after the other. The first hop starts when this object is made.

    Iterating yields (number, flat piece) for each remote slice's piece of one round, ring.size - 1
    of them: clockwise in the order rank-1, rank-2, ..., counter-clockwise in the order rank+1,
    rank+2, .... A piece is valid until the next one is asked for. Only transient buffers are
    written to. ``own`` must not change before the first piece was yielded.
    """

    def __init__(
        self, ring: Ring, own: Tensor, layout: Layout, direction: Direction, hop: HopIdentity
    ) -> None:
        """Start the first hop. ``hop`` is its identity, with the round."""
        self._ring = ring
        self._layout = layout
        self._direction = direction
        self._hop = hop
        self._next = self._start_hop(own, 1)

    def _start_hop(self, outgoing: Tensor, step: int) -> _Incoming | None:
        if step >= self._ring.size:
            return None
        buffer = self._ring.pool.take(self._layout.numel(0), outgoing.dtype, outgoing.device)
        incoming = buffer[: self._layout.numel(self._piece(step))]
        identity = self._hop._replace(step=step).pack()
        hop = self._ring.shift(outgoing, incoming, self._direction, Stream.WEIGHTS, identity)
        return _Incoming(hop, buffer, incoming)

    def _piece(self, step: int) -> int:
        return self._layout.piece(
            (self._ring.rank - step * self._direction) % self._ring.size, self._hop.round_
        )

    def __iter__(self) -> Iterator[tuple[int, Tensor]]:
        for step in range(1, self._ring.size):
            incoming = self._next
            assert incoming is not None
            incoming.hop.wait()
            self._next = self._start_hop(incoming.flat, step + 1)
            yield self._piece(step), incoming.flat
            if self._next is not None:
                self._next.hop.wait()  # it sends from the buffer put back now
            self._ring.pool.put(incoming.buffer)

    def close(self) -> None:
        """Return when no hop is in flight, even if not all slices were asked for."""
        if self._next is not None:
            self._next.hop.wait()
            self._ring.pool.put(self._next.buffer)
            self._next = None


def meet(ring: Ring, like: Tensor, hop: HopIdentity) -> None:
    """Return when both neighbours begin the same pass; one number in the dtype of ``like`` travels.

    Rows have no identity. Without this, a rank that calls another module would wait elsewhere, and
    this one here, until the timeout.

    Raises:
        RingError: a neighbour is gone or too late.
        RotationError: a neighbour calls another module.
    """
    buffer = ring.pool.take(1, like.dtype, like.device)
    try:
        number, arrives = with_room(1, like.dtype, like.device).zero_(), buffer[:1]
        ring.shift(number, arrives, Direction.CLOCKWISE, Stream.WEIGHTS, hop.pack()).wait()
    finally:
        ring.pool.put(buffer)


# Where a product of matrices has another dtype than the sum, it needs memory of its own. It is
# formed in blocks of at most this many elements (16 MiB in float32). Twice as many raise the peak
# by as much; far fewer make the matrix products too small for the processor.
_MAX_PRODUCT_NUMEL = 2**22


class SliceGrad:
    """One slice's gradient while it is on this rank.

    Every contribution is scaled before it is added. The memory of an empty gradient is
    uninitialised until something was added to it.
    """

    def __init__(self, parts: Sequence[Tensor], *, empty: bool, scale: float) -> None:
        """``parts`` are the gradients of the parameters, views of the buffer that travels."""
        self._parts = parts
        self._empty = [empty] * len(parts)
        self._scale = scale

    def add(self, position: int, grad: Tensor) -> None:
        """Add ``grad``, of the same shape, to the gradient at ``position``."""
        part = self._parts[position]
        if not self._empty[position]:
            part.add_(grad, alpha=self._scale)
        elif part.dtype == grad.dtype:
            torch.mul(grad, self._scale, out=part)
        else:
            part.copy_(grad).mul_(self._scale)
        self._empty[position] = False

    def add_product(
        self, position: int, left: Tensor, right: Tensor, entry: int | None = None
    ) -> None:
        """Add the product of two matrices to the gradient at ``position``.

        With ``entry``, add it to that matrix along the gradient's first dim. The product is not
        formed as a whole next to the gradient.
        """
        part, empty = self._parts[position], self._empty[position]
        self._empty[position] = False
        if entry is not None:
            if empty:
                part.zero_()
            part, empty = part[entry], False
        if part.dtype == left.dtype == right.dtype:
            part.addmm_(left, right, beta=0 if empty else 1, alpha=self._scale)
            return
        if takes_wide_product(part, left, right):
            add_wide_product(part, left, right, beta=0 if empty else 1, alpha=self._scale)
            return
        if empty:
            part.zero_()
        num_rows = max(1, _MAX_PRODUCT_NUMEL // max(1, part.shape[1]))
        for rows, of_rows in zip(
            torch.split(part, num_rows), torch.split(left, num_rows), strict=True
        ):
            rows.add_(of_rows @ right, alpha=self._scale)

    def close(self) -> None:
        """Fill with zeros the gradients that nothing was added to."""
        for part, empty in zip(self._parts, self._empty, strict=True):
            if empty:
                part.zero_()


class _GradientPiece(NamedTuple):
    """The gradient of one piece, on this rank or in flight to it.

    Attributes:
        piece: its number in the layout.
        flat: where the gradient lies, in ``buffer`` or in the own slice's gradient.
        buffer: the pool's buffer; None for a piece of the own slice.
    """

    piece: int
    flat: Tensor
    buffer: Tensor | None


class GradientRing:
    """The gradients of one module's slices, each one step behind its weights, counter-clockwise.

    For each piece of each round, from rank+1's to the own one: `receive` it, add to it, then
    `send_on`. All contributions are scaled by 1 / ring.size, so that the sum is the average over
    the ranks.
    """

    def __init__(
        self, ring: Ring, layout: Layout, dtype: torch.dtype, device: torch.device, number: int
    ) -> None:
        """``number`` is the module's in `Ring.modules`."""
        self._number = number
        self._trained = digest_of_names(cut.name for cut in layout.cuts)
        self._ring = ring
        self._layout = layout
        self._dtype = dtype
        self._device = device
        self._here: tuple[_GradientPiece, SliceGrad] | None = None
        # The hop, the piece that it sends, and the piece that arrives.
        self._in_flight: tuple[Hop, _GradientPiece, _GradientPiece] | None = None
        self._own: Tensor | None = None

    def receive(self, piece: int) -> SliceGrad:
        """The gradient of ``piece`` as the previous ranks left it; empty on the first rank.

        Calls before the next `send_on` return the same object.

        Raises:
            RingError: the gradient did not arrive.
        """
        if self._here is None:
            flight, self._in_flight = self._in_flight, None
            empty = flight is None
            here = self._piece(piece) if flight is None else self._arrived(*flight)
            parts = self._layout.views(here.flat, piece)
            self._here = here, SliceGrad(parts, empty=empty, scale=1 / self._ring.size)
        return self._here[1]

    def send_on(self) -> None:
        """Send the received gradient to the next rank, and start to receive the next piece's.

        The own slice's gradient stays.
        """
        assert self._here is not None
        here, grad = self._here
        grad.close()
        self._here = None
        round_, index = divmod(here.piece, self._ring.size)
        if index != self._ring.rank:
            arriving = self._piece(self._layout.piece((index + 1) % self._ring.size, round_))
            step = (index - self._ring.rank) % self._ring.size
            identity = HopIdentity(self._number, False, True, round_, step, self._trained).pack()
            hop = self._ring.shift(
                here.flat, arriving.flat, Direction.COUNTER_CLOCKWISE, Stream.GRADIENTS, identity
            )
            self._in_flight = hop, here, arriving

    def finish(self) -> Tensor:
        """The own slice's gradient, flat and complete, in memory that belongs to the caller."""
        assert self._own is not None
        return self._own

    def _arrived(self, hop: Hop, sent: _GradientPiece, arrived: _GradientPiece) -> _GradientPiece:
        hop.wait()
        assert sent.buffer is not None
        self._ring.pool.put(sent.buffer)
        return arrived

    def _piece(self, piece: int) -> _GradientPiece:
        """Memory for the gradient of ``piece``."""
        if piece % self._ring.size != self._ring.rank:
            buffer = self._ring.pool.take(self._layout.numel(0), self._dtype, self._device)
            return _GradientPiece(piece, buffer[: self._layout.numel(piece)], buffer)
        if self._own is None:
            numel = self._layout.in_rounds(1).numel(self._ring.rank)
            # pieces arrive in the order of rounds, so behind one nothing has been written yet
            self._own = with_room(numel, self._dtype, self._device, is_scratch=True)
        return _GradientPiece(piece, self._layout.piece_in(self._own, piece), None)
