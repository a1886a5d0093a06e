"""Datasets with transformed samples, from declarations of operators and clients."""

import hashlib
import json
import math
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import msgspec
import numpy as np

from gyre_daemon.datasets.dataset import Dataset
from gyre_daemon.datasets.formats import FieldSpec, SampleIndex
from gyre_daemon.datasets.formats.base import is_servable
from gyre_daemon.errors import ConfigError
from gyre_daemon.order.planner import NO_SAMPLES
from gyre_daemon.runtime.threads import NO_JOB
from gyre_daemon.storage.base import Storage
from gyre_daemon.transforms.made_samples import (
    STEP,
    Keep,
    Lengths,
    MeasuredIndex,
    RecordIndex,
    as_records,
    cut,
    record_shard,
    records_of,
)
from gyre_daemon.transforms.messages import (
    BFLOAT16,
    ENCODER,
    RECIPE_DECODER,
    Described,
    MadeField,
    Recipe,
    SourceField,
    Step,
    dtype_of,
    name_of,
)
from gyre_daemon.transforms.names import to_steps
from gyre_daemon.transforms.transform import Cost
from gyre_daemon.transforms.workers import TransformWorkers
from gyre_daemon.workers.compute_workers import ExchangeRoom

# Memory of samples being read and transformed, of all jobs; it is not part of any budget.
# Less would leave processes idle while a slow storage is read.
_MAX_BYTES_AT_ONCE = 128 << 20
# Datasets and chains before `cache` whose records are known. Another one forgets where the records
# in memory are, and has those on disk looked up again.
_MAX_KEPT = 64
# Of one field of a sample. A process may allocate twice as much; with more, each sample would end
# the process that makes it, and another one would have to start.
_MAX_MADE_BYTES = 1 << 30
# Fields of a sample whose lengths have limits get memory for the longest one. With more than this,
# lengths are measured instead: a few long samples would multiply the memory of each batch.
_MAX_LIMIT_BYTES = 256 << 10
_NOT_COUNTED = ("python", "payload")  # where a function's file is; its digest counts
_DTYPES = frozenset(
    np.dtype(f"{kind}{size}").str
    for kind, sizes in (("b", [1]), ("i", [1, 2, 4, 8]), ("u", [1, 2, 4, 8]), ("f", [2, 4, 8]))
    for size in sizes
)


@dataclass(frozen=True, slots=True)
class TransformPool:
    """The daemon's resources for transforms.

    Attributes:
        workers: the processes.
        room: the memory that samples have meanwhile.
    """

    workers: TransformWorkers
    room: ExchangeRoom


