"""The format `webdataset`: tar archives in which successive members with one key make a sample.

A field is named after the extension of its members. `jpg;png` takes whichever of the two a sample
has, `jpg` before `png`. Its name is then `jpg`, or `image` if it is written `image=jpg;png`.

All arrays of a field have one type and one number of dims. If they have one shape, they are
stacked. If they differ in their first dim alone, a batch has their rows one after the other, and
its offsets count rows. If they differ in other dims, it has all elements one after the other, its
offsets count elements, and the tensor `NAME.shape` has the shape of each.
"""

import difflib
import itertools
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from gyre_daemon.datasets.formats.base import (
    PRESENT_SUFFIX,
    SHAPE_SUFFIX,
    TAKEN,
    Arrays,
    CodecName,
    DamagedSample,
    FieldSpec,
    Scan,
    corrupt,
    is_servable,
    media_type_of,
)
from gyre_daemon.datasets.formats.sample_table import SampleTable
from gyre_daemon.datasets.formats.tar_shards import (
    SCAN_VERSION,
    check_scan,
    codec_of,
    num_samples,
    scan_tar,
)
from gyre_daemon.errors import ConfigError
from gyre_daemon.order.permutation import Int64Array
from gyre_daemon.storage.shard import Shard

_NAMES_ARE_TAKEN = f"{TAKEN}; name the other `fields` to serve, or rename it: `NAME=EXTENSION`"


@dataclass(frozen=True, slots=True)
class TarField:
    """A field to serve.

    Attributes:
        name: of the tensor.
        extensions: of the members that may hold it, the preferred one first.
        is_optional: whether samples may lack it.
    """

    name: str
    extensions: tuple[str, ...]
    is_optional: bool

    @property
    def codec(self) -> CodecName:
        """How it is stored; all of its extensions are stored in the same way."""
        return codec_of(self.extensions[0])

    @property
    def members(self) -> str:
        """Its extensions, for messages."""
        return " or ".join(f".{extension}" for extension in self.extensions)


@dataclass(frozen=True, slots=True)
class TarShard:
    """A shard and its scan; see `scan_tar` for the arrays and for `meta`."""

    shard: Shard
    scan: Arrays
    meta: Mapping[str, Any]

    @property
    def name(self) -> str:
        """The shard's name."""
        return self.shard.name

    @property
    def num_samples(self) -> int:
        """How many samples the shard has."""
        return num_samples(self.scan)


def parse_fields(texts: Sequence[str], optional: Sequence[str]) -> tuple[TarField, ...]:
    """The fields that a configuration names.

    Raises:
        ConfigError: no batch can have them, or they contradict each other.
    """
    fields = tuple(_parse_field(text, optional) for text in texts)
    names = [field.name for field in fields]
    for field in fields:
        if not is_servable(field.name) or not all(field.extensions):
            raise ConfigError(
                f"a webdataset cannot serve a field `{field.name}`: {_NAMES_ARE_TAKEN}"
            )
        if len({codec_of(extension) for extension in field.extensions}) > 1:
            raise ConfigError(
                f"field `{field.name}` cannot be {field.members}: they are stored in different ways"
            )
    if len(set(names)) < len(names):
        raise ConfigError(f"fields of a webdataset names one twice: {', '.join(names)}")
    for name in optional:
        if fields and name not in names:
            close = difflib.get_close_matches(name, names, n=1)
            hint = f"did you mean `{close[0]}`?" if close else f"they are {', '.join(names)}"
            raise ConfigError(
                f"optional of a webdataset has `{name}`, which is none of its fields; {hint}"
            )
    return fields


def all_fields(shards: Sequence[TarShard], optional: Sequence[str]) -> tuple[TarField, ...]:
    """A field for every extension that any sample has, in order of appearance.

    Optional fields that no sample has come last.
    """
    found: dict[str, None] = {}
    for shard in shards:
        for extension in shard.meta["extensions"]:
            if not is_servable(extension):
                reason = f"it has members .{ascii(extension)[1:-1]}: {_NAMES_ARE_TAKEN}"
                raise corrupt(shard.name, int(shard.scan["start"][0].min()), reason)
            found[extension] = None
    names = dict.fromkeys([*found, *optional])
    return tuple(TarField(name, (name,), name in optional) for name in names)


