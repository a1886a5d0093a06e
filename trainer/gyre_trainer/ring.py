"""The ring: hops between neighbours and the buffers they land in.

This is the only file that knows point-to-point communication. A hop sends one buffer to one neighbour while another arrives
from the other. Every wait ends at the process group's timeout, which `init_process_group(timeout=...)` sets. On CUDA a wait
holds up the current stream, not the process: NCCL moves the buffers on a stream of its own, in the order of the hops.
"""

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from enum import IntEnum
from weakref import WeakValueDictionary

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from gyre_trainer.errors import RingError
from gyre_trainer.roll_call import RollCall
from gyre_trainer.spans import span


class Direction(IntEnum):
    """Where a buffer goes: the difference between the receiver's and the sender's rank."""

    CLOCKWISE = 1
    COUNTER_CLOCKWISE = -1


class Stream(IntEnum):
    """What a buffer holds; the value is its tag, so that the two never meet between the same two ranks."""

    WEIGHTS = 1
    GRADIENTS = 2


class Pool:
    """Transient buffers for all rotations of one ring: as large as what travels, and none allocated once that is known.

    Attributes:
        unit: elements of the largest slice that can only travel as a whole; others follow it, in pieces no larger.
    """

    def __init__(self) -> None:
        self.unit = 0
        self._free: dict[tuple[torch.dtype, torch.device], list[Tensor]] = {}
        self._numel: dict[tuple[torch.dtype, torch.device], int] = {}

    def take(self, numel: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        """A flat buffer of at least ``numel`` elements that nobody else uses until it is put back."""
        key = (dtype, device)
        if numel > self._numel.get(key, -1):
            self._numel[key], self._free[key] = max(numel, self.unit), []
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

    def __init__(self, works: Sequence[tuple[dist.Work, str]], roll_call: RollCall) -> None:
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
                except RuntimeError as error:
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
        self.pool = Pool()
        self.bytes_sent = 0
        self.roll_call = RollCall(group)
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
        return Hop(self._start(ops), self.roll_call)

    def _start(self, ops: Sequence[tuple[dist.P2POp, str]]) -> list[tuple[dist.Work, str]]:
        if not ops:
            return []
        try:
            # Sends first. What the other side waits for already, gloo writes at once, and holds a lock meanwhile on which its
            # own thread spins if the two share a core. What nobody waits for yet, that thread writes later.
            works = dist.batch_isend_irecv([op for op, _ in reversed(ops)])
        except RuntimeError as error:
            raise self.roll_call.error(" and ".join(what for _, what in ops), error) from error
        # One work may stand for the whole batch (NCCL), or each operation may have its own (gloo).
        whats = [what for _, what in ops] if len(works) == len(ops) else [" and ".join(what for _, what in ops)]
        return list(zip(reversed(works), whats, strict=True))

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
