"""What the machine lets this process have: descriptors, and the memory of its control groups."""

import resource
from dataclasses import dataclass
from pathlib import Path

from gyre_daemon.errors import ConfigError

_CGROUPS = Path("/sys/fs/cgroup")
_MEMBERSHIP = Path("/proc/self/cgroup")

# Of the descriptors that the process may have, a quarter may be connections to object storage and a quarter open shards. The
# other half is kept for clients, of which each takes two, for arenas, of which each takes two, and for what the daemon itself
# has open (measured: 50 with four copiers). Without that reserve nobody can connect any more while others read: with a limit of
# 256, one dataset in object storage took 237. Where the limit is in the thousands, as usual, nothing is ever short.
_SHARE_OF_CONNECTIONS = 4
_SHARE_OF_SHARDS = 4
_DESCRIPTORS_PER_SHARD = 2  # its mapping has one of its own
_PLENTY = 1 << 30
_MAX_SHARDS = 32768  # half of the mappings that Linux lets a process have


@dataclass(frozen=True, slots=True)
class DescriptorShares:
    """How the descriptors of this process are divided.

    Attributes:
        limit: all that it may have.
        connections: to object storage, and so requests in flight, over all endpoints.
        shards: local files that may be open, over all datasets.
    """

    limit: int
    connections: int
    shards: int

    @classmethod
    def of(cls, limit: int) -> "DescriptorShares":
        """The shares of so many descriptors; `RLIM_INFINITY` for as many as one likes."""
        limit = _PLENTY if limit == resource.RLIM_INFINITY else limit
        shards = limit // _SHARE_OF_SHARDS // _DESCRIPTORS_PER_SHARD
        return cls(limit, max(1, limit // _SHARE_OF_CONNECTIONS), max(1, min(_MAX_SHARDS, shards)))


def descriptor_shares() -> DescriptorShares:
    """The shares of what the process may open now."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return DescriptorShares.of(soft)


def raise_descriptor_limit() -> int:
    """The process may open as many descriptors as it was ever allowed to; gives their number."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    except (OSError, ValueError):  # a filter of system calls, or a kernel with a lower ceiling
        return soft
    return hard


def check_memory_budget(budget_bytes: int, limit_bytes: int | None) -> None:
    """Refuse a budget that would have the kernel kill the daemon before it is used up.

    Args:
        budget_bytes: `memory_budget`.
        limit_bytes: of the control group; None for none.

    Raises:
        ConfigError: the budget is larger.
    """
    if limit_bytes is not None and budget_bytes > limit_bytes:
        raise ConfigError(
            f"memory_budget is {budget_bytes} bytes, but this process's control group may use {limit_bytes}: "
            "lower memory_budget, and leave some for the daemon itself, or raise the limit (MemoryMax=, --memory)"
        )


def memory_limit_bytes(cgroups: Path = _CGROUPS, membership: Path = _MEMBERSHIP) -> int | None:
    """The lowest memory limit of this process's control group and those around it; None where there is none.

    See cgroups(7): a line of the membership is `ID:CONTROLLERS:PATH`, of version 2 `0::PATH`. In a container the path may be
    the host's; the limit then stands at the root of what is mounted.

    Args:
        cgroups: where the control groups are mounted.
        membership: says which of them the process is in.
    """
    limits = []
    for line in _text(membership).splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers not in ("", "memory"):
            continue
        mount, name = (cgroups / "memory", "memory.limit_in_bytes") if controllers else (cgroups, "memory.max")
        inside = Path("" if ".." in path.split("/") else path.lstrip("/"))
        texts = [_text(mount / folder / name) for folder in (inside, *inside.parents)]
        limits += [int(text) for text in texts if text.strip().isdecimal()]
    lowest = min(limits, default=None)
    return None if lowest is None or lowest >= 1 << 62 else lowest  # version 1 writes "none" as a number of that size


def _text(path: Path) -> str:
    try:
        return path.read_text()
    except (OSError, ValueError):
        return ""
