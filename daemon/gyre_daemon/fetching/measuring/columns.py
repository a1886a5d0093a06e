"""Reads stored columns once, for filters that compare their values.

Each shard's part is kept in a sidecar: numbers as they are, texts as the numbers of the different
ones. So the next daemon reads only shards that are new or have changed.
"""

import asyncio
import hashlib
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import pairwise

import numpy as np

from gyre_daemon.config import DatasetConfig
from gyre_daemon.datasets.dataset import Dataset, shard_bounds
from gyre_daemon.datasets.filters import TEXT, Asked, Column, Values, apply_late, asked_of
from gyre_daemon.datasets.formats import Extents, FieldSpec, SampleIndex, stored_fields
from gyre_daemon.datasets.formats.base import Arrays, array_of
from gyre_daemon.datasets.sidecars import SidecarKey, SidecarStore
from gyre_daemon.errors import ConfigError
from gyre_daemon.fetching.fetch import Fetcher
from gyre_daemon.fetching.measuring.shared_work import SharedWork, WorkByKey
from gyre_daemon.fetching.portions import Staging
from gyre_daemon.order.block_order import BlockTable
from gyre_daemon.order.permutation import Int64Array
from gyre_daemon.order.steps import GroupPlan
from gyre_daemon.runtime.events import log_event
from gyre_daemon.runtime.threads import FairExecutor, Flow, compute
from gyre_daemon.transforms.declared import TransformedDataset
from gyre_daemon.transforms.made_samples import Lengths

SUFFIX = ".gyre-columns"
_VERSION, _CODES, _TEXTS, _ENDS = "column/1", "values", "texts", "ends"
# Samples that are read at once; their bytes are bounded too.
_AT_ONCE, _MAX_BYTES = 1 << 14, 16 << 20
# Different texts of a column. A filter compares it with a few of them; a column of documents, where
# all differ, is a mistake that would take the memory of the whole dataset.
_MAX_TEXTS, _MAX_TEXT_BYTES = 1 << 16, 256
_Key = tuple[int, str, str]
_Bytes = np.ndarray[tuple[int], np.dtype[np.uint8]]
# Takes a dataset as it is stored; returns it with the transforms of its definition, measured, and
# nothing cached: a filtered dataset has other records than the whole.
Measure = Callable[[DatasetConfig, Dataset], Awaitable[TransformedDataset]]


class _OneField(SampleIndex):
    """The index of one stored field of a dataset."""

    def __init__(self, dataset: Dataset, name: str) -> None:
        self._index = dataset.index
        stored = stored_fields(dataset.fields)
        self._column = [spec.name for spec in stored].index(name)
        self._spec = stored[self._column]

    @property
    def fields(self) -> Sequence[FieldSpec]:
        """See `SampleIndex.fields`."""
        return [self._spec]

    @property
    def num_samples(self) -> int:
        """See `SampleIndex.num_samples`."""
        return self._index.num_samples

    def locate(self, sample_ids: Int64Array) -> Extents:
        """See `SampleIndex.locate`."""
        found, which = self._index.locate(sample_ids), slice(self._column, self._column + 1)
        return replace(
            found,
            start=found.start[:, which],
            size=found.size[:, which],
            lengths=None if found.lengths is None else found.lengths[:, which],
            absent=None if found.absent is None else found.absent[:, which],
            indexed=(),
        )

    def max_ragged_bytes(self, num_samples: int) -> int:
        """See `SampleIndex.max_ragged_bytes`; nobody lays out batches of it."""
        return self._index.max_ragged_bytes(num_samples)

    def blocks(self, io_block_bytes: int) -> BlockTable:
        """See `SampleIndex.blocks`."""
        return self._index.blocks(io_block_bytes)

    def digest(self) -> bytes:
        """See `SampleIndex.digest`."""
        return self._index.digest()


@dataclass(frozen=True, slots=True)
class _Part:
    """The samples of one shard: `[first, stop)`."""

    dataset: Dataset
    field: FieldSpec
    shard: int
    first: int
    stop: int


@dataclass(slots=True)
class ColumnReading(SharedWork[Column]):
    """The reading of one column.

    Attributes:
        name: of the field.
    """

    name: str = ""


