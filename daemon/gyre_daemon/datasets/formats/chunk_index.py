"""Rows of chunks: the scan of a shard with chunks, and the index of a dataset. Pure.

[Note: Rows of chunks]

A format of chunks describes the *decoded shard*: the decoded chunks of a shard, back to back. A
decoded chunk has its fields one after the other, and each field the values of all rows. So a row
is byte ranges again, and all that batches are made of works as for other formats. Only two things
differ. A read of a decoded shard has its chunk decoded first (`datasets.made_shards`), and a block
of the cache and of the order `block` is a chunk.

Where the rows of ragged fields begin is found when the shards are scanned, with the same code that
decodes them later. A chunk that decodes to other lengths than then is refused.

Where the stored bytes of a chunk already are those of its fields, as in uncompressed Arrow, the
scan says where each field begins (`places`). Then rows are ranges of the stored shard, and no chunk
is decoded. Single booleans are bits there, so the index has their values.

The format's side is a `Scan` that returns `chunk_arrays`, and a function `Decode`. Both run in
processes that may be killed.
"""

import hashlib
import json
import zlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Annotated, Any, ClassVar, Literal

import msgspec
import numpy as np
import numpy.typing as npt

from gyre_daemon.datasets.formats.base import (
    Arrays,
    DamagedSample,
    Extents,
    FieldSpec,
    SampleIndex,
    array_of,
    is_servable,
    json_of,
    presence_of,
    require,
)
from gyre_daemon.datasets.formats.sample_table import common_schema, described_all, located_bounds
from gyre_daemon.errors import CorruptSample
from gyre_daemon.order.permutation import (
    BlockTable,
    Int64Array,
    blocks_of_unequal_samples,
    blocks_that_begin_at,
    kept_tables,
)
from gyre_daemon.storage.shard import Shard

# The most that a decoded chunk may have. It is in memory as a whole, once in the process that
# decodes it and once in the cache; and rows within it are counted with 32 bits.
MAX_CHUNK_BYTES = 2 << 30
_MAX_REASON_CHARS = 300
_Size = Annotated[int, msgspec.Meta(gt=0, le=MAX_CHUNK_BYTES)]
_Codec = Literal["bytes", "text", "json"]
# Name, dtype, shape, raggedness, codec, categories and media type of each field.
_Field = tuple[str, str, tuple[_Size, ...], bool, _Codec, tuple[str, ...], str]
_FIELDS = msgspec.json.Decoder(list[_Field])
_DAMAGED = msgspec.json.Decoder(list[tuple[int, str]])


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

    @property
    def without_data(self) -> "Column":
        """Where its rows end, and which are present."""
        return Column(np.empty(0, np.uint8), self.ends, self.present)


