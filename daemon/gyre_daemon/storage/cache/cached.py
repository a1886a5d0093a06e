"""A storage behind the node cache."""

import asyncio
import hashlib
import json
import secrets
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path

from gyre_daemon.runtime.fair import Flow
from gyre_daemon.storage.base import Bounds, Reads, Storage
from gyre_daemon.storage.cache.blocks import BlockMap, Integers
from gyre_daemon.storage.cache.node import NodeCache
from gyre_daemon.storage.cache.volume import Volume
from gyre_daemon.storage.shard import Shard

_MIN_BLOCK_BYTES = 256 << 10
_MAX_BLOCKS = 1 << 17  # of one dataset: what is known of each takes memory


class CachedStorage:
    """The shards of one dataset, read through the cache of the node.

    A job that asks for whole blocks gets its own size of them. All others share blocks that are small enough for a first batch
    not to wait long, and large enough to bring many samples with one request.
    """

    def __init__(self, storage: Storage, location: str, cache: NodeCache, block_map: Callable[[int], BlockMap]) -> None:
        """Stand before a storage.

        Args:
            storage: where the bytes come from.
            location: the dataset's; with the shards' names and versions it says whose blocks these are.
            cache: the node's.
            block_map: the dataset's blocks of about so many bytes; computation, done in a thread.
        """
        self.shards = storage.shards
        self._storage = storage
        self._bounds = Bounds(storage.shards)
        self._cache = cache
        self._block_map = block_map
        self._identity = _identity(location, storage.shards)
        self._shared_block_bytes = shared_block_bytes(storage.shards)
        self._volumes: dict[int, asyncio.Task[Volume]] = {}

    @property
    def reads_in_bulk(self) -> bool:
        """See `Storage.reads_in_bulk`: true once the cache has every block."""
        return any(opening.done() and _is_complete(opening) for opening in self._volumes.values())

    async def read(self, reads: Reads) -> None:
        """See `Storage.read`."""
        self._bounds.check(reads)
        reads = reads.nonempty()
        if len(reads):
            await self._cache.read(await self._volume(reads.block_bytes or self._shared_block_bytes), reads)

    async def expect(self, block_bytes: int, blocks: Integers, flow: Flow) -> None:
        """Blocks of a size that a job reads next, in this order: they are fetched as soon as there is room for them."""
        self._cache.expect(await self._volume(block_bytes), blocks, flow)

    def stream(self, shard: int) -> AsyncIterator[bytes]:
        """See `Storage.stream`; nothing of it is kept."""
        return self._storage.stream(shard)

    def local_path(self, shard: int) -> Path | None:
        """See `Storage.local_path`: nowhere, since only the cache knows what of it is there."""
        return None

    async def _volume(self, block_bytes: int) -> Volume:
        """The blocks of a size; whoever comes first opens them for all."""
        opening = self._volumes.get(block_bytes)
        if opening is None or (opening.done() and (opening.cancelled() or opening.exception())):
            opening = self._volumes[block_bytes] = asyncio.create_task(self._open(block_bytes))
        return await asyncio.shield(opening)

    async def _open(self, block_bytes: int) -> Volume:
        blocks = await asyncio.to_thread(self._block_map, block_bytes)
        return await self._cache.open_volume(self._identity, self._storage, blocks, block_bytes)


def shared_block_bytes(shards: Sequence[Shard]) -> int:
    """About how large the blocks are that all jobs share which ask for none of their own: a power of two."""
    total_bytes = sum(shard.size_bytes for shard in shards)
    return max(_MIN_BLOCK_BYTES, 1 << max(0, (total_bytes - 1) // _MAX_BLOCKS).bit_length())


def _identity(location: str, shards: Sequence[Shard]) -> str:
    """Whose blocks these are; where a shard has no version, nobody's who comes later."""
    listing: list[object] = [location, [(shard.name, shard.size_bytes, shard.version) for shard in shards]]
    if not all(shard.version for shard in shards):
        listing.append(secrets.token_hex())
    return hashlib.blake2b(json.dumps(listing).encode(), digest_size=16).hexdigest()


def _is_complete(opening: asyncio.Task[Volume]) -> bool:
    return not opening.cancelled() and not opening.exception() and opening.result().is_complete
