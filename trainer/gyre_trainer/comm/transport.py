"""How a hop's tensors get from rank to rank: an interface, and its form over a process group."""

from collections.abc import Sequence
from contextlib import suppress
from datetime import timedelta
from enum import IntEnum
from typing import NamedTuple, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from gyre_trainer.comm.hang_diagnosis import HangDiagnosis


class Stream(IntEnum):
    """The content of a buffer. The value is in its tag, so that two streams never mix."""

    WEIGHTS = 1
    GRADIENTS = 2


_NEVER_SENT_TAG = 32  # beyond those of `Stream`
# Tags of tensors are apart by this, one for each size up to the prime number, and from there again.
_SIZE_TAG = 64
_NUM_SIZE_TAGS = 16_777_213


class Work(Protocol):
    """A transfer that was started."""

    def wait(self) -> object:
        """Return when the tensor has arrived, or raise RuntimeError.

        On CUDA the current stream waits, not the caller.
        """
        ...


class Leg(NamedTuple):
    """One half of a hop: a tensor that this rank sends to a neighbour or receives from one.

    Attributes:
        tensor: contiguous and not empty.
        offset: the other rank minus this rank, modulo the ring's size: 1 or -1 for a neighbour.
        arrives: whether the tensor is received.
        description: for messages, such as "rank 0: sending weights to rank 1".
    """

    tensor: Tensor
    offset: int
    arrives: bool
    description: str


class Transport(Protocol):
    """A way to carry legs to other ranks of a ring."""

    @property
    def moves(self) -> bool:
        """Whether it moves anything: a simulated process group does not."""
        ...

    def start(self, legs: Sequence[Leg], stream: Stream) -> list[tuple[Work, str]]:
        """Start the legs of one hop, as one batch.

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


class ProcessGroupTransport:
    """Sends and receives in a process group, which carries hops alone where it is of NCCL.

    NCCL makes transfers in the order in which they were started, on every rank. All-reduces have a
    communicator of their own, and start when no hop is in flight.
    """

    def __init__(self, group: dist.ProcessGroup, diagnosis: HangDiagnosis) -> None:
        self._group = group
        self._diagnosis = diagnosis
        self.moves = dist.get_backend(group) != "fake"

    def start(self, legs: Sequence[Leg], stream: Stream) -> list[tuple[Work, str]]:
        """Start the legs as one batch of point-to-point operations."""
        try:
            # Sends come first. Gloo writes at once what the other side already waits for, and holds
            # a lock meanwhile on which its own thread spins if the two share a core. That thread
            # itself writes later data that has no reader yet.
            works = dist.batch_isend_irecv([self._operation(leg, stream) for leg in reversed(legs)])
        except RuntimeError as error:
            raise self._diagnosis.error(_described(legs), error) from error
        if len(works) != len(legs):  # NCCL returns one work for the whole batch
            return [(work, _described(legs)) for work in works]
        return list(zip(works[::-1], (leg.description for leg in legs), strict=True))

    def give_up(self) -> None:
        """End this rank's connections.

        NCCL has a call for that. Gloo closes all of them where a wait passes its timeout
        (`UnboundBuffer::waitRecv`).
        """
        if not self.moves:
            return
        if "nccl" in dist.get_backend_config(self._group):
            self._group.abort()
            return
        # Of each rank: where one has closed its connection already, a wait for it fails without a
        # timeout, and closes no other connection, on which a third rank may wait.
        for step in range(1, dist.get_world_size(self._group)):
            other = (dist.get_rank(self._group) + step) % dist.get_world_size(self._group)
            with torch._C._DisableTorchDispatch(), suppress(RuntimeError):
                work = dist.irecv(torch.zeros(1), None, self._group, _NEVER_SENT_TAG, other)
                if work is not None:
                    work.wait(timedelta(milliseconds=1))

    def _operation(self, leg: Leg, stream: Stream) -> dist.P2POp:
        """A transfer that meets one of the same size alone.

        Gloo ends the process if a tensor arrives that is larger than what waits for it. So tensors
        of different sizes never meet; the hang diagnosis says which modules they are of.
        """
        operation = dist.irecv if leg.arrives else dist.isend
        tag = stream + _SIZE_TAG * (leg.tensor.nbytes % _NUM_SIZE_TAGS)
        peer = (dist.get_rank(self._group) + leg.offset) % dist.get_world_size(self._group)
        return dist.P2POp(operation, leg.tensor, group=self._group, tag=tag, group_peer=peer)


def _described(legs: Sequence[Leg]) -> str:
    """Such as "rank 0: receiving weights from rank 2 and sending weights to rank 1"."""
    first, *others = (leg.description for leg in legs)
    return " and ".join([first, *(each.partition(": ")[2] for each in others)])
