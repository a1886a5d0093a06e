"""SIGHUP: datasets and job weights of a running daemon become those of its configuration file, unless that is unusable."""

import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import fields, replace

from gyre_daemon.catalog import Catalog
from gyre_daemon.config import DaemonConfig
from gyre_daemon.errors import ConfigError
from gyre_daemon.events import log_event
from gyre_daemon.notify import notify
from gyre_daemon.sessions import SessionTable

Reread = Callable[[], DaemonConfig]


def reload(running: DaemonConfig, reread: Reread, catalog: Catalog, sessions: SessionTable) -> DaemonConfig:
    """The configuration in force afterwards; what happened is in the log, and the service manager is told.

    Sessions go on with what they read. Other keys that differ are named, and wait for a restart.
    """
    notify(f"RELOADING=1\nMONOTONIC_USEC={time.monotonic_ns() // 1000}")
    try:
        wanted = reread()
    except ConfigError as error:
        log_event("reload refused", {"reason": error}, logging.WARNING)
    else:
        log_event("reloaded", _differences(running, wanted))
        catalog.replace(wanted.datasets)
        sessions.reweigh(wanted.job_weights)
        running = replace(running, datasets=wanted.datasets, job_weights=wanted.job_weights)
    notify("READY=1")
    return running


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
