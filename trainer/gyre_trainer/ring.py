"""The ring: hops between neighbours, the buffers they land in, and who visits whom when.

This is the only file that knows point-to-point communication. A hop sends one buffer to one neighbour while another arrives
from the other; `Visitors` chains hops so that the next slice is under way while the caller computes with the present one.
Every wait ends at the process group's timeout, which `init_process_group(timeout=...)` sets.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import IntEnum
from weakref import WeakValueDictionary

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from gyre_trainer.errors import RingError
from gyre_trainer.layout import Layout


class Direction(IntEnum):
    """Where a buffer goes: the difference between the receiver's and the sender's rank."""

    CLOCKWISE = 1
    COUNTER_CLOCKWISE = -1


class Stream(IntEnum):
    """What a buffer holds; the value is its tag, so that the two never meet between the same two ranks."""

    WEIGHTS = 1
    GRADIENTS = 2


class Pool:
    """Transient buffers for all rotations of one ring: as large as the largest slice, and none allocated once that is known."""

    def __init__(self) -> None:
        self._free: dict[tuple[torch.dtype, torch.device], list[Tensor]] = {}
        self._numel: dict[tuple[torch.dtype, torch.device], int] = {}

    def take(self, numel: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        """A flat buffer of at least ``numel`` elements that nobody else uses until it is put back."""
        key = (dtype, device)
        if numel > self._numel.get(key, -1):
            self._numel[key], self._free[key] = numel, []
        if self._free[key]:
            return self._free[key].pop()
        with torch.inference_mode(mode=False):  # an inference tensor could not carry gradients later
            return torch.empty(self._numel[key], dtype=dtype, device=device)

    def put(self, buffer: Tensor) -> None:
        """Hand back what `take` gave."""
        key = (buffer.dtype, buffer.device)
        if buffer.numel() == self._numel[key]:  # those of the time before a larger slice came are dropped
            self._free[key].append(buffer)


class Hop:
    """One buffer on its way to a neighbour and another on its way here."""

    def __init__(self, works: Sequence[tuple[dist.Work, str]]) -> None:
        self._works = works

    def wait(self) -> None:
        """Returns when both have arrived.

        Raises:
            RingError: a neighbour is gone or did not answer in time.
        """
        for work, what in self._works:
            try:
                work.wait()
            except RuntimeError as error:
                raise RingError(f"{what} failed: {error}") from error
        self._works = ()


class Ring:
    """This rank's place among its neighbours.

    Attributes:
        rank: on the ring, in [0, size).
        size: ranks on the ring.
        pool: the transient buffers of all that rotates here.
        bytes_sent: by this rank since the ring was made.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.rank = dist.get_rank(group)
        self.size = dist.get_world_size(group)
        self.pool = Pool()
        self.bytes_sent = 0
        self._group = group

    def shift(self, outgoing: Tensor, incoming: Tensor, direction: Direction, stream: Stream) -> Hop:
        """Start sending ``outgoing`` one rank on while ``incoming`` fills from the rank on the other side.

        Both are contiguous and belong to the hop until it was waited for. Empty tensors do not travel.
        """
        here = f"rank {self._global(0)}"
        ops: list[tuple[dist.P2POp, str]] = []
        for op, tensor, offset, verb in (
            (dist.irecv, incoming, -direction, "receiving {} from"),
            (dist.isend, outgoing, +direction, "sending {} to"),
        ):
            if tensor.numel():
                peer = (self.rank + offset) % self.size
                what = f"{here}: {verb.format(stream.name.lower())} rank {self._global(offset)}"
                ops.append((dist.P2POp(op, tensor, group=self._group, tag=int(stream), group_peer=peer), what))
        self.bytes_sent += outgoing.numel() * outgoing.element_size()
        return Hop(self._start(ops))

    def _start(self, ops: Sequence[tuple[dist.P2POp, str]]) -> list[tuple[dist.Work, str]]:
        if not ops:
            return []
        try:
            works = dist.batch_isend_irecv([op for op, _ in ops])
        except RuntimeError as error:
            raise RingError(f"{' and '.join(what for _, what in ops)} failed: {error}") from error
        # One work may stand for the whole batch (NCCL), or each operation may have its own (gloo).
        whats = [what for _, what in ops] if len(works) == len(ops) else [" and ".join(what for _, what in ops)]
        return list(zip(works, whats, strict=True))

    def _global(self, offset: int) -> int:
        return dist.get_global_rank(self._group, (self.rank + offset) % self.size)


_RINGS: WeakValueDictionary[dist.ProcessGroup, Ring] = WeakValueDictionary()


