"""A session's arenas, mapped: batches are used where the daemon put them, without a copy.

The mapping is private: writes of this process into a batch stay in this process, and the daemon's
bytes cannot be harmed. When a batch is released, the pages written to are dropped, so that they do
not show in a later batch of the same slot. Pages that were only read stay mapped for the next
batch.

[Note: Tensors after a session]
A tensor stays valid as long as it is held. When a session ends, the batches still held are
moved out of its arenas: each becomes memory of this process, at the same address. Then the arenas
are unmapped and the side channel is closed, which tells the daemon that it may free them. So one
batch in use never keeps an arena.

[Note: Forked children]
The daemon fills a slot again when this process has released it, whatever a child still reads. So
a child inherits no page of an arena, but copies: before a fork, all pages of the batches that the
script may hold become this process's own. The child then moves them out. Batches that were not
read yet are not copied. A batch that another thread takes while this one forks is not mapped in
the child. To start a program without `preexec_fn` runs none of this, and copies nothing.

[Note: Finalizers of memory]
The last view of a batch may die in any thread and at any line, also while an exception unwinds.
Code of Python that ran there could be interrupted half-way, so none does: the weak reference to the
memory appends itself to a queue, which gRPC's sending thread empties. The locks here are held in
background threads alone, where no signal is handled.

[Note: Sealed memory] A process that reads beyond the end of a mapped file is killed (SIGBUS). So a
file is mapped only if the kernel guarantees that it cannot be made shorter. Python's own `mmap` is
not used: it keeps a duplicate of the descriptor, and the whole file mapped as long as one view of
it exists. Pages that were written to must be dropped before the next batch uses their slot; the
kernel says which, as dropping all pages would cost the next batch a page fault for each.
"""

import contextlib
import ctypes
import errno
import fcntl
import logging
import mmap
import os
import threading
import weakref
from bisect import bisect
from collections import deque
from collections.abc import Callable, Iterable
from ctypes import c_int, c_long, c_size_t, c_void_p
from functools import partial

import numpy as np
import numpy.typing as npt

from gyre_client.errors import DaemonFault, DaemonUnavailable
from gyre_client.transport.channel import NotShared, SideChannel

_MREMAP_MAYMOVE, _MREMAP_FIXED = 1, 2
_MADV_POPULATE_WRITE = 23  # since Linux 5.14; not named in the standard library
_FAILED = c_void_p(-1).value

# PyDLL keeps the interpreter's lock during a call; `move_out` depends on it.
_libc = ctypes.PyDLL(None, use_errno=True)
_mmap, _mremap, _munmap = _libc.mmap, _libc.mremap, _libc.munmap
_memmove, _madvise = _libc.memmove, _libc.madvise
_mmap.restype = _mremap.restype = _memmove.restype = c_void_p
_mmap.argtypes = [c_void_p, c_size_t, c_int, c_int, c_int, c_long]
_mremap.argtypes = [c_void_p, c_size_t, c_size_t, c_int, c_void_p]
_munmap.argtypes = [c_void_p, c_size_t]
_memmove.argtypes = [c_void_p, c_void_p, c_size_t]
_madvise.argtypes = [c_void_p, c_size_t, c_int]
# `munmap` as the callback of a weak reference, which is its third argument and is ignored. No code
# of Python runs, so a signal cannot interrupt it.
_munmap_for = _libc["munmap"]
_munmap_for.argtypes = [c_void_p, c_size_t, ctypes.py_object]

Memory = npt.NDArray[np.uint8]
# The memory that was moved out, by its address; entries of freed memory are removed later.
_moved_out: "dict[int, weakref.ref[Memory]]" = {}


_SCAN = 0xC0606610  # PAGEMAP_SCAN, of linux/fs.h, since Linux 6.7
_IS_FILE, _IS_PRESENT, _IS_SWAPPED = 1 << 2, 1 << 3, 1 << 4
_Argument = ctypes.c_uint64 * 12

