"""Build missing parts of a dataset's index, and read the first job's data ahead."""

import contextlib
from collections import Counter
from collections.abc import AsyncGenerator, Callable, Iterator
from dataclasses import replace

from gyre_protos.v1 import loader_pb2 as pb

from gyre_daemon.access.principal import Principal
from gyre_daemon.config import DatasetConfig
from gyre_daemon.datasets.indexing.catalog import Catalog
from gyre_daemon.datasets.indexing.changes import Change
from gyre_daemon.datasets.indexing.shards import IndexProgress
from gyre_daemon.datasets.unheld import unheld
from gyre_daemon.errors import Overloaded
from gyre_daemon.fetching.measuring.columns import ColumnReading
from gyre_daemon.fetching.measuring.lengths import Measuring
from gyre_daemon.service import requests
from gyre_daemon.service.opening import SessionOpener

_CHANGES: dict[Change, "pb.ShardChange.ValueType"] = {
    "indexed": pb.SHARD_CHANGE_INDEXED,
    "kept": pb.SHARD_CHANGE_KEPT,
    "restored": pb.SHARD_CHANGE_RESTORED,
    "changed": pb.SHARD_CHANGE_CHANGED,
}


Exempt = Callable[[Principal], bool]


class LongCalls:
    """Calls that read whole datasets, by user and dataset."""

    def __init__(self, most: int, doing: str, exempt: Exempt | None = None) -> None:
        """Count nothing yet.

        Args:
            most: the calls that a user may have at once on one dataset.
            doing: a verb, for messages.
            exempt: whether a caller may have any number; None where no caller may.
        """
        self._most, self._doing, self._exempt = most, doing, exempt
        self._num: Counter[tuple[str, str]] = Counter()

    @contextlib.contextmanager
    def one(self, caller: Principal, dataset: str) -> Iterator[None]:
        """Count a call inside the block.

        Raises:
            Overloaded: the caller has as many on this dataset as it may.
        """
        key = caller.name, dataset
        is_exempt = self._exempt is not None and self._exempt(caller)
        if self._num[key] >= self._most and not is_exempt:
            raise Overloaded(
                f"{caller.name} has {self._most} calls that {self._doing} `{dataset:.200}`, and "
                "may have no more; wait until one is over, or end it",
                {"who": caller.name, "limit_calls": self._most},
            )
        self._num[key] += 1
        try:
            yield
        finally:
            self._num[key] -= 1
            self._num += Counter()  # forgets those who have none


class IndexService:
    """Answers the method `IndexDataset`."""

    def __init__(
        self, catalog: Catalog, opener: SessionOpener, calls: LongCalls, range_calls: LongCalls
    ) -> None:
        self._catalog, self._opener = catalog, opener
        self._calls, self._range_calls = calls, range_calls

    async def index(
        self, caller: Principal, request: pb.IndexDatasetRequest
    ) -> AsyncGenerator[pb.IndexProgress, None]:
        """Index the shards, then read the columns of the filter, then measure samples.

        Raises:
            Overloaded: see `LongCalls.one`.
            GyreError: as `SessionOpener.resolve_stored`, `Catalog.index`, `SessionOpener.reading`
                and `SessionOpener.measuring`.
        """
        name, config = self._opener.resolve_stored(request.dataset, caller)
        calls = self._range_calls if request.HasField("shards") else self._calls
        with calls.one(caller, name):
            async with contextlib.aclosing(self._progress(name, config, request)) as all_of_it:
                async for progress in all_of_it:
                    yield progress

    async def _progress(
        self, name: str, config: DatasetConfig, request: pb.IndexDatasetRequest
    ) -> AsyncGenerator[pb.IndexProgress, None]:
        chosen = requests.to_shards(request)
        indexing = self._catalog.index(
            name, config, with_checksums=request.checksums, shards=chosen
        )
        async with contextlib.aclosing(unheld(indexing)) as told:
            async for progress in told:
                yield _from_progress(progress)
        declared = requests.declared(request)
        tables = None if declared is None else requests.to_transforms(declared)
        if chosen is not None:
            if request.measure:
                async for measuring in self._opener.measuring_some(name, config, tables, chosen):
                    yield _from_measuring(measuring)
            return
        was_read = False
        async for reading in self._opener.reading(name, config):
            was_read = True
            yield _from_reading(reading)
        if tables is None:
            all_measured = self._opener.measuring(name, config)
        else:
            all_measured = self._opener.measuring_some(name, config, tables, None)
        async for measuring in all_measured:
            yield _from_measuring(measuring)
        if was_read:  # the filter takes the columns, so that nobody keeps them
            await self._catalog.open(name, replace(config, pack=None))


def _from_progress(progress: IndexProgress) -> pb.IndexProgress:
    """The progress after one more shard."""
    return pb.IndexProgress(
        shards_done=progress.num_done,
        num_shards=progress.num_shards,
        num_samples=progress.num_samples,
        shard=progress.shard,
        reused=progress.reused,
        change=_CHANGES[progress.change],
        fingerprint=progress.fingerprint,
        fingerprint_before=progress.fingerprint_before,
        removed=progress.removed,
        was_appended=progress.was_appended,
    )


def _from_reading(reading: ColumnReading) -> pb.IndexProgress:
    """The progress after more shards of a column were read."""
    column = pb.ColumnProgress(
        name=reading.name, shards_done=reading.num_done, num_reused=reading.num_reused
    )
    return pb.IndexProgress(num_shards=reading.num_shards, column=column)


def _from_measuring(measuring: Measuring) -> pb.IndexProgress:
    """The progress after more shards were measured."""
    measured = pb.MeasuringProgress(
        shards_done=measuring.num_done,
        num_reused=measuring.num_reused,
        shard=measuring.shard,
    )
    return pb.IndexProgress(num_shards=measuring.num_shards, measured=measured)