@dataclass(frozen=True, slots=True)
class ScannedChunk:
    """A chunk of a scan.

    Attributes:
        num_rows: at least 1.
        pieces: the bytes `[start, stop)` of the shard to decode.
        columns: for each field; data is not looked at. None for a field that is not ragged and
            present in all rows.
        number: of the chunk in its shard; None for its place among those with rows.
        parameters: numbers that its decoder needs; with `places` where the bytes begin that it
            would be decoded from.
        damage: why it cannot be decoded; its rows have no bytes then. None if it can be.
        places: for each field where its values begin in the shard, and how far behind that the
            first row begins; None if chunks must be decoded. Columns of single booleans then have
            data.
    """

    num_rows: int
    pieces: Sequence[tuple[int, int]]
    columns: Sequence[Column | None] = ()
    number: int | None = None
    parameters: Sequence[int] = ()
    damage: str | None = None
    places: Sequence[tuple[int, int]] | None = None


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
    chunks: Sequence[ScannedChunk],
    shared: tuple[int, int] = (0, 0),
    units: Sequence[Mapping[str, str]] | None = None,
) -> Arrays:
    """The arrays of a scanned shard with C chunks of together R rows.

    Args:
        fields: of a row; of a ragged one every row has a length, also if it is not present.
        chunks: all of them.
        shared: bytes `[start, stop)` of the shard that all chunks need to be decoded; none if
            chunks with `places` cannot be.
        units: of each field the types of its numbers and times, by their paths in a value; None
            for a format whose values have no units.

    Returns:
        fields: JSON of name, dtype, shape, raggedness, codec, categories and media type of each
            field.
        numbers, rows, num_pieces: int64 [C]; pieces: int64 [P, 2]; shared: int64 [2];
        parameters: int64 [C, any].
        ends: uint32 [R, ragged fields], where each row ends among the field's bytes of its chunk.
        optional: int64 [K], the fields that some row lacks; present: bool [R, K].
        damaged: JSON of [place, reason], if there are damaged chunks.
        units: JSON of the argument.
        base: int64 [C, F], where the values of each field begin; first: int64 [C, ragged fields],
            how far behind that their first rows do; bits: bool [R, single booleans]. Only with
            `places`.
    """
    num_rows = [chunk.num_rows for chunk in chunks]
    total, ragged = sum(num_rows), [place for place, spec in enumerate(fields) if spec.ragged]
    ends = np.zeros((total, len(ragged)), np.uint32)
    present = np.ones((total, len(fields)), np.bool_)
    begin = 0
    for chunk in chunks:
        rows = slice(begin, begin := begin + chunk.num_rows)
        for place, column in enumerate(chunk.columns if chunk.damage is None else ()):
            if column is not None and column.ends is not None:
                ends[rows, ragged.index(place)] = column.ends
            if column is not None and column.present is not None:
                present[rows, place] = column.present
    optional = np.flatnonzero(~present.all(axis=0)).astype(np.int64)
    described = [
        (
            spec.name,
            spec.dtype.str,
            spec.shape,
            spec.ragged,
            spec.codec,
            spec.categories,
            spec.media_type,
        )
        for spec in fields
    ]
    reasons = [
        (place, chunk.damage[:_MAX_REASON_CHARS])
        for place, chunk in enumerate(chunks)
        if chunk.damage is not None
    ]
    texts: dict[str, Any] = {"fields": described} | ({"damaged": reasons} if reasons else {})
    if units is not None:
        texts["units"] = units
    numbers = [place if each.number is None else each.number for place, each in enumerate(chunks)]
    ranges = [piece for chunk in chunks for piece in chunk.pieces]
    num_parameters = len(chunks[0].parameters) if chunks else 0
    return {
        **{
            name: np.frombuffer(json.dumps(each).encode(), np.uint8) for name, each in texts.items()
        },
        **_places_of(fields, chunks),
        "numbers": np.array(numbers, np.int64),
        "rows": np.array(num_rows, np.int64),
        "num_pieces": np.array([len(chunk.pieces) for chunk in chunks], np.int64),
        "pieces": np.array(ranges, np.int64).reshape(-1, 2),
        "shared": np.array(shared, np.int64),
        "parameters": np.array([chunk.parameters for chunk in chunks], np.int64).reshape(
            len(chunks), num_parameters
        ),
        "ends": ends,
        "optional": optional,
        "present": present[:, optional],
    }


def _places_of(fields: Sequence[FieldSpec], chunks: Sequence[ScannedChunk]) -> Arrays:
    """The arrays `base`, `first` and `bits`; none where chunks are decoded."""
    places = [chunk.places for chunk in chunks if chunk.places is not None]
    if not places:
        return {}
    table = np.array(places, np.int64).reshape(len(chunks), len(fields), 2)
    bits = [
        np.concatenate([column.data for chunk in chunks if (column := chunk.columns[place])])
        for place, spec in enumerate(fields)
        if is_bit(spec)
    ]
    num_rows = sum(chunk.num_rows for chunk in chunks)
    return {
        "base": table[:, :, 0].copy(),
        "first": table[:, [place for place, spec in enumerate(fields) if spec.ragged], 1],
        "bits": np.array(bits, np.bool_).T.reshape(num_rows, len(bits)),
    }


