"""The storage formats: how the bytes of a dataset are divided into samples and fields.

In: the names, sizes and bytes of shards. Out: a `SampleIndex`, which has the place and the fields
of each sample. Everything here is pure. `base` defines the interface and shows how to write a
format; `sample_table`, `chunk_index` and `concat` have the indexes that formats share.
`known_formats`, outside this package, lists them.
"""

from gyre_daemon.datasets.formats.base import (
    MASK,
    OFFSETS_SUFFIX,
    SAMPLE_ID,
    Extents,
    FieldSpec,
    Format,
    FormatEntry,
    ListedFormat,
    SampleIndex,
    indexed_fields,
    stored_fields,
)

__all__ = [
    "MASK",
    "OFFSETS_SUFFIX",
    "SAMPLE_ID",
    "Extents",
    "FieldSpec",
    "Format",
    "FormatEntry",
    "ListedFormat",
    "SampleIndex",
    "indexed_fields",
    "stored_fields",
]
