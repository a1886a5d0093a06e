"""Where shards lie and how their bytes are read: the only room that knows fsspec.

A `Location` is what the operator wrote. `StorageOpener` lists its shards and gives a `Storage`; `Reads` are half-open
ranges of shards, each with the memory where its bytes belong. Reading waits; it never decodes.
"""

from gyre_daemon.storage.base import MAX_GAP_BYTES, ArenaClosed, Bounds, NextUse, Reads, Region, Shard, Storage
from gyre_daemon.storage.checksums import Checksums, checksums_as_listed
from gyre_daemon.storage.delays import Delays, RequestDelays
from gyre_daemon.storage.endpoint import Endpoint, Terms
from gyre_daemon.storage.local import LocalStorage, check_listed, list_files, stat_shard
from gyre_daemon.storage.location import Location, parse_location
from gyre_daemon.storage.opener import StorageOpener
from gyre_daemon.storage.openfiles import file_error
from gyre_daemon.storage.patterns import matches_any

__all__ = [
    "MAX_GAP_BYTES",
    "ArenaClosed",
    "Bounds",
    "Checksums",
    "Delays",
    "Endpoint",
    "LocalStorage",
    "Location",
    "NextUse",
    "Reads",
    "Region",
    "RequestDelays",
    "Shard",
    "Storage",
    "StorageOpener",
    "Terms",
    "check_listed",
    "checksums_as_listed",
    "file_error",
    "list_files",
    "matches_any",
    "parse_location",
    "stat_shard",
]