def damaged_chunks(arrays: Arrays) -> list[tuple[int, str]]:
    """The places of damaged chunks of a shard, and why.

    Raises:
        ValueError: the arrays are forged.
    """
    if "damaged" not in arrays:
        return []
    found = json_of(arrays, "damaged", _DAMAGED, "its damaged chunks are none")
    are_chunks = all(0 <= place < len(arrays["rows"]) for place, _ in found)
    require(are_chunks, "its damaged chunks are none")
    return found


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


class ChunkFormat(ABC):
    """A `Format` whose samples are rows of chunks.

    All samples of a damaged chunk are damaged. It is found when all chunks are decoded.

    Attributes:
        noun: the format's name for a chunk.
    """

    noun: ClassVar[str]

    def assemble(self, shards: Sequence[Shard], inspected: Sequence[Arrays]) -> SampleIndex:
        refuse_damaged(shards, inspected, self.noun)
        return self.index_of(shards, inspected)

    def assemble_tolerantly(
        self, shards: Sequence[Shard], inspected: Sequence[Arrays]
    ) -> tuple[SampleIndex, Sequence[DamagedSample]]:
        return self.index_of(shards, inspected), ()

    @abstractmethod
    def index_of(self, shards: Sequence[Shard], inspected: Sequence[Arrays]) -> SampleIndex:
        """The index of all chunks; see `Format.assemble`."""


def text_column(texts: Sequence[bytes]) -> Column:
    """A column of texts or bytes, one for each row."""
    ends = np.cumsum(np.fromiter(map(len, texts), np.int64, len(texts)))
    return Column(np.frombuffer(b"".join(texts), np.uint8), ends)


def num_rows(arrays: Arrays) -> int:
    """The rows of a shard."""
    return int(arrays["rows"].sum())


def num_samples(arrays: Arrays) -> int:
    """The samples of a shard: rows of chunks, or ranges with a `size` each."""
    return num_rows(arrays) if "rows" in arrays else len(arrays["size"])


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
    is_numbered = {len(numbers), len(counts), len(parameters)} == {len(rows)}
    rises = (np.diff(numbers, prepend=-1) >= 1).all()
    require(is_numbered and rises, "its chunks are not numbered")
    has_rows = ((rows >= 1) & (rows <= MAX_CHUNK_BYTES)).all()
    require(has_rows, "its chunks have no rows")
    total, num_ragged = int(rows.sum()), sum(spec.ragged for spec in fields)
    shapes = (total, num_ragged), (total, len(optional))
    require((ends.shape, present.shape) == shapes, "its rows are not those of its chunks")
    has_bytes = (counts >= 1).all() and counts.sum() == len(pieces) and pieces.shape[1:] == (2,)
    require(has_bytes, "its chunks have no bytes")
    require(shared.shape == (2,), "its chunks point outside the shard")
    ranges = np.concatenate((pieces, shared.reshape(-1, 2)))
    is_inside = (ranges[:, 0] >= 0) & (ranges[:, 0] <= ranges[:, 1]) & (ranges[:, 1] <= file_bytes)
    is_inside[: len(pieces)] &= pieces[:, 0] < pieces[:, 1]
    require(is_inside.all(), "its chunks point outside the shard")
    damaged_chunks(arrays)
    is_field = ((optional >= 0) & (optional < len(fields))).all() and (np.diff(optional) >= 1).all()
    require(is_field, "its fields are not those of its rows")
    inner = np.ones(total, np.bool_)
    inner[np.cumsum(rows) - rows] = False
    rises = (ends[1:] >= ends[:-1])[inner[1:]].all()
    require(rises, "its rows do not follow each other")
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
    num_rows, num_bits = len(ends), sum(map(is_bit, fields))
    shapes = (len(rows), len(fields)), (len(rows), len(ragged)), (num_rows, num_bits)
    is_whole = (base.shape, first.shape, bits.shape) == shapes
    require(is_whole, "its fields are not those of its rows")
    in_sequence = (np.diff(pieces) >= 0).all() and len(pieces) == 2 * len(rows)
    require(in_sequence, "its chunks are not in sequence")
    begin = arrays["parameters"].ravel()
    is_before = len(begin) == len(rows) and ((begin >= 0) & (begin <= pieces[::2])).all()
    require(is_before, "its chunks point outside the shard")
    start = base.copy()
    start[:, ragged] += np.clip(first, -1, file_bytes)
    sizes = field_bytes(fields, rows, ends)
    sizes[:, [place for place, spec in enumerate(fields) if is_bit(spec)]] = 0
    is_outside = (base < 0) | (base > file_bytes) | (start < base) | (start > file_bytes - sizes)
    require(not is_outside.any(), "its fields point outside the shard")


