"""`webdataset`: tar shards whose consecutive members with one key make a sample; what follows the key's first dot is the field.

`tarscan` looks through a shard once, `tarfields` decides on the fields of all samples, `tararrays` on the shapes of arrays.
Here the shards become one index.
"""

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import BinaryIO

import numpy as np
import numpy.typing as npt

from gyre_daemon.datasets.formats.base import PRESENT_SUFFIX, Arrays, Extents, FieldSpec
from gyre_daemon.datasets.formats.tararrays import ArrayField, array_field
from gyre_daemon.datasets.formats.tarfields import (
    Column,
    ScannedShard,
    TarField,
    all_fields,
    check_inside,
    check_members,
    column,
    parse_fields,
)
from gyre_daemon.datasets.formats.tarscan import SCANNER, scan_tar
from gyre_daemon.order.blocks import BlockTable, BlockTables, blocks_of_unequal_samples
from gyre_daemon.storage.shard import Shard

_INT64, _UINT8, _BOOL = np.dtype("<i8"), np.dtype(np.uint8), np.dtype(np.bool_)

_Integers = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class WebdatasetOptions:
    """Keys of a `webdataset` dataset.

    Attributes:
        fields: extensions to serve, such as `txt`, `jpg;png` or `image=jpg;png`; empty for all that any sample has.
        optional: names of fields that samples may lack.
    """

    fields: tuple[str, ...] = ()
    optional: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        """Refuse fields that no batch can have."""
        parse_fields(self.fields, self.optional)


class WebdatasetFormat:
    """Tar shards, indexed once by one pass over their headers."""

    pattern = "*.{tar,tar.gz,tgz}"
    scanner = SCANNER
    probe = None

    def __init__(self, options: WebdatasetOptions) -> None:
        self._options = options

    def scan(self, shard: str, file: BinaryIO) -> Arrays:
        """See `Format.scan`."""
        return scan_tar(shard, file)

    def assemble(self, shards: Sequence[Shard], scans: Sequence[Arrays]) -> "WebdatasetIndex":
        """See `Format.assemble`."""
        return WebdatasetIndex(self._options, shards, scans)


