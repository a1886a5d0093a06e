"""The memory of batches: its budget, and arenas, which are memory files divided into slots.

[Note: The life of a slot] The kernel needs about a second to allocate a few GiB of fresh memory. So
the first arena is small, and all threads allocate it together. The rest of the share follows piece
by piece, one arena whenever a batch group finds no slot; a trainer faster than its storage
never needs most of it. A slot is taken for a batch group before the group is read. The group owns
the slot until no consumer needs any of its batches (`Free` in `sessions.stream_state`); then the
slot is put back. Code that reads or writes in a slot meanwhile holds a lease of the arena; see
[Note: Who owns an arena].

[Note: Who owns an arena] A shared stream makes an arena and closes it. Code that reads or writes
there holds a lease: a thread while its work runs, a coroutine while it waits for bytes that land
there, a payload until it was sent. When the arena is closed and the last lease was returned, the
memory is given back at once, even if a frame or a traceback still refers to a slot. An arena that
is still being made when its stream ends is closed by the task that makes it.

[Note: Arenas that clients keep] A client gets a descriptor that only reads. The daemon cannot see
how the client uses it: it may keep it after it said that it has unmapped the arena, or pass it on
to another process. So an arena that was handed over counts against the budget, and against the
users who were handed it, until the kernel says that the file is gone: when the last reference to a
file without a name goes, in whichever process, inotify reports that the file was deleted.

[Note: Memory files] Other processes may map and read an arena's file, but neither write nor resize
it. Python's `mmap` duplicates the descriptor and keeps the memory as long as a view of it exists.
Here the last lease ends both, even if a frame, a traceback or a reference cycle still has a view.
"""

import asyncio
import bisect
import contextlib
import ctypes
import fcntl
import mmap
import os
import stat
import struct
import threading
import weakref
from collections import Counter
from collections.abc import Callable, Collection, Iterator
from functools import partial

from msgspec import Struct

from gyre_daemon.errors import Overloaded
from gyre_daemon.memory.share import Share
from gyre_daemon.runtime.events import log_event
from gyre_daemon.runtime.threads import FairExecutor, Flow, in_thread
from gyre_daemon.storage.reads import ArenaClosed
from gyre_daemon.workers.copy_workers import NO_COPY_WORKERS, CopyWorkers, new_key

_NUM_NAMED = 3  # users in an error message
# How long a user has to unmap arenas before its sessions find no memory. A client does it within
# milliseconds, unless its machine is busy.
_MAX_WAIT_FOR_USER_S = 10.0


