"""What a node keeps of its datasets, so that nothing is read or scanned twice.

Sidecars are the indexes of shards, checksums tell whether local ones are what they were. Compressed shards are unpacked into a
folder. The node cache holds raw blocks of remote shards, in memory and in a local folder, for all
jobs of a daemon; `CachedStorage` puts it before a storage. All of it may be lost at any time: it is never the only place of
anything.
"""

from gyre_daemon.cache.blocks import BlockMap
from gyre_daemon.cache.cached import CachedStorage, shared_block_bytes
from gyre_daemon.cache.checksums import ChecksumTaker
from gyre_daemon.cache.disk import DiskCache, open_disk_cache
from gyre_daemon.cache.node import NodeCache
from gyre_daemon.cache.sidecars import SUFFIX, Arrays, SidecarKey, SidecarStore
from gyre_daemon.cache.unpacked import UnpackedDataset, UnpackedShards, is_compressed, unpacked_name

__all__ = [
    "SUFFIX",
    "Arrays",
    "BlockMap",
    "CachedStorage",
    "ChecksumTaker",
    "DiskCache",
    "NodeCache",
    "SidecarKey",
    "SidecarStore",
    "UnpackedDataset",
    "UnpackedShards",
    "is_compressed",
    "open_disk_cache",
    "shared_block_bytes",
    "unpacked_name",
]
