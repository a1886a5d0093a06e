"""Finds all corrupt samples of a dataset before it is opened, and reports them."""

import contextlib
import logging
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from gyre_daemon.datasets.checks.samples import (
    CorruptRecord,
    CorruptReports,
    DecodedShards,
    SampleChecker,
    check_limit,
)
from gyre_daemon.datasets.chunks.decoded import DecodedStorage, DecodingRoom
from gyre_daemon.datasets.formats import FieldSpec, SampleIndex
from gyre_daemon.datasets.formats.base import DamagedSample
from gyre_daemon.datasets.formats.indexes.chunk_index import chunks_of
from gyre_daemon.datasets.indexing.shards import OpeningDataset
from gyre_daemon.errors import ConfigError
from gyre_daemon.runtime.events import log_event
from gyre_daemon.storage.base import Storage


class CorruptFinder:
    """Finds the samples that others replace, for all datasets of a daemon."""

    def __init__(
        self,
        checker: SampleChecker,
        decoding: DecodingRoom,
        reports: CorruptReports | None,
    ) -> None:
        """Look at nothing yet.

        Args:
            checker: checks samples.
            decoding: decodes them.
            reports: names the findings; None if the daemon has no folder for it.
        """
        self._checker, self._decoding, self._reports = checker, decoding, reports

    async def find(
        self,
        opening: OpeningDataset,
        served: Storage,
        index: SampleIndex,
        fields: Sequence[FieldSpec],
        damaged: Sequence[DamagedSample],
    ) -> npt.NDArray[np.int64]:
        """The ids of all corrupt samples, in rising order; they are reported.

        A chunk that cannot be decoded makes all of its samples corrupt.

        Args:
            opening: the dataset.
            served: its shards, uncompressed.
            index: its samples.
            fields: its fields, renamed and cast.
            damaged: those that are known to be corrupt.

        Raises:
            CorruptSample: they are more than `max_corrupt`, or a shard cannot be checked.
        """
        if self._reports is None:
            raise ConfigError(
                f"dataset `{opening.name}` replaces corrupt samples, and this daemon has no folder "
                "for their report"
            )
        decoded: DecodedShards | None = None
        if chunks := chunks_of(index):
            storage = DecodedStorage(served, chunks, index.digest(), self._decoding)
            decoded = DecodedShards(storage, chunks, index)
        corrupt = [
            CorruptRecord(
                *served.shards[each.shard].place_of(each.offset), each.sample, each.reason
            )
            for each in damaged
        ]
        known = np.array([each.sample for each in damaged], np.int64)
        checking = self._checker.run(
            opening.location, decoded or served, index, known, fields, refresh=False
        )
        async with contextlib.aclosing(checking) as checked:
            async for shard in checked:
                if shard.failure:
                    raise shard.failure
                listed = served.shards[shard.number]
                for damage in shard.damages:
                    sample, place = shard.first_sample + damage.sample, damage.offset
                    corrupt.append(CorruptRecord(*listed.place_of(place), sample, damage.reason))
        corrupt.sort(key=lambda each: each.sample_id)
        path = await self._reports.write(opening.name, opening.identity, corrupt)
        if corrupt:
            facts = {"dataset": opening.name, "samples": len(corrupt), "report": path}
            log_event("corrupt samples found", facts, logging.WARNING)
        check_limit(opening.name, corrupt, index.num_samples, opening.config.max_corrupt)
        return np.array([each.sample_id for each in corrupt], np.int64)
