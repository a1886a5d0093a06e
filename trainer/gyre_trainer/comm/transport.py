"""How a hop's tensors get from rank to rank: one interface, and its form over the process group.

A ring is built with its transports. It asks them in order, and the first that reaches a neighbour
carries the hop's leg to that neighbour. `gyre_trainer.comm.shared_memory` has the other transport.
"""

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from enum import IntEnum
from typing import Any, NamedTuple, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from gyre_trainer.comm.hang_diagnosis import HangDiagnosis


class Stream(IntEnum):
    """What a buffer holds. The value is in its tag, so that two streams never mix."""

    WEIGHTS = 1
    GRADIENTS = 2


# Tags beyond those of `Stream`, so that no identity is taken for a tensor.
_IDENTITY_TAG = 16
_NEVER_SENT_TAG = 32
# Tags of tensors are apart by this, one for each size up to the prime number, and from there again.
_SIZE_TAG = 64
_NUM_SIZE_TAGS = 16_777_213


class MispairedHop(RuntimeError):
    """A neighbour sends or expects another hop than this rank does.

    Attributes:
        theirs: the packed identity of the neighbour's hop.
    """

    def __init__(self, theirs: int) -> None:
        super().__init__("ranks make different calls")
        self.theirs = theirs


class Work(Protocol):
    """A transfer that was started: a work of the process group, or a `Transfer` of a link."""

    def wait(self) -> object:
        """Return when the tensor has arrived, or raise RuntimeError or OSError.

        A `MispairedHop` says that the tensor belongs to another hop.
        """
        ...


class Leg(NamedTuple):
    """One half of a hop: a tensor that this rank sends to a neighbour or receives from one.

    Attributes:
        tensor: contiguous and not empty.
        offset: the other rank minus this rank, modulo the ring's size: 1 or -1 for a neighbour.
        arrives: whether the tensor is received.
        description: for messages, such as "rank 0: sending weights to rank 1".
        identity: the hop's, packed; both ends compare it. See `gyre_trainer.comm.identity`. None
            where they have compared another one just before.
    """

    tensor: Tensor
    offset: int
    arrives: bool
    description: str
    identity: int | None


