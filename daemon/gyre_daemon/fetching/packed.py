"""Batches of packed sequences: which documents are read where, and the tensors that are made.

A batch of B sequences of L tokens has `sample_id` [B], the packed field [B, L], `position` and
`loss_mask` [B, L], `document_id` and its offsets, and `cu_seqlens` and its offsets. Documents are
read straight into their places; all else is computed once they are there.
"""

from typing import Any

import numpy as np
import numpy.typing as npt
from msgspec import Struct

from gyre_daemon.datasets.formats import OFFSETS_SUFFIX, Extents, SampleIndex
from gyre_daemon.datasets.formats.concat import SOURCE
from gyre_daemon.datasets.packing import CU_SEQLENS, DOCUMENT_ID, LOSS_MASK, POSITION, Packed
from gyre_daemon.fetching.layout import (
    ALIGNMENT_BYTES,
    BatchLayout,
    GroupLayout,
    TensorPlaces,
    joined,
    write_ids,
)
from gyre_daemon.order.permutation import Int64Array
from gyre_daemon.order.steps import BatchPlan, GroupPlan

# What the daemon keeps of each part of a document, beside the batch: its number, its place and
# where it goes.
_PART_METADATA_BYTES, _BATCH_METADATA_BYTES = 96, 8192


class PackedRows(Struct, frozen=True):
    """The parts of B sequences, or B samples that are not packed.

    Attributes:
        documents: int64 [n], the document of each part.
        lengths: int64 [n], its tokens.
        starts: int64 [n], where in its sequence each part begins.
        bounds: int64 [B + 1], the first part of each sequence, and n.
        filled: int64 [B], the tokens of each sequence; behind them it is padded.
        begins: int64 [n], the token of its document at which each part begins; None where all begin
            at 0.
    """

    documents: Int64Array
    lengths: Int64Array
    starts: Int64Array
    bounds: Int64Array
    filled: Int64Array
    begins: Int64Array | None = None

    def which(self, begin: int, end: int) -> slice:
        """The parts of the sequences `[begin, end)`."""
        return slice(int(self.bounds[begin]), int(self.bounds[end]))

    def part(self, begin: int, end: int) -> "PackedRows":
        """The sequences `[begin, end)`."""
        some = self.which(begin, end)
        return PackedRows(
            self.documents[some],
            self.lengths[some],
            self.starts[some],
            self.bounds[begin : end + 1] - some.start,
            self.filled[begin:end],
            None if self.begins is None else self.begins[some],
        )


def rows_of(packed: Packed, plan: GroupPlan) -> PackedRows:
    """The parts of all sequences of a plan."""
    sequences = packed.sequences
    numbers, bounds = sequences.parts_of(plan.sample_ids.reshape(-1))
    lengths = sequences.lengths[numbers].astype(np.int64)
    before = np.concatenate(([0], np.cumsum(lengths)))
    return PackedRows(
        sequences.documents[numbers],
        lengths,
        before[:-1] - np.repeat(before[bounds[:-1]], np.diff(bounds)),
        bounds,
        np.diff(before[bounds]),
        None if sequences.begins is None else sequences.begins[numbers],
    )


class _Tokens(Struct, frozen=True):
    """The places of the tokens of one batch, counted from its beginning.

    Attributes:
        starts: int64 [n], where each part of a document begins.
        gaps: int64 [m, 2], the places `[begin, end)` of each sequence that have no document.
    """

    starts: Int64Array
    gaps: Int64Array

    @property
    def num_bounds(self) -> int:
        """The elements of `cu_seqlens`: padding is one more document."""
        return len(self.starts) + len(self.gaps) + 1


def _tokens(packed: Packed, rows: PackedRows) -> _Tokens:
    """Where the tokens of a batch are."""
    length = packed.config.length
    begins = np.arange(len(rows.filled)) * length
    starts = rows.starts + np.repeat(begins, np.diff(rows.bounds))
    gaps = np.stack((begins + rows.filled, begins + length), axis=1)
    return _Tokens(starts, gaps[rows.filled < length])


def locate_packed(
    index: SampleIndex, packed: Packed, plan: GroupPlan
) -> tuple[PackedRows, Extents]:
    """The parts of all sequences of a plan, and where they lie in storage."""
    rows, columns = rows_of(packed, plan), [*packed.read]
    items = np.array([spec.dtype.itemsize for spec in packed.read.values()])
    found = index.locate(rows.documents)
    start, size = found.start[:, columns], found.size[:, columns]
    lengths = rows.lengths[:, None] * items
    if packed.config.overlong in ("split", "truncate"):
        size = lengths
        if rows.begins is not None:
            start = start + rows.begins[:, None] * items
    absent = None if found.absent is None else found.absent[:, columns]
    return rows, Extents(found.shard, start, size, lengths, absent)