@dataclass(frozen=True, slots=True, kw_only=True)
class TransformedDataset(Dataset):
    """A dataset whose samples are transformed when they are read; `chosen` are the results.

    Attributes:
        source: the samples as they are stored.
        recipe: an encoded `Recipe`.
        made: the fields that transforms make, which come first.
        read: the names of the stored fields that they read.
        cost: of one sample.
        pool: the processes that transform them.
        engines: programs that may transform them faster, the fastest first.
        limits: the most elements of each ragged output field; 0 where that is unknown.
        measured: the lengths of the ragged output fields; None while unknown.
        has_limits: `measured` has the limits, because no length was measured.
        random: the names of transforms that may draw random numbers.
    """

    source: Dataset
    recipe: bytes
    made: Sequence[FieldSpec]
    read: Sequence[str]
    cost: Cost
    pool: TransformPool
    engines: Sequence[str] = ()
    limits: Sequence[int] = ()
    measured: MeasuredIndex | None = None
    has_limits: bool = False
    random: Sequence[str] = ()

    @property
    def sized(self) -> SampleIndex:
        """See `Dataset.sized`."""
        return self.measured or self.index

    @property
    def num_made(self) -> int:
        """See `Dataset.num_made`: fields made before `cache` and passed on since count, too."""
        names = {spec.name for spec in self.source.made}
        passed = (self.chosen or ())[len(self.made) :]
        return len(self.made) + sum(spec.name in names for spec in passed)

    @property
    def made_ragged(self) -> Sequence[FieldSpec]:
        """The fields that transforms make and whose samples differ in length."""
        return [spec for spec in self.made if spec.ragged]

    @property
    def is_read_in_groups(self) -> bool:
        """Whether several small batches are best read together: not if that takes much longer."""
        return self.source.is_read_in_groups and self.cost == "light"

    def with_lengths(self, lengths: Lengths) -> "TransformedDataset":
        """The dataset with the lengths of its samples, int32 [N, R]."""
        passed = self.fields[len(self.made) :]
        fields = self.source.fields
        index = MeasuredIndex(self.source.index, fields, self.made, passed, lengths)
        return replace(self, measured=index)

    def with_limits(self) -> "TransformedDataset | None":
        """The dataset with limits in place of lengths; None where they are unknown or large."""
        specs = self.made_ragged
        pairs = zip(specs, self.limits, strict=True)
        if not specs or not all(self.limits):
            return None
        if sum(spec.element_bytes * most for spec, most in pairs) > _MAX_LIMIT_BYTES:
            return None
        shape = self.source.index.num_samples, len(specs)
        lengths = np.broadcast_to(np.array(self.limits, np.int32), shape)
        return replace(self.with_lengths(lengths), has_limits=True)

    def sized_fully(self) -> "TransformedDataset":
        """The dataset with an index of its own fields, if none of its outputs must be measured."""
        if self.measured:
            return self
        return self.with_lengths(np.empty((self.source.index.num_samples, 0), np.int32))


# Takes the dataset of the transforms before `cache`, and whether none follows; returns it measured.
Ready = Callable[[TransformedDataset, bool], Awaitable[TransformedDataset]]


