"""Shows a format the bytes of shards that it wants to see when a dataset is opened, and remembers what it made of them.

What many shards or remote ones told is kept in one file among the sidecars, for exactly these shards in these versions.
"""

import asyncio
import hashlib
import json
import logging
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Executor
from typing import Any

import numpy as np

from gyre_daemon.datasets.formats import Found, Probe, Wanted
from gyre_daemon.datasets.formats.base import Arrays
from gyre_daemon.datasets.sidecars import SidecarKey, SidecarStore
from gyre_daemon.errors import Overloaded, ShardMissing, first_error
from gyre_daemon.runtime.events import log_event
from gyre_daemon.storage.base import Reads, Storage
from gyre_daemon.storage.opener import StorageOpener
from gyre_daemon.storage.shard import Shard

_MAX_UNKEPT = 16  # local shards: to look at so few takes less time than a file that says what they told
_VERSION = "probe/1"


class Prober:
    """Asks the shards of one daemon's datasets."""

    def __init__(self, opener: StorageOpener, sidecars: SidecarStore, threads: Executor) -> None:
        self._opener = opener
        self._sidecars = sidecars
        self._threads = threads

    async def look(
        self,
        probe: Callable[[Sequence[Shard]], Probe],
        storage: Storage,
        location: str,
        settings: Mapping[str, Any],
        *,
        anew: bool,
    ) -> Arrays:
        """What the format makes of its shards.

        Args:
            probe: the format's.
            storage: the shards.
            location: the dataset's, redacted.
            settings: of the storage driver.
            anew: whatever is remembered.

        Raises:
            CorruptSample: they are nothing that the format stores.
            ShardMissing, NotAllowed, StorageUnavailable: they cannot be read.
        """
        if len(storage.shards) <= _MAX_UNKEPT and storage.local_path(0):
            return await self._ask(probe(storage.shards), storage, settings)
        key = _key(location, storage.shards)
        kept = None if anew else await self._sidecars.load(key, None)
        if kept is None:
            kept = await self._ask(probe(storage.shards), storage, settings)
            await self._keep(key, kept)
        return kept

    async def _keep(self, key: SidecarKey, arrays: Arrays) -> None:
        try:
            await self._sidecars.save(key, None, arrays)
        except Overloaded as error:
            log_event("index not stored", {"shard": key.shard, "reason": error}, logging.WARNING)

    async def _ask(self, asking: Probe, storage: Storage, settings: Mapping[str, Any]) -> Arrays:
        """Answer until the format knows enough; it thinks in a thread."""
        loop = asyncio.get_running_loop()
        found: Found | None = None
        while True:
            wanted = await loop.run_in_executor(self._threads, _next, asking, found)
            if not isinstance(wanted, Wanted):
                return wanted
            found = await self._find(wanted, storage, settings)

    async def _find(self, wanted: Wanted, storage: Storage, settings: Mapping[str, Any]) -> Found | None:
        if not wanted.suffix:
            return await _read(storage, wanted.shard, wanted)
        shards = list(dict.fromkeys(wanted.shard))
        beside = await self._opener.open_beside(storage, shards, wanted.suffix, settings)
        if beside is not None:
            return await _read(beside, [shards.index(shard) for shard in wanted.shard], wanted)
        if wanted.is_optional:
            return None
        names = f"{storage.shards[shards[0]].name} to {storage.shards[shards[-1]].name}"
        raise ShardMissing(f"not each of the shards {names} has its {wanted.suffix} file beside it; restore the missing ones")


def _next(asking: Probe, found: Found | None) -> Wanted | Arrays:
    """What the format wants next, or what it knows."""
    try:
        return asking.send(found)
    except StopIteration as end:
        known: Arrays = end.value
        return known


async def _read(storage: Storage, files: Sequence[int], wanted: Wanted) -> Found:
    """All ranges at once, cut off at the ends of their files."""
    sizes = [storage.shards[file].size_bytes for file in files]
    starts = [min(start, size) for start, size in zip(wanted.start, sizes, strict=True)]
    stops = [min(stop, size) for stop, size in zip(wanted.stop, sizes, strict=True)]
    pieces = [np.empty(stop - start, np.uint8) for start, stop in zip(starts, stops, strict=True)]
    try:
        await storage.read(Reads.into(pieces, files, starts))
    except ExceptionGroup as errors:
        raise first_error(errors) from errors
    return Found([piece.tobytes() for piece in pieces], sizes)


def _key(location: str, shards: Sequence[Shard]) -> SidecarKey:
    """One file for all shards; it counts for these names, sizes and versions."""
    listed = json.dumps([(shard.name, shard.size_bytes, shard.version) for shard in shards])
    version = hashlib.blake2b(listed.encode(), digest_size=16).hexdigest()
    return SidecarKey(location, "all shards' headers", sum(shard.size_bytes for shard in shards), version, _VERSION)