def is_bit(spec: FieldSpec) -> bool:
    """Whether a field is one boolean a row, which is a bit where chunks are not decoded."""
    return spec.dtype == np.bool_ and not spec.shape and not spec.ragged


def fields_of(arrays: Arrays) -> list[FieldSpec]:
    """The fields of a shard.

    Raises:
        ValueError: a format of chunks has no such fields.
    """
    fields = []
    described = json_of(arrays, "fields", _FIELDS, "its fields are no tensors")
    for name, dtype, shape, ragged, codec, categories, media in described:
        try:
            kind = np.dtype(dtype)
        except TypeError as error:
            raise ValueError("its fields are no tensors") from error
        is_number = kind.kind in "biuf" and kind.isnative
        require(is_number and is_servable(name), "its fields are no tensors")
        require(media.isprintable(), "its media types are none")
        spec = FieldSpec(name, kind, shape, ragged=ragged, codec=codec)
        fields.append(replace(spec, categories=categories, media_type=media))
    return fields


def field_bytes(
    fields: Sequence[FieldSpec], rows: Int64Array, ends: npt.NDArray[np.uint32]
) -> Int64Array:
    """Int64 [C, F], the bytes of each of F fields in each of C chunks; `ends` of `chunk_arrays`."""
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


class Chunks:
    """The C chunks of an index, whose samples are their rows.

    Attributes:
        noun: the format's name for a chunk.
        num_chunks: C.
        shard: int64 [C], of each chunk.
        base: int64 [C], where it begins in its decoded shard.
        chunk_bytes: int64 [C], its size there.
    """

    def __init__(
        self,
        scanned: Sequence["ChunkIndex"],
        owner: Int64Array,
        place: Int64Array,
        shard: Int64Array,
    ) -> None:
        """Take chunks of one or more scanned schemas.

        Args:
            scanned: know how chunks are decoded.
            owner: int64 [C], which of them knows each chunk.
            place: int64 [C], the number of the chunk there.
            shard: int64 [C], in rising order.
        """
        self._scanned, self._owner, self._place, self.shard = scanned, owner, place, shard
        self.noun, self.num_chunks = scanned[0].noun, len(shard)
        self.chunk_bytes = np.zeros(len(shard), np.int64)
        for number, index in enumerate(scanned):
            some = owner == number
            self.chunk_bytes[some] = index.chunk_bytes[place[some]]
        before = np.cumsum(self.chunk_bytes) - self.chunk_bytes
        self.base: Int64Array = before - before[np.searchsorted(shard, shard)]

    @classmethod
    def joined(cls, parts: Sequence["Chunks"], shards: Sequence[Sequence[int]]) -> "Chunks":
        """The chunks of several indexes, given the numbers of their shards in the dataset."""
        shard = np.concatenate(
            [np.array(its)[part.shard] for part, its in zip(parts, shards, strict=True)]
        )
        in_order = np.argsort(shard, kind="stable")
        first = np.cumsum([0, *(len(part._scanned) for part in parts)]).tolist()
        owner = [part._owner + begin for part, begin in zip(parts, first, strict=False)]
        place = [part._place for part in parts]
        return cls(
            [index for part in parts for index in part._scanned],
            np.concatenate(owner)[in_order],
            np.concatenate(place)[in_order],
            shard[in_order],
        )

    @property
    def identity(self) -> bytes:
        """Distinguishes decoded rows from those of other columns, which may lie alike."""
        return b" ".join(dict.fromkeys(index.identity for index in self._scanned))

    def some(self, chosen: Int64Array) -> "Chunks":
        """Some of the chunks, by rising numbers; decoded shards lack the others."""
        return Chunks(self._scanned, self._owner[chosen], self._place[chosen], self.shard[chosen])

    def owner(self, chunk: int) -> tuple["ChunkIndex", int]:
        """The index that knows how a chunk is decoded, and the number of the chunk there."""
        return self._scanned[int(self._owner[chunk])], int(self._place[chunk])

    def pieces(self, chunk: int) -> list[tuple[int, int]]:
        """The bytes of its shard that a chunk is decoded from: first those that all chunks need."""
        index, place = self.owner(chunk)
        return index.pieces(place)


