"""Opens datasets, for a daemon and for `gyred check-config`, which looks for their files first.

On SIGHUP, a `Reloader` takes over datasets, operators, job weights and limits of the configuration.
The sessions of a user who may no longer read their dataset end. A file without any dataset is
refused where some are served: it may be half-written. A configuration of thousands of datasets
takes seconds to read, check and compare, and the names of users may come from a server that does
not answer. So all that happens in a thread.
"""

import asyncio
import errno
import itertools
import logging
import os
import stat
import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path

from msgspec import Struct

from gyre_daemon.access.policy import Policy
from gyre_daemon.config import SCALAR_KEYS, DaemonConfig, DatasetConfig
from gyre_daemon.datasets.checks import CorruptReports
from gyre_daemon.datasets.dataset import Dataset
from gyre_daemon.datasets.indexing.catalog import Catalog
from gyre_daemon.datasets.indexing.unpacked import UnpackedShards
from gyre_daemon.datasets.sidecars import SidecarStore
from gyre_daemon.errors import (
    ConfigError,
    GyreError,
    InvalidInput,
    NotAllowed,
    StorageUnavailable,
    first_error,
)
from gyre_daemon.fetching.columns import Measurer
from gyre_daemon.fetching.dataset_opener import DatasetOpener
from gyre_daemon.fetching.transformed import keep_records
from gyre_daemon.monitoring.metrics import Metrics
from gyre_daemon.runtime.events import log_event, notify
from gyre_daemon.runtime.listen import NotOurs, check_folder
from gyre_daemon.runtime.threads import DaemonThreads, FairExecutor, in_thread
from gyre_daemon.sessions.table import SessionTable
from gyre_daemon.storage.beneath import NotRegular, file_error
from gyre_daemon.storage.cache.node import NodeCache
from gyre_daemon.storage.engine.endpoint import EndpointOptions
from gyre_daemon.storage.location import parse_location
from gyre_daemon.storage.mounts import MOUNTS
from gyre_daemon.storage.sources.opener import StorageOpener
from gyre_daemon.transforms.declared import Transforms, TransformWorkers
from gyre_daemon.transforms.recipes import to_steps
from gyre_daemon.workers.compute_workers import ComputeServer
from gyre_daemon.workers.copy_workers import NO_COPY_WORKERS, CopyWorkers


class DatasetParts(Struct, frozen=True):
    """The parts of a daemon that open datasets."""

    catalog: Catalog
    transforms: Transforms
    measurer: Measurer
    _opener: StorageOpener
    _compute_server: ComputeServer
    _cache: NodeCache | None

    @classmethod
    def of(
        cls,
        config: DaemonConfig,
        fallback_index_dir: Path,
        workers: FairExecutor,
        metrics: Metrics,
        cache: NodeCache | None,
        copy_workers: CopyWorkers = NO_COPY_WORKERS,
        *,
        is_private: bool = False,
    ) -> "DatasetParts":
        """Make them; they own the cache, too.

        Args:
            config: checked.
            fallback_index_dir: for indexes that can be stored nowhere else.
            workers: the daemon's threads.
            metrics: of the daemon.
            cache: of the node; None for none.
            copy_workers: started.
            is_private: whether clients may define datasets and transforms.
        """
        terms = EndpointOptions(
            config.max_requests,
            config.read_deadline_s,
            config.hedge,
            config.hub_requests_per_s,
            config.mount_threads,
        )
        opener = StorageOpener(workers, terms, metrics, copy_workers)
        sidecars = SidecarStore(config.index_dir, fallback_index_dir)
        own_folder = Path(config.index_dir) if config.index_dir else fallback_index_dir.parent
        unpack_dir = Path(config.unpack_dir or own_folder / "unpacked")
        reports = CorruptReports(Path(config.report_dir or own_folder / "reports"))
        compute_server = ComputeServer()
        catalog = Catalog(
            config.datasets,
            opener,
            sidecars,
            cache,
            allow_ad_hoc=is_private,
            compute_server=compute_server,
            unpacked=UnpackedShards(unpack_dir, config.unpack_disk),
            reports=reports,
        )
        num_workers = config.num_transform_workers or len(os.sched_getaffinity(0))
        transforms = Transforms(
            TransformWorkers(
                compute_server, num_workers, config.transform_deadline_s, metrics.transforms
            ),
            config.installed_transforms,
            partial(keep_records, cache, workers) if cache else None,
            allow_modules=is_private,
        )
        measurer = Measurer(sidecars, workers, reports)
        return cls(catalog, transforms, measurer, opener, compute_server, cache)

    async def close(self) -> None:
        """End their processes and requests, and close their files."""
        self.catalog.close()
        self.measurer.close()
        self.transforms.close()
        self._compute_server.close()
        self._opener.close()
        if self._cache:
            await self._cache.close()


