"""A link between neighbours of one host: a tensor moves by one copy in memory that both map.

For each tensor one end offers a buffer. The other end copies into it or out of it, and then says
that the copy is done. A thread makes the copy as soon as the offer has come (`copy_thread`),
whatever the process computes meanwhile; a caller that waits before that thread got a processor
makes the copy itself. The two ends exchange messages through a socket, so the end of either process
ends the other's waits.
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
from contextlib import contextmanager, suppress
from datetime import timedelta
from enum import IntEnum

import torch
from torch import Tensor
from torch._C._autograd import _profiler_enabled

from gyre_trainer.comm.shared_memory.files import SharedMemory, mapped
from gyre_trainer.comm.transport import MispairedHop

_MESSAGE = struct.Struct("=BBxxIQ")  # the kind, the stream, the number of a file, the identity
_FD = struct.Struct("=i")  # a file descriptor beside a message
_FD_SPACE = socket.CMSG_SPACE(_FD.size)

# Tools that count or trace operators see by these what is sent. The operators do nothing: the copy
# itself is no operator.
_OPERATORS = torch.library.Library("gyre", "DEF")  # type: ignore[no-untyped-call]
for _name in ("send", "recv"):
    _OPERATORS.define(f"{_name}(Tensor tensor) -> ()")  # type: ignore[no-untyped-call]
    _OPERATORS.impl(_name, lambda tensor: None, "CompositeExplicitAutograd")  # type: ignore[no-untyped-call]


class _Kind(IntEnum):
    MAP = 0  # a new file; its descriptor comes with the message
    UNMAP = 1
    OFFER = 2
    DONE = 3
    MISPAIRED = 4  # instead of DONE: the identities differ, and nothing was copied


class Transfer:
    """A tensor on its way from one neighbour to the other.

    Attributes:
        tensor: this end's tensor.
        arrives: whether ``tensor`` is filled; else it is read.
        identity: what it belongs to; the two ends compare it.
        is_done: whether the copy was made, or found to be mispaired.
        theirs: the other end's identity where it is another one; else None.
    """

    def __init__(self, link: "Link", tensor: Tensor, identity: int, *, arrives: bool) -> None:
        if torch._C._len_torch_dispatch_stack() or _profiler_enabled():
            (torch.ops.gyre.recv if arrives else torch.ops.gyre.send)(tensor)
        self._link = link
        self.tensor = tensor
        self.arrives = arrives
        self.identity = identity
        self.is_done = False
        self.theirs: int | None = None

    def wait(self) -> None:
        """Return when the copy was made.

        Raises:
            OSError: the neighbour is gone, or did not answer in time.
            MispairedHop: the neighbour's transfer belongs to something else.
        """
        self._link.wait_for(self)
        if self.theirs is not None:
            raise MispairedHop(self.theirs)


class Link:
    """This process's end of a link.

    Both ends start the same transfers of each stream in the same order, one end with `offer` and
    the other with `copy`. One thread starts transfers and waits; another may call `make_copies`
    meanwhile.

    Attributes:
        number: the socket's file descriptor.
    """

    def __init__(
        self, end: socket.socket, memory: SharedMemory, timeout: timedelta, due_copies: select.epoll
    ) -> None:
        """Take over a connected socket.

        Args:
            end: closed when the link is released.
            memory: where offered tensors lie.
            timeout: the longest that one wait takes.
            due_copies: reports the socket when `make_copies` should be called.
        """
        end.setblocking(False)
        self.number = end.fileno()
        self._end = end
        self._memory = memory
        self._timeout_s = timeout.total_seconds()
        self._due_copies = due_copies
        self._due_copies.register(end, select.EPOLLONESHOT)
        self._request_lock = threading.Lock()
        self._poll = select.poll()
        self._poll.register(end, select.POLLIN)
        # The holder of this lock receives messages, copies and answers, so that messages and
        # streams keep their order.
        self._progress_lock = threading.Lock()
        self._failed: OSError | None = None  # raised in waits for a transfer that is not done
        self._announced: set[int] = set()  # files of this end that the other end has mapped
        self._mapped: dict[int, Tensor] = {}  # files of the other end
        # By stream, in the order of their start: transfers that this end offered, transfers that
        # this end copies, and files and identities of the other end's offers not used yet.
        self._offered: defaultdict[int, deque[Transfer]] = defaultdict(deque)
        self._to_copy: defaultdict[int, deque[Transfer]] = defaultdict(deque)
        self._offers: defaultdict[int, deque[tuple[int, int]]] = defaultdict(deque)
        weakref.finalize(self, end.close)

    def offer(self, stream: int, tensor: Tensor, *, arrives: bool, identity: int = 0) -> Transfer:
        """Start a transfer to or from ``tensor``, which begins where a file begins."""
        self._announce_files()
        transfer = Transfer(self, tensor, identity, arrives=arrives)
        self._offered[stream].append(transfer)  # before the answer can come
        self._send(_Kind.OFFER, stream, self._memory.number(tensor), identity)
        return transfer

    def copy(self, stream: int, tensor: Tensor, *, arrives: bool, identity: int = 0) -> Transfer:
        """Start a transfer between ``tensor`` and the buffer that the other end offers."""
        transfer = Transfer(self, tensor, identity, arrives=arrives)
        self._to_copy[stream].append(transfer)
        self._request_copies()
        return transfer

    def make_copies(self) -> None:
        """Make the copies that can be made, unless a waiting caller makes them already."""
        if self._progress_lock.acquire(blocking=False):
            with self._releasing_progress():
                try:
                    self._make_progress()
                except OSError as error:
                    self._failed = error

    def wait_for(self, transfer: Transfer) -> None:
        """Do what `Transfer.wait` says."""
        if transfer.is_done:
            return
        deadline_s = time.monotonic() + self._timeout_s
        if not self._progress_lock.acquire(timeout=self._timeout_s):
            raise TimeoutError(f"a copy took more than {self._timeout_s:g} s")
        with self._releasing_progress():
            self._make_progress()
            # From here on this thread receives the messages itself.
            self._due_copies.modify(self._end, select.EPOLLONESHOT)
            while not transfer.is_done:
                self._wait_for_message(deadline_s)
                self._make_progress()

    def give_up(self) -> None:
        """Let all waits fail, here and, once it has read what was sent, at the other end."""
        with suppress(OSError):  # the other process may be gone
            self._end.shutdown(socket.SHUT_RDWR)

    @contextmanager
    def _releasing_progress(self) -> Iterator[None]:
        """Release the lock at the end, and request the copies that are left."""
        try:
            yield
        finally:
            self._progress_lock.release()
            if self._failed is None and any(self._to_copy.values()):
                self._request_copies()

    def _request_copies(self) -> None:
        """Request `make_copies`: at the next message, or at once where a copy is possible."""
        with self._request_lock:  # so that the last request is the one that knew the most
            is_due = any(
                waiting and self._offers[stream] for stream, waiting in tuple(self._to_copy.items())
            )
            # A socket can always be written to, so EPOLLOUT reports it at once.
            events = select.EPOLLIN | select.EPOLLOUT if is_due else select.EPOLLIN
            self._due_copies.modify(self._end, events | select.EPOLLONESHOT)

    def _make_progress(self) -> None:
        """Receive the messages that have come, and make the copies that can be made."""
        while self._receive():
            pass
        for stream, waiting in tuple(self._to_copy.items()):
            while waiting and self._offers[stream]:
                transfer, (number, theirs) = waiting.popleft(), self._offers[stream].popleft()
                if theirs == transfer.identity:
                    self._copy(stream, transfer, self._mapped[number])
                else:
                    self._send(_Kind.MISPAIRED, stream, identity=transfer.identity)
                    transfer.theirs, transfer.is_done = theirs, True

    def _wait_for_message(self, deadline_s: float) -> None:
        if self._failed is not None:
            raise self._failed
        if not self._poll.poll(max(0.0, deadline_s - time.monotonic()) * 1e3):
            raise TimeoutError(f"no answer within {self._timeout_s:g} s")

    def _announce_files(self) -> None:
        """Let the other end map all present files, for later offers too, and unmap all others."""
        files = dict(self._memory.files)
        for number in self._announced - files.keys():
            self._send(_Kind.UNMAP, number=number)
        for number in files.keys() - self._announced:
            self._send(_Kind.MAP, number=number, fds=[files[number]])
        self._announced = set(files)

    def _copy(self, stream: int, transfer: Transfer, theirs: Tensor) -> None:
        ours = transfer.tensor
        if theirs.nbytes < ours.nbytes:
            raise ConnectionError(
                f"{theirs.nbytes} bytes were offered for {ours.nbytes}; ranks make different calls"
            )
        into, source = (ours, theirs) if transfer.arrives else (theirs, ours)
        # The interpreter is free during memmove. An operator of torch would start threads of its
        # own in each thread that calls it.
        ctypes.memmove(into.data_ptr(), source.data_ptr(), ours.nbytes)
        self._send(_Kind.DONE, stream)
        transfer.is_done = True

    def _send(
        self,
        kind: _Kind,
        stream: int = 0,
        number: int = 0,
        identity: int = 0,
        fds: Sequence[int] = (),
    ) -> None:
        message = _MESSAGE.pack(kind, stream, number, identity)
        if fds:
            socket.send_fds(self._end, [message], fds)
        else:
            self._end.send(message)

    def _receive(self) -> bool:
        """Handle one message; False where there is none."""
        try:
            message, beside, _, _ = self._end.recvmsg(_MESSAGE.size, _FD_SPACE)
        except BlockingIOError:
            return False
        except ConnectionError:
            message = b""
        if not message:
            self._failed = ConnectionError("its process is gone, or gave up")
            return False
        kind, stream, number, identity = _MESSAGE.unpack(message)
        match kind:
            case _Kind.MAP:
                (fd,) = _FD.unpack(beside[0][2])
                self._mapped[number] = mapped(fd)
                os.close(fd)
            case _Kind.UNMAP:
                del self._mapped[number]
            case _Kind.OFFER:
                self._offers[stream].append((number, identity))
            case _Kind.MISPAIRED:
                transfer = self._offered[stream].popleft()
                transfer.theirs, transfer.is_done = identity, True
            case _:
                self._offered[stream].popleft().is_done = True
        return True
