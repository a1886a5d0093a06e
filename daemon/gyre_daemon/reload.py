"""SIGHUP: the daemon takes over datasets, operators, job weights and limits of its configuration.

The sessions of a user who may no longer read their dataset end.

A file without any dataset is refused where some are served: it may be half-written.

A configuration of thousands of datasets takes seconds to read, check and compare, and the names of
users may come from a server that does not answer. So all that happens in a thread.
"""

import asyncio
import itertools
import logging
import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial

from msgspec import Struct

from gyre_daemon.access.policy import Policy
from gyre_daemon.config import SCALAR_KEYS, DaemonConfig
from gyre_daemon.datasets.indexing.catalog import Catalog
from gyre_daemon.errors import ConfigError, InvalidInput, NotAllowed
from gyre_daemon.runtime.events import log_event
from gyre_daemon.runtime.liveness import notify
from gyre_daemon.runtime.threads import in_thread
from gyre_daemon.sessions.table import SessionTable

# Sessions checked at once after a reload: some microseconds each.
_CHECKED_AT_ONCE = 200


class _Reading(Struct, frozen=True):
    """A configuration that was read, its changes, and its rules."""

    config: DaemonConfig
    policy: Policy
    added: list[str]
    removed: list[str]
    changed: list[str]
    reweighed: list[str]
    need_restart: list[str]

    @classmethod
    def of(cls, reread: Callable[[], DaemonConfig], running: DaemonConfig) -> "_Reading":
        """Read the configuration and compare it with the one in force.

        Raises:
            ConfigError: it cannot be used.
        """
        wanted = reread()
        return cls(
            wanted,
            Policy(wanted),
            *_differences(running.datasets, wanted.datasets),
            sorted(itertools.chain(*_differences(running.job_weights, wanted.job_weights))),
            [
                key
                for key in (*SCALAR_KEYS, "tokens")
                if key != "admin" and getattr(running, key) != getattr(wanted, key)
            ],
        )


class Reloader:
    """Reads the configuration again when it is asked to, and applies it."""

    def __init__(
        self,
        running: DaemonConfig,
        reread: Callable[[], DaemonConfig],
        catalog: Catalog,
        sessions: SessionTable,
        policy: Policy,
    ) -> None:
        """Keep the objects that a reload needs.

        Args:
            running: the configuration in force.
            reread: reads and checks the file; raises ConfigError where it cannot be used.
            catalog: gets the datasets.
            sessions: get the job weights, and end where their owner lost access.
            policy: gets the rules.
        """
        self._running = running
        self._reread = reread
        self._catalog = catalog
        self._sessions = sessions
        self._policy = policy
        self._asked = asyncio.Event()

    def ask(self) -> None:
        """Have the file read; once more if it is being read now."""
        self._asked.set()

    async def run(self) -> None:
        """Reload after each `ask`, without end."""
        while True:
            await self._asked.wait()
            self._asked.clear()
            await self.reload()

    async def reload(self) -> None:
        """Read the file and apply it; log the result and tell the service manager."""
        notify(f"RELOADING=1\nMONOTONIC_USEC={time.monotonic_ns() // 1000}")
        metrics = self._sessions.resources.metrics
        try:
            await self._apply(await self._reading())
        except InvalidInput as error:
            metrics.is_reload_good = False
            facts = {"reason": error, "kept": sorted(self._running.datasets)}
            log_event("reload refused", facts, logging.WARNING)
        else:
            metrics.is_reload_good = True
        metrics.reloaded_at = time.time()
        notify("READY=1")

    async def _reading(self) -> _Reading:
        """The configuration as it is now.

        Raises:
            ConfigError: it cannot be used.
        """
        reading = await in_thread(partial(_Reading.of, self._reread, self._running), "gyre-reload")
        if self._running.datasets and not reading.config.datasets:
            raise ConfigError(
                "the file has no dataset at all, as if it was empty or half-written; "
                "to serve none, restart the daemon instead of reloading it"
            )
        return reading

    async def _apply(self, reading: _Reading) -> None:
        """Replace datasets, rules and weights; open sessions keep the dataset that they read."""
        running, wanted = self._running, reading.config
        others = {*reading.removed, *reading.changed}
        replaced = Counter(
            name for session in self._sessions if (name := session.request.dataset.name) in others
        )
        facts = {
            "added": reading.added,
            "removed": reading.removed,
            "changed": reading.changed,
            "reweighed": reading.reweighed,
            "limits_changed": running.limits != wanted.limits,
            "need_restart": reading.need_restart,
            "sessions_on_replaced": dict(replaced),
        }
        log_event("reloaded", facts)
        self._catalog.replace(wanted.datasets)
        self._sessions.reweigh(wanted.job_weights)
        self._policy.take_over(reading.policy)
        self._sessions.resources.limits.replace(wanted.limits)
        self._running = replace(
            running,
            datasets=wanted.datasets,
            job_weights=wanted.job_weights,
            admin=wanted.admin,
            limits=wanted.limits,
        )
        await self._end_sessions_without_access()

    async def _end_sessions_without_access(self) -> None:
        for number, session in enumerate(list(self._sessions), 1):
            request = session.request
            try:
                self._policy.check_session(request.owner, request.dataset.name, request.reader.job)
            except NotAllowed as reason:
                self._sessions.close(session.session_id, reason)
            if number % _CHECKED_AT_ONCE == 0:
                await asyncio.sleep(0)


def _differences(
    before: Mapping[str, object], after: Mapping[str, object]
) -> tuple[list[str], list[str], list[str]]:
    """The keys that were added, removed and changed."""
    changed = (key for key in before.keys() & after.keys() if before[key] != after[key])
    return (
        sorted(after.keys() - before.keys()),
        sorted(before.keys() - after.keys()),
        sorted(changed),
    )
