"""Limits that the machine sets for the descriptors of this process."""

import resource
from dataclasses import dataclass

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