_MADV_POPULATE_READ = 22  # since Linux 5.14; not named in the standard library
# CDLL gives up the interpreter's lock: to map all pages of an arena takes milliseconds.
_populate = ctypes.CDLL(None).madvise
_populate.argtypes = [c_void_p, c_size_t, c_int]
# PyDLL keeps the lock: a scan takes microseconds, and to get the lock back may take longer.
_ioctl = ctypes.PyDLL(None).ioctl
_ioctl.argtypes = [c_int, ctypes.c_ulong, c_void_p]


class ArenaMapping:
    """The mapping of one file. Ranges are half-open, in bytes of the file, and of whole pages.

    Attributes:
        address: The address of the first byte.
        num_bytes: The length of the file, a multiple of the page size.
    """

    def __init__(self, descriptor: int) -> None:
        """Maps the file; the caller may close the descriptor afterwards.

        Raises:
            OSError: The file cannot be mapped privately.
        """
        self.num_bytes = os.fstat(descriptor).st_size
        self.address = _map(self.num_bytes, mmap.MAP_PRIVATE, descriptor)
        # The daemon's later writes must not appear in a forked child: see `arena`.
        _madvise(self.address, self.num_bytes, mmap.MADV_DONTFORK)
        self._found = (ctypes.c_uint64 * 3)()
        self._pagemap = -1
        with contextlib.suppress(OSError):
            self._pagemap = os.open("/proc/self/pagemap", os.O_RDONLY | os.O_CLOEXEC)

    def close_pagemap(self) -> None:
        """Closes this process's page map, which `may_be_written` asks."""
        descriptor, self._pagemap = self._pagemap, -1
        if descriptor >= 0:
            os.close(descriptor)

    def view(self, begin: int, end: int) -> Memory:
        """Returns the bytes [begin, end) as a writable array, uint8 [end - begin].

        The array does not keep the mapping alive, and the range need not be of whole pages.

        Raises:
            ValueError: The range is not inside the file.
        """
        if not 0 <= begin <= end <= self.num_bytes:
            raise ValueError(f"bytes [{begin}, {end}) of a file of {self.num_bytes}")
        return np.asarray(_Memory(self.address + begin, end - begin))

    def map_pages(self) -> None:
        """Maps every page in one call, which takes half as long as one by one.

        A kernel without this call maps each page when it is first read.
        """
        _populate(self.address, self.num_bytes, _MADV_POPULATE_READ)

    def may_be_written(self, begin: int, end: int) -> bool:
        """Whether any page of a range is this process's own copy.

        True as well if the kernel cannot tell.
        """
        if self._pagemap < 0:
            return True
        size, flags, walk_end = ctypes.sizeof(_Argument), 0, 0
        first, last = self.address + begin, self.address + end
        found, one_region, one_page = ctypes.addressof(self._found), 1, 1
        # masks (inverted, all of, any of, returned): present or swapped, and not the file's
        wanted = (_IS_FILE, _IS_FILE, _IS_PRESENT | _IS_SWAPPED, 0)
        argument = _Argument(
            size, flags, first, last, walk_end, found, one_region, one_page, *wanted
        )
        num_regions: int = _ioctl(self._pagemap, _SCAN, ctypes.addressof(argument))
        return num_regions != 0  # an older kernel, or a sandbox, says -1

    def drop_private(self, begin: int, end: int) -> None:
        """Drops this process's copies of the pages in a range: it shows the file again."""
        _madvise(self.address + begin, end - begin, mmap.MADV_DONTNEED)
        _madvise(self.address + begin, end - begin, mmap.MADV_DONTFORK)

    def copy_for_child(self, begin: int, end: int) -> bool:
        """Makes every page of a range this process's own copy, which a forked child inherits.

        The kernel copies as if each page were written to, so no write of another thread is lost.
        (Before Linux 5.14 one byte of each page is read and written back here: a write to that byte
        by a thread outside the interpreter at that moment may be lost.)

        Returns:
            Whether there was memory for the copies; if not, the child does not inherit the range.
        """
        address, num_bytes = self.address + begin, end - begin
        if _madvise(address, num_bytes, _MADV_POPULATE_WRITE):
            if ctypes.get_errno() != errno.EINVAL:
                return False
            self.view(begin, end)[:: mmap.PAGESIZE] |= 0
        return not _madvise(address, num_bytes, mmap.MADV_DOFORK)

    def move_out(self, begin: int, end: int, memory: Memory) -> bool:
        """Replaces a range by memory of this process, with the same bytes at the same address.

        The kernel swaps the pages in one step, so threads that read the range are not disturbed.
        The interpreter's lock is held, so no Python code writes to the range meanwhile. Writes of a
        thread outside the interpreter at that moment may be lost.

        `memory` is the array over the range, which is unmapped when the array is gone.

        Returns:
            Whether there was memory for the copy; if not, the range still shows the file.
        """
        address, num_bytes = self.address + begin, end - begin
        for each in [each for each, kept in list(_moved_out.items()) if kept() is None]:
            _moved_out.pop(each, None)
        _moved_out[address] = weakref.ref(memory, partial(_munmap_for, address, num_bytes))
        try:
            copy = _map(num_bytes, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, -1)
        except OSError:
            return False
        _memmove(copy, address, num_bytes)
        if _mremap(copy, num_bytes, num_bytes, _MREMAP_MAYMOVE | _MREMAP_FIXED, address) == address:
            return True
        _munmap(copy, num_bytes)
        return False

    def unmap(self, begin: int, end: int) -> None:
        """Unmaps a range; arrays over it must not be used any more."""
        if end > begin:
            _munmap(self.address + begin, end - begin)


