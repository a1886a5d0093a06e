"""Limits that the machine sets for the descriptors of this process."""

import contextlib
import os
import resource
from collections.abc import Iterator
from dataclasses import dataclass

from gyre_daemon.errors import Overloaded

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


@dataclass(frozen=True, slots=True)
class DescriptorShares:
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
        """Take a descriptor.

        Raises:
            OSError: none is left.
        """
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
