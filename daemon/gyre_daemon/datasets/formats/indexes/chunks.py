"""The second seam: formats whose samples are rows of chunks that must be decoded whole. Pure.

[Note: Rows of chunks]

A format of chunks describes the *decoded shard*: the decoded chunks of a shard, back to back. A
decoded chunk has its fields one after the other, and each field the values of all rows. So a row
is byte ranges again, and all that batches are made of works as for other formats. Only two things
differ. A read of a decoded shard has its chunk decoded first (`datasets.decoded`), and a block of
the cache and of the order `block` is a chunk.

Where the rows of ragged fields begin is found when the shards are scanned, with the same code that
decodes them later. A chunk that decodes to other lengths than then is refused.

Where the stored bytes of a chunk already are those of its fields, as in uncompressed Arrow, the
scan says where each field begins (`places`). Then rows are ranges of the stored shard, and no chunk
is decoded. Single booleans are bits there, so the index has their values.

The format's side is a `Scan` that returns `chunk_arrays`, and a function `Decode`. Both run in
processes that may be killed.
"""

import json
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from gyre_daemon.datasets.formats.base import (
    Arrays,
    CodecName,
    FieldSpec,
    array_of,
)
from gyre_daemon.datasets.formats.indexes.stored import json_of
from gyre_daemon.datasets.formats.names import is_servable
from gyre_daemon.errors import CorruptSample
from gyre_daemon.order.shuffle.permutation import Int64Array
from gyre_daemon.storage.shard import Shard

# The most that a decoded chunk may have. It is in memory as a whole, once in the process that
# decodes it and once in the cache; and rows within it are counted with 32 bits.
MAX_CHUNK_BYTES = 2 << 30
_MAX_REASON_CHARS = 300
_CODECS: frozenset[CodecName] = frozenset(("bytes", "text", "json"))


@dataclass(frozen=True, slots=True)
class Column:
    """One field of all R rows of a chunk.

    Attributes:
        data: uint8, the values of all rows, back to back.
        ends: int64 [R], where each row ends in the data; None if the field is not ragged.
        present: bool [R], which rows have a value; None if all do. Others have zeros or no bytes.
    """

    data: npt.NDArray[np.uint8]
    ends: Int64Array | None = None
    present: npt.NDArray[np.bool_] | None = None


@dataclass(frozen=True, slots=True)
class StoredChunk:
    """A chunk as it is stored.

    Attributes:
        shard: the name of its shard.
        number: of the chunk in its shard.
        shard_bytes: the size of the shard.
        pieces: of the shard, by the byte where each begins; at first the part that all chunks of
            the shard need, if there is one.
        parameters: numbers of the scan that its decoder needs.
    """

    shard: str
    number: int
    shard_bytes: int
    pieces: Sequence[tuple[int, memoryview]]
    parameters: tuple[int, ...] = ()


# Returns a column for each field, in the order of `chunk_arrays`. It must be picklable.
Decode = Callable[[StoredChunk], Sequence[Column]]


@dataclass(frozen=True, slots=True)
class Expected:
    """The size and checksums that a field of a decoded chunk must have.

    Attributes:
        num_bytes: of all rows.
        ends: a checksum of where the rows end; 0 if the field is not ragged.
        present: a checksum of the rows with a value; 0 if all have one.
    """

    num_bytes: int
    ends: int
    present: int

    @classmethod
    def of(cls, column: Column) -> "Expected":
        """The size and checksums of a column."""
        ends = 0 if column.ends is None else checksum(column.ends.astype(np.uint32))
        has_all = column.present is None or column.present.all()
        present = 0 if has_all else checksum(np.asarray(column.present))
        return cls(column.data.nbytes, ends, present)


class DamagedPart(ValueError):
    """A part of a chunk is damaged, and it is known where.

    Attributes:
        offset: where the part begins in the shard.
    """

    def __init__(self, message: str, offset: int) -> None:
        """Take the damage in words, and its offset."""
        super().__init__(message)
        self.offset = offset


def checksum(values: npt.NDArray[np.generic]) -> int:
    """A checksum other than 0."""
    return zlib.crc32(np.ascontiguousarray(values).data) | 1 << 32


