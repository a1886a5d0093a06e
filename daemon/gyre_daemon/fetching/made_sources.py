"""Sources of mixtures that have transforms of their own.

What such a source's transforms make of a sample is a record, as behind the step `cache`, and a
mixture reads records as it reads stored samples: see [Note: How transformed samples are cached] in
`transforms.kept`. So it can be mixed, packed and transformed again like any other. The records are
not kept, unless the source's chain says `cache`. Where the chain draws random numbers, each read
brings the seed and the epoch: see [Note: Samples of sources that depend on chance] in
`storage.base`.
"""

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from gyre_daemon.datasets.dataset import Dataset
from gyre_daemon.fetching.made import MadeStorage
from gyre_daemon.runtime.threads import FairExecutor
from gyre_daemon.transforms.declared import Made, TransformedDataset, Transforms
from gyre_daemon.transforms.kept import (
    KeptDataset,
    RecordIndex,
    as_records,
    kept_as,
    record_shard,
)

Tables = Sequence[Mapping[str, Any]]


@dataclass(frozen=True, slots=True)
class _Made:
    """One source that was made: its dataset, how, and the result."""

    stored: Dataset
    transformed: Made
    made: KeptDataset


class MadeSources:
    """Makes each source once, and again when its dataset or its transforms are others."""

    def __init__(self, transforms: Transforms, threads: FairExecutor) -> None:
        """Make nothing yet.

        Args:
            transforms: of the daemon.
            threads: the daemon's.
        """
        self._transforms, self._threads = transforms, threads
        self._made: dict[str, _Made] = {}

    def of(self, name: str, dataset: Made, height: int) -> KeptDataset:
        """The results of a dataset's transforms, as a dataset of records.

        Args:
            name: of the source.
            dataset: transformed, and measured where that makes fields of different lengths.
            height: how many mixtures lie below the source, one in another.
        """
        last = self._made.get(name)
        if last and _is_same(last, dataset):
            return last.made
        made = dataset if isinstance(dataset, KeptDataset) else self._make(dataset, height)
        both = f"{dataset.fingerprint} {dataset.transforms}".encode()
        fingerprint = hashlib.blake2b(both, digest_size=16, person=b"gyre.made").hexdigest()
        shards = made.storage.shards
        made = replace(made, shards=shards, fingerprint=fingerprint, transforms="", made=())
        self._made[name] = _Made(dataset.stored, dataset, made)
        return made

    def _make(self, dataset: TransformedDataset, height: int) -> KeptDataset:
        passed = dataset.fields[len(dataset.made) :]
        prefix = self._transforms.for_records(dataset.sized_fully(), height)
        prefix = replace(prefix, chosen=as_records(dataset.made, passed))
        index = RecordIndex(dataset.source, prefix.fields, prefix.measured)
        shard = record_shard(index, dataset.source, dataset.recipe)
        storage = MadeStorage(prefix, index, shard, self._threads)
        made = kept_as(dataset.source, prefix, index, storage)
        return replace(made, drawing=(*dataset.drawing, *dataset.random))


def _is_same(last: _Made, dataset: Made) -> bool:
    before = last.transformed
    if isinstance(before, KeptDataset) or isinstance(dataset, KeptDataset):
        return before is dataset
    return (
        last.stored is dataset.stored
        and (before.recipe, before.transforms) == (dataset.recipe, dataset.transforms)
        and before.fingerprint == dataset.fingerprint
    )
