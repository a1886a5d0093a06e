"""Problems of a daemon and its node, each with its remedy: `gyre status --check`.

Each problem is one sentence: the object, the figure, what to change. The limits are those of the
alerts in `docker/prometheus`.
"""

import os
import time
from collections.abc import Iterator

from gyre_daemon.config import DaemonConfig
from gyre_daemon.config.schema import memory_limit_bytes
from gyre_daemon.monitoring.metrics import Census
from gyre_daemon.runtime.limits import descriptor_shares, own_bytes
from gyre_daemon.sessions.table import SessionTable
from gyre_daemon.storage.mounts import MOUNTS

_SLOW_READ_S = 0.25
_FULL, _NEARLY_FULL = 0.8, 0.95  # of descriptors; of memory_budget
_EXPIRES_SOON_S = 14 * 86400.0
_GIB, _MIB = 1 << 30, 1 << 20


class Checkup:
    """Looks at a daemon when it is asked to."""

    def __init__(self, config: DaemonConfig, sessions: SessionTable) -> None:
        self._config = config
        self._sessions = sessions

    def problems(self, census: Census) -> list[str]:
        """A sentence for each problem."""
        return [
            *self._mounts(),
            *self._cache(census),
            *self._descriptors(),
            *self._memory(census),
            *_files(census),
        ]

    def _mounts(self) -> Iterator[str]:
        for mount in MOUNTS:
            name = f"the mount {mount.path} ({mount.file_system})"
            if hangs_s := mount.hangs_since_s:
                yield f"{name} has not answered for {hangs_s:.0f} s: restore its server."
            elif (read_s := mount.latency.median_s or 0.0) > _SLOW_READ_S:
                yield (
                    f"{name} takes {read_s:.2f} s for a read: look at its server's load, or keep "
                    "its blocks on a local disk (cache_dir)."
                )

    def _cache(self, census: Census) -> Iterator[str]:
        config, counts = self._config, census.counts.cache
        if counts.is_disk_failing:
            yield (
                f"no block is written to cache_dir ({config.cache_dir}): make room, or look for "
                "the disk's errors in the log."
            )
        cached = {
            dataset.fingerprint: dataset.num_bytes
            for dataset in (session.request.dataset for session in self._sessions)
            if dataset.storage.block_cache
        }
        needed = sum(cached.values())
        has_disk = bool(config.cache_dir) and not counts.is_disk_failing
        size = config.cache_memory + (config.cache_disk if has_disk else 0)
        if counts.num_evicted and needed > size:
            key = "cache_disk" if has_disk else "cache_memory, or cache_dir with cache_disk,"
            yield (
                f"the node cache has {_size(size)} and jobs read {_size(needed)} through it, so "
                f"each epoch reads some again: raise {key} by {_size(needed - size)}."
            )

    def _descriptors(self) -> Iterator[str]:
        shares, num_open = descriptor_shares(), len(os.listdir("/proc/self/fd"))  # noqa: PTH208
        if num_open > _FULL * shares.limit:
            yield f"{num_open} of {shares.limit} descriptors are open: raise LimitNOFILE=."
        elif shares.connections < self._config.max_requests:
            yield (
                f"{shares.limit} descriptors allow {shares.connections} requests in flight, and "
                f"max_requests is {self._config.max_requests}: raise LimitNOFILE= to "
                f"{4 * self._config.max_requests}, or lower max_requests."
            )

    def _memory(self, census: Census) -> Iterator[str]:
        budget, abandoned = census.memory_budget_bytes, census.memory_abandoned_bytes
        # all but the blocks in memory: indexes, requests, the interpreter
        own = max(0, own_bytes() - census.counts.cache.memory_bytes)
        needed, limit = budget + self._config.cache_memory + own, memory_limit_bytes()
        if limit is not None and needed > limit:
            yield (
                f"memory_budget, cache_memory and the daemon's own {_size(own)} are "
                f"{_size(needed)}, and its control group allows {_size(limit)}: raise the limit "
                "(MemoryMax=, --memory), or lower memory_budget."
            )
        if census.memory_reserved_bytes + abandoned > _NEARLY_FULL * budget:
            yield (
                f"sessions hold {_size(census.memory_reserved_bytes + abandoned)} of "
                f"memory_budget ({_size(budget)}), and the next may be refused: raise it, or "
                "lower session_memory."
            )
        if abandoned > budget // 10:
            yield (
                f"clients keep {_size(abandoned)} of sessions that have ended: end those that are "
                "frozen."
            )


def _files(census: Census) -> Iterator[str]:
    counts = census.counts
    if not counts.is_reload_good:
        yield "the last reload was refused: correct the file (gyred check-config), and reload it."
    for (kind, name), at in counts.expires.items():
        left_s = at - time.time()
        if left_s < _EXPIRES_SOON_S:
            when = f"expires in {left_s / 86400:.1f} days" if left_s > 0 else "has expired"
            yield f"the {kind} {name} {when}: replace its file."


def _size(num_bytes: int) -> str:
    if num_bytes >= _GIB:
        return f"{num_bytes / _GIB:.1f} GiB"
    return f"{max(1, num_bytes // _MIB)} MiB"