async def check_folders(config: DaemonConfig) -> None:
    """Refuse folders that others control; missing ones are made when they are needed.

    One on a mount that hangs is passed over.

    Raises:
        ConfigError: names the folder's key, and the fix.
    """
    named = {key: getattr(config, key) for key in ("cache_dir", "index_dir", "unpack_dir")}
    for key, text in named.items():
        try:
            if text:
                await MOUNTS.answered(text, check_folder, Path(text))
        except NotOurs as error:
            raise ConfigError(f"{key} cannot be used: {error.strerror}") from error
        except OSError:
            continue  # unusable folders are told when they are needed


def check_transforms(config: DaemonConfig, *, is_private: bool) -> None:
    """Refuse definitions of datasets whose transforms this daemon does not have.

    Their options are checked when a job opens the dataset.

    Raises:
        ConfigError: names the dataset and the transform.
    """
    for name, dataset in config.datasets.items():
        try:
            to_steps(
                dataset.transforms,
                config.installed_transforms,
                allow_modules=is_private,
                allow_files=True,  # the operator names them
            )
        except GyreError as error:
            raise ConfigError(f"datasets.{name}: {error}") from error


async def missing_datasets(config: DaemonConfig) -> dict[str, GyreError]:
    """Why local datasets cannot be served, by name; lists and opens nothing.

    A file or folder is missing, may not be read, or is on a mount that hangs.
    """
    missing: dict[str, GyreError] = {}
    for name, dataset in sorted(config.datasets.items()):
        if dataset.mixture:  # its sources are looked for by themselves
            continue
        location = parse_location(dataset.uri)
        if location.scheme != "file":
            continue
        try:
            for path in location.paths:
                await MOUNTS.answered(path, _look_for, path)
        except TimeoutError as error:
            missing[name] = StorageUnavailable(f"{error.strerror}. Restore its server.")
        except GyreError as error:
            missing[name] = error
    return missing


def _look_for(path: str) -> None:
    """Raise the error of a missing or unreadable path; patterns are not tried."""
    try:
        mode = Path(path).stat().st_mode  # opening a device may do something
        if not (stat.S_ISREG(mode) or stat.S_ISDIR(mode)):
            raise NotRegular
        if not os.access(path, os.R_OK):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
    except FileNotFoundError as error:
        if not any(letter in path for letter in "*?["):
            raise file_error(path, error) from error
    except OSError as error:
        raise file_error(path, error) from error


async def open_datasets(
    config: DaemonConfig, fallback_index_dir: Path, missing: Mapping[str, GyreError]
) -> dict[str, Dataset | Exception]:
    """Open all datasets at once, as the daemon would; missing indexes and lengths are kept.

    Args:
        config: checked.
        fallback_index_dir: for indexes that can be stored nowhere else.
        missing: as `missing_datasets` returned; those on a mount that hangs are not opened.

    Returns:
        Each dataset by name, or why it cannot be opened.
    """
    with DaemonThreads(config.num_io_threads, "gyre-io") as executor:
        workers, metrics = FairExecutor(executor, config.num_io_threads), Metrics()
        # A daemon that runs may have the cache's folder.
        size = config.cache_memory
        cache = NodeCache(size, None, workers, metrics.cache) if size else None
        parts = DatasetParts.of(config, fallback_index_dir, workers, metrics, cache)
        datasets = DatasetOpener(parts.catalog, parts.transforms, parts.measurer)
        hung = {n: e for n, e in missing.items() if isinstance(e, StorageUnavailable)}
        names = sorted(config.datasets.keys() - hung.keys())
        looking = asyncio.create_task(_look_at_mounts())
        try:
            opened = await asyncio.gather(
                *(_open(datasets, name, config.datasets[name]) for name in names)
            )
        finally:
            looking.cancel()
            await parts.close()
    return dict(sorted({**hung, **dict(zip(names, opened, strict=True))}.items()))


async def _look_at_mounts() -> None:
    """Log which mounts hang, until it is cancelled."""
    while True:
        MOUNTS.look()
        await asyncio.sleep(1)


async def _open(datasets: DatasetOpener, name: str, config: DatasetConfig) -> Dataset | Exception:
    try:
        return await datasets.made(name, config, config.transforms, by_client=False)
    except GyreError as error:
        return error
    except ExceptionGroup as errors:
        return first_error(errors)


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
