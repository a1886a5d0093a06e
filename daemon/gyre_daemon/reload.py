"""SIGHUP: the datasets of a running daemon become those of its configuration file, or stay as they are if that is unusable."""

import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import fields, replace

from gyre_daemon.catalog import Catalog
from gyre_daemon.config import DaemonConfig
from gyre_daemon.errors import ConfigError
from gyre_daemon.events import log_event
from gyre_daemon.notify import notify

Reread = Callable[[], DaemonConfig]


def reload_datasets(running: DaemonConfig, reread: Reread, catalog: Catalog) -> DaemonConfig:
    """The configuration in force afterwards; what happened is in the log, and the service manager is told.

    Sessions go on with what they read. Only the datasets change; other keys that differ are named, and wait for a restart.
    """
    notify(f"RELOADING=1\nMONOTONIC_USEC={time.monotonic_ns() // 1000}")
    try:
        wanted = reread()
    except ConfigError as error:
        log_event("reload refused", {"reason": error}, logging.WARNING)
    else:
        log_event("reloaded", _differences(running, wanted))
        catalog.replace(wanted.datasets)
        running = replace(running, datasets=wanted.datasets)
    notify("READY=1")
    return running


def _differences(running: DaemonConfig, wanted: DaemonConfig) -> Mapping[str, list[str]]:
    before, after = running.datasets, wanted.datasets
    keys = [each.name for each in fields(DaemonConfig) if each.name != "datasets"]
    return {
        "added": sorted(after.keys() - before.keys()),
        "removed": sorted(before.keys() - after.keys()),
        "changed": sorted(name for name in after.keys() & before.keys() if after[name] != before[name]),
        "need_restart": [key for key in keys if getattr(running, key) != getattr(wanted, key)],
    }