def ring_of(mesh: DeviceMesh) -> Ring:
    """The one ring on a mesh of one axis; it lives as long as somebody holds it."""
    group = mesh.get_group()
    ring = _RINGS.get(group)
    if ring is None:
        ring = _RINGS[group] = Ring(group)
    return ring


@dataclass(frozen=True, slots=True)
class _Arrival:
    """A slice on its way here: ``flat`` is the part of the pool's ``buffer`` that it fills."""

    hop: Hop
    buffer: Tensor
    flat: Tensor


class Visitors:
    """The other ranks' slices, one after the other; the first hop is under way as soon as this exists.

    Iterating yields (slice index, flat slice), ring.size - 1 of them. Clockwise the slices come in the order rank-1, rank-2,
    ...; counter-clockwise in the order rank+1, rank+2, .... A visitor is valid until the next one is asked for. Only
    transient buffers are written to; ``own`` must not change before the first visitor was yielded.
    """

    def __init__(self, ring: Ring, own: Tensor, layout: Layout, direction: Direction) -> None:
        self._ring = ring
        self._layout = layout
        self._direction = direction
        self._next = self._depart(own, 1)

    def _depart(self, outgoing: Tensor, step: int) -> _Arrival | None:
        if step >= self._ring.size:
            return None
        buffer = self._ring.pool.take(self._layout.numel(0), outgoing.dtype, outgoing.device)
        incoming = buffer[: self._layout.numel(self._index(step))]
        return _Arrival(self._ring.shift(outgoing, incoming, self._direction, Stream.WEIGHTS), buffer, incoming)

    def _index(self, step: int) -> int:
        return (self._ring.rank - step * self._direction) % self._ring.size

    def __iter__(self) -> Iterator[tuple[int, Tensor]]:
        for step in range(1, self._ring.size):
            arrival = self._next
            assert arrival is not None
            arrival.hop.wait()
            self._next = self._depart(arrival.flat, step + 1)
            yield self._index(step), arrival.flat
            if self._next is not None:
                self._next.hop.wait()  # it sends from the buffer that goes back now
            self._ring.pool.put(arrival.buffer)

    def close(self) -> None:
        """Returns when nothing is under way any more, also where visitors were never asked for or one of them failed."""
        if self._next is not None:
            self._next.hop.wait()
            self._ring.pool.put(self._next.buffer)
            self._next = None


class Relay:
    """A gradient's way home: each slice's buffer follows one step behind its weights, counter-clockwise.

    Every rank adds its part to the buffer that passes; the owner adds the last one. ``grads`` has one entry for each cut of
    the layout, None for zero.
    """

    def __init__(self, ring: Ring, layout: Layout, dtype: torch.dtype, device: torch.device) -> None:
        self._ring = ring
        self._layout = layout
        self._dtype = dtype
        self._device = device
        self._leaving: Tensor | None = None
        self._next: _Arrival | None = None

    def pass_on(self, index: int, grads: Sequence[Tensor | None]) -> None:
        """Add to the gradient of visitor ``index``, which goes rank+1, rank+2, ..., and send it on."""
        buffer = self._transient() if self._next is None else self._next.buffer
        flat = self._added(index, buffer[: self._layout.numel(index)], grads)
        following = (index + 1) % self._ring.size
        room = self._own() if following == self._ring.rank else self._transient()
        incoming = room[: self._layout.numel(following)]
        self._next = _Arrival(self._ring.shift(flat, incoming, Direction.COUNTER_CLOCKWISE, Stream.GRADIENTS), room, incoming)
        self._leaving = buffer

    def finish(self, grads: Sequence[Tensor | None]) -> Tensor:
        """Add the last part, to the own slice's gradient; it is complete now, and in memory of its own."""
        return self._added(self._ring.rank, self._own() if self._next is None else self._next.flat, grads)

    def _added(self, index: int, flat: Tensor, grads: Sequence[Tensor | None]) -> Tensor:
        """What arrived for slice ``index``, nothing at the first step, plus ``grads``."""
        views = self._layout.views(flat, index)
        if self._next is None:
            for view, grad in zip(views, grads, strict=True):
                view.zero_() if grad is None else view.copy_(grad)
            return flat
        self._next.hop.wait()
        assert self._leaving is not None
        self._ring.pool.put(self._leaving)
        for view, grad in zip(views, grads, strict=True):
            if grad is not None:
                view.add_(grad)
        return flat

    def _transient(self) -> Tensor:
        return self._ring.pool.take(self._layout.numel(0), self._dtype, self._device)

    def _own(self) -> Tensor:
        return torch.empty(self._layout.numel(self._ring.rank), dtype=self._dtype, device=self._device)