def chunk_arrays(
    fields: Sequence[FieldSpec],
    num_rows: Sequence[int],
    pieces: Sequence[Sequence[tuple[int, int]]],
    columns: Sequence[Sequence[Column | None]],
    shared: tuple[int, int] = (0, 0),
    numbers: Sequence[int] | None = None,
    parameters: Sequence[Sequence[int]] | None = None,
    damaged: Mapping[int, str] | None = None,
    places: Sequence[Sequence[tuple[int, int]]] | None = None,
) -> Arrays:
    """The arrays of a scanned shard with C chunks of together R rows.

    Args:
        fields: of a row; of a ragged one every row has a length, also if it is not present.
        num_rows: of each chunk.
        pieces: of each chunk, the bytes `[start, stop)` of the shard to decode.
        columns: of each chunk, a column for each field; their data is not looked at. None for a
            field that is not ragged and present in all rows.
        shared: bytes `[start, stop)` of the shard that all chunks need.
        numbers: of the chunks in their shard, if it has others without a row.
        parameters: of each chunk, numbers that its decoder needs; None for none.
        damaged: why chunks cannot be decoded, by their places; their rows have no bytes.
        places: of each chunk, for each field where its values begin in the shard, and how far
            behind that the first row begins; None if chunks must be decoded. Columns of single
            booleans then have data.

    Returns:
        fields: JSON of name, dtype, shape, raggedness, codec, categories and media type of each
            field.
        numbers, rows, num_pieces: int64 [C]; pieces: int64 [P, 2]; shared: int64 [2];
        parameters: int64 [C, any].
        ends: uint32 [R, ragged fields], where each row ends among the field's bytes of its chunk.
        optional: int64 [K], the fields that some row lacks; present: bool [R, K].
        damaged: JSON of [place, reason], if there are damaged chunks.
        base: int64 [C, F], where the values of each field begin; first: int64 [C, ragged fields],
            how far behind that their first rows do; bits: bool [R, single booleans]. Only with
            `places`.
    """
    total, ragged = sum(num_rows), [place for place, spec in enumerate(fields) if spec.ragged]
    ends = np.zeros((total, len(ragged)), np.uint32)
    present = np.ones((total, len(fields)), np.bool_)
    begin = 0
    for count, its in zip(num_rows, columns, strict=True):
        for column, place in enumerate(ragged):
            found = its[place]
            assert found is not None
            assert found.ends is not None
            ends[begin : begin + count, column] = found.ends
        for place, found in enumerate(its):
            if found is not None and found.present is not None:
                present[begin : begin + count, place] = found.present
        begin += count
    optional = np.flatnonzero(~present.all(axis=0)).astype(np.int64)
    described = [
        [
            spec.name,
            spec.dtype.str,
            list(spec.shape),
            spec.ragged,
            spec.codec,
            spec.categories,
            spec.media_type,
        ]
        for spec in fields
    ]
    stored: dict[str, npt.NDArray[Any]] = {}
    if places is not None:
        table = np.array(places, np.int64).reshape(len(num_rows), len(fields), 2)
        bits = [place for place, spec in enumerate(fields) if is_bit(spec)]
        values = [np.concatenate([its[place].data for its in columns]) for place in bits]  # type: ignore[union-attr]
        nothing = np.empty((total, 0), np.bool_)
        stored = {
            "base": table[:, :, 0].copy(),
            "first": table[:, ragged, 1],
            "bits": np.stack(values, axis=1).astype(np.bool_) if bits else nothing,
        }
    ranges = [piece for its in pieces for piece in its]
    reasons = [[place, reason[:_MAX_REASON_CHARS]] for place, reason in (damaged or {}).items()]
    text = np.frombuffer(json.dumps(reasons).encode(), np.uint8)
    return {
        **({"damaged": text} if reasons else {}),
        **stored,
        "fields": np.frombuffer(json.dumps(described).encode(), np.uint8),
        "numbers": np.array(range(len(num_rows)) if numbers is None else numbers, np.int64),
        "rows": np.array(num_rows, np.int64),
        "num_pieces": np.array([len(its) for its in pieces], np.int64),
        "pieces": np.array(ranges, np.int64).reshape(-1, 2),
        "shared": np.array(shared, np.int64),
        "parameters": np.array(parameters or [[]] * len(num_rows), np.int64).reshape(
            len(num_rows), -1 if parameters else 0
        ),
        "ends": ends,
        "optional": optional,
        "present": present[:, optional],
    }