class _Memory:
    """Memory at an address, in the form that `numpy.asarray` takes without a copy."""

    def __init__(self, address: int, num_bytes: int) -> None:
        self.__array_interface__ = {
            "version": 3,
            "typestr": "|u1",
            "shape": (num_bytes,),
            "data": (address, False),
        }


def _map(num_bytes: int, flags: int, descriptor: int) -> int:
    address: int | None = _mmap(
        None, num_bytes, mmap.PROT_READ | mmap.PROT_WRITE, flags, descriptor, 0
    )
    if address is None or address == _FAILED:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    return address


def check_memory(descriptor: int, num_bytes: int | None) -> None:
    """Checks a memory file before it is mapped.

    `num_bytes` is the size that was announced; None for any size of whole pages.

    Raises:
        DaemonFault: It is no memory file, is not sealed against shrinking, or has another size.
    """
    try:
        seals = fcntl.fcntl(descriptor, fcntl.F_GET_SEALS)
    except OSError as error:
        raise DaemonFault(
            f"the daemon passed another kind of file as shared memory: {error.strerror}"
        ) from None
    if not seals & fcntl.F_SEAL_SHRINK:
        raise DaemonFault(
            "the daemon passed shared memory without a seal against shrinking: it could end "
            "this process at any time"
        )
    found_bytes = os.fstat(descriptor).st_size
    if found_bytes == 0 or found_bytes % mmap.PAGESIZE:
        raise DaemonFault(
            f"the daemon passed shared memory of {found_bytes} bytes, which are not whole pages"
        )
    if num_bytes is not None and found_bytes != num_bytes:
        raise DaemonFault(
            f"the daemon passed shared memory of {found_bytes} bytes and announced {num_bytes}"
        )


_log = logging.getLogger("gyre_client")


class Loan(weakref.ref[Memory]):
    """Memory of a lent batch group; it queues itself when the last view of it is gone.

    It ends with a page. `is_read` says whether the script may hold views of it, and `is_copied`
    whether all its pages are this process's own.
    """

    __slots__ = ("_arena", "begin", "end", "first_step", "is_copied", "is_read", "num_batches")

    def __new__(cls, memory: Memory, returned: "Callable[[Loan], None]", *_: object) -> "Loan":
        """Makes a weak reference; `returned` is called with it when the memory is gone."""
        return super().__new__(cls, memory, returned)

    def __init__(
        self,
        memory: Memory,
        returned: "Callable[[Loan], None]",
        arena: "Arena",
        extent: tuple[int, int],
        first_step: int,
        num_batches: int,
    ) -> None:
        super().__init__(memory, returned)  # type: ignore[call-arg]
        self._arena = arena
        self.begin, self.end = extent
        self.first_step = first_step
        self.num_batches = num_batches
        self.is_read = self.is_copied = False

    def take_back(self) -> None:
        """Frees the memory, once it is gone; for a background thread."""
        self._arena.take_back(self)


