"""Where samples are stored, for people: dataset, shard, row and byte."""

from dataclasses import dataclass

from gyre_daemon.datasets.dataset import Dataset, shard_bounds
from gyre_daemon.datasets.filters import Filtered
from gyre_daemon.datasets.formats.indexes.chunk_index import chunks_of
from gyre_daemon.order.shuffle.permutation import Int64Array

_FAR = 1 << 62  # beyond any shard


@dataclass(frozen=True, slots=True)
class Source:
    """A dataset with shards of its own, as part of a mixture.

    Attributes:
        name: in the mixture; empty for any other dataset.
        dataset: the dataset, without transforms.
        first_id: the mixture's id of its first sample.
    """

    name: str
    dataset: Dataset
    first_id: int


@dataclass(frozen=True, slots=True)
class Located:
    """Where n samples of one dataset are stored.

    Attributes:
        sample_ids: int64 [n], in the dataset.
        shards: the names of their shards.
        rows: int64 [n], how many samples stand before each in its shard, also those that a filter
            leaves out.
        offsets: int64 [n], the first byte in the shard; None where chunks of it are decoded.
        num_bytes: int64 [n], of all stored fields.
    """

    sample_ids: Int64Array
    shards: list[str]
    rows: Int64Array
    offsets: Int64Array | None
    num_bytes: Int64Array


def located(dataset: Dataset, sample_ids: Int64Array) -> Located:
    """Look samples of a dataset with shards of its own up in its index; int64 [n]."""
    index, ids = dataset.index, sample_ids
    extents = index.locate(ids)
    while isinstance(index, Filtered):
        ids, index = index.stored_ids(ids), index.unfiltered
    is_decoded = chunks_of(index) is not None
    offsets = None if is_decoded else extents.start.min(axis=1, initial=_FAR)
    bounds = shard_bounds(index, len(dataset.shards))
    return Located(
        sample_ids,
        [dataset.shards[shard].name for shard in extents.shard.tolist()],
        ids - bounds[extents.shard],
        offsets,
        extents.size.sum(axis=1),
    )
