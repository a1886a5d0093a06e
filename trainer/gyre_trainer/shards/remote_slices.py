"""The slices of the other ranks: the next one is in flight while the caller uses this one.

See [Note: The backward ring] in `gyre_trainer.rotation.ring_pass`.
"""

from collections.abc import Iterator
from typing import NamedTuple

from torch import Tensor

from gyre_trainer.comm.identity import HopIdentity
from gyre_trainer.comm.ring import Direction, Hop, Ring
from gyre_trainer.comm.transport import Stream
from gyre_trainer.shards.layout import Layout


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
                self._next.hop.wait()  # it sends from the buffer that is put back now
            self._ring.pool.put(incoming.buffer)

    def close(self) -> None:
        """Return when no hop is in flight, even if not all slices were asked for."""
        if self._next is not None:
            self._next.hop.wait()
            self._ring.pool.put(self._next.buffer)
            self._next = None
