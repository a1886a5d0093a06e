"""Members of an archive as files: fsspec's drivers of `zip` and `tar` over a storage.

The archive is a shard like any other, so it is opened and read by the rules of its own location: a
local one beneath its folder, another one by the ranges that are needed.
"""

import asyncio
import functools
import io
import tarfile
import zipfile

import fsspec
from fsspec.spec import AbstractFileSystem

from gyre_daemon.errors import InvalidRequest
from gyre_daemon.storage.base import Storage, StorageFile
from gyre_daemon.storage.sources.driver_threads import EndpointThreads, ThreadedFileSystem

# Each driver keeps a directory of the archive, of some 3 KB for each member.
_NUM_DRIVERS, _MAX_MEMBERS = 4, 100_000
_BUFFER_BYTES = 128 << 10  # of the archive that one read asks for, at least


def open_archive(scheme: str, address: str, storage: Storage) -> ThreadedFileSystem:
    """The members of an archive; reads nothing yet.

    Args:
        scheme: of the kind of archive.
        address: the part of members' URLs before their names.
        storage: its only shard is the archive.
    """
    loop = asyncio.get_running_loop()
    return ThreadedFileSystem(
        address,
        functools.partial(_driver, scheme, storage, loop),
        EndpointThreads(address, _NUM_DRIVERS),
        # the storage notices where the archive changes
        {"version": storage.shards[0].version},
    )


def _driver(scheme: str, storage: Storage, loop: asyncio.AbstractEventLoop) -> AbstractFileSystem:
    name = storage.shards[0].name
    file = io.BufferedReader(StorageFile(storage, loop), _BUFFER_BYTES)
    try:
        make = fsspec.get_filesystem_class(scheme)
        driver = make(fo=file, skip_instance_cache=True)  # codespell:ignore fo
    except (tarfile.TarError, zipfile.BadZipFile) as error:
        raise InvalidRequest(
            f"{name} is no {scheme} archive: {error}. A compressed tar has no index; name it "
            "without `tar://`, and its format is webdataset"
        ) from error
    driver.info("")  # which fills `dir_cache`
    if (num_members := len(driver.dir_cache)) > _MAX_MEMBERS:
        raise InvalidRequest(
            f"{name} has too many members (got {num_members}, at most {_MAX_MEMBERS}). Unpack it"
        )
    return driver
