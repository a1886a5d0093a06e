"""Puts the node's cache before a dataset's storage."""

import numpy as np

from gyre_daemon.datasets.chunks.decoded import DecodedStorage, DecodingRoom
from gyre_daemon.datasets.dataset import block_ranges
from gyre_daemon.datasets.formats import SampleIndex
from gyre_daemon.datasets.formats.indexes.chunk_index import chunks_of
from gyre_daemon.datasets.indexing.shards import OpeningDataset
from gyre_daemon.storage.base import Storage
from gyre_daemon.storage.cache.blocks import BlockMap
from gyre_daemon.storage.cache.cached import CachedStorage
from gyre_daemon.storage.cache.node import NodeCache
from gyre_daemon.storage.unions import ConcatenatedFiles

# Of more local files, blocks of the cache have several: each block takes 80 bytes for good.
_MAX_BY_SAMPLE = 1 << 22


def behind_cache(
    opening: OpeningDataset,
    storage: Storage,
    index: SampleIndex,
    node_cache: NodeCache | None,
    decoding: DecodingRoom,
) -> Storage:
    """The storage, behind the node's cache, which local files pass by while their mount is fast.

    For samples in chunks, that of decoded shards, whose blocks are the chunks.
    """
    cache = node_cache if opening.config.cache else None
    if chunks := chunks_of(index):
        decoded = DecodedStorage(storage, chunks, index.digest(), decoding)
        if cache is None:
            return decoded
        size = int(chunks.chunk_bytes.max())
        identity = f"{opening.identity} decoded"
        return CachedStorage(decoded, identity, cache, lambda _: decoded.chunks, size)
    if cache is None:
        return storage

    def block_map(block_bytes: int) -> BlockMap:
        table = index.blocks(block_bytes)
        ranges = block_ranges(index, table, np.arange(table.num_blocks))
        return BlockMap.of(ranges.shard, ranges.start, ranges.stop)

    is_folder = isinstance(storage, ConcatenatedFiles) and storage.table.stamps is not None
    return CachedStorage(
        storage,
        opening.identity,
        cache,
        block_map,
        by_sample=is_folder and index.num_samples <= _MAX_BY_SAMPLE,
        passes_local=True,
    )