def check_members(shard: TarShard, field: TarField) -> None:
    """Check that all members of a field can be served.

    Raises:
        CorruptSample: with shard and field.
    """
    unsound = shard.meta["unsound"]
    for extension in field.extensions:
        if extension in unsound:
            offset, reason = unsound[extension]
            raise corrupt(shard.name, offset, reason, field=field.name)


def check_complete(shard: TarShard, field: TarField) -> None:
    """Check that no sample lacks a required field.

    Raises:
        CorruptSample: with shard, sample and field.
    """
    extensions = shard.meta["extensions"]
    if field.is_optional:
        return
    numbers = {extensions.index(name) for name in field.extensions if name in extensions}
    lacking = [kind for kind in shard.meta["kinds"] if numbers.isdisjoint(kind[0])]
    if lacking:
        _, _, offset, key = min(lacking, key=lambda kind: int(kind[1]))
        reason = (
            f"sample `{key}` has no member {field.members}; name the fields that all samples have "
            f'(`fields`), or those that some may lack (`optional = ["{field.name}"]`)'
        )
        if all(len(kind[0]) == 1 for kind in shard.meta["kinds"]) and len(extensions) > 1:
            reason = (
                f"sample `{key}` has no member {field.members}: every sample has one member. Those "
                "of a sample have one name up to its first dot, folders included, and follow each "
                "other; name them so and write the shard with `tar --sort=name`"
            )
        raise corrupt(shard.name, offset, reason, field=field.name, key=key)


def locate_fields(
    shards: Sequence[TarShard], fields: Sequence[TarField]
) -> tuple[Int64Array, Int64Array, Int64Array]:
    """The places of F fields in the N samples of some shards.

    Returns:
        Three int64 [N, F]: first byte; size; and the number of the extension of the member that has
        the field. Where a sample lacks it, its own first byte, 0 and -1.
    """
    shape = sum(each.num_samples for each in shards), len(fields)
    start, size, member = (np.full(shape, value, np.int64) for value in (0, 0, -1))
    begin = 0
    for extensions, alike in itertools.groupby(shards, lambda each: each.meta["extensions"]):
        scans = [each.scan for each in alike]
        starts, sizes = (np.concatenate([its[name] for its in scans]) for name in ("start", "size"))
        here = slice(begin, begin := begin + len(starts))
        start[here] = starts.min(axis=1, keepdims=True)
        for column, field in enumerate(fields):
            for extension in reversed(field.extensions):
                if extension in extensions:
                    number = extensions.index(extension)
                    has = sizes[:, number] >= 0
                    start[here, column][has] = starts[has, number]
                    size[here, column][has] = sizes[has, number]
                    member[here, column][has] = number
    return start, size, member


def _parse_field(text: str, optional: Sequence[str]) -> TarField:
    name, equals, rest = text.partition("=")
    extensions = tuple(part.strip() for part in (rest if equals else text).split(";"))
    name = name.strip() if equals else extensions[0]
    return TarField(name, extensions, name in optional)


@dataclass(frozen=True, slots=True)
class ArrayField:
    """A field whose samples are npy arrays.

    Attributes:
        spec: of the field.
        lengths: int64 [N], bytes of each array; None if all have the same.
        shape: the spec of the indexed field of the shapes; None if the batch does not need them.
        shapes: int64 [N, dims]; zeros for a sample without an array.
    """

    spec: FieldSpec
    lengths: Int64Array | None
    shape: FieldSpec | None
    shapes: Int64Array


