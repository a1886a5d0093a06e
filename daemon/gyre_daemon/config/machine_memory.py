"""How much memory this process may have: the machine's, or the limit of its control groups."""

import os
from pathlib import Path

from gyre_daemon.errors import ConfigError

_CGROUPS = Path("/sys/fs/cgroup")
_MEMBERSHIP = Path("/proc/self/cgroup")
_PART_FOR_BATCHES = 4


def default_memory_budget() -> int:
    """A fourth of the memory that this process may have; reserved, not allocated."""
    machine_bytes = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    limit_bytes = memory_limit_bytes()
    may_have_bytes = machine_bytes if limit_bytes is None else min(machine_bytes, limit_bytes)
    return may_have_bytes // _PART_FOR_BATCHES


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
