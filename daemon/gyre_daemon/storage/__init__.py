"""Where shards lie and how their bytes are read: the only room that knows fsspec.

A `Location` is what the operator wrote. `open_storage` lists its shards and gives a `Storage`; a `Read` is one contiguous
half-open range of one shard, scattered over the memory where its bytes belong. Reading waits; it never decodes.
"""

from gyre_daemon.storage.base import Reads, Shard, Storage
from gyre_daemon.storage.local import file_error
from gyre_daemon.storage.location import Location, parse_location
from gyre_daemon.storage.opener import StorageOpener

__all__ = ["Location", "Reads", "Shard", "Storage", "StorageOpener", "file_error", "parse_location"]
