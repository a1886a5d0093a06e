"""Datasets whose samples are transformed, from what operators and clients declare."""

import hashlib
import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import msgspec
import numpy as np

from gyre_daemon.datasets.chunks.exchange import ExchangeRoom
from gyre_daemon.datasets.dataset import Dataset
from gyre_daemon.datasets.formats import FieldSpec, SampleIndex
from gyre_daemon.datasets.formats.names import is_servable
from gyre_daemon.errors import ConfigError
from gyre_daemon.runtime.fair import NO_JOB
from gyre_daemon.transforms.measured import MeasuredIndex
from gyre_daemon.transforms.messages import (
    ENCODER,
    RECIPE_DECODER,
    Described,
    MadeField,
    Recipe,
    SourceField,
)
from gyre_daemon.transforms.names import to_steps
from gyre_daemon.transforms.transform import Cost
from gyre_daemon.transforms.workers import TransformWorkers

# Memory of samples that are being read and transformed, of all jobs; it is not part of any budget.
# Less would leave processes idle while a slow storage is read.
_MAX_BYTES_AT_ONCE = 128 << 20
_DTYPES = frozenset(
    np.dtype(f"{kind}{size}").str
    for kind, sizes in (("b", [1]), ("i", [1, 2, 4, 8]), ("u", [1, 2, 4, 8]), ("f", [2, 4, 8]))
    for size in sizes
)


@dataclass(frozen=True, slots=True)
class TransformPool:
    """What transforming takes from a daemon.

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
        pool: who transforms them.
        engines: programs that may transform them faster, the fastest first.
        measured: the lengths of the ragged fields that are made; None while they are not known.
    """

    source: Dataset
    recipe: bytes
    made: Sequence[FieldSpec]
    read: Sequence[str]
    cost: Cost
    pool: TransformPool
    engines: Sequence[str] = ()
    measured: MeasuredIndex | None = None

    @property
    def sized(self) -> SampleIndex:
        """See `Dataset.sized`."""
        return self.measured or self.index

    @property
    def made_ragged(self) -> Sequence[FieldSpec]:
        """The fields that transforms make and whose samples differ in length."""
        return [spec for spec in self.made if spec.ragged]

    @property
    def is_read_in_groups(self) -> bool:
        """Whether several small batches are best read together: not if that takes much longer."""
        return self.source.is_read_in_groups and self.cost == "light"


class Transforms:
    """Makes transformed datasets for a daemon."""

    def __init__(
        self, workers: TransformWorkers, installed: Collection[str], *, allow_modules: bool
    ) -> None:
        """Start no process yet.

        Args:
            workers: of the daemon.
            installed: names of other packages' transforms that the operator enables.
            allow_modules: whether clients may name classes of their own.
        """
        self._pool = TransformPool(workers, ExchangeRoom(_MAX_BYTES_AT_ONCE))
        self._installed = installed
        self._allow_modules = allow_modules

    async def apply(
        self, dataset: Dataset, declared: Sequence[Mapping[str, Any]], *, by_client: bool
    ) -> TransformedDataset:
        """The dataset with its samples transformed.

        Args:
            dataset: as it is stored.
            declared: tables with a `name` and options; at least one.
            by_client: whether a client declares them, and not the operator.

        Raises:
            ConfigError: a transform is unknown, or does not fit the dataset or its options.
            NotAllowed: a transform is not served here.
            Overloaded: no process can be started.
        """
        allow_modules = self._allow_modules
        allow_files = allow_modules or not by_client
        steps = to_steps(
            declared, self._installed, allow_modules=allow_modules, allow_files=allow_files
        )
        source = [SourceField(each.name, each.dtype.str, _shape(each)) for each in dataset.fields]
        recipe = ENCODER.encode(Recipe(steps, source))
        described = await self._pool.workers.describe(recipe, NO_JOB)
        if described.error:
            raise ConfigError(described.error)
        recipe = ENCODER.encode(Recipe(steps, source, described.versions))
        made = [_checked(each) for each in described.made]
        passed = [spec for spec in dataset.fields if spec.name in described.passed]
        chosen = [*made, *passed]
        _check_names(chosen)
        values = {each.name: getattr(dataset, each.name) for each in fields(Dataset)}
        values |= {
            "chosen": chosen,
            "transforms": _fingerprint(declared, described),
            "transform_names": tuple(step.name for step in steps),
        }
        return TransformedDataset(
            **values,
            source=dataset,
            recipe=recipe,
            made=made,
            read=described.read,
            cost=described.cost,
            pool=self._pool,
            engines=described.engines,
        )

    async def with_engine(self, dataset: TransformedDataset, engine: str) -> TransformedDataset:
        """The dataset, transformed by a faster program; what it makes must be verified.

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


def _fingerprint(declared: Sequence[Mapping[str, Any]], described: Described) -> str:
    """Tells one list of transforms from another, by options as they were written and versions."""
    text = json.dumps([list(map(dict, declared)), described.versions], sort_keys=True, default=str)
    return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()


def _shape(spec: FieldSpec) -> tuple[int | None, ...]:
    return (None, *spec.shape) if spec.ragged else spec.shape


def _checked(made: MadeField) -> FieldSpec:
    """The field that a process says it makes, which foreign code may have written."""
    if made.dtype not in _DTYPES:
        raise ConfigError(
            f"the transforms make {made.name!r} with the dtype {made.dtype!r}; it must be one of "
            f"{', '.join(sorted(np.dtype(each).name for each in _DTYPES))}"
        )
    dtype, shape = np.dtype(made.dtype), made.shape
    is_ragged = bool(shape) and shape[0] is None
    fixed = tuple(length for length in shape[is_ragged:] if length)
    if len(fixed) != len(shape) - is_ragged:
        raise ConfigError(f"the transforms make {made.name!r} with lengths that samples differ in")
    return FieldSpec(made.name, dtype, fixed, ragged=is_ragged, codec="bytes")


def _check_names(chosen: Sequence[FieldSpec]) -> None:
    if not chosen:
        raise ConfigError("the transforms leave no field")
    names = [spec.name for spec in chosen]
    for name in names:
        if not is_servable(name) or names.count(name) > 1:
            raise ConfigError(f"no field can have the name {name!r:.100}, which transforms make")
