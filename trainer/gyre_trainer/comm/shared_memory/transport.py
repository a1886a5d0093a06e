"""The transport between neighbours of one host, and how a rank finds these neighbours."""

import logging
import os
import secrets
import select
import socket
import struct
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import TypeVar
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor

from gyre_trainer.comm.hang_diagnosis import HangDiagnosis
from gyre_trainer.comm.shared_memory.copy_thread import CopyThread
from gyre_trainer.comm.shared_memory.files import SharedMemory
from gyre_trainer.comm.shared_memory.link import Link
from gyre_trainer.comm.transport import Leg, Stream, Work

_log = logging.getLogger(__name__)
_CREDENTIALS = struct.Struct("iII")  # process, user, group: unix(7), SO_PEERCRED
_T = TypeVar("_T")


class SharedMemoryTransport:
    """Carries tensors on the CPU to the neighbours that share this rank's host. See `Transport`.

    As long as it lives, a thread makes the copies of its links.
    """

    def __init__(self, group: dist.ProcessGroup, diagnosis: HangDiagnosis) -> None:
        self._group = group
        self._diagnosis = diagnosis
        self._copy_thread: CopyThread | None = None
        self._reached: frozenset[int] | None = None

    def offsets(self, device: torch.device) -> frozenset[int]:
        """The neighbours on this host (1: next rank, -1: rank before); none off the CPU.

        The first call for a CPU is collective.
        """
        if device.type != "cpu":
            return frozenset()
        if self._reached is None:
            self._reached = frozenset(self._links())
        return self._reached

    def start(self, legs: Sequence[Leg], stream: Stream) -> list[tuple[Work, str]]:
        """Start the legs. The side whose buffer is the pool's offers it; offers go first.

        A rank waits for its own offers last: the neighbour may not serve them before this rank has
        made its own copy.
        """
        links = self._links()
        works: list[tuple[Work, str]] = []
        for leg in legs if stream is Stream.WEIGHTS else reversed(legs):
            link = links[leg.offset]
            start = link.offer if leg.arrives == (stream is Stream.WEIGHTS) else link.copy
            try:
                work = start(stream, leg.tensor, arrives=leg.arrives, identity=leg.identity or 0)
            except OSError as error:
                raise self._diagnosis.error(leg.description, error) from error
            works.insert(0, (work, leg.description))
        return works

    def give_up(self) -> None:
        """Let the waits at both ends of each link fail; the process group's are not touched."""
        connections = _CONNECTIONS.get(self._group)
        for link in connections.links.values() if connections else ():
            link.give_up()

    def allocate(self, numel: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        """A flat buffer in memory that a link can offer; an empty one needs no such memory."""
        if numel == 0:
            return torch.empty(0, dtype=dtype, device=device)
        return self._connections().memory.allocate(numel, dtype)

    def _links(self) -> Mapping[int, Link]:
        connections = self._connections()
        if connections.due_copies is not None and self._copy_thread is None:
            self._copy_thread = CopyThread(connections.due_copies, connections.links.values())
        return connections.links

    def _connections(self) -> "_Connections":
        connections = _CONNECTIONS.get(self._group)
        if connections is None:
            with self._diagnosis.collective("finding out which neighbours are on this host"):
                connections = _CONNECTIONS[self._group] = _Connections.made(self._group)
        return connections


@dataclass(frozen=True, slots=True)
class _Connections:
    """This rank's links to its neighbours; they live as long as the process group.

    Attributes:
        memory: where tensors that are offered through a link lie.
        links: by offset, 1 or -1.
        due_copies: has the socket of each link whose copies are due; None without links.
    """

    memory: SharedMemory
    links: Mapping[int, Link]
    due_copies: select.epoll | None

    @classmethod
    def made(cls, group: dist.ProcessGroup) -> "_Connections":
        """Connect this rank to its neighbours; collective."""
        if (
            sys.platform != "linux"
            or dist.get_world_size(group) == 1
            or dist.get_backend(group) == "fake"
        ):
            return cls(SharedMemory(), {}, None)
        timeout: timedelta = group._get_backend(torch.device("cpu")).options._timeout
        memory = SharedMemory()
        due_copies = select.epoll()
        ends = connect_neighbours(group, timeout)
        links = {offset: Link(end, memory, timeout, due_copies) for offset, end in ends.items()}
        _log.info("rank %d: hops go %s", dist.get_rank(), _described(links))
        return cls(memory, links, due_copies if links else None)


_CONNECTIONS: WeakKeyDictionary[dist.ProcessGroup, _Connections] = WeakKeyDictionary()


def _described(links: Mapping[int, Link]) -> str:
    if len(links) == 2:
        return "through memory that is shared with both neighbours"
    if not links:
        return "through the process group: memory can be shared with no neighbour"
    one, other = (
        ("the next rank", "the one before") if 1 in links else ("the rank before", "the next one")
    )
    return f"through memory that is shared with {one}, and through the process group with {other}"


def connect_neighbours(group: dist.ProcessGroup, timeout: timedelta) -> dict[int, socket.socket]:
    """Connected sockets to the next rank (1) and the one before (-1), where they are on this host.

    Collective. The two ranks of each pair agree on whether they are connected.
    """
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        listener.settimeout(timeout.total_seconds())
        names = _all_gather(_listen(listener), group)
        next_rank = _connect(names[(rank + 1) % size], timeout) if names[rank] else None
        found = {} if next_rank is None else {1: next_rank}
        if _all_gather(next_rank is not None, group)[rank - 1]:
            found[-1] = _accept(listener)
    return found


def _all_gather(mine: _T, group: dist.ProcessGroup) -> list[_T]:
    """The value of each rank, in the order of their ranks."""
    everyone = [mine] * dist.get_world_size(group)
    # This happens once per group, so those who count the bytes of a step must not see it.
    with torch._C._DisableTorchDispatch():
        dist.all_gather_object(everyone, mine, group=group)
    return everyone


def _listen(listener: socket.socket) -> bytes:
    """The name of the socket for processes of this host; b"" where memory cannot be shared."""
    name = b"\0gyre-" + secrets.token_hex(16).encode()  # in no folder, and so gone with the process
    try:
        SharedMemory().allocate(1, torch.uint8)
        listener.bind(name)
        listener.listen()
    except OSError:
        return b""
    return name


def _connect(name: bytes, timeout: timedelta) -> socket.socket | None:
    """A connection to this user's process that listens under ``name``; None if elsewhere."""
    if not name:
        return None
    end = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    try:
        end.settimeout(timeout.total_seconds())
        end.connect(name)
        if _is_same_user(end):
            return end
    except OSError:
        pass
    end.close()
    return None


def _accept(listener: socket.socket) -> socket.socket:
    """The connection of the rank before; connections of other users are closed."""
    while True:
        end, _ = listener.accept()
        if _is_same_user(end):
            return end
        end.close()


def _is_same_user(end: socket.socket) -> bool:
    """Whether the other end is of the same user; other users may find the name too."""
    _, user, _ = _CREDENTIALS.unpack(
        end.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    )
    return bool(user == os.getuid())