class Arenas:
    """The memory files of one session, each mapped when its first batch comes.

    Attributes:
        returned: The loans whose memory is gone, not taken back yet.
    """

    def __init__(self, side: SideChannel, session_id: str, first_bytes: int) -> None:
        """Receives the first arena; `map_first` maps its pages.

        `first_bytes` is its size, as the daemon announced it. This object owns `side`.

        Raises:
            NotShared: The daemon's memory cannot be mapped in this process.
            DaemonUnavailable: The arena did not arrive.
            DaemonFault: The arena is not sealed memory of that size.
        """
        self._side = side
        self._session_id = session_id
        self._num_received = 0
        self.returned: deque[Loan] = deque()
        self._mapped = {0: self._receive(0, first_bytes)}

    def num_lent(self, enough: int = 0) -> int:
        """Returns the number of batches whose memory is in use; any below `enough` if it is."""
        # The receiver may add an arena meanwhile, hence the copy.
        num_lent = sum(arena.num_lent for arena in list(self._mapped.values()))
        if num_lent > enough and self.returned:
            num_lent -= sum(loan.num_batches for loan in self.returned.copy())
        return num_lent

    def map_first(self) -> None:
        """Maps the pages of the first arena, while the daemon reads the first batches."""
        self._mapped[0].map_pages()

    def get(self, number: int) -> "Arena":
        """Returns the session's arena of this number; receives and maps it if it is new.

        Raises:
            NotShared: The daemon's memory cannot be mapped in this process.
            DaemonUnavailable: The arena did not arrive.
            DaemonFault: It is not the session's next arena, or not sealed memory.
        """
        arena = self._mapped.get(number)
        if arena is None:
            if number != self._num_received:
                raise DaemonFault(
                    f"the daemon put a batch into arena {number}, but the next one of this "
                    f"session is arena {self._num_received}"
                )
            arena = self._mapped[number] = self._receive(number)
            arena.map_pages()
        return arena

    def leave(self, numbers: Iterable[int]) -> list[int]:
        """Closes arenas that the daemon uses no longer; batches held there are moved out.

        Returns:
            The arenas that this process no longer maps.

        Raises:
            DaemonFault: One of them was never received, or was left before.
        """
        left = []
        for number in numbers:
            arena = self._mapped.pop(number, None)
            if arena is None:
                raise DaemonFault(f"the daemon left arena {number}, which this process has not")
            if arena.close():
                left.append(number)
        return left

    def close(self) -> None:
        """Closes all arenas at the session's end: see [Note: Tensors after a session]."""
        are_out = [arena.close() for arena in list(self._mapped.values())]
        if all(are_out):
            self._side.close()

    def _receive(self, number: int, num_bytes: int | None = None) -> "Arena":
        descriptor = self._side.receive(self._session_id, number)
        arena = Arena(descriptor, num_bytes, self.returned)
        self._num_received += 1
        return arena