def array_field(
    field: TarField, shards: Sequence[TarShard], members: Sequence[Int64Array]
) -> ArrayField:
    """Decide how the arrays of all shards are served.

    Args:
        field: of arrays.
        shards: all with samples.
        members: for each, of the field, see `locate_fields`.

    Raises:
        CorruptSample: they differ in type or in their number of dims; names the first that does.
        ConfigError: there are no arrays, so their type is not known.
    """
    dtype, num_dims = _common_type(field, shards)
    shapes = np.concatenate(
        [_shapes(each, its, num_dims) for each, its in zip(shards, members, strict=True)]
    )
    present = np.concatenate(members) >= 0
    first = shapes[np.argmax(present)]
    differs = (shapes != first)[present].any(axis=0)
    if not differs.any():
        spec = FieldSpec(field.name, dtype, tuple(first.tolist()), ragged=False, codec="npy")
        return ArrayField(spec, None, None, shapes)
    lengths = np.where(present, shapes.prod(axis=1) * dtype.itemsize, 0)
    if not differs[1:].any() and first[1:].all():
        spec = FieldSpec(field.name, dtype, tuple(first[1:].tolist()), ragged=True, codec="npy")
        return ArrayField(spec, lengths, None, shapes)
    spec = FieldSpec(field.name, dtype, (), ragged=True, codec="npy")
    name = field.name + SHAPE_SUFFIX
    shape = FieldSpec(name, _INT64, (num_dims,), ragged=False, codec="indexed")
    return ArrayField(spec, lengths, shape, shapes)


def _common_type(field: TarField, shards: Sequence[TarShard]) -> tuple[np.dtype[np.generic], int]:
    """The little-endian type and the number of dims of all arrays."""
    first: tuple[str, int, str] | None = None
    for shard in shards:
        arrays = shard.meta["arrays"]
        for extension in field.extensions:
            if extension not in arrays:
                continue
            dtype, num_dims, offset, key = arrays[extension]
            if first is None:
                first = dtype, num_dims, f"sample `{key}` of shard {shard.name}"
            if (dtype, num_dims) != first[:2]:
                reason = (
                    f"sample `{key}` has as its {field.name} an array of {num_dims} dims of type "
                    f"{dtype}, and {first[2]} has one of {first[1]} dims of type {first[0]}; a "
                    "field's arrays must have one type and one number of dims"
                )
                raise corrupt(shard.name, offset, reason, field=field.name, key=key)
    if first is None:
        raise ConfigError(
            f"no shard has a member {field.members}, so the type of the field `{field.name}` is "
            "not known"
        )
    return np.dtype(first[0]), first[1]


def _shapes(shard: TarShard, member: Int64Array, num_dims: int) -> Int64Array:
    """Int64 [n, dims], zeros for a sample without an array."""
    shapes = np.zeros((shard.num_samples, num_dims), np.int64)
    begin = 0
    for extension, (_, count, *_) in shard.meta["arrays"].items():
        if count == num_dims:
            some = member == shard.meta["extensions"].index(extension)
            shapes[some] = shard.scan["shape"][some, begin : begin + count]
        begin += count
    return shapes


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
            TarShard(shard, scan, msgspec.json.decode(scan["meta"].tobytes()))
            for shard, scan in zip(shards, inspected, strict=True)
        ]
        full = [each for each in every if each.num_samples]
        options = self._options
        fields: Sequence[TarField] = ()
        if full:
            fields = parse_fields(options.fields, options.optional) or all_fields(
                full, options.optional
            )
        for each in full:
            _check(each, fields, is_tolerant=is_tolerant)
        start, size, member = locate_fields(full, fields)
        ends = np.cumsum([each.num_samples for each in full])[:-1]
        arrays = {
            number: array_field(field, full, np.split(member[:, number], ends))
            for number, field in enumerate(fields)
            if field.codec == "npy"
        }
        stored = [
            arrays[number].spec if number in arrays else _field_spec(field)
            for number, field in enumerate(fields)
        ]
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
            start,
            size,
            identity=_identity(fields, every),
            lengths={
                number: each.lengths for number, each in arrays.items() if each.lengths is not None
            },
            absent=member < 0 if any(field.is_optional for field in fields) else None,
            indexed=[values for _, values in indexed],
        )
        return index, damaged


def _check(shard: TarShard, fields: Sequence[TarField], *, is_tolerant: bool) -> None:
    for field in fields:
        # the type and shape of a field of arrays are known only if every member has them
        if not is_tolerant or field.codec == "npy":
            check_members(shard, field)
        if not is_tolerant:
            check_complete(shard, field)


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
        offset = int(shard.scan["start"][sample - first].min())
        lacks = next(each for each in required if member[sample, each] < 0)
        damaged.append(DamagedSample(number, sample, offset, reasons[lacks]))
    return damaged


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