class Transforms:
    """Makes transformed datasets for a daemon."""

    def __init__(
        self,
        workers: TransformWorkers,
        installed: Collection[str],
        keep: Keep | None,
        *,
        allow_modules: bool,
    ) -> None:
        """Start no process yet.

        Args:
            workers: of the daemon.
            installed: names of other packages' transforms that the operator enables.
            keep: see `Keep`; None where the node has no cache.
            allow_modules: whether clients may name their own classes.
        """
        self._pool = TransformPool(workers, ExchangeRoom(_MAX_BYTES_AT_ONCE))
        # A transform that waits for records holds an exchange meanwhile, so records have separate
        # pools. A source of a mixture waits for its own records, and a mixture for its sources: so
        # there are two pools for each depth of nested mixtures.
        self._pools_of_records: dict[int, TransformPool] = {}
        self._installed = installed
        self._keep = keep
        self._allow_modules = allow_modules
        self._kept: OrderedDict[tuple[Storage, str, bytes, str], Dataset] = OrderedDict()

    async def apply(
        self,
        dataset: Dataset,
        declared: Sequence[Mapping[str, Any]],
        ready: Ready,
        *,
        by_client: bool,
        height: int,
    ) -> Dataset:
        """The dataset with its samples transformed: a `TransformedDataset`, or its records.

        Args:
            dataset: as it is stored.
            declared: tables with a `name` and options; at least one.
            ready: see `Ready`.
            by_client: whether a client declares them, and not the operator.
            height: the depth of nested mixtures in the dataset.

        Raises:
            ConfigError: a transform is unknown, or does not fit the dataset or its options.
            NotAllowed: a transform is not served here.
            Overloaded: no process can be started.
            GyreError: from `ready`.
        """
        steps = self._steps(declared, by_client=by_client)
        described = await self._described(dataset, steps)
        place = cut(steps, described.random, dataset.drawing)
        if place < 0:
            made = self._transformed(dataset, steps, described, self._pool)
            return replace(made, transforms=_fingerprint(declared, described))
        is_last = place + 1 == len(steps)
        prefix = await self._prefix(dataset, steps[:place], declared[:place], height)
        source = self._records(dataset, await ready(prefix, is_last))
        if is_last:
            return source
        # The whole chain without `cache`, which changes nothing, identifies the rest.
        declared = [*declared[:place], *declared[place + 1 :]]
        del described.versions[place]
        fingerprint = _fingerprint(declared, described)
        rest = steps[place + 1 :]
        made = self._transformed(source, rest, await self._described(source, rest), self._pool)
        names = tuple(step.name for step in steps)
        made = replace(made, transforms=fingerprint, transform_names=names)
        return made if made.made_ragged else made.sized_fully()

    async def before_cache(
        self, dataset: Dataset, declared: Sequence[Mapping[str, Any]]
    ) -> tuple[TransformedDataset, bool] | None:
        """The dataset that `apply` hands to `ready`, of an operator's transforms; None without one.

        Raises:
            GyreError: as `apply`.
        """
        steps = self._steps(declared, by_client=False)
        place = cut(steps, (await self._described(dataset, steps)).random, dataset.drawing)
        if place < 0:
            return None
        prefix = await self._prefix(dataset, steps[:place], declared[:place], 0)
        return prefix, place + 1 == len(steps)

    def _steps(self, declared: Sequence[Mapping[str, Any]], *, by_client: bool) -> list[Step]:
        allow_modules = self._allow_modules
        allow_files = allow_modules or not by_client
        return to_steps(
            declared, self._installed, allow_modules=allow_modules, allow_files=allow_files
        )

    async def _described(self, dataset: Dataset, steps: Sequence[Step]) -> Described:
        recipe = ENCODER.encode(Recipe(list(steps), _source(dataset)))
        described = await self._pool.workers.describe(recipe, NO_JOB)
        if described.error:
            raise ConfigError(described.error)
        return described

    async def _prefix(
        self,
        dataset: Dataset,
        steps: Sequence[Step],
        declared: Sequence[Mapping[str, Any]],
        height: int,
    ) -> TransformedDataset:
        """The dataset of the transforms before `cache`."""
        if self._keep is None:
            raise ConfigError(
                "a chain has the transform `cache`, and this daemon has no cache; set cache_memory"
            )
        described = await self._described(dataset, steps)
        prefix = self._transformed(dataset, steps, described, self._pool_at(2 * height))
        return replace(prefix, transforms=_fingerprint(declared, described))

    def _records(self, dataset: Dataset, prefix: TransformedDataset) -> Dataset:
        """Its records; the same object for the same records."""
        assert self._keep
        # samples that cannot be transformed are part of `transforms`
        key = dataset.storage, dataset.fingerprint, prefix.recipe, prefix.transforms
        if key not in self._kept:
            fields = as_records(prefix.made, prefix.fields[len(prefix.made) :])
            prefix = replace(prefix.sized_fully(), chosen=fields)
            assert prefix.measured
            index = RecordIndex(prefix.measured, fields, prefix.corrupt)
            shard = record_shard(index, dataset, prefix.recipe)
            records = records_of(prefix, index, self._keep(prefix, index, shard))
            names = (*prefix.transform_names, STEP)
            self._kept[key] = replace(records, transform_names=names)
            if len(self._kept) > _MAX_KEPT:
                self._kept.popitem(last=False)
        self._kept.move_to_end(key)
        return self._kept[key]

    def _transformed(
        self, dataset: Dataset, steps: Sequence[Step], described: Described, pool: TransformPool
    ) -> TransformedDataset:
        made = [_checked(each) for each in described.made]
        passed = [spec for spec in dataset.fields if spec.name in described.passed]
        chosen = [*made, *passed]
        _check_names(made, passed)
        values = {each.name: getattr(dataset, each.name) for each in fields(Dataset)}
        values |= {"chosen": chosen, "transform_names": tuple(step.name for step in steps)}
        values |= {"source": dataset, "made": made, "failed": NO_SAMPLES}
        return TransformedDataset(
            **values,
            recipe=ENCODER.encode(Recipe(list(steps), _source(dataset), described.versions)),
            read=described.read,
            cost=described.cost,
            pool=pool,
            engines=described.engines,
            limits=[each.max_length for each in described.made if None in each.shape],
            random=[steps[place].name for place in described.random],
        )

    def for_records(self, dataset: TransformedDataset, height: int) -> TransformedDataset:
        """The same for readers of its samples that run while jobs hold their memory.

        Args:
            dataset: a source of a mixture.
            height: see `apply`.
        """
        return replace(dataset, pool=self._pool_at(2 * height + 1))

    def _pool_at(self, level: int) -> TransformPool:
        """A pool whose memory is held only by reads that wait for lower levels, or for none."""
        if level not in self._pools_of_records:
            room = ExchangeRoom(_MAX_BYTES_AT_ONCE)
            self._pools_of_records[level] = TransformPool(self._pool.workers, room)
        return self._pools_of_records[level]

    async def with_engine(self, dataset: TransformedDataset, engine: str) -> TransformedDataset:
        """The dataset, transformed by a faster program whose results must be verified.

        Raises:
            ConfigError: the program cannot do it.
            Overloaded: no process can be started.
        """
        recipe = msgspec.structs.replace(RECIPE_DECODER.decode(dataset.recipe), engine=engine)
        encoded = ENCODER.encode(recipe)
        described = await self._pool.workers.describe(encoded, NO_JOB)
        if described.error:
            raise ConfigError(described.error)
        return replace(dataset, recipe=encoded, cost=described.cost)

    def close(self) -> None:
        """End the processes and give back the memory."""
        self._pool.workers.close()
        self._pool.room.close()
        for pool in self._pools_of_records.values():
            pool.room.close()