class WebdatasetIndex:
    """Dense arrays of where each field of each sample lies: 16 bytes per sample and field."""

    def __init__(self, options: WebdatasetOptions, shards: Sequence[Shard], scans: Sequence[Arrays]) -> None:
        scanned = [ScannedShard(*each, json.loads(each[1]["meta"].tobytes())) for each in zip(shards, scans, strict=True)]
        whole = [each for each in scanned if each.num_samples]
        fields = parse_fields(options.fields, options.optional) or all_fields(whole, options.optional)
        fields = fields if whole else ()
        columns = [_columns(each, fields) for each in whole]
        arrays = {
            number: array_field(field, whole, [its[number] for its in columns])
            for number, field in enumerate(fields)
            if field.codec == "npy"
        }
        self._start = _table([[field.start for field in its] for its in columns], len(fields))
        self._size = _table([[field.size for field in its] for its in columns], len(fields))
        self._absent = _absent(fields, columns)
        self._lengths = {number: its.lengths for number, its in arrays.items() if its.lengths is not None}
        self._first = np.concatenate(([0], np.cumsum([each.num_samples for each in scanned]))).astype(np.int64)
        self.num_samples = len(self._start)
        stored = [arrays[number].spec if number in arrays else _field_spec(field) for number, field in enumerate(fields)]
        known = [*_presence(fields, self._absent), *_shapes(arrays)]
        self.fields = (*stored, *(spec for spec, _ in known))
        self._known = [values for _, values in known]
        self._is_ragged = [spec.ragged for spec in stored]
        self._digest = _digest(fields, scanned, [self._start, self._size, *self._lengths.values(), *self._known])
        self._blocks = BlockTables(self._make_blocks)

    def locate(self, sample_ids: _Integers) -> Extents:
        """See `SampleIndex.locate`."""
        shard = np.searchsorted(self._first, sample_ids, side="right") - 1
        size = self._size[sample_ids]
        lengths = self._lengths_of(sample_ids, size) if self._lengths else None
        absent = None if self._absent is None else self._absent[sample_ids]
        known = tuple(values[sample_ids] for values in self._known)
        return Extents(shard, self._start[sample_ids], size, lengths, absent, known)

    def _lengths_of(self, sample_ids: _Integers, size: _Integers) -> _Integers:
        """What samples take in ragged tensors, which is less than what is stored of arrays."""
        lengths = size.copy()
        for number, its in self._lengths.items():
            lengths[:, number] = its[sample_ids]
        return lengths

    def max_ragged_bytes(self, num_samples: int) -> int:
        """See `SampleIndex.max_ragged_bytes`; each sample occurs at most once in each epoch that the positions touch."""
        totals = self._size[:, self._is_ragged].sum(axis=1)
        num_epochs = num_samples // max(self.num_samples, 1) + 2
        num_largest = min(-(-num_samples // num_epochs), self.num_samples)
        largest = np.partition(totals, self.num_samples - num_largest)[self.num_samples - num_largest :]
        return num_epochs * int(largest.sum())

    def blocks(self, io_block_bytes: int) -> BlockTable:
        """See `SampleIndex.blocks`; 16 bytes per block, made by a look at every sample."""
        return self._blocks.of(io_block_bytes)

    def _make_blocks(self, io_block_bytes: int) -> BlockTable:
        shard = np.repeat(np.arange(len(self._first) - 1), np.diff(self._first))
        start, stop = self._start.min(axis=1), (self._start + self._size).max(axis=1)
        return blocks_of_unequal_samples(shard, start, stop, io_block_bytes)

    def digest(self) -> bytes:
        """See `SampleIndex.digest`."""
        return self._digest


def _columns(each: ScannedShard, fields: Sequence[TarField]) -> list[Column]:
    """Of one shard, each field's."""
    check_inside(each)
    for field in fields:
        check_members(each, field)
    return [column(each, field) for field in fields]


def _table(parts: Sequence[Sequence[_Integers]], num_fields: int) -> _Integers:
    """int64 [N, F] of the columns of all shards."""
    nothing = np.empty((0, num_fields), np.int64)
    return np.concatenate([nothing, *(np.stack(part, axis=1) for part in parts if part)])


def _absent(fields: Sequence[TarField], columns: Sequence[Sequence[Column]]) -> npt.NDArray[np.bool_] | None:
    """Bool [N, F], which samples lack which fields; None where none may."""
    if not any(field.is_optional for field in fields):
        return None
    return _table([[each.member for each in its] for its in columns], len(fields)) < 0


def _field_spec(field: TarField) -> FieldSpec:
    """Of a field that is no array."""
    if field.codec == "integer":
        return FieldSpec(field.name, _INT64, (), ragged=False, codec="integer")
    return FieldSpec(field.name, _UINT8, (), ragged=True, codec=field.codec)


def _presence(
    fields: Sequence[TarField], absent: npt.NDArray[np.bool_] | None
) -> list[tuple[FieldSpec, npt.NDArray[np.generic]]]:
    """Of each optional field, which samples have it."""
    if absent is None:
        return []
    return [
        (FieldSpec(field.name + PRESENT_SUFFIX, _BOOL, (), ragged=False, codec="known"), ~absent[:, number])
        for number, field in enumerate(fields)
        if field.is_optional
    ]


def _shapes(arrays: Mapping[int, ArrayField]) -> list[tuple[FieldSpec, npt.NDArray[np.generic]]]:
    """Of each field of flattened arrays, their shapes."""
    return [(its.shape, its.shapes) for its in arrays.values() if its.shape]


def _digest(fields: Sequence[TarField], shards: Sequence[ScannedShard], tables: Sequence[npt.NDArray[np.generic]]) -> bytes:
    """Of what the samples are; a dataset whose fields are single extensions that all samples have is known by these alone."""
    is_plain = all(field.extensions == (field.name,) and not field.is_optional for field in fields)
    named = [field.name if is_plain else [field.name, field.extensions, field.is_optional] for field in fields]
    metas = [{name: each.meta[name] for name in ("extensions", "npy", "names")} for each in shards]
    digest = hashlib.blake2b(json.dumps([named, metas]).encode(), digest_size=16)
    for table in tables:
        digest.update(table.tobytes())
    return digest.digest()
