"""The index of a mixture: all samples of all its sources, one source behind the other. Pure.

A field of the mixture is one that every source has, with one dtype and one shape; lists whose
lengths are equal in one source and differ in another one are ragged. How each source stores a field
is one of its `forms`, as for shards with different schemas. The indexed field `source` is the
number of the sample's source; sources of a source count by themselves.
"""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, NoReturn

import numpy as np
import numpy.typing as npt

from gyre_daemon.datasets.formats import (
    Extents,
    FieldSpec,
    SampleIndex,
    indexed_fields,
    stored_fields,
)
from gyre_daemon.errors import ConfigError, InvalidRequest
from gyre_daemon.order.permutation import Int64Array

SOURCE = "source"


@dataclass(frozen=True, eq=False)
class Part:
    """One source of a mixture.

    Attributes:
        name: of its dataset.
        index: its samples.
        fields: its tensors, under the names by which they are served.
        leaves: the names of a mixture's own sources; empty for a plain dataset.
    """

    name: str
    index: SampleIndex
    fields: Sequence[FieldSpec]
    leaves: tuple[str, ...] = ()

    @property
    def source_names(self) -> list[str]:
        """The names that the field `source` counts: its own name, or those of its sources."""
        return [f"{self.name}/{leaf}" for leaf in self.leaves] or [self.name]

    @cached_property
    def num_schemas(self) -> int:
        """In how many ways its shards store fields."""
        return max((len(spec.forms) for spec in self.fields), default=0) or 1

    def field(self, name: str) -> FieldSpec:
        """The field of this name."""
        return next(spec for spec in self.fields if spec.name == name)


class MixedIndex:
    """A `SampleIndex` of the samples of several others."""

    def __init__(self, parts: Sequence[Part]) -> None:
        """Find the fields that all of them have.

        Raises:
            ConfigError: fields of one name differ, or no field is in all sources.
        """
        self._parts = parts
        counts = [part.index.num_samples for part in parts]
        self.first_ids: list[int] = [0, *np.cumsum(counts).tolist()]
        self._first_shard = [0]
        stored = _shared([stored_fields(part.fields) for part in parts], parts)
        indexed = _shared([indexed_fields(_without_source(part)) for part in parts], parts)
        if not stored and not indexed:
            each = "; ".join(
                f"`{part.name}` has {', '.join(spec.name for spec in part.fields)}"
                for part in parts
            )
            raise ConfigError(f"the sources of a mixture have no field in common: {each}")
        self._stored = [_in_all(name, parts) for name in stored]
        self._indexed = [parts[0].field(name) for name in indexed]
        self._columns = [_columns(stored, stored_fields(part.fields)) for part in parts]
        self._values = [_columns(indexed, indexed_fields(part.fields)) for part in parts]
        self._own_source = [
            _columns([SOURCE], indexed_fields(part.fields))[0] if part.leaves else None
            for part in parts
        ]
        self._first_source = np.cumsum([0, *(len(part.source_names) for part in parts)]).tolist()
        names = tuple(name for part in parts for name in part.source_names)
        self._source = FieldSpec(
            SOURCE, np.dtype("<i4"), (), ragged=False, codec="indexed", categories=names
        )
        self._first_schema = np.cumsum([0, *(part.num_schemas for part in parts)]).tolist()

    @property
    def num_samples(self) -> int:
        """See `SampleIndex.num_samples`."""
        return self.first_ids[-1]

    @property
    def fields(self) -> Sequence[FieldSpec]:
        """See `SampleIndex.fields`."""
        return [*self._stored, *self._indexed, self._source]

    def with_shards(self, counts: Sequence[int]) -> "MixedIndex":
        """The same, where the sources have so many shards each."""
        self._first_shard = [0, *np.cumsum(counts).tolist()]
        return self

    def locate(self, sample_ids: Int64Array) -> Extents:
        """See `SampleIndex.locate`."""
        part_of = np.searchsorted(self.first_ids, sample_ids, side="right") - 1
        n, shape = len(sample_ids), (len(sample_ids), len(self._stored))
        shard, schema = np.zeros(n, np.int64), np.zeros(n, np.int64)
        start, size, lengths = (np.zeros(shape, np.int64) for _ in range(3))
        absent = np.zeros(shape, np.bool_)
        source = np.zeros(n, np.int32)
        values: list[npt.NDArray[Any]] = [
            np.zeros((n, *spec.shape), spec.dtype) for spec in self._indexed
        ]
        for number in np.unique(part_of).tolist():
            some = np.flatnonzero(part_of == number)
            its = self._parts[number].index.locate(sample_ids[some] - self.first_ids[number])
            columns = self._columns[number]
            shard[some] = its.shard + self._first_shard[number]
            schema[some] = self._first_schema[number] + (0 if its.schema is None else its.schema)
            start[some], size[some] = its.start[:, columns], its.size[:, columns]
            lengths[some] = its.tensor_bytes[:, columns]
            if its.absent is not None:
                absent[some] = its.absent[:, columns]
            for into, column in zip(values, self._values[number], strict=True):
                into[some] = its.indexed[column]
            own = self._own_source[number]
            source[some] = self._first_source[number] + (0 if own is None else its.indexed[own])
        has_forms = self._first_schema[-1] > 1
        return Extents(
            shard,
            start,
            size,
            lengths,
            absent if absent.any() else None,
            (*values, source),
            schema if has_forms else None,
        )

    def max_ragged_bytes(self, num_samples: int) -> int:
        """See `SampleIndex.max_ragged_bytes`: all could be of the source with the largest."""
        together = sum(part.index.max_ragged_bytes(num_samples) for part in self._parts)
        largest = max(part.index.max_ragged_bytes(1) for part in self._parts)
        return min(together, num_samples * largest)

    def blocks(self, io_block_bytes: int) -> NoReturn:
        """See `SampleIndex.blocks`."""
        raise InvalidRequest("a mixture has no blocks; use the order `full` or `sequential`")

    def digest(self) -> bytes:
        """See `SampleIndex.digest`."""
        digest = hashlib.blake2b(b"mixture", digest_size=16)
        for part in self._parts:
            digest.update(part.index.digest())
        return digest.digest()


