"""Hops of backward that start ahead of time, while the previous module still computes.

See [Note: The backward ring] in `gyre_trainer.rotation.ring_pass`.
"""

from typing import Self
from weakref import WeakKeyDictionary, ref

from torch.autograd import Variable

from gyre_trainer.comm.identity import HopIdentity
from gyre_trainer.comm.ring import Direction, Ring
from gyre_trainer.rotation.rotation import Rotation
from gyre_trainer.shards.remote_slices import RemoteSlices


class SlicesInFlight:
    """The slices of a rotation, or their pieces of one round, in flight. A context that closes it.

    Attributes:
        own: the number of the own piece, and the piece as it travels.
        remote: the pieces of the other ranks; the first hop has started.
        version: the version of the sharded parameters when the own piece was sent.
    """

    def __init__(self, rotation: Rotation, direction: Direction, round_: int) -> None:
        ring, pieces = rotation.sharded.ring, rotation.pieces
        self._pool = ring.pool
        forward = direction is Direction.CLOCKWISE
        flat, self._buffer = rotation.own_piece(round_, forward=forward)
        self.own = pieces.piece(ring.rank, round_), flat
        hop = HopIdentity(rotation.number, forward, False, round_, 1)
        self.remote = RemoteSlices(ring, flat, pieces, direction, hop)
        self.version = rotation.sharded.version

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_error: object) -> None:
        self.close()

    def close(self) -> None:
        """Wait for the hops in flight, and put the buffers back."""
        buffer, self._buffer = self._buffer, None
        try:
            self.remote.close()
        finally:
            if buffer is not None:
                self._pool.put(buffer)


class Prefetch:
    """Starts the first hop of the next round or rotation while the present one still computes.

    The order of rotations in backward is learned from the last backward. All ranks learn the same
    order, since all make the same calls in the same order. If the expectation was wrong, the hop is
    made again.
    """

    def __init__(self) -> None:
        self._next_rotation: WeakKeyDictionary[Rotation, ref[Rotation]] = WeakKeyDictionary()
        self._last: Rotation | None = None
        self._ready: tuple[Rotation, int, SlicesInFlight] | None = None

    def backward_begins(self, rotation: Rotation) -> None:
        """Note that the backward of ``rotation`` begins."""
        if self._last is not None:
            self._next_rotation[self._last] = ref(rotation)
        self._last = rotation
        Variable._execution_engine.queue_callback(self._backward_ended)

    def slices(self, rotation: Rotation, round_: int) -> SlicesInFlight:
        """The slices that were started ahead of time, or new ones."""
        if self._ready is not None:
            expected_rotation, expected_round, slices = self._ready
            self._ready = None
            if (
                expected_rotation is rotation
                and expected_round == round_
                and slices.version == rotation.sharded.version
            ):
                return slices
            slices.close()
        return SlicesInFlight(rotation, Direction.COUNTER_CLOCKWISE, round_)

    def start_next(self, rotation: Rotation, round_: int) -> None:
        """Start the round or rotation after this round; call it after the remote slices."""
        if round_ + 1 < rotation.pieces.num_rounds:
            next_rotation: Rotation | None = rotation
        else:
            known = self._next_rotation.get(rotation)
            next_rotation, round_ = known() if known is not None else None, -1
        if next_rotation is None:
            _reserve_buffers(rotation)
        elif next_rotation.rule.backward_reads_weights:
            self.cancel()
            self._ready = (
                next_rotation,
                round_ + 1,
                SlicesInFlight(next_rotation, Direction.COUNTER_CLOCKWISE, round_ + 1),
            )

    def cancel(self) -> None:
        """End what was started ahead of time, if anything was."""
        if self._ready is not None:
            self._ready[2].close()
            self._ready = None

    def _backward_ended(self) -> None:
        """Cancel what was started: the next step has other weights."""
        self.cancel()
        self._last = None


def _reserve_buffers(rotation: Rotation) -> None:
    """Let the pool allocate the buffers that `start_next` will take in the second backward.

    The first backward starts no hop ahead of time.
    """
    sharded, dtype = rotation.sharded, rotation.travelling_dtype
    if sharded.ring.size > 1:
        num_buffers = 2 if rotation.sends_copy else 1  # for the remote and the own slice
        buffers = [
            sharded.ring.pool.take(rotation.pieces.numel(0), dtype, sharded.flat.device)
            for _ in range(num_buffers)
        ]
        for buffer in buffers:
            sharded.ring.pool.put(buffer)


_PREFETCHES: WeakKeyDictionary[Ring, Prefetch] = WeakKeyDictionary()


def prefetch_of(ring: Ring) -> Prefetch:
    """The one prefetch of all rotations on a ring."""
    return _PREFETCHES.setdefault(ring, Prefetch())
