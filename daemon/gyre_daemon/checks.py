"""What `gyred check-config` finds out beyond the file: whether datasets are there, and whether they can be opened."""

import asyncio
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from gyre_daemon.config import DaemonConfig, DatasetConfig
from gyre_daemon.datasets.catalog import Catalog
from gyre_daemon.datasets.formats import make_format
from gyre_daemon.datasets.sidecars import SidecarStore
from gyre_daemon.errors import GyreError, first_error
from gyre_daemon.monitoring.metrics import Metrics
from gyre_daemon.runtime.fair import FairExecutor
from gyre_daemon.storage.engine.endpoint import Terms
from gyre_daemon.storage.local.local import list_files
from gyre_daemon.storage.location import parse_location
from gyre_daemon.storage.opener import StorageOpener


@dataclass(frozen=True, slots=True)
class Finding:
    """What became of opening one dataset.

    Attributes:
        name: of the dataset.
        text: what it has, or why it cannot be opened.
        is_open: it was opened.
    """

    name: str
    text: str
    is_open: bool


def missing_datasets(config: DaemonConfig) -> Iterator[tuple[str, GyreError]]:
    """Local datasets of which a file or a folder is not there, or may not be looked at; nothing is opened."""
    for name, dataset in sorted(config.datasets.items()):
        location = parse_location(dataset.uri)
        if location.scheme != "file":
            continue
        pattern = make_format(name, dataset).pattern
        try:
            for path in location.paths:
                list_files(Path(path), pattern)
        except GyreError as error:
            yield name, error


async def open_datasets(config: DaemonConfig, fallback_index_dir: Path) -> list[Finding]:
    """Open every dataset as the daemon would, all at the same time; an index that is missing is made and kept.

    Args:
        config: checked.
        fallback_index_dir: for indexes that can be stored nowhere else.
    """
    with ThreadPoolExecutor(config.num_io_threads) as executor:
        workers = FairExecutor(executor, config.num_io_threads)
        opener = StorageOpener(workers, Terms(config.max_requests, config.read_deadline_s, config.hedge), Metrics())
        sidecars = SidecarStore(config.index_dir, fallback_index_dir)
        catalog = Catalog(config.datasets, opener, sidecars, None, allow_ad_hoc=False)
        try:
            return await asyncio.gather(*(_open(catalog, *each) for each in sorted(config.datasets.items())))
        finally:
            catalog.close()
            opener.close()


async def _open(catalog: Catalog, name: str, config: DatasetConfig) -> Finding:
    try:
        dataset = await catalog.open(name, config)
    except GyreError as error:
        return Finding(name, str(error), is_open=False)
    except ExceptionGroup as errors:
        return Finding(name, str(first_error(errors)), is_open=False)
    return Finding(name, f"{dataset.num_samples} samples in {len(dataset.storage.shards)} shards", is_open=True)
