"""What a node keeps of its datasets, so that nothing is read or scanned twice.

Sidecars are the indexes of shards. The node cache holds raw blocks of remote shards, in memory and in a local folder, for all
jobs of a daemon; `CachedStorage` puts it before a storage. All of it may be lost at any time: it is never the only place of
anything.
"""

from gyre_daemon.cache.blocks import BlockMap
from gyre_daemon.cache.cached import CachedStorage, shared_block_bytes
from gyre_daemon.cache.disk import DiskCache, open_disk_cache
from gyre_daemon.cache.node import NodeCache
from gyre_daemon.cache.sidecars import SUFFIX, Arrays, SidecarKey, SidecarStore

__all__ = [
    "SUFFIX",
    "Arrays",
    "BlockMap",
    "CachedStorage",
    "DiskCache",
    "NodeCache",
    "SidecarKey",
    "SidecarStore",
    "open_disk_cache",
    "shared_block_bytes",
]