class Budget:
    """How many bytes arenas and the metadata of their batches may have together.

    Attributes:
        freed: set whenever bytes become free; waiters clear it.
        limit_bytes: the whole budget.
        reserved_bytes: reserved by sessions.
        abandoned_bytes: size of the arenas that the daemon has closed and that clients may keep.
        abandoned_by: the same by user. Where several users may keep an arena, it counts for each of
            them in equal parts, since the kernel does not tell which of them do.
    """

    def __init__(self, limit_bytes: int) -> None:
        self.limit_bytes = limit_bytes
        self.reserved_bytes = 0
        self.abandoned_bytes = 0
        self.abandoned_by: Counter[str] = Counter()
        self.freed = asyncio.Event()

    @property
    def free_bytes(self) -> int:
        """How many bytes can still be reserved."""
        return self.limit_bytes - self.reserved_bytes - self.abandoned_bytes

    def reserve(self, num_bytes: int, purpose: str, only_user: str | None = None) -> None:
        """Reserve bytes.

        Args:
            num_bytes: how many.
            purpose: the use of the bytes, for the error message.
            only_user: the one user whom the error message may name; None for all.

        Raises:
            Overloaded: they are not free.
        """
        if num_bytes > self.free_bytes:
            raise Overloaded(
                f"{purpose} needs {num_bytes} bytes, but of the daemon's memory_budget of "
                f"{self.limit_bytes} bytes only {max(0, self.free_bytes)} are free"
                f"{self._kept(only_user)}. "
                "Close a session, lower the batch size or raise memory_budget.",
                {
                    "needed_bytes": num_bytes,
                    "free_bytes": max(0, self.free_bytes),
                    "limit_bytes": self.limit_bytes,
                },
            )
        self.reserved_bytes += num_bytes

    def give_back(self, num_bytes: int) -> None:
        """Return bytes that were reserved."""
        self.reserved_bytes -= num_bytes
        self.freed.set()

    async def settle(self, user: str) -> None:
        """Wait until a user's reserved memory can be used, but no longer than some seconds.

        A session whose stream ends goes on in another, with other arenas and the same reserved
        memory. A client that keeps the arenas of each stream would take more than there is.

        Raises:
            Overloaded: more is reserved and abandoned than there is, and the user keeps some.
        """
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_MAX_WAIT_FOR_USER_S):
                while self._is_overdrawn_by(user):
                    self.freed.clear()
                    await self.freed.wait()
        if self._is_overdrawn_by(user):
            raise Overloaded(
                f"{user} keeps {self.abandoned_by[user]} bytes of arenas that it was asked to "
                f"unmap, and the daemon's memory_budget of {self.limit_bytes} bytes is used up. "
                "Unmap them and close their descriptors."
            )

    def abandon(self, num_bytes: int, users: Collection[str]) -> None:
        """Count bytes of a closed arena that clients of these users may keep."""
        self.abandoned_bytes += num_bytes
        for user in users:
            self.abandoned_by[user] += num_bytes // len(users)
        self.freed.set()

    def regain(self, num_bytes: int, users: Collection[str]) -> None:
        """Count bytes no longer that were abandoned by these users."""
        self.abandoned_bytes -= num_bytes
        for user in users:
            self.abandoned_by[user] -= num_bytes // len(users)
        self.abandoned_by += Counter()  # forgets users at 0
        self.freed.set()

    def _is_overdrawn_by(self, user: str) -> bool:
        return self.free_bytes < 0 and self.abandoned_by[user] > 0

    def _kept(self, only_user: str | None) -> str:
        """Who keeps how much of closed arenas, for an error message."""
        if not self.abandoned_bytes:
            return ""
        users = self.abandoned_by.most_common(_NUM_NAMED)
        if only_user is not None:
            own_bytes = self.abandoned_by[only_user]
            users = [(only_user, own_bytes), ("other users", self.abandoned_bytes - own_bytes)]
        names = ", ".join(f"{user}: {num_bytes}" for user, num_bytes in users if num_bytes)
        return f" and {self.abandoned_bytes} are kept by clients whose sessions are over ({names})"


_IN_DELETE_SELF, _IN_IGNORED = 0x400, 0x8000
_EVENT = struct.Struct("iIII")  # the watch, the kind of event, a cookie, the length of a name
_READ_BYTES = 64 << 10

_libc = ctypes.CDLL(None, use_errno=True)


class FileWatch:
    """Watches memory files of this process. Used from one event loop."""

    def __init__(self) -> None:
        """Watch nothing yet."""
        self._inotify = -1
        self._when_gone: dict[int, Callable[[], None]] = {}

    def add(self, descriptor: int, gone: Callable[[], None]) -> None:
        """Call `gone` once no process has the file open or mapped.

        Args:
            descriptor: of a file not watched yet; the caller goes on to own it.
            gone: called on the event loop, by `look` or soon after the file is gone.

        Raises:
            OSError: the kernel cannot tell, as a rule because this user watches too many files
                (`fs.inotify.max_user_watches`).
        """
        if self._inotify < 0:
            self._inotify = _checked(_libc.inotify_init1(os.O_NONBLOCK | os.O_CLOEXEC))
            asyncio.get_running_loop().add_reader(self._inotify, self.look)
        path = f"/proc/self/fd/{descriptor}".encode()
        self._when_gone[_checked(_libc.inotify_add_watch(self._inotify, path, _IN_DELETE_SELF))] = (
            gone
        )

    def look(self) -> None:
        """Call the callbacks of files that are gone by now."""
        if self._inotify < 0:
            return
        while True:
            try:
                events = os.read(self._inotify, _READ_BYTES)
            except BlockingIOError:
                return
            for watch, what, _, _ in _EVENT.iter_unpack(events):
                if what & _IN_IGNORED and watch in self._when_gone:
                    self._when_gone.pop(watch)()

    def close(self) -> None:
        """Watch no more."""
        if self._inotify >= 0:
            asyncio.get_running_loop().remove_reader(self._inotify)
            os.close(self._inotify)
            self._inotify = -1
            self._when_gone.clear()


def _checked(result: int) -> int:
    if result < 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    return result


# constants that the standard library does not name
_MADV_POPULATE_WRITE = 23  # since Linux 5.14
_F_SEAL_FUTURE_WRITE = 0x0010  # since Linux 5.1
_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL | _F_SEAL_FUTURE_WRITE
_PROT_NONE, _MAP_FIXED, _MAP_NORESERVE = 0, 0x10, 0x4000
_FAILED = ctypes.c_void_p(-1).value

