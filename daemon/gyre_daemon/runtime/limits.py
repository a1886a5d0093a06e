"""Limits of this process: its descriptors, and the memory of connections.

[Note: Connections that are closed]

gRPC keeps the headers of each call in memory before any code of ours sees the call, and says
nothing about its connections. None of its own limits tells strangers from others: 1,000 connections
with 16 calls each took 240 MiB, and a limit on their number or age would meet clients, too. So they
are found among the descriptors of this process, and those of strangers, and in need others, are
closed with shutdown(2), after which gRPC frees their memory.
"""

import contextlib
import ctypes
import ipaddress
import logging
import math
import os
import resource
import socket
import stat
import struct
import time
from collections.abc import Callable, Collection, Iterator
from pathlib import Path
from typing import NamedTuple
from urllib.parse import unquote

from msgspec import Struct, field

from gyre_daemon.errors import Overloaded
from gyre_daemon.runtime.events import log_event

# A quarter of the descriptors may be connections to object storage, and a quarter open shards. An
# eighth may be connections of clients to gRPC, an eighth those to the side channel, and a sixteenth
# memory shared with processes that decode or transform. The rest is kept for arenas, and
# for the daemon itself, which has some 55 open with four copy workers. Without that reserve no
# client connects while others read: under a limit of 256, one dataset in object storage took 237.
# Limits are usually in the thousands, where nothing runs short.
_SHARE_OF_CONNECTIONS = 4
_SHARE_OF_SHARDS = 4
_SHARE_OF_CLIENTS = 8
_SHARE_OF_EXCHANGES = 16
_NUM_ROOMS = 2  # of shared memory: for decoding, and for transforms
_DESCRIPTORS_PER_FILE = 2  # Python's mapping of a file duplicates its descriptor
_UNLIMITED = 1 << 30
_MAX_SHARDS = 32768  # half of the mappings that Linux allows a process


