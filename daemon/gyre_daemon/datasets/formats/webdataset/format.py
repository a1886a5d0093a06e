"""The options of a `webdataset`, and the index of all its shards."""

import json
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from gyre_daemon.datasets.formats.base import (
    PRESENT_SUFFIX,
    Arrays,
    DamagedSample,
    FieldSpec,
    Scan,
)
from gyre_daemon.datasets.formats.indexes.table import SampleTable
from gyre_daemon.datasets.formats.media import media_type_of
from gyre_daemon.datasets.formats.webdataset.arrays import array_field
from gyre_daemon.datasets.formats.webdataset.fields import (
    FieldLocations,
    TarField,
    TarShard,
    all_fields,
    check_complete,
    check_inside,
    check_members,
    locate_field,
    parse_fields,
)
from gyre_daemon.datasets.formats.webdataset.scan import SCAN_VERSION, num_samples, scan_tar
from gyre_daemon.datasets.formats.webdataset.stored import check_scan
from gyre_daemon.order.shuffle.permutation import Int64Array
from gyre_daemon.storage.shard import Shard

_INT64, _UINT8, _BOOL = np.dtype("<i8"), np.dtype(np.uint8), np.dtype(np.bool_)


@dataclass(frozen=True, slots=True)
class WebdatasetOptions:
    """The keys of a `webdataset` dataset.

    Attributes:
        fields: extensions to serve, such as `txt`, `jpg;png` or `image=jpg;png`; empty for all that
            any sample has.
        optional: names of fields that samples may lack.
    """

    fields: tuple[str, ...] = ()
    optional: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        """Refuse fields that no batch can have."""
        parse_fields(self.fields, self.optional)


class WebdatasetFormat:
    """A `Format` that scans the headers of each archive once."""

    pattern = "*.{tar,tar.gz,tgz}"
    unpacks_gzip = True
    inspection = Scan(
        SCAN_VERSION,
        scan_tar,
        num_samples,
        check_scan,
        skips=True,
    )

    @staticmethod
    def recognises(head: bytes) -> bool:
        """See `FormatEntry.recognises`: the magic of a tar header."""
        return head[257:262] == b"ustar"

    def __init__(self, options: WebdatasetOptions) -> None:
        self._options = options

    def assemble(self, shards: Sequence[Shard], inspected: Sequence[Arrays]) -> SampleTable:
        """See `Format.assemble`."""
        return self._assemble(shards, inspected, is_tolerant=False)[0]

    def assemble_tolerantly(
        self, shards: Sequence[Shard], inspected: Sequence[Arrays]
    ) -> tuple[SampleTable, Sequence[DamagedSample]]:
        """See `TolerantFormat`: the samples that lack a member.

        Members that contradict their extension are found when all samples are checked.
        """
        return self._assemble(shards, inspected, is_tolerant=True)

    def _assemble(
        self, shards: Sequence[Shard], inspected: Sequence[Arrays], *, is_tolerant: bool
    ) -> tuple[SampleTable, Sequence[DamagedSample]]:
        every = [
            TarShard(shard, scan, json.loads(scan["meta"].tobytes()))
            for shard, scan in zip(shards, inspected, strict=True)
        ]
        full = [each for each in every if each.num_samples]
        options = self._options
        fields: Sequence[TarField] = ()
        if full:
            fields = parse_fields(options.fields, options.optional) or all_fields(
                full, options.optional
            )
        locations = [_locate_fields(each, fields, is_tolerant=is_tolerant) for each in full]
        arrays = {
            number: array_field(field, full, [its[number] for its in locations])
            for number, field in enumerate(fields)
            if field.codec == "npy"
        }
        stored = [
            arrays[number].spec if number in arrays else _field_spec(field)
            for number, field in enumerate(fields)
        ]
        member = _table([[each.member for each in its] for its in locations], len(fields))
        indexed: list[tuple[FieldSpec, npt.NDArray[np.generic]]] = [
            (_presence_spec(field), member[:, number] >= 0)
            for number, field in enumerate(fields)
            if field.is_optional
        ]
        indexed += [(each.shape, each.shapes) for each in arrays.values() if each.shape]
        damaged = _lacking(every, fields, member) if is_tolerant else []
        index = SampleTable(
            (*stored, *(spec for spec, _ in indexed)),
            [each.num_samples for each in every],
            _table([[each.start for each in its] for its in locations], len(fields)),
            _table([[each.size for each in its] for its in locations], len(fields)),
            identity=_identity(fields, every),
            lengths={
                number: each.lengths for number, each in arrays.items() if each.lengths is not None
            },
            absent=member < 0 if any(field.is_optional for field in fields) else None,
            indexed=[values for _, values in indexed],
        )
        return index, damaged


def _locate_fields(
    shard: TarShard, fields: Sequence[TarField], *, is_tolerant: bool
) -> list[FieldLocations]:
    check_inside(shard)
    for field in fields:
        # the type and shape of a field of arrays are known only if every member has them
        if not is_tolerant or field.codec == "npy":
            check_members(shard, field)
        if not is_tolerant:
            check_complete(shard, field)
    return [locate_field(shard, field) for field in fields]


def _lacking(
    shards: Sequence[TarShard], fields: Sequence[TarField], member: Int64Array
) -> list[DamagedSample]:
    """The samples that lack a required field.

    Args:
        shards: all of them.
        fields: F fields.
        member: int64 [N, F], -1 where a sample lacks a field.
    """
    required = [number for number, field in enumerate(fields) if not field.is_optional]
    reasons = [f"the sample has no member {field.members}" for field in fields]
    ends = np.cumsum([each.num_samples for each in shards])
    damaged = []
    for sample in np.flatnonzero((member[:, required] < 0).any(axis=1)).tolist():
        number = int(np.searchsorted(ends, sample, side="right"))
        shard, first = shards[number], int(ends[number]) - shards[number].num_samples
        offset = int(shard.scan["start"][shard.scan["first"][sample - first]])
        lacks = next(each for each in required if member[sample, each] < 0)
        damaged.append(DamagedSample(number, sample, offset, reasons[lacks]))
    return damaged


def _table(parts: Sequence[Sequence[Int64Array]], num_fields: int) -> Int64Array:
    """Int64 [N, F] of the columns of all shards."""
    nothing = np.empty((0, num_fields), np.int64)
    return np.concatenate([nothing, *(np.stack(part, axis=1) for part in parts if part)])


def _field_spec(field: TarField) -> FieldSpec:
    """The spec of a field without arrays."""
    if field.codec == "integer":
        return FieldSpec(field.name, _INT64, (), ragged=False, codec="integer")
    media_type = media_type_of(field.extensions) if field.codec == "bytes" else ""
    return FieldSpec(field.name, _UINT8, (), ragged=True, codec=field.codec, media_type=media_type)


def _presence_spec(field: TarField) -> FieldSpec:
    """The spec of the tensor that says which samples have an optional field."""
    return FieldSpec(field.name + PRESENT_SUFFIX, _BOOL, (), ragged=False, codec="indexed")


def _identity(fields: Sequence[TarField], shards: Sequence[TarShard]) -> bytes:
    """The meaning of the samples: their fields, and the scans' facts about all members of a shard.

    A field of one extension, which all samples must have, is identified by its name alone.
    """
    is_plain = all(field.extensions == (field.name,) and not field.is_optional for field in fields)
    named = [
        field.name if is_plain else [field.name, field.extensions, field.is_optional]
        for field in fields
    ]
    metas = [{name: each.meta[name] for name in ("extensions", "npy", "names")} for each in shards]
    return json.dumps([named, metas]).encode()
