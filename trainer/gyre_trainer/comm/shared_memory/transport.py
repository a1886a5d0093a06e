"""Which of a rank's neighbours on the ring are on its own host, and the links to them."""

import logging
import os
import secrets
import select
import socket
import struct
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import TypeVar
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor

from gyre_trainer.comm.hang_diagnosis import RollCall
from gyre_trainer.comm.shared_memory.copy_thread import Carrier
from gyre_trainer.comm.shared_memory.files import SharedMemory
from gyre_trainer.comm.shared_memory.link import Link

_log = logging.getLogger(__name__)
_PEER = struct.Struct("iII")  # process, user, group: unix(7), SO_PEERCRED
_T = TypeVar("_T")


class Neighbourhood:
    """How a rank's buffers reach the ranks beside it."""

    def __init__(self, group: dist.ProcessGroup, roll_call: RollCall) -> None:
        self._group = group
        self._roll_call = roll_call
        self._carrier: Carrier | None = None

    def links(self, device: torch.device) -> Mapping[int, Link]:
        """To the rank after (1) and the one before (-1), where buffers on the device can be shared with them.

        Collective at the first call for a CPU. As long as this neighbourhood lives, a thread makes the links' copies.
        """
        if device.type != "cpu":
            return {}
        shared = self._shared()
        if shared.calls is not None and self._carrier is None:
            self._carrier = Carrier(shared.calls, shared.links.values())
        return shared.links

    def allocate(self, numel: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        """A flat buffer, one that a link can offer where there are any."""
        if numel and self.links(device):
            return self._shared().memory.allocate(numel, dtype)
        return torch.empty(numel, dtype=dtype, device=device)

    def _shared(self) -> "_Shared":
        shared = _SHARED.get(self._group)
        if shared is None:
            with self._roll_call.together("finding out which neighbours are on this host"):
                shared = _SHARED[self._group] = _Shared.found(self._group)
        return shared


@dataclass(frozen=True, slots=True)
class _Shared:
    """What the ranks of a group share with the ranks beside them, as long as the group lives.

    Attributes:
        memory: where tensors that are offered through a link lie.
        calls: where links call for their copies; None without links.
    """

    memory: SharedMemory
    links: Mapping[int, Link]
    calls: select.epoll | None

    @classmethod
    def found(cls, group: dist.ProcessGroup) -> "_Shared":
        """Collective."""
        if sys.platform != "linux" or dist.get_world_size(group) == 1 or dist.get_backend(group) == "fake":
            return cls(SharedMemory(), {}, None)
        timeout: timedelta = group._get_backend(torch.device("cpu")).options._timeout
        memory = SharedMemory()
        calls = select.epoll()
        links = {offset: Link(end, memory, timeout, calls) for offset, end in _met(group, timeout).items()}
        _log.info("rank %d: hops go %s", dist.get_rank(), _described(links))
        return cls(memory, links, calls if links else None)


_SHARED: WeakKeyDictionary[dist.ProcessGroup, _Shared] = WeakKeyDictionary()


def _described(links: Mapping[int, Link]) -> str:
    if len(links) == 2:
        return "through memory that is shared with both neighbours"
    if not links:
        return "through the process group: memory can be shared with no neighbour"
    one, other = ("the next rank", "the one before") if 1 in links else ("the rank before", "the next one")
    return f"through memory that is shared with {one}, and through the process group with {other}"


def _met(group: dist.ProcessGroup, timeout: timedelta) -> dict[int, socket.socket]:
    """Connected sockets to the rank after (1) and the one before (-1), where there can be; each pair agrees on whether."""
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        listener.settimeout(timeout.total_seconds())
        names = _told(_listening(listener), group)
        after = _connected(names[(rank + 1) % size], timeout) if names[rank] else None
        found = {} if after is None else {1: after}
        if _told(after is not None, group)[rank - 1]:
            found[-1] = _accepted(listener)
    return found


def _told(mine: _T, group: dist.ProcessGroup) -> list[_T]:
    """What each rank says."""
    everyone = [mine] * dist.get_world_size(group)
    with torch._C._DisableTorchDispatch():  # said once, so it is no part of what whoever counts a step's bytes wants to know
        dist.all_gather_object(everyone, mine, group=group)
    return everyone


def _listening(listener: socket.socket) -> bytes:
    """The name under which processes of this host find the socket; b"" where memory cannot be shared."""
    name = b"\0gyre-" + secrets.token_hex(16).encode()  # it stands in no folder, and so is gone with the process
    try:
        SharedMemory().allocate(1, torch.uint8)
        listener.bind(name)
        listener.listen()
    except OSError:
        return b""
    return name


def _connected(name: bytes, timeout: timedelta) -> socket.socket | None:
    """A connection to the process of this user that listens under that name, if it is on this host."""
    if not name:
        return None
    end = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    try:
        end.settimeout(timeout.total_seconds())
        end.connect(name)
        if _is_ours(end):
            return end
    except OSError:
        pass
    end.close()
    return None


def _accepted(listener: socket.socket) -> socket.socket:
    """The connection of the rank before."""
    while True:
        end, _ = listener.accept()
        if _is_ours(end):
            return end
        end.close()


def _is_ours(end: socket.socket) -> bool:
    """Whether the process at the other end is of the same user; other users may find the name too."""
    _, user, _ = _PEER.unpack(end.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _PEER.size))
    return bool(user == os.getuid())