class DescriptorShares(Struct, frozen=True):
    """How the descriptors of this process are divided.

    Attributes:
        limit: of the process.
        connections: to object storage, over all endpoints; so this bounds requests in flight, too.
        shards: local files that may be open at once, over all datasets.
        clients: connections of clients, to gRPC and to the side channels each.
        exchanges: memory files of chunks in decoding, and as many of samples in transformation.
    """

    limit: int
    connections: int
    shards: int
    clients: int
    exchanges: int

    @classmethod
    def of(cls, limit: int) -> "DescriptorShares":
        """The shares under a limit, which may be `RLIM_INFINITY`."""
        limit = _UNLIMITED if limit == resource.RLIM_INFINITY else limit
        shards = limit // _SHARE_OF_SHARDS // _DESCRIPTORS_PER_FILE
        return cls(
            limit,
            max(1, limit // _SHARE_OF_CONNECTIONS),
            max(1, min(_MAX_SHARDS, shards)),
            max(1, limit // _SHARE_OF_CLIENTS),
            max(1, limit // _SHARE_OF_EXCHANGES // _NUM_ROOMS // _DESCRIPTORS_PER_FILE),
        )


def descriptor_shares() -> DescriptorShares:
    """The shares under the present limit of this process."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return DescriptorShares.of(soft)


def raise_descriptor_limit() -> int:
    """Raise the soft limit to the hard one, and return it."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    except (OSError, ValueError):  # system calls are filtered, or the kernel's ceiling is lower
        return soft
    return hard


# Descriptors that an open session may need at once: arenas, shards, requests. With less, a session
# opens and fails at its first batches; with more, newcomers are refused where they would fit.
_NUM_FOR_SESSION = 16


class SpareDescriptor:
    """One descriptor, free while it is lent."""

    def __init__(self) -> None:
        """Take a descriptor; raises OSError if none is left."""
        self._descriptor = _take()

    @contextlib.contextmanager
    def lent(self) -> Iterator[None]:
        """Leave the descriptor free inside the block, for a connection to refuse."""
        self.close()
        try:
            yield
        finally:
            with contextlib.suppress(OSError):  # the next time, maybe
                self._descriptor = _take()

    def close(self) -> None:
        """Hold nothing back any more."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1


def check_descriptors() -> None:
    """Refuse a session that would not find the descriptors that it needs.

    Raises:
        Overloaded: this process has too few left.
    """
    taken: list[int] = []
    try:
        while len(taken) < _NUM_FOR_SESSION:
            taken.append(_take())
    except OSError as error:
        raise Overloaded(
            f"a session needs {_NUM_FOR_SESSION} file descriptors, but the daemon has only "
            f"{len(taken)} left. Close a session, or raise its limit (LimitNOFILE= of the unit, or "
            "ulimit -n).",
            {"needed_descriptors": _NUM_FOR_SESSION, "free_descriptors": len(taken)},
        ) from error
    finally:
        for descriptor in taken:
            os.close(descriptor)


def _take() -> int:
    return os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)


# Over TCP, connections on which no caller has proved who it is. A client of ours calls within
# milliseconds; health probes and anonymous readers of `tcp:` have short connections, too. The
# worst headers that were tried took 60 MiB with 64 connections of 16 calls each.
MAX_STRANGERS = 64
_STRANGER_S = 30.0
# The daemon's own memory, beyond batches and cache: this share of its limit, and at least this.
# An index of 30 million samples with two fields takes the least.
_OWN_SHARE = 0.5
_LEAST_OWN_BYTES = 1 << 30
# Closed connections are logged at most once in this time, with their number.
_LOG_PAUSE_S = 10.0
_PID = struct.Struct("3i")
_malloc_trim = ctypes.CDLL(None).malloc_trim

Clock = Callable[[], float]


class Remote(NamedTuple):
    """The other end of a connection: an IP address and a port, or a process of this machine."""

    host: str
    number: int

    @classmethod
    def of_grpc(cls, text: str) -> "Remote":
        """From gRPC's form: `ipv4:127.0.0.1:1234` or `ipv6:%5B::1%5D:1234`."""
        host, _, port = unquote(text).partition(":")[2].rpartition(":")
        return cls(_plain(host.strip("[]")), int(port))

    @classmethod
    def of_socket(cls, connection: socket.socket) -> "Remote":
        """The other end of a connected socket; of a Unix socket its process.

        Raises:
            OSError: it is not connected any more.
        """
        if connection.family == socket.AF_UNIX:
            credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _PID.size)
            return cls("", _PID.unpack(credentials)[0])
        host, port = connection.getpeername()[:2]
        return cls(_plain(host), port)


class _Calls(Struct):
    """The calls of one peer, perhaps before its connection was found.

    It was last used when its connection was found, or when its last call ended; it is proven once a
    caller has proved who it is.
    """

    last_used: float
    is_proven: bool = False
    num_calls: int = 0


class _Connection(Struct, frozen=True):
    """A connection that this process has accepted; gRPC owns the socket behind `descriptor`."""

    descriptor: int
    peer: Remote
    calls: _Calls

    @property
    def is_stranger(self) -> bool:
        """Whether it came over TCP, and no caller has proved who it is."""
        return bool(self.peer.host) and not self.calls.is_proven and not self.calls.num_calls


class Connections(Struct):
    """The connections that gRPC has accepted at some addresses."""

    clock: Clock = time.monotonic
    _addresses: set[str | int] = field(default_factory=set)
    _found: dict[int, _Connection | None] = field(default_factory=dict)  # sockets, by inode
    _calls: dict[Remote, _Calls] = field(default_factory=dict)
    _num_closed: int = 0
    _logged_at: float = -math.inf

    def listen_at(self, address: str | int) -> None:
        """Look for connections at a path, or at a port."""
        self._addresses.add(address)

    @contextlib.contextmanager
    def call(self, peer: str, *, is_proven: bool) -> Iterator[None]:
        """Note a call over TCP that was admitted, as long as it goes on; gRPC names its peer."""
        calls = self._calls.setdefault(Remote.of_grpc(peer), _Calls(self.clock()))
        calls.is_proven |= is_proven
        calls.num_calls += 1
        try:
            yield
        finally:
            calls.num_calls -= 1
            calls.last_used = self.clock()

    def look(self) -> list[_Connection]:
        """Find the open connections, the newest last."""
        before, self._found = self._found, {}
        for name in os.listdir("/proc/self/fd"):  # noqa: PTH208  # numbers, without the paths
            with contextlib.suppress(OSError):
                descriptor = int(name)
                found = os.fstat(descriptor)
                if stat.S_ISSOCK(found.st_mode):
                    known, inode = found.st_ino in before, found.st_ino
                    self._found[inode] = before[inode] if known else self._accepted(descriptor)
        connections = [each for each in self._found.values() if each]
        peers = {each.peer for each in connections}
        self._calls = {
            peer: calls for peer, calls in self._calls.items() if peer in peers or calls.num_calls
        }
        return connections

    def close_strangers(self) -> None:
        """Close connections over TCP of callers that prove nothing: those beyond the limits."""
        if not any(isinstance(each, int) for each in self._addresses):
            return
        now = self.clock()
        strangers = [each for each in self.look() if each.is_stranger]
        strangers.sort(key=lambda each: each.calls.last_used)
        num_over = max(0, len(strangers) - MAX_STRANGERS)
        late = [each for each in strangers[num_over:] if now - each.calls.last_used > _STRANGER_S]
        self._close([*strangers[:num_over], *late], "no caller has proved who it is")

    def close_for_memory(self, own_bytes: int, limit_bytes: int, readers: Collection[int]) -> None:
        """Where the daemon's own memory exceeds its limit, close the newest half of connections.

        Those with a session are left alone: over TCP those with a call that goes on, and of this
        machine those of the processes `readers`.
        """
        if own_bytes <= limit_bytes:
            return
        idle = [
            each
            for each in self.look()
            if not (each.calls.num_calls if each.peer.host else each.peer.number in readers)
        ]
        newest = idle[len(idle) // 2 :]
        reason = f"the daemon itself uses {own_bytes >> 20} MiB, and may use {limit_bytes >> 20}"
        self._close(newest, reason)
        _malloc_trim(0)  # otherwise the allocator keeps the memory

    def _accepted(self, descriptor: int) -> _Connection | None:
        """The connection behind a socket; None where it is no connection of a client."""
        with socket.socket(fileno=os.dup(descriptor)) as found:
            families = (socket.AF_UNIX, socket.AF_INET, socket.AF_INET6)
            if found.type != socket.SOCK_STREAM or found.family not in families:
                return None
            if found.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
                return None
            name = found.getsockname()
            if (name if found.family == socket.AF_UNIX else name[1]) not in self._addresses:
                return None
            peer = Remote.of_socket(found)
            calls = self._calls.setdefault(peer, _Calls(self.clock()))
            return _Connection(descriptor, peer, calls)

    def _close(self, connections: Collection[_Connection], reason: str) -> None:
        for each in connections:
            with (
                contextlib.suppress(OSError),  # it has ended meanwhile
                socket.socket(fileno=os.dup(each.descriptor)) as found,
            ):
                # gRPC may have closed it, and the number may be another's by now.
                if Remote.of_socket(found) == each.peer:
                    found.shutdown(socket.SHUT_RDWR)
        self._num_closed += len(connections)
        now = self.clock()
        if self._num_closed and now >= self._logged_at + _LOG_PAUSE_S:
            facts = {"connections": self._num_closed, "reason": reason}
            log_event("connections closed", facts, logging.WARNING)
            self._num_closed, self._logged_at = 0, now


def own_limit_bytes(limit_bytes: int | None) -> int:
    """The memory that the daemon itself may use, beyond batches and cache, by its group's limit."""
    machine = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return max(_LEAST_OWN_BYTES, int(_OWN_SHARE * min(machine, limit_bytes or machine)))


def own_bytes() -> int:
    """The private memory of this process: neither files nor memory that it shares."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("RssAnon:"):
            return int(line.split()[1]) << 10
    return 0


def _plain(host: str) -> str:
    """An address in one form, whether it came over IPv4 or IPv6."""
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return host
    mapped = address.ipv4_mapped if isinstance(address, ipaddress.IPv6Address) else None
    return str(mapped or address)
