"""Two neighbours of one host: tensors go from one to the other by one copy in memory that both have mapped.

Of each tensor one side offers a buffer, and the other copies to it or from it and says when that is done. A thread makes the
copy as soon as the offer came (`copy_thread`), whatever the process computes meanwhile; who waits for it before that
thread got a processor makes it by itself. What the two sides tell each other goes through a socket, which also ends with the
process at its other end, however that came about.
"""

import ctypes
import os
import select
import socket
import struct
import threading
import time
import weakref
from collections import defaultdict, deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from enum import IntEnum

import torch
from torch import Tensor

from gyre_trainer.comm.shared_memory.files import SharedMemory, mapped

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

    Both ends start the same transfers of each stream in the same order, one with `offer` and the other with `copy`. One thread
    starts and waits; another one may `carry` meanwhile.
    """

    def __init__(self, end: socket.socket, memory: SharedMemory, timeout: timedelta, calls: select.epoll) -> None:
        """``memory`` is where offered tensors lie; ``timeout`` ends each wait; ``calls`` has the socket when `carry` is due."""
        end.setblocking(False)
        self.number = end.fileno()
        self._end = end
        self._memory = memory
        self._timeout_s = timeout.total_seconds()
        self._calls = calls
        self._calls.register(end, select.EPOLLONESHOT)
        self._calling = threading.Lock()
        self._poll = select.poll()
        self._poll.register(end, select.POLLIN)
        self._turn = threading.Lock()  # who has it hears, copies and answers; words and streams keep their order so
        self._failed: OSError | None = None  # which matters only to who waits for what is not done
        self._shown: set[int] = set()  # files of ours that the other end has
        self._seen: dict[int, Tensor] = {}  # files of the other end, mapped
        self._given: defaultdict[int, deque[Transfer]] = defaultdict(deque)  # by stream: offered from here
        self._wanted: defaultdict[int, deque[Transfer]] = defaultdict(deque)  # by stream: to be copied here
        self._offers: defaultdict[int, deque[int]] = defaultdict(deque)  # by stream: for what is still to be wanted
        weakref.finalize(self, end.close)

    def offer(self, stream: int, tensor: Tensor, *, arrives: bool) -> Transfer:
        """Start a transfer to or from ``tensor``, which begins where one of the memory's files does."""
        self._show()
        transfer = Transfer(self, tensor, arrives=arrives)
        self._given[stream].append(transfer)  # before the answer can come
        self._say(_Says.OFFERED, stream, self._memory.number(tensor))
        return transfer

    def copy(self, stream: int, tensor: Tensor, *, arrives: bool) -> Transfer:
        """Start a transfer between ``tensor`` and what the other end offers."""
        transfer = Transfer(self, tensor, arrives=arrives)
        self._wanted[stream].append(transfer)
        self._call()
        return transfer

    def carry(self) -> None:
        """Make the copies that can be made, unless somebody who waits does it already."""
        if self._turn.acquire(blocking=False):
            with self._calling_again():
                try:
                    self._look()
                except OSError as error:
                    self._failed = error

    def wait_for(self, transfer: Transfer) -> None:
        """See `Transfer.wait`."""
        if transfer.is_done:
            return
        deadline_s = time.monotonic() + self._timeout_s
        if not self._turn.acquire(timeout=self._timeout_s):
            raise TimeoutError(f"a copy took more than {self._timeout_s:g} s")
        with self._calling_again():
            self._look()
            self._calls.modify(self._end, select.EPOLLONESHOT)  # what comes now is heard here
            while not transfer.is_done:
                self._wait_for_word(deadline_s)
                self._look()

    @contextmanager
    def _calling_again(self) -> Iterator[None]:
        """The turn ends with this, and what is left to copy is carried when its offer comes."""
        try:
            yield
        finally:
            self._turn.release()
            if self._failed is None and any(self._wanted.values()):
                self._call()

    def _call(self) -> None:
        """Call for `carry`: at the next word, or at once where there is something to copy already."""
        with self._calling:  # what is called for last is what was known last
            is_due = any(wanted and self._offers[stream] for stream, wanted in tuple(self._wanted.items()))
            events = select.EPOLLIN | select.EPOLLOUT if is_due else select.EPOLLIN  # a word can always be sent
            self._calls.modify(self._end, events | select.EPOLLONESHOT)

    def _look(self) -> None:
        """Hear what the other end has said, and copy what can be copied."""
        while self._hear():
            pass
        for stream, wanted in tuple(self._wanted.items()):
            while wanted and self._offers[stream]:
                self._copy(stream, wanted.popleft(), self._seen[self._offers[stream].popleft()])

    def _wait_for_word(self, deadline_s: float) -> None:
        if self._failed is not None:
            raise self._failed
        if not self._poll.poll(max(0.0, deadline_s - time.monotonic()) * 1e3):
            raise TimeoutError(f"no answer within {self._timeout_s:g} s")

    def _show(self) -> None:
        """The other end knows all files that there are, also those that are offered later, and none that is gone."""
        files = dict(self._memory.files)
        for number in self._shown - files.keys():
            self._say(_Says.FREED, number=number)
        for number in files.keys() - self._shown:
            self._say(_Says.SHOWN, number=number, fds=[files[number]])
        self._shown = set(files)

    def _copy(self, stream: int, transfer: Transfer, theirs: Tensor) -> None:
        ours = transfer.tensor
        if theirs.nbytes < ours.nbytes:
            raise ConnectionError(f"{theirs.nbytes} bytes were offered for {ours.nbytes}; ranks make different calls")
        into, source = (ours, theirs) if transfer.arrives else (theirs, ours)
        # The interpreter is free meanwhile. An operator of torch's would start threads of its own in each thread that calls it.
        ctypes.memmove(into.data_ptr(), source.data_ptr(), ours.nbytes)
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
            self._failed = ConnectionError("its process is gone")
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