class Transport(Protocol):
    """A way to carry legs to some of the neighbours."""

    def offsets(self, device: torch.device) -> frozenset[int]:
        """The neighbours that this transport reaches with tensors on ``device``."""
        ...

    def start(self, legs: Sequence[Leg], stream: Stream) -> list[tuple[Work, str]]:
        """Start the legs of one hop; all of their neighbours are within reach.

        Returns:
            The works with their descriptions, in the order in which they are to be waited for.

        Raises:
            RingError: a leg could not be started.
            RotationError: another rank has found that ranks call different modules.
        """
        ...

    def give_up(self) -> None:
        """Let the waits of both ends of each connection fail, now and later."""
        ...

    def allocate(self, numel: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        """A flat buffer of ``numel`` elements on a device with a neighbour within reach.

        It lies in the memory from which, and into which, this transport carries most cheaply.
        """
        ...


class ProcessGroupTransport:
    """Sends and receives in a process group, which reaches every rank on every device.

    A message with the hop's identity goes before each tensor, and the receiver compares it. With
    CUDA, too, gloo carries it from process to process: a wait is one for the neighbour's process,
    which has to start the same hop, never for the device.
    """

    def __init__(
        self, group: dist.ProcessGroup, diagnosis: HangDiagnosis, words: dist.ProcessGroup
    ) -> None:
        """``words`` has the same ranks, and carries the identities."""
        self._group = group
        self._diagnosis = diagnosis
        self._is_real = dist.get_backend(group) != "fake"
        self._words = words

    def offsets(self, device: torch.device) -> frozenset[int]:
        """Both neighbours."""
        return frozenset((1, -1))

    def start(self, legs: Sequence[Leg], stream: Stream) -> list[tuple[Work, str]]:
        """Start the legs as one batch of point-to-point operations."""
        try:
            # Sends come first. Gloo writes at once what the other side already waits for, and holds
            # a lock meanwhile on which its own thread spins if the two share a core. That thread
            # itself writes later data that has no reader yet.
            identities = (
                [self._identity(leg, stream) for leg in reversed(legs)][::-1]
                if self._is_real
                else []
            )
            works = dist.batch_isend_irecv([self._operation(leg, stream) for leg in reversed(legs)])
        except RuntimeError as error:
            raise self._diagnosis.error(_described(legs), error) from error
        if not self._is_real:
            return [(work, _described(legs)) for work in works]
        # NCCL returns one work for the whole batch, gloo one for each operation.
        batch: Sequence[Work | None] = (
            works[::-1] if len(works) == len(legs) else [*[None] * (len(legs) - 1), works[0]]
        )
        return [
            (_ComparedWork(work, identity), leg.description)
            for work, identity, leg in zip(batch, identities, legs, strict=True)
        ]

    def allocate(self, numel: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        """A flat buffer in torch's own memory."""
        return torch.empty(numel, dtype=dtype, device=device)

    def give_up(self) -> None:
        """Close this rank's connections of gloo; NCCL's watchdog ends waits at the timeout.

        Gloo closes all of them where a wait passes its timeout (`UnboundBuffer::waitRecv`); it has
        no call for that.
        """
        group = self._words
        if not self._is_real:
            return
        # Of each rank: where one has closed its connection already, a wait for it fails without a
        # timeout, and closes no other connection, on which a third rank may wait.
        for step in range(1, dist.get_world_size(group)):
            other = (dist.get_rank(group) + step) % dist.get_world_size(group)
            with torch._C._DisableTorchDispatch(), suppress(RuntimeError):
                work = dist.irecv(torch.zeros(1), None, group, _NEVER_SENT_TAG, other)
                if work is not None:
                    work.wait(timedelta(milliseconds=1))

    def _identity(self, leg: Leg, stream: Stream) -> "_Identity | None":
        """Start to send or receive the identity of a leg, if it has one."""
        if leg.identity is None:
            return None
        # Tools that count the bytes of a step, or its memory, must not see this.
        with torch._C._DisableTorchDispatch():
            message = torch.tensor([0 if leg.arrives else leg.identity])
            peer, tag = self._peer(leg), _IDENTITY_TAG + stream
            work = (
                dist.irecv(message, group=self._words, group_src=peer, tag=tag)
                if leg.arrives
                else dist.isend(message, group=self._words, group_dst=peer, tag=tag)
            )
        return _Identity(work, message, leg.identity)

    def _operation(self, leg: Leg, stream: Stream) -> dist.P2POp:
        """A transfer that meets one of the same size alone.

        Gloo ends the process if a tensor arrives that is larger than what waits for it. So tensors
        of mispaired hops must not meet before their identities are compared.
        """
        operation = dist.irecv if leg.arrives else dist.isend
        tag = stream + _SIZE_TAG * (leg.tensor.nbytes % _NUM_SIZE_TAGS)
        return dist.P2POp(
            operation, leg.tensor, group=self._group, tag=tag, group_peer=self._peer(leg)
        )

    def _peer(self, leg: Leg) -> int:
        return (dist.get_rank(self._group) + leg.offset) % dist.get_world_size(self._group)


@dataclass(frozen=True, slots=True)
class _Identity:
    """The identity of a leg, on its way before the tensor.

    Attributes:
        work: the transfer of ``message``.
        message: one int64: the neighbour's identity once it has arrived, or the own one.
        expected: the own identity.
    """

    work: Any
    message: Tensor
    expected: int


class _ComparedWork:
    """A work that fails where the identity before its tensor is not the expected one.

    Without a ``work`` the tensor comes with another leg of the batch, which is waited for later.
    Without an ``identity`` nothing is compared.
    """

    def __init__(self, work: Work | None, identity: _Identity | None) -> None:
        self._work = work
        self._identity = identity

    def wait(self) -> None:
        if self._identity is not None:
            self._identity.work.wait()
            with torch._C._DisableTorchDispatch():
                theirs = int(self._identity.message)
            if theirs != self._identity.expected:
                raise MispairedHop(theirs)
        if self._work is not None:
            self._work.wait()


def group_of_processes(group: dist.ProcessGroup) -> dist.ProcessGroup:
    """The group, or a new one of the same ranks where it carries nothing between CPUs (NCCL alone).

    Collective where it makes one, which has the timeout of the group.
    """
    if torch.device("cpu") in group._device_types or dist.get_backend(group) == "fake":
        return group
    ranks = dist.get_process_group_ranks(group)
    timeout: timedelta = group._get_backend(group._device_types[0]).options._timeout
    words = dist.new_group(ranks, timeout, "gloo", use_local_synchronization=True)
    assert isinstance(words, dist.ProcessGroup)  # this rank is on it
    return words


def _described(legs: Sequence[Leg]) -> str:
    return " and ".join(leg.description for leg in legs)
