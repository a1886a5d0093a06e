"""The index of rows of record batches. Pure.

It takes a few numbers for each record batch, and 8 bytes for each row and ragged field.
"""

import hashlib
import json
from collections.abc import Sequence
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

from gyre_daemon.datasets.formats.base import PRESENT_SUFFIX, Arrays, Extents, FieldSpec
from gyre_daemon.datasets.formats.indexes.bounds import RaggedBounds
from gyre_daemon.datasets.formats.schemas import described_all
from gyre_daemon.errors import CorruptSample
from gyre_daemon.order.shuffle.blocks import BlockTable, BlockTables, blocks_of_unequal_samples
from gyre_daemon.order.shuffle.permutation import Int64Array
from gyre_daemon.storage.shard import Shard

_BOOL = np.dtype(np.bool_)


class RecordBatchIndex:
    """A `SampleIndex` of the rows of all record batches of a dataset."""

    def __init__(self, shards: Sequence[Shard], inspected: Sequence[Arrays]) -> None:
        """Join the scans of all shards; see `scan_arrow` for the arrays.

        Raises:
            CorruptSample: a shard has other columns than the first with rows.
        """
        text = _common_columns(shards, inspected)
        columns = [_spec(*each) for each in json.loads(text)]
        full = [(number, scan) for number, scan in enumerate(inspected) if len(scan["rows"])]
        scans = [scan for _, scan in full]
        is_bit = [spec.dtype == _BOOL and not spec.shape for spec in columns]
        order = [place for place, bit in enumerate(is_bit) if not bit]
        self._stored = [columns[place] for place in order]
        self._rows = _stacked([scan["rows"] for scan in scans], np.int64)
        self._first = np.concatenate(([0], np.cumsum(self._rows))).astype(np.int64)
        self.num_samples = int(self._first[-1])
        counts = [len(scan["rows"]) for scan in scans]
        self._shard = np.repeat(np.array([number for number, _ in full], np.int64), counts)
        self._body = _stacked([scan["body"] for scan in scans], np.int64, 2)
        self._base = _stacked([scan["base"] for scan in scans], np.int64, len(columns))[:, order]
        self._ragged = [spec.ragged for spec in self._stored]
        num_ragged = sum(self._ragged)
        self._begin = _stacked([scan["first"] for scan in scans], np.int64, num_ragged)
        self._ends = _stacked([scan["ends"] for scan in scans], np.int64, num_ragged)
        optional = sorted({place for scan in scans for place in scan["optional"].tolist()})
        self._present = {
            place: np.concatenate([_present(scan, place) for scan in scans]) for place in optional
        }
        bits = _stacked([scan["bits"] for scan in scans], _BOOL, sum(is_bit))
        self._absent = [
            (number, self._present[place])
            for number, place in enumerate(order)
            if place in self._present
        ]
        of_bits = [spec for spec, bit in zip(columns, is_bit, strict=True) if bit]
        self._indexed = [
            *((_indexed(spec.name), bits[:, number]) for number, spec in enumerate(of_bits)),
            *(
                (_indexed(columns[place].name + PRESENT_SUFFIX), values)
                for place, values in self._present.items()
            ),
        ]
        self._blocks = BlockTables(self._make_blocks)
        digest = hashlib.blake2b(b"arrow " + text, digest_size=16)
        for table in (self._first, self._base, self._begin, self._ends):
            digest.update(table.tobytes())
        for _, values in self._indexed:
            digest.update(np.packbits(values).tobytes())
        self._digest = digest.digest()

    @property
    def fields(self) -> Sequence[FieldSpec]:
        """See `SampleIndex.fields`; a field that some row lacks has one more, `NAME.present`."""
        return [*self._stored, *(spec for spec, _ in self._indexed)]

    def locate(self, sample_ids: Int64Array) -> Extents:
        """See `SampleIndex.locate`."""
        batch = np.searchsorted(self._first, sample_ids, side="right") - 1
        row = sample_ids - self._first[batch]
        start = self._base[batch]
        size = np.empty_like(start)
        ragged = 0
        for place, spec in enumerate(self._stored):
            if spec.ragged:
                ends = self._ends[:, ragged]
                begin = np.where(row > 0, ends[sample_ids - 1], self._begin[batch, ragged])
                size[:, place] = ends[sample_ids] - begin
                start[:, place] += begin
                ragged += 1
            else:
                size[:, place] = spec.element_bytes
                start[:, place] += row * spec.element_bytes
        absent: npt.NDArray[np.bool_] | None = None
        if self._absent:
            absent = np.zeros(size.shape, np.bool_)
            for place, present in self._absent:
                absent[:, place] = ~present[sample_ids]
            size[absent] = 0
        indexed = tuple(values[sample_ids] for _, values in self._indexed)
        return Extents(self._shard[batch], start, size, absent=absent, indexed=indexed)

    def max_ragged_bytes(self, num_samples: int) -> int:
        """See `SampleIndex.max_ragged_bytes`."""
        return self._bounds.largest(num_samples)

    def blocks(self, io_block_bytes: int) -> BlockTable:
        """See `SampleIndex.blocks`: a block has whole record batches, which store columns apart."""
        return self._blocks.of(io_block_bytes)

    def digest(self) -> bytes:
        """See `SampleIndex.digest`."""
        return self._digest

    @cached_property
    def _bounds(self) -> RaggedBounds:
        return RaggedBounds(self._ragged_bytes)

    def _ragged_bytes(self) -> Int64Array:
        """Int64 [N], the bytes of all ragged fields of each row."""
        begin = np.empty_like(self._ends)
        begin[1:] = self._ends[:-1]
        begin[self._first[:-1]] = self._begin
        total: Int64Array = (self._ends - begin).sum(axis=1)
        return total

    def _make_blocks(self, io_block_bytes: int) -> BlockTable:
        table = blocks_of_unequal_samples(
            self._shard, self._body[:, 0], self._body[:, 1], io_block_bytes
        )
        first = self._first[table.first_sample(np.arange(table.num_blocks + 1))]
        return BlockTable(
            max(1, self.num_samples // max(1, len(first) - 1)), np.arange(len(first)), first
        )


def _common_columns(shards: Sequence[Shard], inspected: Sequence[Arrays]) -> bytes:
    first, owner = b"[]", ""
    for shard, scan in zip(shards, inspected, strict=True):
        columns = scan["columns"].tobytes()
        if not len(scan["rows"]) or columns == first:
            continue
        if owner:
            reason = f"it has {_describe(columns)}, and shard {owner} has {_describe(first)}"
            raise CorruptSample(
                f"shard {shard.name} does not fit: {reason}; serve them as two datasets",
                {"shard": shard.name, "reason": reason},
            )
        first, owner = columns, shard.name
    return first


def _describe(columns: bytes) -> str:
    return described_all([_spec(*each) for each in json.loads(columns)])


def _spec(
    name: str,
    dtype: str,
    shape: list[int],
    ragged: bool,
    codec: str,
    categories: list[str],
    media_type: str,
) -> FieldSpec:
    return FieldSpec(
        name,
        np.dtype(dtype),
        tuple(shape),
        ragged=ragged,
        codec="text" if codec == "text" else "bytes",
        categories=tuple(categories),
        media_type=media_type,
    )


def _indexed(name: str) -> FieldSpec:
    return FieldSpec(name, _BOOL, (), ragged=False, codec="indexed")


def _present(scan: Arrays, place: int) -> npt.NDArray[np.bool_]:
    """Bool [n], which rows of a shard have a value in a column."""
    found = np.flatnonzero(scan["optional"] == place)
    if not len(found):
        return np.ones(int(scan["rows"].sum()), np.bool_)
    present: npt.NDArray[np.bool_] = scan["present"][:, found[0]]
    return present


def _stacked(
    parts: Sequence[npt.NDArray[Any]], dtype: npt.DTypeLike, *row: int
) -> npt.NDArray[Any]:
    """The rows of several arrays, each of this shape."""
    return np.concatenate([np.empty((0, *row), dtype), *parts])
