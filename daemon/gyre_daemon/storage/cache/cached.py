"""A storage behind the node cache."""

import asyncio
import hashlib
import json
import logging
import secrets
from collections.abc import AsyncIterator, Callable, Sequence

import numpy as np

from gyre_daemon.runtime.events import log_event
from gyre_daemon.runtime.threads import Flow, compute
from gyre_daemon.storage.base import BlockCache, ReadPlan, ShardBounds, Storage
from gyre_daemon.storage.beneath import LocalFile
from gyre_daemon.storage.cache.blocks import BlockMap, Integers
from gyre_daemon.storage.cache.node import NodeCache
from gyre_daemon.storage.cache.placement import Volume
from gyre_daemon.storage.checksums import ShardChecksums
from gyre_daemon.storage.shard import Shard

# The size of shared blocks. Smaller ones take more requests per epoch, larger ones delay a first
# batch, and what is known of each block takes memory.
_MIN_BLOCK_BYTES, _MAX_BLOCKS = 256 << 10, 1 << 17


class CachedStorage:
    """The shards of one dataset, read through the cache of the node.

    A job that wants whole blocks chooses their size. All others share blocks that are small enough
    for a fast first batch, and large enough to bring many samples with one request.
    """

    def __init__(
        self,
        storage: Storage,
        location: str,
        cache: NodeCache,
        block_map: Callable[[int], BlockMap],
        block_bytes: int = 0,
        *,
        by_sample: bool = False,
        passes_local: bool = False,
    ) -> None:
        """Read a storage through a cache.

        Args:
            storage: where the bytes come from.
            location: of the dataset; with the names and versions of its shards it identifies the
                blocks.
            cache: the node's.
            block_map: returns the dataset's blocks of about a given size; called in a thread.
            block_bytes: the one size that there is; 0 lets jobs choose.
            by_sample: whether the blocks that jobs share are a sample each. Where each is a file, a
                larger one would bring no more with one read, but take a read for each file.
            passes_local: whether reads pass the cache by while this node has the bytes: the page
                cache keeps them. Decoded chunks are kept all the same.
        """
        self.shards = storage.shards
        self._storage = storage
        self._bounds = ShardBounds(storage.shards)
        self._cache = cache
        self._block_map = block_map
        self._location = location
        self._block_bytes = block_bytes
        self._by_sample = by_sample
        self._shared_bytes = 1 if by_sample else shared_block_bytes(storage.shards)
        self._passes_local = passes_local
        self._volumes: dict[int, asyncio.Task[Volume]] = {}  # by block size

    @property
    def is_node_local(self) -> bool:
        """See `Storage.is_node_local`: true once the cache has every block."""
        return self._storage.is_node_local or any(
            opening.done()
            and not opening.cancelled()
            and not opening.exception()
            and opening.result().is_complete
            for opening in self._volumes.values()
        )

    @property
    def is_bypassed(self) -> bool:
        """Whether reads pass the cache by now: local files do while their mount is fast."""
        return self._passes_local and self._storage.is_node_local

    @property
    def checksums(self) -> ShardChecksums | None:
        """See `Storage.checksums`."""
        return self._storage.checksums

    @property
    def block_cache(self) -> BlockCache | None:
        """See `Storage.block_cache`."""
        return None if self.is_bypassed else self

    async def read(self, plan: ReadPlan) -> None:
        """See `Storage.read`."""
        if self.is_bypassed:
            await self._storage.read(plan)
            return
        reads = plan.part(slice(None))
        self._bounds.check(reads)
        reads = reads.nonempty()
        if len(reads):
            volume = await self._volume(reads.block_bytes or self._shared_bytes)
            await self._cache.read(volume, reads)

    async def expect(self, block_bytes: int, blocks: Integers, flow: Flow) -> None:
        """See `BlockCache.expect`."""
        if self.is_bypassed:
            return
        self._cache.expect(await self._volume(block_bytes), blocks, flow)

    def stream(self, shard: int) -> AsyncIterator[bytes]:
        """See `Storage.stream`; the cache keeps nothing of it."""
        return self._storage.stream(shard)

    def path(self, shard: int) -> str:
        """See `Storage.path`."""
        return self._storage.path(shard)

    def local_file(self, shard: int) -> LocalFile | None:
        """See `Storage.local_file`."""
        return self._storage.local_file(shard)

    async def _volume(self, block_bytes: int) -> Volume:
        """The blocks of a size; the first read opens them for all."""
        block_bytes = self._block_bytes or block_bytes
        opening = self._volumes.get(block_bytes)
        if opening is None or (opening.done() and (opening.cancelled() or opening.exception())):
            opening = self._volumes[block_bytes] = asyncio.create_task(self._open(block_bytes))
        return await asyncio.shield(opening)

    async def _open(self, block_bytes: int) -> Volume:
        identity = await compute(_identity, self._location, self.shards)
        blocks = await compute(self._block_map, block_bytes)
        volume = await self._cache.open_volume(
            identity,
            self._storage,
            blocks,
            block_bytes,
            comes_together=self._by_sample and block_bytes == self._shared_bytes,
        )
        too_large = volume.memory_sizes > self._cache.memory_bytes
        if too_large.any():
            facts = {
                "dataset": self._location,
                "cache_memory_bytes": self._cache.memory_bytes,
                "largest_block_bytes": int(volume.memory_sizes.max()),
                "blocks": f"{np.count_nonzero(too_large)} of {len(too_large)} are larger",
                "reason": "every read of such a block (a row group, a chunk) fetches and decodes "
                "it again; set cache_memory to several times the largest, or write smaller ones",
            }
            log_event("cache_memory is below one block", facts, logging.WARNING)
        return volume


def shared_block_bytes(shards: Sequence[Shard]) -> int:
    """About the size of the blocks that jobs share; a power of two."""
    total_bytes = sum(shard.size_bytes for shard in shards)
    return max(_MIN_BLOCK_BYTES, 1 << max(0, (total_bytes - 1) // _MAX_BLOCKS).bit_length())


def _identity(location: str, shards: Sequence[Shard]) -> str:
    """Identifies the blocks of these shards; unique if a shard has no version."""
    versions = [(shard.name, shard.size_bytes, shard.version) for shard in shards]
    listing: list[object] = [location, versions]
    if not all(shard.version for shard in shards):
        listing.append(secrets.token_hex())
    return hashlib.blake2b(json.dumps(listing).encode(), digest_size=16).hexdigest()