_mmap, _munmap = _libc.mmap, _libc.munmap
_mmap.restype = ctypes.c_void_p
_mmap.argtypes = [
    ctypes.c_void_p,
    ctypes.c_size_t,
    ctypes.c_int,
    ctypes.c_int,
    ctypes.c_int,
    ctypes.c_long,
]
_munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
_madvise = _libc.madvise  # `mmap.madvise` keeps the interpreter's lock for as long as it takes
_madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]


def _map(address: int | None, num_bytes: int, protection: int, flags: int, descriptor: int) -> int:
    mapped: int | None = _mmap(address, num_bytes, protection, flags, descriptor, 0)
    if mapped is None or mapped == _FAILED:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    return mapped


def _map_file(num_bytes: int) -> tuple[int, int]:
    """The descriptor of a new memory file, and the address where it is mapped for writing."""
    descriptor = os.memfd_create("gyre-arena", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.ftruncate(descriptor, num_bytes)
        os.fchmod(descriptor, stat.S_IRUSR)  # no other user can open it
        access = mmap.PROT_READ | mmap.PROT_WRITE
        return descriptor, _map(None, num_bytes, access, mmap.MAP_SHARED, descriptor)
    except OSError:
        os.close(descriptor)
        raise


def whole_pages(num_bytes: int) -> int:
    """The number of bytes, rounded up to whole pages."""
    return -(-num_bytes // mmap.PAGESIZE) * mmap.PAGESIZE


class Slot(Struct, frozen=True, eq=False):
    """The memory of one batch group.

    Attributes:
        arena: the arena that the slot is a part of.
        offset_bytes: where it begins in the arena.
        memory: writable, whole pages, at least as long as was asked for. Only the holder of a lease
            of the arena may touch it.
        address: of its first byte.
    """

    arena: "Arena"
    offset_bytes: int
    memory: memoryview
    address: int

    @property
    def num_bytes(self) -> int:
        """The slot's capacity."""
        return self.memory.nbytes


class Arena:
    """Slots for batches in one memory file; [Note: Who owns an arena] says who frees it.

    Attributes:
        key: its name, which no other arena of this process has or had.
        num_bytes: its size.
        descriptor: of the file; -1 once the memory is given back.
        address: of its first byte.
        held_bytes: size of the taken slots.
        is_closed: no further batch is put here.
        is_kept: whether a client was handed it and the kernel has not said that it is gone.
    """

    def __init__(
        self, num_bytes: int, budget: Budget | None = None, files: FileWatch | None = None
    ) -> None:
        """Map an empty file; `allocate` gives it memory, `seal` makes slots available.

        Args:
            num_bytes: at least, rounded up to whole pages.
            budget: told about bytes kept by clients; see [Note: Arenas that clients keep].
            files: tells when the file is gone.

        Raises:
            Overloaded: the machine has no such memory.
        """
        self.key = new_key()
        self.num_bytes = whole_pages(num_bytes)
        with self._refusal():
            self.descriptor, self.address = _map_file(self.num_bytes)
        array = (ctypes.c_char * self.num_bytes).from_address(self.address)
        self._memory = memoryview(array).cast("B")  # touching it after the end kills the process
        # the addresses stay reserved as long as a view exists, so that nothing else is mapped there
        weakref.finalize(array, _munmap, self.address, self.num_bytes).atexit = False
        # (offset, length) of every free range, sorted, none touching the next
        self._free = [(0, self.num_bytes)]
        self.held_bytes = 0
        self._budget = budget or Budget(0)
        self._files = files or FileWatch()
        self._users: frozenset[str] = frozenset()  # names of those who were handed it
        self._clients: list[Callable[[Arena], None]] = []  # once for each mapping
        self.is_closed = self.is_kept = False
        self._when_unmapped: list[Callable[[], object]] = []
        self._when_gone: list[Callable[[], object]] = []
        self._lock = threading.Lock()  # guards the number of leases
        self._num_leases = 1  # the maker's, until `close`

    @contextlib.contextmanager
    def lease(self) -> Iterator[None]:
        """Hold a lease inside the block. In any thread.

        Raises:
            ArenaClosed: the memory was given back, so no reader waits for the bytes.
        """
        if not self.acquire():
            raise ArenaClosed
        try:
            yield
        finally:
            self.release()

    def acquire(self) -> bool:
        """Take a lease, returned by `release`; False where the memory is gone. In any thread."""
        with self._lock:
            self._num_leases += self._num_leases > 0
            return self._num_leases > 0

    def release(self) -> None:
        """Return a lease; the last one gives the memory back. In any thread."""
        with self._lock:
            self._num_leases -= 1
            if self._num_leases:
                return
        self._unmap()
        for act in self._when_unmapped:
            act()

    def allocate(self, begin: int, end: int) -> None:
        """Allocate and touch the whole pages `[begin, end)`; takes some ms per 10 MiB.

        Several threads may allocate different parts at once.

        Raises:
            Overloaded: the machine has no such memory.
            ArenaClosed: the arena was closed meanwhile.
        """
        with self.lease(), self._refusal():
            os.posix_fallocate(self.descriptor, begin, end - begin)
            # an older kernel does it when a page is first written
            _madvise(self.address + begin, end - begin, _MADV_POPULATE_WRITE)

    def seal(self) -> None:
        """Allow no further mapping for writing, and no change of the size; then slots are taken."""
        fcntl.fcntl(self.descriptor, fcntl.F_ADD_SEALS, _SEALS)

    def take(self, num_bytes: int) -> Slot | None:
        """Take the first free slot of at least `num_bytes`, or None where none is large enough."""
        needed = whole_pages(num_bytes)
        for index, (offset, length) in enumerate(self._free):
            if length >= needed:
                self._free[index : index + 1] = (
                    [(offset + needed, length - needed)] if length > needed else []
                )
                self.held_bytes += needed
                memory = self._memory[offset : offset + needed]
                return Slot(self, offset, memory, self.address + offset)
        return None

    def put_back(self, slot: Slot) -> None:
        """Make a slot free for another batch group; no thread or client may touch it any more."""
        begin, end = slot.offset_bytes, slot.offset_bytes + slot.num_bytes
        self.held_bytes -= slot.num_bytes
        index = bisect.bisect(self._free, (begin,))
        if index < len(self._free) and self._free[index][0] == end:
            end += self._free.pop(index)[1]
        if index and sum(self._free[index - 1]) == begin:
            index -= 1
            begin = self._free.pop(index)[0]
        self._free.insert(index, (begin, end - begin))

    def when_unmapped(self, act: Callable[[], object]) -> None:
        """Call `act` once the memory is unmapped, in the thread that returns the last lease."""
        self._when_unmapped.append(act)

    def when_gone(self, act: Callable[[], object]) -> None:
        """Call `act` on the event loop once no client keeps the arena; call it only if one does."""
        self._when_gone.append(act)

    def close(self) -> None:
        """Put no further batch here, and give the memory back with the last lease.

        As long as a client may keep the arena, it counts as abandoned. A second call changes
        nothing.
        """
        if self.is_closed:
            return
        self.is_closed = True
        self._free.clear()
        if self.is_kept:
            self._budget.abandon(self.num_bytes, self._users)
        self.leave()
        self.release()

    def open_for(self, user: str) -> int:
        """A descriptor for a client of this user; the caller closes it.

        Raises:
            OSError: no descriptor is left, or the kernel cannot tell when the arena is gone.
        """
        if not self.is_kept:
            self._files.add(self.descriptor, self._file_gone)
        # a new file description, which only reads
        descriptor = os.open(f"/proc/self/fd/{self.descriptor}", os.O_RDONLY | os.O_CLOEXEC)
        if self.is_closed:  # and leased: a slow peer is still to be sent a batch
            if self.is_kept:
                self._budget.regain(self.num_bytes, self._users)
            self._budget.abandon(self.num_bytes, self._users | {user})
        self.is_kept = True
        self._users |= {user}
        return descriptor

    def leave(self) -> None:
        """Tell clients that no further batch is put here, so that they unmap it."""
        for on_left in set(self._clients):
            on_left(self)

    def add_client(self, on_left: "Callable[[Arena], None]") -> None:
        """Count a client that maps the arena; `on_left` tells it when it should unmap it."""
        self._clients.append(on_left)

    def remove_client(self, on_left: "Callable[[Arena], None]") -> None:
        """Count a client no longer, which has unmapped the arena, as it says."""
        self._clients.remove(on_left)

    def _unmap(self) -> None:
        """Unmap the memory; the kernel frees it once no other process has it open or maps it."""
        descriptor, self.descriptor = self.descriptor, -1
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_FIXED | _MAP_NORESERVE
        _map(self.address, self.num_bytes, _PROT_NONE, flags, -1)
        os.close(descriptor)

    @contextlib.contextmanager
    def _refusal(self) -> Iterator[None]:
        """Turn an error of the operating system inside the block into Overloaded."""
        try:
            yield
        except OSError as error:
            raise Overloaded(
                f"this machine has no {self.num_bytes} bytes of memory for a session: "
                f"{error.strerror}"
            ) from error

    def _file_gone(self) -> None:
        self.is_kept = False
        self._budget.regain(self.num_bytes, self._users)
        for act in self._when_gone:
            act()


# Closed arenas keep their memory until their leases are returned and copy workers have unmapped
# them, for some 10 ms. A new arena waits for that room, but is made after this time all the same: a
# read that hangs keeps its lease, and other sessions must not wait for it.
_MAX_WAIT_FOR_ROOM_S = 2.0


class ArenaRegistry:
    """All arenas of a daemon that have memory, closed ones included.

    Attributes:
        num_bytes: size of those arenas.
        files: tells when an arena that clients were handed is gone.
    """

    def __init__(self, limit_bytes: int, copy_workers: CopyWorkers = NO_COPY_WORKERS) -> None:
        self.num_bytes = 0
        self.files = FileWatch()
        self._limit_bytes = limit_bytes
        self._copy_workers = copy_workers
        self._own: set[Arena] = set()  # those that this process or its copy workers map
        self._in_copy_workers: set[Arena] = set()
        self._unmapping: set[asyncio.Task[None]] = set()
        self._changed = asyncio.Event()

    def add(self, arena: Arena) -> None:
        """Count an arena until no process has its memory any more."""
        self.num_bytes += arena.num_bytes
        self._own.add(arena)
        loop = asyncio.get_running_loop()

        def unmapped() -> None:  # in any thread
            with contextlib.suppress(RuntimeError):  # the daemon ends
                loop.call_soon_threadsafe(self._unmapped, arena)

        arena.when_unmapped(unmapped)

    def map_in_copy_workers(self, arena: Arena) -> None:
        """Have copy workers map an arena before it is sealed; waits until each is idle.

        Raises:
            ArenaClosed: the arena was closed meanwhile.
        """
        with arena.lease():
            self._in_copy_workers.add(arena)
            self._copy_workers.map(arena.key, arena.descriptor)

    async def room(self, num_bytes: int) -> None:
        """Wait until `num_bytes` more are within the limit, but no longer than some seconds.

        The budget has promised them, so they are about to be given back.
        """
        if self.num_bytes + num_bytes <= self._limit_bytes:
            return
        log_event(
            "memory not given back yet", {"mapped_bytes": self.num_bytes, "needed_bytes": num_bytes}
        )
        await self._wait_until(lambda: self.num_bytes + num_bytes <= self._limit_bytes)

    async def settle(self) -> None:
        """Wait until this process has given back all closed arenas, for some seconds at most.

        Then only arenas that clients keep count as abandoned.
        """
        await self._wait_until(lambda: not any(arena.is_closed for arena in self._own))

    async def _wait_until(self, holds: Callable[[], bool]) -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_MAX_WAIT_FOR_ROOM_S):
                while not holds():
                    self._changed.clear()
                    await self._changed.wait()

    def _unmapped(self, arena: Arena) -> None:
        if arena not in self._in_copy_workers:
            self._given_back(arena)
            return
        self._in_copy_workers.remove(arena)
        task = asyncio.create_task(self._unmap(arena))
        self._unmapping.add(task)
        task.add_done_callback(self._unmapping.discard)

    async def _unmap(self, arena: Arena) -> None:
        await in_thread(partial(self._copy_workers.unmap, arena.key), "gyre-unmap")
        self._given_back(arena)

    def _given_back(self, arena: Arena) -> None:
        self.files.look()
        self._own.remove(arena)
        if arena.is_kept:
            arena.when_gone(partial(self._count_down, arena.num_bytes))
            self._changed.set()
        else:
            self._count_down(arena.num_bytes)

    def _count_down(self, num_bytes: int) -> None:
        self.num_bytes -= num_bytes
        self._changed.set()


# An arena has about this many bytes, and at least one batch group. If it is larger, a trainer that
# is a little slow makes the daemon allocate more memory than it needs; if smaller, more file
# descriptors travel to each client.
_PIECE_BYTES = 8 << 20
# A thread allocates this much before another job has its turn. With more, other jobs wait for their
# turn; with less, the threads change jobs more often.
_STEP_BYTES = 8 << 20


class Arenas:
    """Slots in the arenas of one share."""

    def __init__(
        self,
        share: Share,
        budget: Budget,
        registry: ArenaRegistry,
        workers: FairExecutor,
        *,
        shares_with_copy_workers: bool = False,
    ) -> None:
        """Make no arena yet; `allocate` makes the first.

        Args:
            share: the memory that the session has reserved.
            budget: told of the bytes that clients keep.
            registry: is told of each arena.
            workers: the threads that allocate.
            shares_with_copy_workers: whether copy workers write into the arenas.
        """
        self._share = share
        # as many whole batch groups as fit, and at least one
        self._piece_bytes = max(1, _PIECE_BYTES // share.group_bytes) * share.group_bytes
        self._budget = budget
        self._registry = registry
        self._workers = workers
        self._shares_with_copy_workers = shares_with_copy_workers
        self._making_bytes = 0  # the size of the arena in the making, or 0
        self._own: list[Arena] = []
        self._is_closed = False
        self._is_short = asyncio.Event()

    @property
    def is_complete(self) -> bool:
        """Whether no further arena can be made: all are there."""
        return self._missing_bytes <= 0

    @property
    def first(self) -> Arena:
        """The first arena."""
        return self._own[0]

    @property
    def held_bytes(self) -> int:
        """The bytes of all taken slots."""
        return sum(arena.held_bytes for arena in self._own)

    async def allocate(self, flow: Flow) -> None:
        """Make the first arena; `complete` makes the others.

        Raises:
            Overloaded: the machine does not have the memory.
        """
        await self._make(min(self._piece_bytes, self._share.num_bytes), flow)

    async def complete(self, flow: Flow, made: Callable[[], None]) -> None:
        """Make one more arena of the share whenever a batch group found no slot, until cancelled.

        Args:
            flow: the job that needs the memory.
            made: called after each new arena.

        Raises:
            Overloaded: the machine does not have the memory.
        """
        while True:
            await self._is_short.wait()
            if not self.is_complete:
                missing_bytes = self._missing_bytes
                is_last = missing_bytes < 2 * self._piece_bytes
                self._making_bytes = missing_bytes if is_last else self._piece_bytes
                try:
                    await self._make(self._making_bytes, flow)
                finally:
                    self._making_bytes = 0
                made()
            self._is_short.clear()

    def take(self, num_bytes: int) -> Slot | None:
        """Take a free slot of at least `num_bytes`.

        If there is none, return None and ask `complete` for a further arena.
        """
        slot = next((slot for arena in self._own if (slot := arena.take(num_bytes))), None)
        if slot is None:
            self._is_short.set()
        return slot

    def put_back(self, slot: Slot) -> None:
        """Free a slot whose batches are no longer needed."""
        slot.arena.put_back(slot)

    def close(self) -> None:
        """Give all arenas back; a leased one, when its last lease is returned.

        An arena in the making is given back, too: by the task that makes it, which may learn
        of its cancellation only after it has made it.
        """
        self._is_closed = True
        for arena in self._own:
            arena.close()
        self._own.clear()
        self._making_bytes = 0

    @property
    def _missing_bytes(self) -> int:
        """The bytes of the share without an arena."""
        there = sum(arena.num_bytes for arena in self._own)
        return self._share.num_bytes - there - self._making_bytes

    async def _make(self, num_bytes: int, flow: Flow) -> None:
        await self._registry.room(num_bytes)
        await self._budget.settle(flow.user)
        arena = Arena(num_bytes, self._budget, self._registry.files)
        self._registry.add(arena)
        try:
            await self._allocate(arena, flow)
            arena.seal()
        except BaseException:
            arena.close()
            raise
        if self._is_closed:  # meanwhile, so `close` has not seen this one
            arena.close()
        else:
            self._own.append(arena)

    async def _allocate(self, arena: Arena, flow: Flow) -> None:
        works = [
            partial(arena.allocate, begin, min(begin + _STEP_BYTES, arena.num_bytes))
            for begin in range(0, arena.num_bytes, _STEP_BYTES)
        ]
        if self._shares_with_copy_workers:
            works.insert(0, partial(self._registry.map_in_copy_workers, arena))
        # Consumers wait for the first arena alone, so all threads allocate it together.
        num_at_once = 1 if self._own else 1 + self._workers.num_threads
        for index in range(0, len(works), num_at_once):
            some = works[index : index + num_at_once]
            await asyncio.gather(*(self._workers.run(flow, 0, 0, work) for work in some))
