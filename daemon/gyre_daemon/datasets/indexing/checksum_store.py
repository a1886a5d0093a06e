"""Keeps the checksums of local shards that an operator had taken (`gyre index --checksums`).

[Note: When a local shard is served] in `storage/checksums.py` explains their use.
"""

import asyncio
import threading

import numpy as np

from gyre_daemon.datasets.sidecars.file import Arrays
from gyre_daemon.datasets.sidecars.store import Check, SidecarKey, SidecarStore
from gyre_daemon.storage.checksums import CHECKSUM_BYTES, Checksums, ShardChecksums, num_blocks
from gyre_daemon.storage.local.listing import file_error
from gyre_daemon.storage.mounts import MOUNTS

CHECKSUMS_SUFFIX = ".gyre-checksums"
_KIND = "checksums/1"
_NAME = "checksums"


class ChecksumStore:
    """The checksums of all datasets of a daemon, in its index folder."""

    def __init__(self, sidecars: SidecarStore) -> None:
        """Read nothing yet.

        Args:
            sidecars: any kind; checksums are stored in the same folders, never next to a shard.
        """
        self._sidecars = sidecars.sibling(CHECKSUMS_SUFFIX)

    def serve(self, location: str, shards: ShardChecksums) -> None:
        """Have the stored checksums of a shard loaded when a read needs them, in any thread."""
        loop = asyncio.get_running_loop()

        async def load(shard: int) -> Checksums | None:
            check = _check(shards, shard)
            arrays = await self._sidecars.load(_key(location, shards, shard), None, check)
            return None if arrays is None else arrays[_NAME]

        def load_in_thread(shard: int) -> Checksums | None:
            return asyncio.run_coroutine_threadsafe(load(shard), loop).result()

        shards.load = load_in_thread

    async def take(
        self, location: str, shards: ShardChecksums, shard: int, stopped: threading.Event
    ) -> Checksums | None:
        """Take and store the checksums of one shard now.

        None if it has changed since it was listed, or `stopped` was set meanwhile.

        Raises:
            ShardMissing, NotAllowed, StorageUnavailable: it cannot be read.
            Overloaded: they cannot be stored.
        """
        try:
            checksums = await MOUNTS.run(shards.folder(shard), shards.take, shard, stopped)
        except OSError as error:
            raise file_error(shards.listed[shard].name, error) from error
        if checksums is not None:
            await self._save(location, shards, shard, checksums)
        return checksums

    async def keep(
        self, location: str, shards: ShardChecksums, shard: int, stopped: threading.Event
    ) -> None:
        """Store the checksums of one shard for later daemons; take them if there are none.

        Nothing is stored if `stopped` is set before all are taken.

        Raises:
            ShardMissing, NotAllowed, StorageUnavailable: it cannot be read.
            Overloaded: they cannot be stored.
        """
        stored = await self.stored(location, shards, shard)
        if stored and stored[1]:
            shards.add(shard, stored[0])
        elif shard in shards.known:
            await self._save(location, shards, shard, shards.known[shard])
        else:
            await self.take(location, shards, shard, stopped)

    async def stored(
        self, location: str, shards: ShardChecksums, shard: int
    ) -> tuple[Checksums, bool] | None:
        """The checksums last stored for a shard, and whether it was then as it is listed now.

        None if there are none.
        """
        found = await self._sidecars.load_latest(
            _key(location, shards, shard), None, _check(shards, shard)
        )
        if found is None or _NAME not in found[0]:
            return None
        return found[0][_NAME], found[1]

    async def _save(
        self, location: str, shards: ShardChecksums, shard: int, checksums: Checksums
    ) -> None:
        await self._sidecars.save(_key(location, shards, shard), None, {_NAME: checksums})


def _check(shards: ShardChecksums, shard: int) -> Check:
    """Refuses arrays that are no checksums of a shard of this size."""

    def check(arrays: Arrays) -> None:
        checksums = arrays.get(_NAME)
        expected = num_blocks(shards.listed[shard].size_bytes), CHECKSUM_BYTES
        if checksums is None or checksums.dtype != np.uint8 or checksums.shape != expected:
            raise ValueError("it has no checksums of this shard")

    return check


def _key(location: str, shards: ShardChecksums, shard: int) -> SidecarKey:
    listed = shards.listed[shard]
    return SidecarKey(location, listed.name, listed.size_bytes, listed.version, _KIND)