def _without_source(part: Part) -> Sequence[FieldSpec]:
    if part.leaves:
        if all(spec.name != SOURCE for spec in indexed_fields(part.fields)):
            raise ConfigError(
                f"the transforms of the mixture `{part.name}` make or drop the field `{SOURCE}`, "
                "which mixtures of it need; leave it as it is"
            )
        return [spec for spec in part.fields if spec.name != SOURCE]
    if any(spec.name == SOURCE for spec in part.fields):
        raise ConfigError(
            f"`{part.name}` has a field `{SOURCE}`, and a mixture adds one; give the former "
            "another name with `rename`"
        )
    return part.fields


def _columns(names: Sequence[str], fields: Sequence[FieldSpec]) -> list[int]:
    own = [spec.name for spec in fields]
    return [own.index(name) for name in names]


def _shared(fields: Sequence[Sequence[FieldSpec]], parts: Sequence[Part]) -> list[str]:
    """The names of the fields that all sources have, in the order of the first.

    Raises:
        ConfigError: two of one name differ; shows both.
    """
    first, *others = ({spec.name: spec for spec in each} for each in fields)
    names = [name for name in first if all(name in other for other in others)]
    for name in names:
        for part, other in zip(parts[1:], others, strict=True):
            if _kind(first[name]) != _kind(other[name]):
                raise ConfigError(
                    f"the field `{name}` is {_shown(first[name])} in `{parts[0].name}` and "
                    f"{_shown(other[name])} in `{part.name}`. Make them equal with `cast`, or give "
                    "one another name with `rename`."
                )
    return names


def _kind(spec: FieldSpec) -> tuple[object, ...]:
    known = spec.dtype, spec.shape, spec.ragged, spec.token_ids, spec.vocabulary, spec.categories
    return *known, "ids" in (spec.codec, *(form.codec for form in spec.forms))


def _shown(spec: FieldSpec) -> str:
    shape = ["n", *map(str, spec.shape)] if spec.ragged else list(map(str, spec.shape))
    of = f" below {spec.vocabulary}" if spec.vocabulary else ""
    classes = f" with {len(spec.categories)} classes" if spec.categories else ""
    return f"{spec.dtype}[{', '.join(shape)}]{of}{classes}"


def _in_all(name: str, parts: Sequence[Part]) -> FieldSpec:
    """A stored field, with the way in which each schema of each source stores it."""
    forms = tuple(
        part.field(name).form(number) for part in parts for number in range(part.num_schemas)
    )
    first = forms[0]
    media = {form.media_type for form in forms}
    lengths = {part.field(name).length for part in parts}
    return replace(
        first,
        forms=forms if len(forms) > 1 else (),
        media_type=first.media_type if len(media) == 1 else "",
        length=lengths.pop() if len(lengths) == 1 else 0,
    )
