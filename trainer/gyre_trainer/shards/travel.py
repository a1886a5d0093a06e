"""The slices of the other ranks: the next one is in flight while the caller uses this one.

Also here:

* How a slice's gradient reaches its owner: each rank adds its contribution and sends it on.

Rows of packed parameters, on their way from where they rest to the slices that they are in.

[Note: Packed parameters]

A packed parameter has the rows of several layers, one section after the other: queries, keys and
values, or gate and up. A slice that computes by itself needs the same part of every section. Rank
r's shard is one range of rows, because every reader of a DTensor, of an optimizer's state and of a
checkpoint takes it for that. So where a module has a packed parameter, its slices travel in another
form than its shards rest in. Before a pass, ranks send each other the rows that the other's slice
needs, and the slices go round the ring. After backward, the gradient's rows go the same way back.

Slices of query heads may need the same key/value head (`Cut.of_slices`). Then its rows are sent to
each of these slices, and what comes back is added up.

Add products of bfloat16 or float16 matrices in float32, on CUDA.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from gyre_trainer.comm.buffer_pool import with_room
from gyre_trainer.comm.identity import HopIdentity, digest_of_names
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


@dataclass(frozen=True, slots=True)
class _Rows:
    """Rows of one parameter that lie together on a rank and in a slice; or columns, as it is cut.

    Attributes:
        position: the parameter's index among the cuts.
        dim: the dim that is cut.
        resting: the first row in the rank's shard.
        travelling: the first row in the slice.
        count: how many there are.
    """

    position: int
    dim: int
    resting: int
    travelling: int
    count: int


@lru_cache(maxsize=4096)
def _rows(layout: Layout, rank: int, index: int) -> tuple[_Rows, ...]:
    """The part of slice ``index`` in the shards of ``rank``."""
    found = []
    for position, cut in enumerate(layout.cuts):
        first, last = layout.at_rest.bounds(cut, rank)
        offset = 0
        for start, stop in layout.ranges(cut, index):
            begin, end = max(start, first), min(stop, last)
            if begin < end:
                travelling = offset + begin - start
                found.append(_Rows(position, cut.dim, begin - first, travelling, end - begin))
            offset += stop - start
    return tuple(found)


def to_slice(layout: Layout, ring: Ring, resting: Tensor, travelling: Tensor) -> None:
    """Fill ``travelling``, flat, with the own slice, of the shards ``resting`` of all ranks.

    Ranks `meet` before.

    Raises:
        RingError: a rank is gone or too late.
    """
    shards = layout.at_rest.views(resting, ring.rank)
    parts = layout.views(travelling, ring.rank)
    _move(
        [_resting(shards, _rows(layout, ring.rank, other)) for other in range(ring.size)],
        [_travelling(parts, _rows(layout, other, ring.rank)) for other in range(ring.size)],
        ring,
        Stream.WEIGHTS,
    )


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


def to_shards(layout: Layout, ring: Ring, gradient: Tensor) -> Tensor:
    """The gradient of the own shards, flat, of every rank's ``gradient`` of its own slice.

    It has been to all ranks before, so all of them are in this module's backward.

    Raises:
        RingError: a rank is gone or too late.
    """
    numel, adds = layout.at_rest.numel(ring.rank), layout.has_shared_rows
    found = gradient.new_zeros(numel) if adds else gradient.new_empty(numel)
    shards = layout.at_rest.views(found, ring.rank)
    parts = layout.views(gradient, ring.rank)
    _move(
        [_travelling(parts, _rows(layout, other, ring.rank)) for other in range(ring.size)],
        [_resting(shards, _rows(layout, ring.rank, other)) for other in range(ring.size)],
        ring,
        Stream.GRADIENTS,
        adds=adds,
    )
    return found


def _resting(shards: Sequence[Tensor], rows: Sequence[_Rows]) -> list[Tensor]:
    return [shards[each.position].narrow(each.dim, each.resting, each.count) for each in rows]


def _travelling(parts: Sequence[Tensor], rows: Sequence[_Rows]) -> list[Tensor]:
    return [parts[each.position].narrow(each.dim, each.travelling, each.count) for each in rows]


def _move(
    sources: Sequence[Sequence[Tensor]],
    targets: Sequence[Sequence[Tensor]],
    ring: Ring,
    stream: Stream,
    *,
    adds: bool = False,
) -> None:
    """Send the views ``sources[i]`` to rank i, and fill ``targets[i]`` with those of rank i.

    Rows are sent from where they lie, and arrive where they belong; columns take a copy. Where
    targets of several ranks are the same rows, what arrives ``adds`` up, from copies, too.
    """
    others = [rank for rank in range(ring.size) if rank != ring.rank]
    outgoing = [(rank, view.contiguous()) for rank in others for view in sources[rank]]
    views = [(rank, view) for rank in others for view in targets[rank]]
    incoming = [
        (rank, view if view.is_contiguous() and not adds else torch.empty_like(view).contiguous())
        for rank, view in views
    ]
    under_way = ring.send_among(outgoing, incoming, stream)
    for source, target in zip(sources[ring.rank], targets[ring.rank], strict=True):
        _put(target, source, adds=adds)
    under_way.wait()
    for (_, view), (_, arrived) in zip(views, incoming, strict=True):
        if arrived is not view:
            _put(view, arrived, adds=adds)


def _put(target: Tensor, source: Tensor, *, adds: bool) -> None:
    target.add_(source) if adds else target.copy_(source)


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
        formed as a whole beside the gradient.
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