def damaged_chunks(arrays: Arrays) -> list[tuple[int, str]]:
    """The places of damaged chunks of a shard, and why.

    Raises:
        ValueError: the arrays are forged.
    """
    if "damaged" not in arrays:
        return []
    found = json_of(arrays, "damaged")
    if not isinstance(found, list):
        raise ValueError("its damaged chunks are none")
    places = len(arrays["rows"])
    for each in found:
        is_pair = isinstance(each, list) and len(each) == 2 and isinstance(each[1], str)
        if not is_pair or type(each[0]) is not int or not 0 <= each[0] < places:
            raise ValueError("its damaged chunks are none")
    return [(place, reason) for place, reason in found]


def refuse_damaged(shards: Sequence[Shard], inspected: Sequence[Arrays], noun: str) -> None:
    """Refuse shards with chunks that cannot be decoded.

    Raises:
        CorruptSample: with the first of them.
    """
    for shard, scan in zip(shards, inspected, strict=True):
        for place, reason in damaged_chunks(scan):
            number = int(scan["numbers"][place])
            first = int(scan["num_pieces"][:place].sum())
            offset = int(scan["pieces"][first, 0])
            raise CorruptSample(
                f"shard {shard.name}: {noun} {number} (at byte {offset}) cannot be read: {reason}",
                {"shard": shard.name, "chunk": number, "offset": offset, "reason": reason},
            )


def lacking(fields: Sequence[FieldSpec], num_rows: int) -> list[Column | None]:
    """The columns of a chunk that cannot be decoded: rows without bytes."""
    nothing = np.empty(0, np.uint8)
    ends = np.zeros(num_rows, np.int64)
    return [Column(nothing, ends) if spec.ragged else None for spec in fields]


def num_rows(arrays: Arrays) -> int:
    """The rows of a shard."""
    return int(arrays["rows"].sum())


def check_chunks(arrays: Arrays, file_bytes: int) -> None:
    """Check that `chunk_arrays` can have returned these arrays for a shard of this size.

    Raises:
        ValueError: it cannot.
    """
    fields = fields_of(arrays)
    numbers, rows, counts = (
        array_of(arrays, name, np.int64) for name in ("numbers", "rows", "num_pieces")
    )
    pieces = array_of(arrays, "pieces", np.int64, 2)
    shared, optional = (array_of(arrays, name, np.int64) for name in ("shared", "optional"))
    parameters = array_of(arrays, "parameters", np.int64, 2)
    ends = array_of(arrays, "ends", np.uint32, 2)
    present = array_of(arrays, "present", np.bool_, 2)
    if {len(numbers), len(counts), len(parameters)} != {len(rows)} or (
        np.diff(numbers, prepend=-1) < 1
    ).any():
        raise ValueError("its chunks are not numbered")
    if (rows < 1).any() or (rows > MAX_CHUNK_BYTES).any():
        raise ValueError("its chunks have no rows")
    total, num_ragged = int(rows.sum()), sum(spec.ragged for spec in fields)
    if ends.shape != (total, num_ragged) or present.shape != (total, len(optional)):
        raise ValueError("its rows are not those of its chunks")
    if (counts < 1).any() or counts.sum() != len(pieces) or pieces.shape[1:] != (2,):
        raise ValueError("its chunks have no bytes")
    ranges = np.concatenate((pieces, shared.reshape(-1, 2)))
    is_inside = (ranges[:, 0] >= 0) & (ranges[:, 0] <= ranges[:, 1]) & (ranges[:, 1] <= file_bytes)
    if shared.shape != (2,) or not is_inside.all() or (pieces[:, 0] == pieces[:, 1]).any():
        raise ValueError("its chunks point outside the shard")
    damaged_chunks(arrays)
    is_field = (optional >= 0) & (optional < len(fields))
    if not is_field.all() or (np.diff(optional) < 1).any():
        raise ValueError("its fields are not those of its rows")
    first = np.cumsum(rows) - rows
    inner = np.ones(total, np.bool_)
    inner[first] = False
    if (ends[1:] < ends[:-1])[inner[1:]].any():
        raise ValueError("its rows do not follow each other")
    if "base" in arrays:
        _check_places(arrays, fields, ends, file_bytes)
    elif (field_bytes(fields, rows, ends).sum(axis=1) > MAX_CHUNK_BYTES).any():
        raise ValueError("its chunks are too large")