class Arena:
    """One memory file. Memory lent out of it stays as it is until it is given back.

    Attributes:
        num_lent: The number of batches whose memory was lent and not taken back.
    """

    def __init__(
        self, descriptor: int, num_bytes: int | None = None, returned: deque[Loan] | None = None
    ) -> None:
        """Maps the file and closes the descriptor, which this object owns.

        `num_bytes` is the size that was announced, if it was. `returned` gets the loans whose
        memory is gone.

        Raises:
            NotShared: The file cannot be mapped.
            DaemonFault: The file may shrink, or has another size.
        """
        try:
            check_memory(descriptor, num_bytes)
            self._mapping = ArenaMapping(descriptor)
        except OSError as error:
            raise NotShared(f"the daemon's memory cannot be mapped: {error}") from error
        finally:
            os.close(descriptor)
        self._returned = deque() if returned is None else returned
        self.num_lent = 0
        self._loans: dict[int, Loan] = {}  # by the first byte
        self._begins: list[int] = []  # of the loans, in rising order
        self._is_closed = False
        self._lock = threading.Lock()  # guards all of the above, in background threads
        _open_arenas.add(self)

    def map_pages(self) -> None:
        """See `ArenaMapping.map_pages`."""
        self._mapping.map_pages()

    def lend(
        self, begin: int, end: int, num_batches: int = 1, first_step: int = 0
    ) -> tuple[Memory, Loan]:
        """Returns the memory of `num_batches` batches, uint8 [end - begin], writable; and its loan.

        `begin` is the first byte of a page.

        Raises:
            ValueError: The range is not inside the file, does not begin with a page, or overlaps
                a lent one.
            DaemonUnavailable: The session is over.
        """
        if begin % mmap.PAGESIZE:
            raise ValueError(f"byte {begin} is not the first of a page")
        memory = self._mapping.view(begin, end)
        end = -(-end // mmap.PAGESIZE) * mmap.PAGESIZE
        with self._lock:
            if self._is_closed:
                raise DaemonUnavailable("the session is over")
            place = bisect(self._begins, begin)
            before = self._loans[self._begins[place - 1]].end if place else 0
            if before > begin or any(each < end for each in self._begins[place : place + 1]):
                raise ValueError(f"the memory at bytes [{begin}, {end}) is lent already")
            loan = Loan(memory, self._returned.append, self, (begin, end), first_step, num_batches)
            self._begins.insert(place, begin)
            self._loans[begin] = loan
            self.num_lent += num_batches
        return memory, loan

    def take_back(self, loan: Loan) -> None:
        """Frees a range whose last view is gone; it shows the file again."""
        with self._lock:
            if self._is_closed:
                return
            del self._loans[loan.begin]
            self._begins.remove(loan.begin)
            self.num_lent -= loan.num_batches
            if loan.is_copied or self._mapping.may_be_written(loan.begin, loan.end):
                self._mapping.drop_private(loan.begin, loan.end)

    def close(self) -> bool:
        """Moves out the lent ranges, and unmaps the rest.

        Returns:
            Whether no memory of this process refers to the file any more.
        """
        with self._lock:
            was_closed, self._is_closed = self._is_closed, True
            if was_closed:
                return True
            self._mapping.close_pagemap()
            is_out, gap_begin = True, 0
            for begin, loan in sorted(self._loans.items()):
                memory = loan()  # keeps the range as it is meanwhile
                if memory is not None:
                    self._mapping.unmap(gap_begin, begin)
                    is_out &= self._mapping.move_out(begin, loan.end, memory)
                    gap_begin = loan.end
            self._mapping.unmap(gap_begin, self._mapping.num_bytes)
            _open_arenas.discard(self)  # last: another thread may fork meanwhile
            return is_out

    def copy_for_child(self) -> None:
        """Copies the batches that the script may hold: see [Note: Forked children]."""
        for loan in list(self._loans.values()):
            memory = loan()  # so that it is not taken back meanwhile
            if memory is None or not loan.is_read or loan.is_copied:
                continue
            loan.is_copied = self._mapping.copy_for_child(loan.begin, loan.end)
            if not loan.is_copied:
                _log.error(
                    "there is no memory to copy the batches that this process holds: the kernel "
                    "ends a forked child that reads them"
                )

    def leave_to_child(self) -> None:
        """In a forked child: keeps the copies made for it, and nothing of the daemon's.

        Other threads do not exist here, and may have held the lock.
        """
        self._mapping.close_pagemap()
        self._lock = threading.Lock()
        self._is_closed = True
        for loan in list(self._loans.values()):
            memory = loan()
            if memory is not None and loan.is_copied:
                self._mapping.move_out(loan.begin, loan.end, memory)


_open_arenas: set[Arena] = set()  # of all sessions of this process


def _before_fork() -> None:
    interrupt: BaseException | None = None
    while True:
        try:
            for arena in list(_open_arenas):
                arena.copy_for_child()
            break
        except KeyboardInterrupt as error:  # the fork takes place in any case
            interrupt = error
    if interrupt is not None:
        raise interrupt


def _in_child() -> None:
    for arena in list(_open_arenas):
        arena.leave_to_child()
    _open_arenas.clear()


os.register_at_fork(before=_before_fork, after_in_child=_in_child)
