"""Two neighbours of one host: tensors go from one to the other by one copy in memory that both have mapped.

Of each tensor one side offers a buffer, and the other copies to it or from it and says when that is done. It copies as soon as
it looks after the offer came: whenever the next tensor sets out, or when it waits. So the rank that is behind, which finds
offers that came long ago, copies at once, and the one ahead, which has to wait anyway, while it waits. What they tell each
other goes through a socket, which also ends with the process at its other end, however that came about.
"""

import os
import select
import socket
import struct
import time
import weakref
from collections import defaultdict, deque
from collections.abc import Sequence
from datetime import timedelta
from enum import IntEnum

import torch
from torch import Tensor

from gyre_trainer.shared import SharedMemory, mapped

_WORD = struct.Struct("BBxxI")  # what it says, of which stream, the number of a file of memory

# What counts or traces operators sees by these what travels; they do nothing, the copy itself is hidden from it.
_OPERATORS = torch.library.Library("gyre", "DEF")  # type: ignore[no-untyped-call]
for _name in ("send", "recv"):
    _OPERATORS.define(f"{_name}(Tensor tensor) -> ()")  # type: ignore[no-untyped-call]
    _OPERATORS.impl(_name, lambda tensor: None, "CompositeExplicitAutograd")  # type: ignore[no-untyped-call]


class _Says(IntEnum):
    SHOWN = 0  # with the file's descriptor
    FREED = 1
    OFFERED = 2
    DONE = 3


class Transfer:
    """A tensor on its way from one neighbour to the other."""

    def __init__(self, link: "Link", tensor: Tensor, *, arrives: bool) -> None:
        (torch.ops.gyre.recv if arrives else torch.ops.gyre.send)(tensor)
        self._link = link
        self.tensor = tensor
        self.arrives = arrives
        self.is_done = False

    def wait(self) -> None:
        """Returns when the tensor has arrived.

        Raises:
            OSError: the neighbour is gone, or did not answer in time.
        """
        self._link.wait_for(self)


class Link:
    """This process's end.

    Both ends start the same transfers of each stream in the same order, one with `offer` and the other with `copy`.
    """

    def __init__(self, end: socket.socket, memory: SharedMemory, timeout: timedelta) -> None:
        """``memory`` is where offered tensors lie; ``timeout`` ends each wait."""
        end.setblocking(False)
        self._end = end
        self._memory = memory
        self._timeout_s = timeout.total_seconds()
        self._poll = select.poll()
        self._poll.register(end, select.POLLIN)
        self._is_gone = False
        self._shown: set[int] = set()  # files of ours that the other end has
        self._seen: dict[int, Tensor] = {}  # files of the other end, mapped
        self._given: defaultdict[int, deque[Transfer]] = defaultdict(deque)  # by stream: offered from here
        self._wanted: defaultdict[int, deque[Transfer]] = defaultdict(deque)  # by stream: to be copied here
        self._offers: defaultdict[int, deque[int]] = defaultdict(deque)  # by stream: for what is still to be wanted
        weakref.finalize(self, end.close)

    def offer(self, stream: int, tensor: Tensor, *, arrives: bool) -> Transfer:
        """Start a transfer to or from ``tensor``, which begins where one of the memory's files does."""
        self._show()
        self._say(_Says.OFFERED, stream, self._memory.number(tensor))
        transfer = Transfer(self, tensor, arrives=arrives)
        self._given[stream].append(transfer)
        return transfer

    def copy(self, stream: int, tensor: Tensor, *, arrives: bool) -> Transfer:
        """Start a transfer between ``tensor`` and what the other end offers."""
        transfer = Transfer(self, tensor, arrives=arrives)
        self._wanted[stream].append(transfer)
        return transfer

    def look(self) -> None:
        """Hear what the other end has said, and copy what can be copied."""
        while self._hear():
            pass
        for stream, wanted in self._wanted.items():
            while wanted and self._offers[stream]:
                self._copy(stream, wanted.popleft(), self._seen[self._offers[stream].popleft()])

    def wait_for(self, transfer: Transfer) -> None:
        """See `Transfer.wait`."""
        deadline_s = time.monotonic() + self._timeout_s
        self.look()
        while not transfer.is_done:
            self._wait_for_word(deadline_s)
            self.look()

    def _wait_for_word(self, deadline_s: float) -> None:
        if self._is_gone:
            raise ConnectionError("its process is gone")
        if not self._poll.poll(max(0.0, deadline_s - time.monotonic()) * 1e3):
            raise TimeoutError(f"no answer within {self._timeout_s:g} s")

    def _show(self) -> None:
        """The other end knows all files that there are, also those that are offered later, and none that is gone."""
        files = self._memory.files
        for number in self._shown - files.keys():
            self._say(_Says.FREED, number=number)
        for number in files.keys() - self._shown:
            self._say(_Says.SHOWN, number=number, fds=[files[number]])
        self._shown = set(files)

    def _copy(self, stream: int, transfer: Transfer, theirs: Tensor) -> None:
        ours = transfer.tensor
        with torch._C._DisableTorchDispatch():
            theirs = theirs.view(ours.dtype)[: ours.numel()]
            into, source = (ours, theirs) if transfer.arrives else (theirs, ours)
            into.copy_(source)
        self._say(_Says.DONE, stream)
        transfer.is_done = True

    def _say(self, what: _Says, stream: int = 0, number: int = 0, fds: Sequence[int] = ()) -> None:
        socket.send_fds(self._end, [_WORD.pack(what, stream, number)], fds)

    def _hear(self) -> bool:
        """Take in one word, if there is one."""
        try:
            word, fds, _, _ = socket.recv_fds(self._end, _WORD.size, 1)
        except BlockingIOError:
            return False
        except ConnectionError:
            word = b""
        if not word:
            self._is_gone = True  # which it may be once all that it had to do is done
            return False
        what, stream, number = _WORD.unpack(word)
        match what:
            case _Says.SHOWN:
                self._seen[number] = mapped(fds[0])
                os.close(fds[0])
            case _Says.FREED:
                del self._seen[number]
            case _Says.OFFERED:
                self._offers[stream].append(number)
            case _:
                self._given[stream].popleft().is_done = True
        return True
