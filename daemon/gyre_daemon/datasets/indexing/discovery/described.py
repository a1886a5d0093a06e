"""Makes a manifest of files that describe the files next to them, as the labels of YOLO do."""

from collections.abc import Awaitable, Callable, Sequence

import numpy as np
import numpy.typing as npt

from gyre_daemon.config import DatasetConfig
from gyre_daemon.datasets.formats.listed import Described, DescribedFormat, Manifest
from gyre_daemon.errors import InvalidRequest
from gyre_daemon.runtime.threads import compute
from gyre_daemon.storage.base import Storage
from gyre_daemon.storage.location import Location
from gyre_daemon.storage.opening.opener import StorageOpener
from gyre_daemon.storage.opening.shard_files import read_ranges

# Files are read so many at a time: of an object storage as requests that wait, and each with the
# cost of a plan. All of them stay in memory until they are parsed, so their size has a limit.
_FILES_AT_ONCE = 1000
_MAX_BYTES = 1 << 30
# Takes the format, the samples, and the file that describes each.
ParseManifest = Callable[[DescribedFormat, Described, Sequence[bytes]], Awaitable[Manifest]]


async def read_described(
    opener: StorageOpener,
    location: Location,
    config: DatasetConfig,
    listed: DescribedFormat,
    about: Storage,
    parse: ParseManifest,
) -> Manifest:
    """The manifest of a folder whose samples are described by files of their own.

    Args:
        opener: of storages.
        location: of the folder.
        config: of the dataset.
        listed: its format.
        about: the file that describes all samples, as the only shard.
        parse: makes the manifest.

    Raises:
        CorruptSample: a file is damaged.
        ConfigError: the options do not fit the files.
        InvalidRequest: the files that describe samples are too large together, or cannot be listed.
        ShardMissing, NotAllowed, StorageUnavailable: a file cannot be read.
    """
    (shard,) = about.shards
    (data,) = await read_ranges(about, [0], [0], [shard.size_bytes])
    files, table = await opener.open_files(
        location, config.storage, listed.is_wanted, follow_links=config.follow_links
    )
    described = await compute(listed.described, shard.name, data, table.names)
    sizes = np.where(described.texts < 0, 0, table.sizes[described.texts])
    if (total := int(sizes.sum())) > _MAX_BYTES:
        raise InvalidRequest(
            f"the files that describe those of {location.text} have {total} bytes, more than "
            f"{_MAX_BYTES}; split it into several datasets"
        )
    texts = await _read(files, described.texts, sizes)
    return await parse(listed, described, texts)


async def _read(
    files: Storage, numbers: npt.NDArray[np.int64], sizes: npt.NDArray[np.int64]
) -> Sequence[bytes]:
    """Whole files; empty ones are not read."""
    texts = [b""] * len(numbers)
    wanted = np.flatnonzero(sizes)
    for begin in range(0, len(wanted), _FILES_AT_ONCE):
        some = wanted[begin : begin + _FILES_AT_ONCE]
        found = await read_ranges(
            files, numbers[some].tolist(), [0] * len(some), sizes[some].tolist()
        )
        for number, text in zip(some.tolist(), found, strict=True):
            texts[number] = text
    return texts
