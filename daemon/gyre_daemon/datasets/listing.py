"""Lists the single files of a dataset, and joins them to one shard."""

from dataclasses import dataclass

from gyre_daemon.config import DatasetConfig
from gyre_daemon.datasets.formats.base import Arrays, Listing, file_arrays
from gyre_daemon.storage.concatenated import ConcatenatedFiles
from gyre_daemon.storage.location import Location
from gyre_daemon.storage.opener import StorageOpener
from gyre_daemon.storage.splits import check_one_tree


@dataclass(frozen=True, slots=True)
class FileListing:
    """The single files of a dataset.

    Attributes:
        storage: the one shard that they make.
        arrays: what their format gets to know of them.
    """

    storage: ConcatenatedFiles
    arrays: Arrays


async def list_files(
    opener: StorageOpener, location: Location, config: DatasetConfig, listing: Listing
) -> FileListing:
    """The files of a location.

    Raises:
        InvalidRequest: the folder holds several datasets; otherwise see `StorageOpener.open_files`.
    """
    files, table = await opener.open_files(
        location, config.storage, listing.is_wanted, follow_links=config.follow_links
    )
    check_one_tree(location.text, table.top_folders())
    storage = ConcatenatedFiles(files, table, table.names, location.text)
    return FileListing(storage, file_arrays(table))