def lay_out_packed(packed: Packed, rows: PackedRows, plan: GroupPlan) -> GroupLayout:
    """Lay out the batches of a group."""
    size = plan.sample_ids.shape[1]
    return joined(
        [
            _lay_out(packed, rows.part(row * size, (row + 1) * size), batch)
            for row, batch in enumerate(plan)
        ]
    )


def _lay_out(packed: Packed, rows: PackedRows, plan: BatchPlan) -> BatchLayout:
    tokens, num_rows = _tokens(packed, rows), len(plan.sample_ids)
    counts = {DOCUMENT_ID: len(rows.documents), CU_SEQLENS: tokens.num_bounds}
    places = TensorPlaces(num_rows, pads=plan.mask is not None)
    bases = {}
    for spec in packed.fields:
        shape = (counts[spec.name],) if spec.ragged else (num_rows, *spec.shape)
        begin = places.add(spec.name, spec.dtype, shape)
        if spec.ragged:
            places.add(spec.name + OFFSETS_SUFFIX, np.dtype("<i8"), (num_rows + 1,))
        bases[spec.name] = begin
    destinations = np.empty((len(tokens.starts), len(packed.read), 2), np.int64)
    for column, spec in enumerate(packed.read.values()):
        item = spec.dtype.itemsize
        destinations[:, column, 0] = bases[spec.name] + tokens.starts * item
        destinations[:, column, 1] = destinations[:, column, 0] + rows.lengths * item
    return places.finished(destinations)


def write_packed(
    packed: Packed, rows: PackedRows, plan: GroupPlan, layout: GroupLayout, memory: memoryview
) -> None:
    """Write everything that is not read, in the places that no document takes.

    Masks of the documents must be there already: they say which tokens can be targets.
    """
    size = plan.sample_ids.shape[1]
    for number, offset in enumerate(layout.offsets.tolist()):
        batch = layout.batches[number]
        write_ids(plan[number : number + 1], batch, layout.offsets[number : number + 1], memory)
        views: dict[str, npt.NDArray[Any]] = {
            each.name: np.ndarray(each.shape, each.dtype, memory, offset + each.offset_bytes)
            for each in batch.tensors
        }
        its = rows.part(number * size, (number + 1) * size)
        _fill(packed, its.documents, _tokens(packed, its), views)
        if packed.mixed:
            views[SOURCE][:] = packed.mixed.source_of(plan.sample_ids[number])


def _fill(
    packed: Packed, documents: Int64Array, tokens: _Tokens, views: dict[str, npt.NDArray[Any]]
) -> None:
    num_rows, length = views[POSITION].shape
    num_places, rows = num_rows * length, np.arange(num_rows + 1) * length
    begins = np.sort(np.concatenate((tokens.starts, tokens.gaps[:, 0])))
    ends = np.append(begins[1:], num_places)
    position = views[POSITION].reshape(-1)
    position[:] = np.arange(num_places) - np.repeat(begins, ends - begins)
    can_be_targets = views[POSITION] > 0
    if packed.mask_column is not None:
        can_be_targets &= views[LOSS_MASK]
    views[LOSS_MASK][:] = can_be_targets
    ids, counts = views[packed.stored.name].reshape(-1), views[LOSS_MASK].reshape(-1)
    for begin, end in tokens.gaps.tolist():
        ids[begin:end] = packed.config.padding_id
        counts[begin:end] = False
    views[DOCUMENT_ID][:] = documents
    views[DOCUMENT_ID + OFFSETS_SUFFIX][:] = np.searchsorted(tokens.starts, rows)
    views[CU_SEQLENS][:-1], views[CU_SEQLENS][-1] = begins, num_places
    bounds = views[CU_SEQLENS + OFFSETS_SUFFIX]
    bounds[:] = np.searchsorted(begins, rows)
    bounds[-1] += 1  # the end of the last sequence


def max_packed_bytes(packed: Packed, num_samples: int) -> int:
    """An upper bound of the size of any batch of `num_samples`."""
    places = num_samples * packed.config.length
    num_parts = packed.most_parts(num_samples)
    made = places * (packed.stored.dtype.itemsize + 4 + 1)
    ragged = num_parts * (8 + 4) + num_samples * 4 + 4 + 2 * (num_samples + 1) * 8
    return made + ragged + 13 * num_samples + 11 * ALIGNMENT_BYTES


def max_packed_metadata_bytes(packed: Packed, num_samples: int) -> int:
    """An upper bound of the memory that the daemon needs for such a batch besides its tensors."""
    num_parts = packed.most_parts(num_samples)
    return num_parts * _PART_METADATA_BYTES + num_samples * 16 + _BATCH_METADATA_BYTES
