"""The ring of ranks: hops between neighbours, and the buffers that hops fill.

A hop sends one buffer to one neighbour while another buffer arrives from the other neighbour. Each
of the two travels by the first of the ring's transports that reaches the neighbour. Every wait ends
at the group's timeout, which `init_process_group(timeout=...)` sets. On CUDA a wait holds up the
current stream, not the process: NCCL moves the buffers on a stream of its own, in the order of the
hops.
"""

from collections.abc import Mapping, Sequence
from enum import IntEnum
from functools import partial
from typing import NamedTuple, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor

from gyre_trainer.comm.buffer_pool import BufferPool
from gyre_trainer.comm.hang_diagnosis import HangDiagnosis
from gyre_trainer.comm.identity import Modules, differ_in_trained
from gyre_trainer.comm.spans import span
from gyre_trainer.comm.transport import Leg, MispairedHop, Stream, Transport, Work
from gyre_trainer.errors import RingError, RotationError


class Direction(IntEnum):
    """Where a buffer goes: the receiver's rank minus the sender's."""

    CLOCKWISE = 1
    COUNTER_CLOCKWISE = -1


class Hop:
    """One buffer on its way to a neighbour, and another on its way to this rank."""

    def __init__(
        self,
        works: Sequence[tuple[Work, str]],
        ring: "Ring",
        identity: int,
        neighbours: Mapping[str, int],
    ) -> None:
        """``neighbours`` has the rank at the other end of each work, by its description."""
        self._works = works
        self._neighbours = neighbours
        self._ring = ring
        self._identity = identity
        self._is_under_way = True
        self._failed: RingError | RotationError | None = None

    def wait(self) -> None:
        """Return when both buffers have arrived.

        Raises:
            RingError: a neighbour is gone or too late; the message names the rank at fault.
            RotationError: the neighbour calls another module; the message names both.
        """
        if self._failed is not None:
            raise self._failed
        if not self._is_under_way:
            return
        diagnosis = self._ring.hang_diagnosis
        with diagnosis.waiting(" and ".join(what for _, what in self._works) or "nothing"):
            for work, what in self._works:
                try:
                    with span(what):
                        work.wait()
                except MispairedHop as error:
                    self._fail(diagnosis.mispaired(what, self._difference(what, error)))
                except (RuntimeError, OSError) as error:
                    self._fail(diagnosis.error(what, error), error)
        self._is_under_way = False
        self._works = ()

    def _fail(self, failure: RingError | RotationError, cause: Exception | None = None) -> NoReturn:
        """End the waits of all ranks, which find the same reason, and raise ``failure``."""
        self._failed = failure
        self._ring.give_up()
        raise failure from cause

    def _difference(self, what: str, error: MispairedHop) -> str:
        modules = self._ring.modules
        if differ_in_trained(self._identity, error.theirs):
            return (
                f"rank {self._ring.global_rank} trains other parameters of "
                f"{modules.describe(self._identity)} than rank {self._neighbours[what]};"
                " freeze and unfreeze the same ones on all ranks (requires_grad_)"
            )
        theirs = modules.describe(error.theirs)
        return (
            f"rank {self._ring.global_rank} calls {modules.describe(self._identity)}, "
            f"but rank {self._neighbours[what]} calls {theirs}; "
            "all ranks must call the same modules in the same order, also to evaluate: call the "
            "model on all ranks, or use gyre-train eval"
        )


class _Sides(NamedTuple):
    """The two ends of all hops of one direction and stream.

    Attributes:
        ends: offset, whether the tensor arrives, and description: of what arrives, of what is sent.
        neighbours: the rank at the other end, by description.
    """

    ends: list[tuple[int, bool, str]]
    neighbours: dict[str, int]


