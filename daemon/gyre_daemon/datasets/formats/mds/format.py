"""The options of `mds`, and the index of all its shards."""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from gyre_daemon.datasets.formats.base import (
    Arrays,
    CodecName,
    FieldSpec,
    SampleIndex,
    Scan,
)
from gyre_daemon.datasets.formats.indexes.table import SampleTable
from gyre_daemon.datasets.formats.indexes.union_index import assemble_union
from gyre_daemon.datasets.formats.mds.compressed import (
    any_compressed,
    check_any,
    compressed_index,
    scan_any,
)
from gyre_daemon.datasets.formats.mds.scan import SCAN_VERSION, MdsColumn
from gyre_daemon.datasets.formats.names import check_names, renamed
from gyre_daemon.datasets.formats.schemas import SchemaOptions, known_columns
from gyre_daemon.errors import ConfigError, CorruptSample
from gyre_daemon.storage.shard import Shard

_RAGGED: Mapping[str, CodecName] = {
    **dict.fromkeys(("bytes", "jpeg", "png"), "bytes"),
    **dict.fromkeys(("str", "str_decimal"), "text"),
    "json": "json",
}
_NUMBERS: Mapping[str, tuple[str, CodecName]] = {
    "int": ("<i8", "bytes"),
    "str_int": ("<i8", "integer"),
    "str_float": ("<f8", "number"),
}
_SCALARS = frozenset(
    f"{kind}{bits}" for kind in ("uint", "int", "float") for bits in (8, 16, 32, 64)
) - {"float8"}


@dataclass(frozen=True, slots=True)
class MdsOptions(SchemaOptions):
    """The keys of an `mds` dataset.

    Attributes:
        columns: names of the columns to serve, such as `tokens`, or `label=class` to serve the
            column `class` under the name `label`; empty for all.
    """

    columns: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        """Refuse fields that no batch can have."""
        SchemaOptions.__post_init__(self)
        renamed(self.columns, "columns")


def _num_samples(scan: Arrays) -> int:
    return len(scan["size"])


class MdsFormat:
    """A `Format` that reads each shard once to find the columns of its samples."""

    pattern = "*.{mds,mds.zst,mds.zstd}"
    unpacks_gzip = False
    inspection = Scan(SCAN_VERSION, scan_any, _num_samples, check_any)

    def __init__(self, options: MdsOptions) -> None:
        self._options = options

    def assemble(self, shards: Sequence[Shard], inspected: Sequence[Arrays]) -> SampleIndex:
        """See `Format.assemble`."""
        return assemble_union(
            self._options,
            [field for field, _ in renamed(self._options.columns, "columns")],
            shards,
            inspected,
            lambda scan: bytes(scan["columns"]),
            _num_samples,
            self._assemble,
        )

    def _assemble(self, shards: Sequence[Shard], inspected: Sequence[Arrays]) -> SampleIndex:
        """The index of shards that have the same columns."""
        columns = _common_columns(shards, inspected)
        names = [column.name for column in columns]
        wanted = renamed(self._options.columns, "columns") or [(name, name) for name in names]
        check_names([field for field, _ in wanted], "columns")
        if columns:
            wanted = known_columns(self._options, wanted, names, shards[0].name)
        full = [scan for scan in inspected if len(scan["size"])]
        places = [names.index(name) for _, name in wanted] if columns else []
        nothing = np.empty((0, len(places)), np.int64)
        specs = [
            _spec(field, columns[place])
            for (field, _), place in zip(wanted, places, strict=bool(columns))
        ]
        identity = json.dumps([(spec.name, spec.codec, spec.dtype.str) for spec in specs]).encode()
        if any_compressed(shards, inspected):
            return compressed_index(shards, inspected, specs, places, identity)
        return SampleTable(
            specs,
            [len(scan["size"]) for scan in inspected],
            np.concatenate([nothing, *(scan["start"][:, places] for scan in full)]),
            np.concatenate([nothing, *(scan["size"][:, places] for scan in full)]),
            identity=identity,
        )


def _common_columns(shards: Sequence[Shard], inspected: Sequence[Arrays]) -> list[MdsColumn]:
    """The columns, which all shards with samples must share.

    Raises:
        CorruptSample: a shard has others than the first one.
    """
    first: list[MdsColumn] = []
    owner = ""
    for shard, scan in zip(shards, inspected, strict=True):
        if not len(scan["size"]):
            continue
        columns = [MdsColumn(*each) for each in json.loads(scan["columns"].tobytes())]
        if first and columns != first:
            reason = f"it has {_describe(columns)}, and shard {owner} has {_describe(first)}"
            raise CorruptSample(
                f"shard {shard.name} does not fit: {reason}; serve them as two datasets",
                {"shard": shard.name, "reason": reason},
            )
        if not first:
            first, owner = columns, shard.name
    return first


def _describe(columns: Sequence[MdsColumn]) -> str:
    return "the columns " + ", ".join(f"{each.name} ({each.encoding})" for each in columns)


def _spec(field: str, column: MdsColumn) -> FieldSpec:
    encoding = column.encoding
    if encoding in _RAGGED:
        media_type = f"image/{encoding}" if encoding in ("jpeg", "png") else ""
        dtype_of_bytes, codec_of_bytes = np.dtype(np.uint8), _RAGGED[encoding]
        return FieldSpec(
            field, dtype_of_bytes, (), ragged=True, codec=codec_of_bytes, media_type=media_type
        )
    dtype, codec = _NUMBERS.get(encoding, (encoding, "bytes"))
    shape: tuple[int, ...] = ()
    if encoding.startswith("ndarray:") and encoding.count(":") == 2:
        _, dtype, sizes = encoding.split(":")
        shape = tuple(int(size) for size in sizes.split(",") if size.isdecimal())
    elif encoding not in _NUMBERS and encoding not in _SCALARS:
        raise ConfigError(
            f"column {column.name!r:.100} has the encoding {encoding!r:.100}, which is no tensor; "
            "leave it out: name the others in `columns`"
        )
    if dtype not in _SCALARS and encoding not in _NUMBERS:
        raise ConfigError(f"column {column.name!r:.100} has an unknown dtype: {encoding!r:.100}")
    spec = FieldSpec(field, np.dtype(dtype).newbyteorder("<"), shape, ragged=False, codec=codec)
    if codec == "bytes" and column.size != math.prod(shape) * spec.dtype.itemsize:
        raise ConfigError(
            f"column {column.name!r:.100} has {column.size} bytes, which is not {encoding!r:.100}"
        )
    return spec
