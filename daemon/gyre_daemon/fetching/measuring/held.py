"""Records that were made to be measured, until the node's cache has them.

[Note: Measured samples are kept]

The cache must know how large a block is, and measuring finds that out. So the records of a chain
with `cache` are held beside the cache, in memory that it lends. When all are measured, its blocks
are read once: the storage of the records hands out what is held in place of making it again. What
found no room is made when a job needs it.
"""

from collections.abc import Iterable

import numpy as np
import numpy.typing as npt

from gyre_daemon.datasets.formats import stored_fields
from gyre_daemon.fetching.portions import ReadPortion
from gyre_daemon.order.shuffle.permutation import Int64Array
from gyre_daemon.storage.cache.node import NodeCache
from gyre_daemon.transforms.declared import TransformedDataset

_Record = npt.NDArray[np.uint8]


class HeldRecords:
    """Records by the ids of their samples.

    Attributes:
        has_room: whether the last one found room.
    """

    def __init__(self, dataset: TransformedDataset, cache: NodeCache) -> None:
        """Hold nothing yet.

        Args:
            dataset: whose records they are.
            cache: lends the memory.
        """
        self._cache, self.has_room = cache, True
        self._records: dict[int, _Record] = {}
        self._lent_bytes: dict[int, int] = {}
        stored = [spec.name for spec in stored_fields(dataset.source.fields)]
        passed = stored_fields(dataset.fields[len(dataset.made) :])
        self._passed = [stored.index(spec.name) for spec in passed]
        self._element_bytes = np.array([spec.element_bytes for spec in dataset.made], np.int64)
        self._ragged = [column for column, spec in enumerate(dataset.made) if spec.ragged]

    def hold(self, portion: ReadPortion, lengths: Int64Array, num_kept: int) -> None:
        """Copy the first samples of a portion out of its room.

        Args:
            portion: that was measured.
            lengths: int64 [n, R], the lengths found.
            num_kept: how many samples the process says are there.
        """
        elements = np.ones((len(lengths), len(self._element_bytes)), np.int64)
        elements[:, self._ragged] = lengths
        ends = portion.room.start + np.cumsum((elements * self._element_bytes).sum(axis=1))
        fitting = int(np.searchsorted(ends, portion.room.stop, side="right"))
        memory, begin = portion.exchange.memory, portion.room.start
        stored = portion.staged.destinations[:, self._passed].tolist()
        ids = portion.plan.sample_ids[: max(0, min(num_kept, fitting))].tolist()
        for row, (sample_id, end) in enumerate(zip(ids, ends.tolist(), strict=False)):
            places = [(begin, end), *stored[row]]
            num_bytes = sum(stop - at for at, stop in places)
            self.has_room = self._cache.lend(num_bytes)
            if not self.has_room:
                return
            parts = [memory[at:stop] for at, stop in places]
            self._records[sample_id] = np.concatenate(parts)
            self._lent_bytes[sample_id] = num_bytes
            begin = end

    def take(self, sample_id: int) -> _Record | None:
        """A record, which is held no longer; None if it is not there."""
        self.hand_over([sample_id])
        return self._records.pop(sample_id, None)

    def hand_over(self, sample_ids: Iterable[int]) -> None:
        """Give back the memory of records that the cache is about to take."""
        for sample_id in sample_ids:
            if num_bytes := self._lent_bytes.pop(sample_id, 0):
                self._cache.take_back(num_bytes)

    def ids(self) -> Int64Array:
        """Int64, whose records are held, ascending."""
        return np.array(sorted(self._records), np.int64)

    def release(self) -> None:
        """Hold nothing any more."""
        self.hand_over([*self._lent_bytes])
        self._records.clear()