def _check_places(
    arrays: Arrays, fields: Sequence[FieldSpec], ends: npt.NDArray[np.uint32], file_bytes: int
) -> None:
    """Check that the fields of stored chunks are within the shard."""
    rows, pieces = arrays["rows"], arrays["pieces"].ravel()
    base, first = (array_of(arrays, name, np.int64, 2) for name in ("base", "first"))
    bits = array_of(arrays, "bits", np.bool_, 2)
    ragged = [place for place, spec in enumerate(fields) if spec.ragged]
    shapes = (len(rows), len(fields)), (len(rows), len(ragged))
    if (base.shape, first.shape) != shapes or bits.shape != (
        len(ends),
        sum(map(is_bit, fields)),
    ):
        raise ValueError("its fields are not those of its rows")
    if (np.diff(pieces) < 0).any() or len(pieces) != 2 * len(rows):
        raise ValueError("its chunks are not in sequence")
    start = base.copy()
    start[:, ragged] += np.clip(first, -1, file_bytes)
    sizes = field_bytes(fields, rows, ends)
    sizes[:, [place for place, spec in enumerate(fields) if is_bit(spec)]] = 0
    is_outside = (base < 0) | (base > file_bytes) | (start < base) | (start > file_bytes - sizes)
    if is_outside.any():
        raise ValueError("its fields point outside the shard")


def is_bit(spec: FieldSpec) -> bool:
    """Whether a field is one boolean a row, which is a bit where chunks are not decoded."""
    return spec.dtype == np.bool_ and not spec.shape and not spec.ragged


def fields_of(arrays: Arrays) -> list[FieldSpec]:
    """The fields of a shard.

    Raises:
        ValueError: a format of chunks has no such fields.
    """
    fields = []
    try:
        for name, dtype, shape, ragged, codec, categories, media in json_of(arrays, "fields"):
            is_shape = all(type(size) is int and 0 < size <= MAX_CHUNK_BYTES for size in shape)
            kind = np.dtype(dtype)
            is_number = kind.kind in "biuf" and kind.isnative
            if not (is_shape and is_number and is_servable(name) and codec in _CODECS):
                raise ValueError("its fields are no tensors")
            if not all(isinstance(each, str) for each in categories):
                raise ValueError("its categories are no names")
            if not isinstance(media, str) or not media.isprintable():
                raise ValueError("its media types are none")
            its = tuple(shape), bool(ragged), codec
            names = tuple(categories)
            fields.append(FieldSpec(name, kind, *its, categories=names, media_type=media))
    except TypeError as error:
        raise ValueError("its fields are no tensors") from error
    return fields


def field_bytes(
    fields: Sequence[FieldSpec], rows: Int64Array, ends: npt.NDArray[np.uint32]
) -> Int64Array:
    """Int64 [C, F], the bytes of each of F fields in each of C chunks.

    Args:
        fields: F.
        rows: int64 [C], of each chunk.
        ends: of `chunk_arrays`, for the rows of all chunks.
    """
    last = np.cumsum(rows) - 1
    sizes = np.empty((len(rows), len(fields)), np.int64)
    ragged = 0
    for place, spec in enumerate(fields):
        if spec.ragged:
            sizes[:, place] = ends[last, ragged]
            ragged += 1
        else:
            sizes[:, place] = np.minimum(rows, MAX_CHUNK_BYTES + 1) * spec.element_bytes
    return sizes
