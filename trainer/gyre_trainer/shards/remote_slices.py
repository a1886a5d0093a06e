"""Who visits whom when: the next slice is under way while the caller computes with the present one."""

from collections.abc import Iterator

from torch import Tensor

from gyre_trainer.comm.ring import Arrival, Direction, Ring, Stream
from gyre_trainer.shards.layout import Layout


class Visitors:
    """The other ranks' slices, one after the other; the first hop is under way as soon as this exists.

    Iterating yields (number, flat piece) of each slice's piece of one round, ring.size - 1 of them. Clockwise they come in
    the order rank-1, rank-2, ...; counter-clockwise in the order rank+1, rank+2, .... A visitor is valid until the next one
    is asked for. Only transient buffers are written to; ``own`` must not change before the first visitor was yielded.
    """

    def __init__(self, ring: Ring, own: Tensor, layout: Layout, direction: Direction, round_: int) -> None:
        self._ring = ring
        self._layout = layout
        self._direction = direction
        self._round = round_
        self._next = self._depart(own, 1)

    def _depart(self, outgoing: Tensor, step: int) -> Arrival | None:
        if step >= self._ring.size:
            return None
        buffer = self._ring.pool.take(self._layout.numel(0), outgoing.dtype, outgoing.device)
        incoming = buffer[: self._layout.numel(self._piece(step))]
        return Arrival(self._ring.shift(outgoing, incoming, self._direction, Stream.WEIGHTS), buffer, incoming)

    def _piece(self, step: int) -> int:
        return self._layout.piece((self._ring.rank - step * self._direction) % self._ring.size, self._round)

    def __iter__(self) -> Iterator[tuple[int, Tensor]]:
        for step in range(1, self._ring.size):
            arrival = self._next
            assert arrival is not None
            arrival.hop.wait()
            self._next = self._depart(arrival.flat, step + 1)
            yield self._piece(step), arrival.flat
            if self._next is not None:
                self._next.hop.wait()  # it sends from the buffer that goes back now
            self._ring.pool.put(arrival.buffer)

    def close(self) -> None:
        """Returns when nothing is under way any more, also where visitors were never asked for or one of them failed."""
        if self._next is not None:
            self._next.hop.wait()
            self._ring.pool.put(self._next.buffer)
            self._next = None