class Ring:
    """This rank among its neighbours.

    Args:
        group: the ranks of the ring, in the order in which they are neighbours.
        transports: the ways to the neighbours, the preferred one first. The last one reaches every
            rank on every device.
        hang_diagnosis: the diagnosis of these ranks, and of those of all replicas.
        modules: those that rotate, or did, on the ranks of the ring.
        replicas: the ranks at this rank's place in all replicas of the ring; None for one ring.

    Attributes:
        rank: this rank's number on the ring, in [0, size).
        global_rank: its number in the default process group.
        size: the number of ranks on the ring.
        part: which part of the global batch this rank has, in [0, num_parts).
        num_parts: the number of ranks on all replicas of the ring.
        pool: the transient buffers of all modules that rotate on this ring.
        bytes_sent: bytes of weights and gradients that this rank has sent since the ring was made.
        modules: those that rotate, or did, on these ranks.
        hang_diagnosis: finds the rank at fault where a hop or a collective of these ranks fails.
    """

    def __init__(
        self,
        group: dist.ProcessGroup,
        transports: Sequence[Transport],
        hang_diagnosis: HangDiagnosis,
        modules: Modules,
        replicas: dist.ProcessGroup | None = None,
    ) -> None:
        self.rank = dist.get_rank(group)
        self.global_rank = dist.get_rank()
        self.size = dist.get_world_size(group)
        self.replicas = replicas
        self.num_parts = self.size * (1 if replicas is None else dist.get_world_size(replicas))
        self.part = self.rank + self.size * (0 if replicas is None else dist.get_rank(replicas))
        self.bytes_sent = 0
        self.hang_diagnosis = hang_diagnosis
        self.modules = modules
        # The pool must not hold the ring: without a cycle, a ring ends with its last holder.
        self.pool = BufferPool(partial(_allocate, transports))
        self._transports = transports
        self._sides: dict[tuple[Direction, Stream], _Sides] = {}
        self.group = group

    def __deepcopy__(self, memo: dict[int, object]) -> "Ring":
        """The ring itself: a copy of a model rotates on the same one."""
        return self

    def shift(
        self,
        outgoing: Tensor,
        incoming: Tensor,
        direction: Direction,
        stream: Stream,
        identity: int = 0,
    ) -> Hop:
        """Start to send ``outgoing`` one rank on, and to receive ``incoming`` from the other side.

        Both tensors are contiguous and belong to the hop until it was waited for. Empty tensors are
        not sent. Weights must arrive at the beginning of a buffer of the pool, and gradients must
        leave from there: these are the sides that a transport may offer to a neighbour.

        Args:
            outgoing: what is sent.
            incoming: what is filled.
            direction: where ``outgoing`` goes.
            stream: what both hold.
            identity: of this hop, as `HopIdentity.pack` gives it, equal on all ranks; 0 outside of
                modules.

        Raises:
            RingError: the hop could not be started.
            RotationError: another rank has found that ranks call different modules.
        """
        self.bytes_sent += outgoing.nbytes
        sides = self._sides.get((direction, stream)) or self._add_sides(direction, stream)
        legs = [
            Leg(tensor, offset, arrives, description, identity)
            for tensor, (offset, arrives, description) in zip(
                (incoming, outgoing), sides.ends, strict=True
            )
            if tensor.numel()
        ]
        works: list[tuple[Work, str]] = []
        for transport in self._transports:
            reached = transport.offsets(outgoing.device)
            if carried := [leg for leg in legs if leg.offset in reached]:
                try:
                    works += transport.start(carried, stream)
                except (RingError, RotationError):
                    self.give_up()
                    raise
            if len(carried) == len(legs):
                break
            legs = [leg for leg in legs if leg.offset not in reached]
        return Hop(works, self, identity, sides.neighbours)

    def send_among(
        self,
        outgoing: Sequence[tuple[int, Tensor]],
        incoming: Sequence[tuple[int, Tensor]],
        stream: Stream,
        identity: int | None,
    ) -> Hop:
        """Start to send tensors to any ranks of the ring, and to receive others.

        They go through the process group. Tensors between two ranks arrive in the order in which
        both ranks list them. All are contiguous, not empty, and belong to the hop until it was
        waited for.

        Args:
            outgoing: what is sent, each after the rank on the ring that gets it.
            incoming: what is filled, each after the rank on the ring that it is from.
            stream: what all hold.
            identity: as `shift` has it; None where all ranks have compared another one just before.

        Raises:
            RingError: the hop could not be started.
            RotationError: another rank has found that ranks call different modules.
        """
        self.bytes_sent += sum(tensor.nbytes for _, tensor in outgoing)
        legs, ranks = [], {}
        for arrives, tensors in ((True, incoming), (False, outgoing)):
            for rank, tensor in tensors:
                offset = rank - self.rank
                description = self._described(offset, stream, arrives=arrives)
                ranks[description] = self._global(offset)
                legs.append(Leg(tensor, offset, arrives, description, identity))
        try:
            works = self._transports[-1].start(legs, stream) if legs else []
        except (RingError, RotationError):
            self.give_up()
            raise
        return Hop(works, self, identity or 0, ranks)

    def give_up(self) -> None:
        """Let every wait of the neighbours fail; the hang diagnosis knows why. For good."""
        for transport in self._transports:
            transport.give_up()

    def _add_sides(self, direction: Direction, stream: Stream) -> "_Sides":
        """What all hops of a direction and stream have in common."""
        ends, neighbours = [], {}
        for offset, arrives in ((-direction, True), (direction, False)):
            description = self._described(offset, stream, arrives=arrives)
            ends.append((offset, arrives, description))
            neighbours[description] = self._global(offset)
        sides = self._sides[direction, stream] = _Sides(ends, neighbours)
        return sides

    def _described(self, offset: int, stream: Stream, *, arrives: bool) -> str:
        verb, preposition = ("receiving", "from") if arrives else ("sending", "to")
        what = f"{verb} {stream.name.lower()} {preposition} rank {self._global(offset)}"
        return f"rank {self._global(0)}: {what}"

    def _global(self, offset: int) -> int:
        return dist.get_global_rank(self.group, (self.rank + offset) % self.size)


def _allocate(
    transports: Sequence[Transport], numel: int, dtype: torch.dtype, device: torch.device
) -> Tensor:
    """A flat buffer from the first transport that reaches a neighbour on ``device``."""
    transport = next(each for each in transports if each.offsets(device))
    return transport.allocate(numel, dtype, device)