class ColumnReader:
    """Reads columns of datasets; all who ask for one wait for one reading."""

    def __init__(self, sidecars: SidecarStore, threads: FairExecutor) -> None:
        """Read nothing yet.

        Args:
            sidecars: keep the results.
            threads: the daemon's.
        """
        self._sidecars, self._threads = sidecars, threads
        self._flow = Flow("columns")
        # those that no filter has taken yet
        self._readings: WorkByKey[_Key, ColumnReading] = WorkByKey()

    async def read(self, dataset: Dataset, name: str) -> Column:
        """The values of a stored field of all samples; they are not kept in memory any longer.

        Waits until all shards are read. A caller that no longer waits does not stop the reading.

        Raises:
            ConfigError: it is neither one number for each sample nor a text, or has too many
                different texts.
            GyreError: a shard cannot be read.
        """
        key, reading = self._begun(dataset, name)
        assert reading.task
        column = await asyncio.shield(reading.task)
        self._readings.forget(key, reading)
        return column

    def progress(self, dataset: Dataset, name: str) -> AsyncIterator[ColumnReading]:
        """The state of the reading, whenever it has moved. The values are kept for `read`.

        Raises:
            GyreError: as `read`.
        """
        _, reading = self._begun(dataset, name)
        return reading.states()

    def close(self) -> None:
        """Stop all reads; shards that are done stay so."""
        self._readings.close()

    def _begun(self, dataset: Dataset, name: str) -> tuple[_Key, ColumnReading]:
        key = id(dataset.storage), dataset.fingerprint, name

        def begin() -> ColumnReading:
            column = _column(dataset, name)
            reading = ColumnReading(len(dataset.shards), name=name)
            reading.begin(self._read(column, reading), partial(self._ended, key, reading))
            return reading

        return key, self._readings.begun(key, begin)

    def _ended(self, key: _Key, reading: ColumnReading) -> None:
        """One that failed is tried again by the next that asks."""
        if reading.has_failed:
            self._readings.forget(key, reading)

    async def _read(self, column: Dataset, reading: ColumnReading) -> Column:
        """The values of the only field of a dataset."""
        (spec,), name = column.index.fields, reading.name
        is_text = spec.ragged
        bounds = (await compute(shard_bounds, column.index, len(column.shards))).tolist()
        parts = []
        for shard, (first, stop) in enumerate(pairwise(bounds)):
            part = _Part(column, spec, shard, first, stop)
            values, was_kept = await self._values(part)
            parts.append(values)
            reading.after(column.shards[shard].name, was_kept=was_kept)
        found = np.concatenate(parts) if parts else np.empty(0, spec.dtype)
        categories: tuple[str, ...] = ()
        if is_text:
            different, found = np.unique(found, return_inverse=True)
            if len(different) > _MAX_TEXTS:
                raise ConfigError(_too_many(name))
            categories = tuple(each.decode(errors="replace") for each in different.tolist())
        dtype = np.dtype(np.int64) if is_text else spec.dtype
        field = FieldSpec(name, dtype, (), ragged=False, codec="indexed", categories=categories)
        return Column(replace(field, media_type=TEXT if is_text else ""), found.astype(dtype))

    async def _values(self, part: _Part) -> tuple[Values, bool]:
        """The values of a shard's samples, and whether they had been read before."""
        is_text = part.field.ragged
        suffix, key = await compute(_key, part)
        sidecars = self._sidecars.sibling(suffix)
        check = partial(_check_texts if is_text else _check_numbers, part)
        arrays = await sidecars.load(key, None, check)
        was_kept = arrays is not None
        if arrays is None:
            found = await self._bytes(part)
            arrays = _as_texts(part, found) if is_text else _as_numbers(found)
            await sidecars.try_to_save(key, None, arrays)
            _log(part)
        return (_texts(arrays) if is_text else arrays[_CODES].view(part.field.dtype)), was_kept

    async def _bytes(self, part: _Part) -> list[_Bytes]:
        """The bytes of the field of each sample."""
        found = []
        fetcher = Fetcher(part.dataset, self._threads)
        for begin in range(part.first, part.stop, _AT_ONCE):
            ids = np.arange(begin, min(begin + _AT_ONCE, part.stop))
            sizes = part.dataset.index.locate(ids).tensor_bytes[:, 0]
            cuts = np.flatnonzero(np.diff(np.cumsum(sizes) // _MAX_BYTES)) + 1
            for some in np.split(ids, cuts):
                plan = GroupPlan(0, some[None], None, np.zeros(1, np.int64))
                (fetch,) = fetcher.prepare(plan, 1)
                memory = np.empty(fetch.layout.num_bytes, np.uint8)
                await fetcher.fill(fetch, Staging.of(memory), self._flow)
                places = fetch.layout.destinations[:, 0].tolist()
                found += [memory[at:end] for at, end in places]
        return found


def _check_numbers(part: _Part, arrays: Arrays) -> None:
    """Refuse stored values that cannot be this shard's."""
    num_bytes = (part.stop - part.first) * part.field.dtype.itemsize
    if array_of(arrays, _CODES, np.uint8, 1).shape != (num_bytes,):
        raise ValueError("its values are not those of the shard's samples")


def _as_numbers(found: Sequence[_Bytes]) -> Arrays:
    # sidecars have no floating-point numbers
    return {_CODES: np.concatenate([np.empty(0, np.uint8), *found])}


def _check_texts(part: _Part, arrays: Arrays) -> None:
    """Refuse stored texts that cannot be this shard's."""
    num, texts = part.stop - part.first, array_of(arrays, _TEXTS, np.uint8, 1)
    codes, ends = array_of(arrays, _CODES, np.int32, 1), array_of(arrays, _ENDS, np.int64, 1)
    is_whole = len(codes) == num and (not num or 0 <= codes.min() <= codes.max() < len(ends))
    if not is_whole or (np.diff(ends, prepend=0) < 0).any() or ends[-1:].sum() != len(texts):
        raise ValueError("its texts are not those of the shard's samples")


def _as_texts(part: _Part, found: Sequence[_Bytes]) -> Arrays:
    """The different texts, and the number of each sample's.

    Raises:
        ConfigError: there are too many, or some are too long.
    """
    samples = [each.tobytes() for each in found]
    different = sorted(set(samples))
    if len(different) > _MAX_TEXTS or max(map(len, different), default=0) > _MAX_TEXT_BYTES:
        raise ConfigError(_too_many(part.field.name))
    numbers = {text: number for number, text in enumerate(different)}
    return {
        _CODES: np.array([numbers[text] for text in samples], np.int32),
        _TEXTS: np.frombuffer(b"".join(different), np.uint8),
        _ENDS: np.cumsum([len(text) for text in different], dtype=np.int64),
    }


def _texts(arrays: Arrays) -> Values:
    """The text of each sample."""
    ends, whole = arrays[_ENDS].tolist(), arrays[_TEXTS].tobytes()
    texts = [whole[begin:end] for begin, end in pairwise([0, *ends])]
    words: Values = np.array([*texts, b""], object)[:-1]
    return words[arrays[_CODES]]


def _column(dataset: Dataset, name: str) -> Dataset:
    """The dataset with one field alone.

    Raises:
        ConfigError: it is neither one number for each sample nor a text.
    """
    index = _OneField(dataset, name)
    (spec,) = index.fields
    is_text = spec.ragged and spec.dtype == np.uint8 and not spec.shape
    if not is_text and (spec.ragged or spec.shape or spec.dtype.kind not in "biuf"):
        raise ConfigError(
            f"a filter compares {name!r:.100}, which is neither a number nor a text of each "
            "sample; it can only compare its length"
        )
    return replace(dataset, index=index, chosen=[spec])


def _log(part: _Part) -> None:
    shards = part.dataset.shards
    facts = {"dataset": part.dataset.name, "column": part.field.name}
    facts |= {"shard": shards[part.shard].name, "done": f"{part.shard + 1}/{len(shards)}"}
    log_event("column read", facts)


def _key(part: _Part) -> tuple[str, SidecarKey]:
    """The suffix of a column's sidecars, and the key of these samples of it."""
    dataset, spec = part.dataset, part.field
    column = f"{spec.name} {spec.dtype.str} {spec.codec}".encode()
    digest = hashlib.blake2b(column, digest_size=16)
    for begin in range(part.first, part.stop, _AT_ONCE):
        extents = dataset.index.locate(np.arange(begin, min(begin + _AT_ONCE, part.stop)))
        digest.update(extents.start.astype("<i8").tobytes() + extents.size.astype("<i8").tobytes())
    shard, kind = dataset.shards[part.shard], f"{_VERSION} {digest.hexdigest()}"
    suffix = f".{hashlib.blake2b(column, digest_size=8).hexdigest()}{SUFFIX}"
    return suffix, SidecarKey(dataset.uri, shard.name, shard.size_bytes, shard.version, kind)


def _too_many(name: str) -> str:
    return (
        f"a filter compares {name!r:.100}, which has more than {_MAX_TEXTS} different texts, or "
        f"some of more than {_MAX_TEXT_BYTES} bytes; it can only compare its length"
    )


@dataclass(frozen=True, slots=True)
class _Filtered:
    """A dataset that was filtered: which one, how, and its rest.

    Attributes:
        transforms: tells the transforms whose lengths were compared; empty for none.
        lengths: of the remaining samples under these, by field.
    """

    stored: Dataset
    config: DatasetConfig
    left: Dataset
    transforms: str = ""
    lengths: Mapping[str, Lengths] = field(default_factory=dict)


class LateFilters:
    """Filters each dataset once, and again when it or its definition is another."""

    def __init__(self, columns: ColumnReader, measure: Measure) -> None:
        """Filter nothing yet.

        Args:
            columns: reads stored columns.
            measure: see `Measure`.
        """
        self._columns, self._measure = columns, measure
        self._kept: dict[str, _Filtered] = {}
        self._locks: dict[str, asyncio.Lock] = {}

    async def of(self, name: str, config: DatasetConfig, dataset: Dataset) -> Dataset:
        """The dataset with the samples that its filter leaves.

        Args:
            name: of the dataset in the catalog.
            config: of the dataset.
            dataset: as it is stored; filtered already, where the index knows all that is compared.

        Raises:
            ConfigError: the filter does not fit, or leaves none.
            GyreError: a value that it compares cannot be read.
        """
        asked = _asked(config, dataset)
        if not asked:
            return dataset
        async with self._locks.setdefault(name, asyncio.Lock()):
            kept = self._kept.get(name)
            if kept is None or kept.stored is not dataset or not _alike(kept.config, config):
                kept = await self._filter(asked, config, dataset)
                self._kept[name] = kept
            return kept.left

    async def reading(
        self, config: DatasetConfig, dataset: Dataset
    ) -> AsyncIterator[ColumnReading]:
        """Reads the columns that a filter compares, and says how far that is; `of` takes them.

        Raises:
            GyreError: as `of`.
        """
        for name in _asked(config, dataset).columns:
            async for each in self._columns.progress(dataset, name):
                yield each

    def lengths_of(self, dataset: TransformedDataset) -> Lengths | None:
        """Known lengths of a filtered dataset's samples under its transforms."""
        names = [spec.name for spec in dataset.made_ragged]
        for kept in self._kept.values():
            is_its = kept.left is dataset.stored and kept.transforms == dataset.transforms
            if is_its and names and kept.lengths.keys() >= set(names):
                return np.stack([kept.lengths[name] for name in names], axis=1)
        return None

    async def _filter(self, asked: Asked, config: DatasetConfig, dataset: Dataset) -> _Filtered:
        columns = [await self._columns.read(dataset, name) for name in asked.columns]
        lengths: dict[str, Lengths] = {}
        transforms = ""
        if asked.lengths and config.transforms:
            measured = await self._measure(config, dataset)
            transforms = measured.transforms
            for place, spec in enumerate(measured.made_ragged if measured.measured else ()):
                lengths[spec.name] = measured.measured.lengths[:, place]  # type: ignore[union-attr]
        made = {
            name: each.astype(np.int64) for name, each in lengths.items() if name in asked.lengths
        }
        left, ids = await compute(apply_late, dataset, config.filter, columns, made)
        if lengths and config.on_corrupt != "replace":
            some = {name: each[ids] for name, each in lengths.items()}
            return _Filtered(dataset, config, left, transforms, some)
        return _Filtered(dataset, config, left)


def _asked(config: DatasetConfig, dataset: Dataset) -> Asked:
    """The columns and lengths that a filter needs and the index lacks.

    Raises:
        ConfigError: the dataset may grow, and it asks for anything.
    """
    asked = asked_of(config.filter, dataset.fields)
    if asked and config.append:
        raise ConfigError(
            f"the filter {config.filter!r:.200} compares values that only the samples have, and a "
            "dataset with `append` is filtered by its index alone. Leave one of them out."
        )
    return asked


def _alike(first: DatasetConfig, second: DatasetConfig) -> bool:
    keys = ("filter", "transforms", "on_corrupt", "max_corrupt")
    return all(getattr(first, key) == getattr(second, key) for key in keys)
