"""The ring: hops between neighbours and the buffers they land in.

A hop sends one buffer to one neighbour while another arrives from the other. On a CPU, neighbours of one host share the memory
that buffers lie in, and a thread copies what travels (`shared_memory`); others send and receive in the process group. Every
wait ends at the group's timeout, which `init_process_group(timeout=...)` sets. On CUDA a wait holds up the current stream, not
the process: NCCL moves the buffers on a stream of its own, in the order of the hops.
"""

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from enum import IntEnum
from typing import Protocol
from weakref import WeakValueDictionary

import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from gyre_trainer.comm.buffer_pool import Pool
from gyre_trainer.comm.hang_diagnosis import RollCall
from gyre_trainer.comm.shared_memory.link import Link
from gyre_trainer.comm.shared_memory.transport import Neighbourhood
from gyre_trainer.comm.spans import span
from gyre_trainer.errors import RingError


class Direction(IntEnum):
    """Where a buffer goes: the difference between the receiver's and the sender's rank."""

    CLOCKWISE = 1
    COUNTER_CLOCKWISE = -1


class Stream(IntEnum):
    """What a buffer holds; the value is its tag, so that the two never meet between the same two ranks."""

    WEIGHTS = 1
    GRADIENTS = 2


class Work(Protocol):
    """A buffer on its way; the process group's, or a `Transfer` between neighbours of one host."""

    def wait(self) -> object:
        """Returns when it has arrived, or fails."""
        ...


@dataclass(frozen=True, slots=True)
class _Leg:
    """One half of a hop: the buffer to or from the rank that is ``offset`` further on the ring."""

    tensor: Tensor
    offset: int
    arrives: bool
    what: str


class Hop:
    """One buffer on its way to a neighbour and another on its way here."""

    def __init__(self, works: Sequence[tuple[Work, str]], roll_call: RollCall) -> None:
        self._works = works
        self._roll_call = roll_call
        self._is_under_way = True
        self._failed: RingError | None = None

    def wait(self) -> None:
        """Returns when both have arrived.

        Raises:
            RingError: a neighbour is gone or did not answer in time; names the rank at fault.
        """
        if self._failed is not None:
            raise self._failed
        if not self._is_under_way:
            return
        with self._roll_call.waiting(" and ".join(what for _, what in self._works) or "nothing"):
            for work, what in self._works:
                try:
                    with span(what):
                        work.wait()
                except (RuntimeError, OSError) as error:
                    self._failed = self._roll_call.error(what, error)
                    raise self._failed from error
        self._is_under_way = False
        self._works = ()


class Ring:
    """This rank's place among its neighbours.

    Attributes:
        rank: on the ring, in [0, size).
        size: ranks on the ring.
        pool: the transient buffers of all that rotates here.
        bytes_sent: by this rank since the ring was made.
        roll_call: who is at fault where a hop, or a collective of these ranks, fails.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.rank = dist.get_rank(group)
        self.size = dist.get_world_size(group)
        self.bytes_sent = 0
        self.roll_call = RollCall(group)
        self._neighbourhood = Neighbourhood(group, self.roll_call)
        self.pool = Pool(self._neighbourhood.allocate)
        self._group = group

    def shift(self, outgoing: Tensor, incoming: Tensor, direction: Direction, stream: Stream) -> Hop:
        """Start sending ``outgoing`` one rank on while ``incoming`` fills from the rank on the other side.

        Both are contiguous and belong to the hop until it was waited for. Empty tensors do not travel. Weights arrive at the
        beginning of a buffer of the pool, and gradients leave from there.
        """
        self.bytes_sent += outgoing.numel() * outgoing.element_size()
        legs = [self._leg(incoming, -direction, stream, arrives=True), self._leg(outgoing, direction, stream, arrives=False)]
        legs = [leg for leg in legs if leg.tensor.numel()]
        links = self._neighbourhood.links(outgoing.device)
        linked = self._start_linked([leg for leg in legs if leg.offset in links], links, stream)
        return Hop(linked + self._start([leg for leg in legs if leg.offset not in links], stream), self.roll_call)

    def _leg(self, tensor: Tensor, offset: int, stream: Stream, *, arrives: bool) -> _Leg:
        verb, preposition = ("receiving", "from") if arrives else ("sending", "to")
        what = f"{verb} {stream.name.lower()} {preposition} rank {self._global(offset)}"
        return _Leg(tensor, offset, arrives, f"rank {self._global(0)}: {what}")

    def _start_linked(self, legs: Sequence[_Leg], links: Mapping[int, Link], stream: Stream) -> list[tuple[Work, str]]:
        """Between neighbours of one host, the side whose buffer is the pool's offers it: its offers go out first.

        They are waited for last: what the other side does with them may have to wait until this one has copied.
        """
        works: list[tuple[Work, str]] = []
        for leg in legs if stream is Stream.WEIGHTS else reversed(legs):
            link = links[leg.offset]
            start = link.offer if leg.arrives == (stream is Stream.WEIGHTS) else link.copy
            try:
                work = start(stream, leg.tensor, arrives=leg.arrives)
            except OSError as error:
                raise self.roll_call.error(leg.what, error) from error
            works.insert(0, (work, leg.what))
        return works

    def _start(self, legs: Sequence[_Leg], stream: Stream) -> list[tuple[Work, str]]:
        if not legs:
            return []
        try:
            # Sends first. What the other side waits for already, gloo writes at once, and holds a lock meanwhile on which its
            # own thread spins if the two share a core. What nobody waits for yet, that thread writes later.
            works = dist.batch_isend_irecv([self._operation(leg, stream) for leg in reversed(legs)])
        except RuntimeError as error:
            raise self.roll_call.error(" and ".join(leg.what for leg in legs), error) from error
        # One work may stand for the whole batch (NCCL), or each operation may have its own (gloo).
        whats = [leg.what for leg in legs] if len(works) == len(legs) else [" and ".join(leg.what for leg in legs)]
        return list(zip(reversed(works), whats, strict=True))

    def _operation(self, leg: _Leg, stream: Stream) -> dist.P2POp:
        peer = (self.rank + leg.offset) % self.size
        return dist.P2POp(dist.irecv if leg.arrives else dist.isend, leg.tensor, group=self._group, tag=stream, group_peer=peer)

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


def together(what: str) -> AbstractContextManager[object]:
    """Around a collective of all ranks of the default group: where it fails, `RingError` names the rank at fault.

    Without a ring on that group it does nothing.
    """
    ring = _RINGS.get(dist.distributed_c10d._get_default_group())
    return ring.roll_call.together(what) if ring is not None else nullcontext()


@dataclass(frozen=True, slots=True)
class Arrival:
    """A slice on its way here: ``flat`` is the part of the pool's ``buffer`` that it fills."""

    hop: Hop
    buffer: Tensor
    flat: Tensor
