"""SIGHUP: datasets and job weights of a running daemon become those of its configuration file, unless that is unusable.

A file that is being written when it is read may be valid and yet lack datasets. So one without any dataset is refused where
some are served, and a dataset is removed only when two readings a second apart are equal.
"""

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import fields, replace

from gyre_daemon.config import DaemonConfig
from gyre_daemon.datasets.catalog import Catalog
from gyre_daemon.errors import ConfigError, InvalidInput
from gyre_daemon.runtime.events import log_event
from gyre_daemon.runtime.notify import notify
from gyre_daemon.sessions.table import SessionTable

Reread = Callable[[], DaemonConfig]
Sleep = Callable[[float], Awaitable[None]]

_CONFIRM_S = 1.0  # between two readings: longer than an editor or a copy takes to write a file
_MAX_READINGS = 30  # of a file that changes each time


class Reloader:
    """Takes the configuration in when it is asked to."""

    def __init__(
        self, running: DaemonConfig, reread: Reread, catalog: Catalog, sessions: SessionTable, sleep: Sleep = asyncio.sleep
    ) -> None:
        """Nobody has asked yet.

        Args:
            running: what is in force.
            reread: gives the configuration as it is now; raises ConfigError where it cannot be used.
            catalog: whose datasets are replaced.
            sessions: whose weights are replaced.
            sleep: waits for so many seconds.
        """
        self._running = running
        self._reread = reread
        self._catalog = catalog
        self._sessions = sessions
        self._sleep = sleep
        self._asked = asyncio.Event()

    def ask(self) -> None:
        """Have the configuration read, again if it is being read now."""
        self._asked.set()

    async def run(self) -> None:
        """Reload whenever somebody asks, for ever; what came of it is in the log, and the service manager is told."""
        while True:
            await self._asked.wait()
            self._asked.clear()
            notify(f"RELOADING=1\nMONOTONIC_USEC={time.monotonic_ns() // 1000}")
            try:
                self._take_in(await self._wanted())
            except InvalidInput as error:
                facts = {"reason": error, "kept": sorted(self._running.datasets)}
                log_event("reload refused", facts, logging.WARNING)
            notify("READY=1")

    async def _wanted(self) -> DaemonConfig:
        """A configuration that is meant: it removes no dataset, or was read twice.

        Raises:
            ConfigError: it cannot be used.
        """
        before: DaemonConfig | None = None
        for _ in range(_MAX_READINGS):
            wanted = self._checked()
            missing = sorted(self._running.datasets.keys() - wanted.datasets.keys())
            if not missing or wanted == before:
                return wanted
            log_event("datasets missing", {"missing": missing, "read_again_after_s": _CONFIRM_S}, logging.WARNING)
            before = wanted
            await self._sleep(_CONFIRM_S)
        raise ConfigError(f"the file lacks datasets and changed at each of {_MAX_READINGS} readings; reload when it is written")

    def _checked(self) -> DaemonConfig:
        wanted = self._reread()
        if self._running.datasets and not wanted.datasets:
            raise ConfigError(
                "the file has no dataset at all, as if it was empty or half-written; "
                "to serve none, restart the daemon instead of reloading it"
            )
        return wanted

    def _take_in(self, wanted: DaemonConfig) -> None:
        """Sessions go on with what they read. Other keys that differ are named, and wait for a restart."""
        facts = _differences(self._running, wanted)
        replaced = Counter(
            name
            for session in self._sessions
            if (name := session.request.dataset.name) in (*facts["removed"], *facts["changed"])
        )
        log_event("reloaded", {**facts, "sessions_on_replaced": dict(replaced)})
        self._catalog.replace(wanted.datasets)
        self._sessions.reweigh(wanted.job_weights)
        self._running = replace(self._running, datasets=wanted.datasets, job_weights=wanted.job_weights)


def _differences(running: DaemonConfig, wanted: DaemonConfig) -> Mapping[str, list[str]]:
    before, after = running.datasets, wanted.datasets
    weights, weights_after = running.job_weights, wanted.job_weights
    keys = [each.name for each in fields(DaemonConfig) if each.name not in ("datasets", "job_weights")]
    return {
        "added": sorted(after.keys() - before.keys()),
        "removed": sorted(before.keys() - after.keys()),
        "changed": sorted(name for name in after.keys() & before.keys() if after[name] != before[name]),
        "reweighed": sorted(
            pattern for pattern in weights.keys() | weights_after.keys() if weights.get(pattern) != weights_after.get(pattern)
        ),
        "need_restart": [key for key in keys if getattr(running, key) != getattr(wanted, key)],
    }
