"""The index of rows of chunks; see [Note: Rows of chunks] in `chunks`. Pure."""

import hashlib
import json
from collections.abc import Sequence
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

from gyre_daemon.datasets.formats.base import (
    PRESENT_SUFFIX,
    Arrays,
    Extents,
    FieldSpec,
    SampleIndex,
)
from gyre_daemon.datasets.formats.indexes.bounds import RaggedBounds
from gyre_daemon.datasets.formats.indexes.chunks import (
    Decode,
    Expected,
    checksum,
    field_bytes,
    fields_of,
    is_bit,
    num_rows,
)
from gyre_daemon.datasets.formats.schemas import described_all
from gyre_daemon.errors import CorruptSample
from gyre_daemon.order.shuffle.blocks import (
    BlockTable,
    BlockTables,
    blocks_of_unequal_samples,
    blocks_that_begin_at,
)
from gyre_daemon.order.shuffle.permutation import Int64Array
from gyre_daemon.storage.shard import Shard


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

    def some(self, chosen: Int64Array) -> "Chunks":
        """Some of the chunks, by rising numbers; decoded shards lack the others."""
        return Chunks(self._scanned, self._owner[chosen], self._place[chosen], self.shard[chosen])

    def decode(self, chunk: int) -> Decode:
        """The decoder of a chunk."""
        return self._of(chunk)[0].decode

    def pieces(self, chunk: int) -> list[tuple[int, int]]:
        """The bytes of its shard that a chunk is decoded from: first those that all chunks need."""
        index, place = self._of(chunk)
        return index.pieces(place)

    def number(self, chunk: int) -> int:
        """The number of a chunk in its shard."""
        index, place = self._of(chunk)
        return int(index.numbers[place])

    def parameters(self, chunk: int) -> tuple[int, ...]:
        """Numbers of the scan that a chunk's decoder needs."""
        index, place = self._of(chunk)
        return tuple(index.parameters[place])

    def expected(self, chunk: int) -> list[Expected]:
        """The size and checksums of each stored field of a decoded chunk."""
        index, place = self._of(chunk)
        return index.expected(place)

    def _of(self, chunk: int) -> tuple["ChunkIndex", int]:
        return self._scanned[int(self._owner[chunk])], int(self._place[chunk])


def chunks_of(index: SampleIndex) -> Chunks | None:
    """The chunks whose rows the samples are; None where samples are ranges of stored shards."""
    return getattr(index, "chunks", None)


class ChunkIndex(SampleIndex):
    """A `SampleIndex` of rows of C chunks, of shards that have the same fields.

    It takes 4 bytes for each row and ragged field, and one for each row and field that rows lack.

    Attributes:
        noun: the format's name for a chunk.
        decode: decodes a chunk.
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
        self.decode, self.noun = decode, noun
        self._columns = _common_fields(shards, inspected)
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
        self._block_tables = BlockTables(self._make_blocks)
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
        """See `SampleIndex.num_samples`."""
        return int(self._first[-1])

    @cached_property
    def fields(self) -> Sequence[FieldSpec]:
        """See `SampleIndex.fields`; a field that some row lacks has one more, `NAME.present`."""
        bits = [spec.name for spec in self._columns if spec not in self._stored]
        names = [*bits, *(self._columns[place].name + PRESENT_SUFFIX for place in self._optional)]
        kind = np.dtype(np.bool_)
        indexed = [FieldSpec(name, kind, (), ragged=False, codec="indexed") for name in names]
        return [*self._stored, *indexed]

    def locate(self, sample_ids: Int64Array) -> Extents:
        """See `SampleIndex.locate`."""
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
        if self._optional:  # decoded rows have zeros there, stored ones any bytes
            absent = np.zeros(size.shape, np.bool_)
            for column, place in enumerate(self._optional):
                if place in self._order:
                    absent[:, self._order.index(place)] = ~present[:, column]
            size[absent] = 0
        bits = self._bits[sample_ids]
        indexed = (*(bits[:, column] for column in range(bits.shape[1])), *indexed)
        return Extents(self._shard[chunk], start, size, absent=absent, indexed=indexed)

    @cached_property
    def _bounds(self) -> RaggedBounds:
        return RaggedBounds(self._ragged_bytes)

    def _ragged_bytes(self) -> Int64Array:
        """Int64 [N], the bytes of all ragged fields of each row."""
        sizes = self._ends.astype(np.int64)
        begins = sizes[:-1].copy()
        begins[self._first[1:-1] - 1] = 0  # of the first row of each further chunk
        sizes[1:] -= begins
        total: Int64Array = sizes.sum(axis=1)
        return total

    def max_ragged_bytes(self, num_samples: int) -> int:
        """See `SampleIndex.max_ragged_bytes`."""
        return self._bounds.largest(num_samples) if self._ragged else 0

    def blocks(self, io_block_bytes: int) -> BlockTable:
        """See `SampleIndex.blocks`: a block is a decoded chunk, or has whole stored ones."""
        return self._block_tables.of(io_block_bytes if not self._is_decoded else 0)

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
        """See `SampleIndex.digest`."""
        return self._digest

    def pieces(self, chunk: int) -> list[tuple[int, int]]:
        """See `Chunks.pieces`."""
        start, stop = self._shared[int(self._shard[chunk])]
        some = self._pieces[self._first_piece[chunk] : self._first_piece[chunk + 1]].tolist()
        return [(start, stop)] * (start < stop) + [(begin, end) for begin, end in some]

    def expected(self, chunk: int) -> list[Expected]:
        """See `Chunks.expected`."""
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


def _common_fields(shards: Sequence[Shard], inspected: Sequence[Arrays]) -> list[FieldSpec]:
    """The fields, which all shards with rows must share."""
    first: list[FieldSpec] | None = None
    owner = ""
    for shard, scan in zip(shards, inspected, strict=True):
        if not len(scan["rows"]):
            continue
        fields = fields_of(scan)
        if first is not None and fields != first:
            reason = f"it has {described_all(fields)}, and shard {owner} has {described_all(first)}"
            raise CorruptSample(
                f"shard {shard.name} does not fit: {reason}; serve them as two datasets, or name "
                "the columns that they share in `columns`",
                {"shard": shard.name, "reason": reason},
            )
        if first is None:
            first, owner = fields, shard.name
    return first or []


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
