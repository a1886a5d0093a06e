"""Limits that the machine sets for this process: descriptors, and memory of its control groups."""

import resource
from dataclasses import dataclass
from pathlib import Path

from gyre_daemon.errors import ConfigError

_CGROUPS = Path("/sys/fs/cgroup")
_MEMBERSHIP = Path("/proc/self/cgroup")

# A quarter of the descriptors may be connections to object storage, and a quarter open shards. An
# eighth may be connections of clients to gRPC, an eighth those to the side channel, and a sixteenth
# memory that is shared with processes which decode or transform. The rest is kept for arenas, and
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


def check_memory_budget(budget_bytes: int, limit_bytes: int | None) -> None:
    """Refuse a memory budget above the control group's limit, where the kernel kills the daemon.

    Args:
        budget_bytes: the setting `memory_budget`.
        limit_bytes: of the control group; None for none.

    Raises:
        ConfigError: the budget is larger than the limit.
    """
    if limit_bytes is not None and budget_bytes > limit_bytes:
        raise ConfigError(
            f"memory_budget is {budget_bytes} bytes, but this process's control group may use "
            f"{limit_bytes}. Lower memory_budget to leave some for the daemon itself, or raise the "
            "limit (MemoryMax=, --memory)."
        )


def memory_limit_bytes(cgroups: Path = _CGROUPS, membership: Path = _MEMBERSHIP) -> int | None:
    """The lowest memory limit of this process's control group and its parents.

    As cgroups(7) says, a line of the membership is `ID:CONTROLLERS:PATH`, and `0::PATH` in version
    2. In a container the path may be the host's; then the limit is found at the root of the mount.

    Args:
        cgroups: where the control groups are mounted.
        membership: the file that says which groups the process is in.

    Returns:
        The limit, or None where no group has one.
    """
    limits = []
    for line in _text(membership).splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers not in ("", "memory"):
            continue
        mount, name = (
            (cgroups / "memory", "memory.limit_in_bytes")
            if controllers
            else (cgroups, "memory.max")
        )
        inside = Path("" if ".." in path.split("/") else path.lstrip("/"))
        texts = [_text(mount / folder / name) for folder in (inside, *inside.parents)]
        limits += [int(text) for text in texts if text.strip().isdecimal()]
    lowest = min(limits, default=None)
    # version 1 writes a number of that size for "no limit"
    return None if lowest is None or lowest >= 1 << 62 else lowest


def _text(path: Path) -> str:
    try:
        return path.read_text()
    except (OSError, ValueError):
        return ""