def chunks_of(index: SampleIndex) -> Chunks | None:
    """The chunks whose rows the samples are; None where samples are ranges of stored shards."""
    return getattr(index, "chunks", None)


class ChunkIndex(SampleIndex):
    """A `SampleIndex` of rows of C chunks, of shards that have the same fields.

    It takes 4 bytes for each row and ragged field, and one for each row and field that rows lack.

    Attributes:
        noun: the format's name for a chunk.
        decode: decodes a chunk.
        identity: of the decoded bytes, other than the fields.
        numbers: int64 [C], of the chunks in their shards.
        parameters: of each chunk, numbers of the scan that its decoder needs.
        chunk_bytes: int64 [C], the size of each decoded chunk.
    """

    def __init__(
        self,
        shards: Sequence[Shard],
        inspected: Sequence[Arrays],
        decode: Decode,
        noun: str,
        identity: bytes,
    ) -> None:
        """Join the scans of all shards.

        Args:
            shards: of the dataset.
            inspected: from `chunk_arrays`, for each shard.
            decode: decodes a chunk.
            noun: the format's name for one.
            identity: all that changes the decoded bytes, other than the fields.

        Raises:
            CorruptSample: a shard has other fields than the first with rows.
        """
        self.decode, self.noun, self.identity = decode, noun, identity
        schemas = [fields_of(scan) if len(scan["rows"]) else None for scan in inspected]
        advice = "serve them as two datasets, or name the columns that they share in `columns`"
        self._columns = common_schema(shards, schemas, described_all, advice) or []
        full = [(number, scan) for number, scan in enumerate(inspected) if len(scan["rows"])]
        scans = [scan for _, scan in full]
        num_chunks = [len(scan["rows"]) for scan in scans]
        self._shard = np.repeat(np.array([number for number, _ in full], np.int64), num_chunks)
        self.numbers = _joined([scan["numbers"] for scan in scans], np.int64)
        self.parameters = [each for scan in scans for each in scan["parameters"].tolist()]
        self._rows = _joined([scan["rows"] for scan in scans], np.int64)
        self._pieces = _joined([scan["pieces"] for scan in scans], np.int64, 2)
        counts = _joined([scan["num_pieces"] for scan in scans], np.int64)
        self._first_piece = np.concatenate(([0], np.cumsum(counts)))
        self._shared = {number: scan["shared"].tolist() for number, scan in full}
        self._is_decoded = not any("base" in scan for scan in scans)
        self._order = [
            place
            for place, spec in enumerate(self._columns)
            if self._is_decoded or not is_bit(spec)
        ]
        self._stored = [self._columns[place] for place in self._order]
        self._ragged = [place for place, spec in enumerate(self._stored) if spec.ragged]
        self._ends = _joined([scan["ends"] for scan in scans], np.uint32, len(self._ragged))
        self._optional = sorted({place for scan in scans for place in scan["optional"].tolist()})
        self._present = _joined(
            [_of_all(scan, self._optional) for scan in scans], np.bool_, len(self._optional)
        )
        self._first = np.concatenate(([0], np.cumsum(self._rows))).astype(np.int64)
        self._block_tables = kept_tables(self._make_blocks)
        self._bounds = located_bounds(self)
        if self._is_decoded:
            self._field_bytes = field_bytes(self._stored, self._rows, self._ends)
            self.chunk_bytes: Int64Array = self._field_bytes.sum(axis=1)
            before = self._chunks().base[:, None] - self._field_bytes
            self._field_start = before + np.cumsum(self._field_bytes, axis=1)
            self._digest = self._make_digest(identity)
            return
        base = _joined([scan["base"] for scan in scans], np.int64, len(self._columns))
        begin = _joined([scan["first"] for scan in scans], np.int64, len(self._ragged))
        num_bits = len(self._columns) - len(self._order)
        self._bits = _joined([scan["bits"] for scan in scans], np.bool_, num_bits)
        self._field_start = base[:, self._order]
        self._digest = self._digest_of_stored(identity, begin)
        self._field_start[:, self._ragged] += begin

    @property
    def chunks(self) -> Chunks | None:
        """All of its chunks; None where the stored shards have the rows.

        A new object each time, which keeps the index.
        """
        return self._chunks() if self._is_decoded else None

    def _chunks(self) -> Chunks:
        places = np.arange(len(self._shard))
        return Chunks([self], np.zeros_like(places), places, self._shard)

    @property
    def num_samples(self) -> int:
        return int(self._first[-1])

    @property
    def fields(self) -> Sequence[FieldSpec]:
        """See `SampleIndex.fields`; a field that some row lacks has one more, `NAME.present`.

        A new list where chunks are stored: their fingerprints cover the fields, as of datasets
        whose fields an operator has chosen, and states have such fingerprints.
        """
        return self._fields if self._is_decoded else list(self._fields)

    @cached_property
    def _fields(self) -> list[FieldSpec]:
        bits = [
            FieldSpec(spec.name, spec.dtype, (), ragged=False, codec="indexed")
            for spec in self._columns
            if spec not in self._stored
        ]
        present = [presence_of(self._columns[place].name) for place in self._optional]
        return [*self._stored, *bits, *present]

    def locate(self, sample_ids: Int64Array) -> Extents:
        chunk = np.searchsorted(self._first, sample_ids, side="right") - 1
        row = sample_ids - self._first[chunk]
        start, ragged = self._field_start[chunk], 0
        size = np.empty_like(start)
        for place, spec in enumerate(self._stored):
            if spec.ragged:
                ends = self._ends[:, ragged]
                begin = np.where(row > 0, ends[sample_ids - 1], 0).astype(np.int64)
                size[:, place] = ends[sample_ids] - begin
                start[:, place] += begin
                ragged += 1
            else:
                size[:, place] = spec.element_bytes
                start[:, place] += row * spec.element_bytes
        present = self._present[sample_ids]
        indexed = tuple(present[:, column] for column in range(len(self._optional)))
        if self._is_decoded:
            return Extents(self._shard[chunk], start, size, indexed=indexed)
        absent = None
        if self._optional and self._stored:  # decoded rows have zeros there, stored ones any bytes
            absent = np.zeros(size.shape, np.bool_)
            for column, place in enumerate(self._optional):
                if place in self._order:
                    absent[:, self._order.index(place)] = ~present[:, column]
            size[absent] = 0
        bits = self._bits[sample_ids]
        indexed = (*(bits[:, column] for column in range(bits.shape[1])), *indexed)
        return Extents(self._shard[chunk], start, size, absent=absent, indexed=indexed)

    def max_ragged_bytes(self, num_samples: int) -> int:
        return self._bounds(num_samples) if self._ragged else 0

    def blocks(self, io_block_bytes: int) -> BlockTable:
        """See `SampleIndex.blocks`: a block is a decoded chunk, or has whole stored ones."""
        return self._block_tables(io_block_bytes if not self._is_decoded else 0)

    def _make_blocks(self, io_block_bytes: int) -> BlockTable:
        if self._is_decoded:
            return blocks_that_begin_at(self._first)
        table = blocks_of_unequal_samples(
            self._shard, self._pieces[:, 0], self._pieces[:, 1], io_block_bytes
        )
        first = self._first[table.first_sample(np.arange(table.num_blocks + 1))]
        mean = self.num_samples // max(1, len(first) - 1)
        return BlockTable(max(1, mean), np.arange(len(first)), first)

    def digest(self) -> bytes:
        return self._digest

    def pieces(self, chunk: int) -> list[tuple[int, int]]:
        """See `Chunks.pieces`."""
        start, stop = self._shared[int(self._shard[chunk])]
        some = self._pieces[self._first_piece[chunk] : self._first_piece[chunk + 1]].tolist()
        return [(start, stop)] * (start < stop) + [(begin, end) for begin, end in some]

    def expected(self, chunk: int) -> list[Expected]:
        """The size and checksums of each stored field of a decoded chunk."""
        rows = slice(int(self._first[chunk]), int(self._first[chunk + 1]))
        expected, ragged = [], 0
        for place, spec in enumerate(self._stored):
            ends = present = 0
            if spec.ragged:
                ends = checksum(self._ends[rows, ragged])
                ragged += 1
            if place in self._optional:
                its = self._present[rows, self._optional.index(place)]
                present = 0 if its.all() else checksum(its)
            expected.append(Expected(int(self._field_bytes[chunk, place]), ends, present))
        return expected

    def _make_digest(self, identity: bytes) -> bytes:
        digest = hashlib.blake2b(identity, digest_size=16)
        described = [
            (spec.name, spec.dtype.str, spec.shape, spec.codec, spec.categories)
            for spec in self.fields
        ]
        digest.update(json.dumps([described, self.parameters]).encode())
        for table in (self._shard, self._rows, self._pieces, self._ends, self._present):
            digest.update(np.ascontiguousarray(table).data)
        return digest.digest()

    def _digest_of_stored(self, identity: bytes, begin: Int64Array) -> bytes:
        """Of rows in stored shards; `begin` is where the first rows are behind the fields."""
        digest = hashlib.blake2b(identity, digest_size=16)
        ends = self._ends.astype(np.int64) + np.repeat(begin, self._rows, axis=0)
        for table in (self._first, self._field_start, begin, ends):
            digest.update(np.ascontiguousarray(table).data)
        for table in (self._bits, self._present):
            for values in table.T:
                digest.update(np.packbits(values).data)
        return digest.digest()


def _of_all(scan: Arrays, optional: Sequence[int]) -> npt.NDArray[np.bool_]:
    """Which rows of a shard have each of these fields."""
    present = np.ones((num_rows(scan), len(optional)), np.bool_)
    for column, place in enumerate(scan["optional"].tolist()):
        present[:, optional.index(place)] = scan["present"][:, column]
    return present


def _joined(
    arrays: Sequence[npt.NDArray[Any]], dtype: npt.DTypeLike, num_columns: int | None = None
) -> npt.NDArray[Any]:
    shape = (0,) if num_columns is None else (0, num_columns)
    return np.concatenate([np.empty(shape, dtype), *arrays])