def _fingerprint(declared: Sequence[Mapping[str, Any]], described: Described) -> str:
    """Tells one list of transforms from another, by options as they were written and versions."""
    tables = [
        {key: value for key, value in table.items() if (table["name"], key) != _NOT_COUNTED}
        for table in declared
    ]
    text = json.dumps([tables, described.versions], sort_keys=True, default=str)
    return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()


def _source(dataset: Dataset) -> list[SourceField]:
    return [
        SourceField(each.name, name_of(each.dtype), _shape(each), each.image)
        for each in dataset.fields
    ]


def _shape(spec: FieldSpec) -> tuple[int | None, ...]:
    return (None, *spec.shape) if spec.ragged else spec.shape


def _checked(made: MadeField) -> FieldSpec:
    """The field that a process says it makes, which foreign code may have written."""
    if made.dtype not in _DTYPES and made.dtype != BFLOAT16:
        raise ConfigError(
            f"the transforms make {made.name!r} with the dtype {made.dtype!r}; it must be one of "
            f"{', '.join(sorted(np.dtype(each).name for each in _DTYPES))}, {BFLOAT16}"
        )
    dtype, shape = dtype_of(made.dtype), made.shape
    num_bytes = dtype.itemsize * math.prod(length or 0 for length in shape)
    if num_bytes > _MAX_MADE_BYTES:
        raise ConfigError(
            f"the transforms make {made.name!r:.100} with {num_bytes} bytes a sample; a field has "
            f"at most {_MAX_MADE_BYTES}"
        )
    is_ragged = bool(shape) and shape[0] is None
    fixed = tuple(length for length in shape[is_ragged:] if length)
    if len(fixed) != len(shape) - is_ragged:
        raise ConfigError(f"the transforms make {made.name!r} with lengths that samples differ in")
    return FieldSpec(made.name, dtype, fixed, ragged=is_ragged, codec="bytes", image=made.image)


def _check_names(made: Sequence[FieldSpec], passed: Sequence[FieldSpec]) -> None:
    if not made and not passed:
        raise ConfigError("the transforms leave no field")
    names = [spec.name for spec in (*made, *passed)]
    for name in names[: len(made)]:
        if not is_servable(name) or names.count(name) > 1:
            raise ConfigError(f"no field can have the name {name!r:.100}, which transforms make")
