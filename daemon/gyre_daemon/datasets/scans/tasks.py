"""A shard that is scanned on another machine, or in another process: its input, and the scan.

A task has all that its machine needs to read the shard: the same code, and either the file at the
same path or the storage's settings. Credentials that are not in these settings are those of that
machine. The task comes from the daemon, so it may be a pickle. The reply comes from a process that
read hostile bytes, so it is not.
"""

import asyncio
import importlib.metadata
import pickle
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, BinaryIO, cast

from gyre_daemon.datasets.formats.base import Arrays, Scan
from gyre_daemon.datasets.scans.server import Run, reply_of
from gyre_daemon.errors import ConfigError
from gyre_daemon.monitoring.metrics import Metrics
from gyre_daemon.runtime.fair import FairExecutor
from gyre_daemon.runtime.threads import DaemonThreads, in_thread
from gyre_daemon.storage.base import Storage, StorageFile
from gyre_daemon.storage.beneath import LocalFile
from gyre_daemon.storage.engine.endpoint import EndpointOptions
from gyre_daemon.storage.local.listing import check_listed
from gyre_daemon.storage.location import Location
from gyre_daemon.storage.opening.opener import StorageOpener
from gyre_daemon.storage.opening.shard_files import open_file, open_shard
from gyre_daemon.storage.shard import Shard, changed

_NUM_THREADS = 2  # of the storage; the scan has its own


@dataclass(frozen=True, slots=True)
class ShardTask:
    """A shard to scan.

    Attributes:
        run: of the format's `Scan`.
        seeks: of the format's `Scan`.
        shard: as it was listed.
        file: where it is on disk; None of an object.
        path: of the object, with its scheme; of a file, for messages.
        settings: of the object's storage; they may have credentials.
        options: of the object's endpoint.
        package: the version of this package in the daemon.
    """

    run: Run
    seeks: bool
    shard: Shard
    file: LocalFile | None
    path: str
    settings: Mapping[str, Any]
    options: EndpointOptions
    package: str

    @classmethod
    def of(
        cls,
        scan: Scan,
        storage: Storage,
        number: int,
        settings: Mapping[str, Any],
        options: EndpointOptions,
    ) -> "ShardTask":
        """The task for one shard of a storage."""
        return cls(
            scan.run,
            scan.seeks,
            storage.shards[number],
            storage.local_file(number),
            storage.path(number),
            settings,
            options,
            importlib.metadata.version("gyre-ml"),
        )


def scan_shard(pickled: bytes) -> bytes:
    """Scan the shard of a pickled `ShardTask`; the reply is that of `server`."""
    task: ShardTask = pickle.loads(pickled)
    return reply_of(task.shard.name, lambda: _scan(task))


def _scan(task: ShardTask) -> Arrays:
    installed = importlib.metadata.version("gyre-ml")
    if installed != task.package:
        raise ConfigError(
            f"a worker has gyre-ml {installed}, and the daemon {task.package}; install the "
            "daemon's version on all nodes of the cluster"
        )
    if task.file is None:
        return asyncio.run(_scan_object(task))
    with open_file(task.file, task.shard.name) as file:
        arrays = task.run(task.shard.name, file)
    check_listed(task.file, task.shard)
    return arrays


async def _scan_object(task: ShardTask) -> Arrays:
    listed = task.shard
    location = Location(task.path.partition("://")[0], (task.path,), task.path)
    with DaemonThreads(_NUM_THREADS, "gyre-io") as threads:
        opener = StorageOpener(FairExecutor(threads, _NUM_THREADS), task.options, Metrics())
        try:
            storage = await opener.open(location, task.settings, "*")
            (found,) = storage.shards
            if (found.size_bytes, found.version) != (listed.size_bytes, listed.version):
                raise changed(listed.name)
            storage.shards = (listed,)  # of the same object, under the name that errors give it
            loop = asyncio.get_running_loop()
            return await in_thread(partial(_scan_storage, task, storage, loop), "gyre-scan")
        finally:
            opener.close()


def _scan_storage(task: ShardTask, storage: Storage, loop: asyncio.AbstractEventLoop) -> Arrays:
    name = task.shard.name
    if task.seeks:
        return task.run(name, cast("BinaryIO", StorageFile(storage, loop)))
    with open_shard(storage, 0, loop) as file:
        return task.run(name, file)
