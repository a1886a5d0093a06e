"""Batches of packed sequences: which documents are read where, and the tensors that are made.

A batch of B sequences of L tokens has `sample_id` [B], the packed field [B, L], `position` and
`loss_mask` [B, L], `document_id` and its offsets, and `cu_seqlens` and its offsets. Documents are
read straight into their places; all else is computed once they are there.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from gyre_daemon.datasets.formats import OFFSETS_SUFFIX, Extents, SampleIndex
from gyre_daemon.datasets.mixing import SOURCE
from gyre_daemon.datasets.packing import CU_SEQLENS, DOCUMENT_ID, LOSS_MASK, POSITION, Packed
from gyre_daemon.fetching.layout import (
    ALIGNMENT_BYTES,
    BatchLayout,
    GroupLayout,
    TensorPlaces,
    joined,
    write_ids,
)
from gyre_daemon.order.shuffle.permutation import Int64Array
from gyre_daemon.order.steps import GroupPlan

# What the daemon keeps of each part of a document, beside the batch: its number, where it lies and
# where it goes.
_PART_METADATA_BYTES, _BATCH_METADATA_BYTES = 96, 8192


@dataclass(frozen=True, slots=True)
class PackedRows:
    """What R sequences consist of.

    Attributes:
        documents: int64 [n], the document of each part.
        lengths: int64 [n], its tokens.
        bounds: int64 [R + 1], the first part of each sequence, and n.
        begins: int64 [n], the token of its document at which each part begins; None where all begin
            at 0.
    """

    documents: Int64Array
    lengths: Int64Array
    bounds: Int64Array
    begins: Int64Array | None = None

    def which(self, begin: int, end: int) -> slice:
        """The parts of the sequences `[begin, end)`."""
        return slice(int(self.bounds[begin]), int(self.bounds[end]))

    def part(self, begin: int, end: int) -> "PackedRows":
        """The sequences `[begin, end)`."""
        some = self.which(begin, end)
        bounds = self.bounds[begin : end + 1] - some.start
        begins = None if self.begins is None else self.begins[some]
        return PackedRows(self.documents[some], self.lengths[some], bounds, begins)

    @property
    def filled(self) -> Int64Array:
        """Int64 [R], the tokens of each sequence."""
        return np.add.reduceat(self.lengths, self.bounds[:-1])

    @property
    def starts(self) -> Int64Array:
        """Int64 [n], where in its sequence each part begins."""
        before = np.cumsum(self.lengths) - self.lengths
        return before - np.repeat(before[self.bounds[:-1]], np.diff(self.bounds))


def rows_of(packed: Packed, plan: GroupPlan) -> PackedRows:
    """The parts of all sequences of a plan."""
    sequences = packed.sequences
    numbers, bounds = sequences.parts_of(plan.sample_ids.reshape(-1))
    documents, lengths = sequences.documents[numbers], sequences.lengths[numbers].astype(np.int64)
    begins = None if sequences.begins is None else sequences.begins[numbers]
    return PackedRows(documents, lengths, bounds, begins)


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
    num_batches, size = plan.sample_ids.shape
    return joined(
        [
            _lay_out(packed, rows.part(row * size, (row + 1) * size), pads=plan.mask is not None)
            for row in range(num_batches)
        ]
    )


def _lay_out(packed: Packed, rows: PackedRows, *, pads: bool) -> BatchLayout:
    num_rows, length = len(rows.bounds) - 1, packed.config.length
    num_padded = int(np.count_nonzero(rows.filled < length))
    counts = {DOCUMENT_ID: len(rows.documents), CU_SEQLENS: len(rows.documents) + num_padded + 1}
    places = TensorPlaces(num_rows, pads=pads)
    bases = {}
    for spec in packed.fields:
        shape = (counts[spec.name],) if spec.ragged else (num_rows, *spec.shape)
        begin = places.add(spec.name, spec.dtype, shape)
        if spec.ragged:
            places.add(spec.name + OFFSETS_SUFFIX, np.dtype("<i8"), (num_rows + 1,))
        bases[spec.name] = begin
    begins = np.repeat(np.arange(num_rows), np.diff(rows.bounds)) * length + rows.starts
    destinations = np.empty((len(begins), len(packed.read), 2), np.int64)
    for column, spec in enumerate(packed.read.values()):
        item = spec.dtype.itemsize
        destinations[:, column, 0] = bases[spec.name] + begins * item
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
        _fill(packed, rows.part(number * size, (number + 1) * size), views)
        if packed.mixed:
            views[SOURCE][:] = packed.mixed.source_of(plan.sample_ids[number])


def _fill(packed: Packed, rows: PackedRows, views: dict[str, npt.NDArray[Any]]) -> None:
    length, num_rows = packed.config.length, len(rows.bounds) - 1
    counts, filled = np.diff(rows.bounds), rows.filled
    padded = np.flatnonzero(filled < length)
    row = np.repeat(np.arange(num_rows), counts)
    # padding is a document of its own
    begins = np.sort(np.concatenate((row * length + rows.starts, padded * length + filled[padded])))
    ends = np.append(begins[1:], num_rows * length)
    position = views[POSITION].reshape(-1)
    position[:] = np.arange(num_rows * length) - np.repeat(begins, ends - begins)
    can_be_targets = views[POSITION] > 0
    if packed.mask_column is not None:
        can_be_targets &= views[LOSS_MASK]
    views[LOSS_MASK][:] = can_be_targets
    tokens = views[packed.stored.name]
    for number in padded.tolist():
        tokens[number, filled[number] :] = packed.config.padding_id
        views[LOSS_MASK][number, filled[number] :] = False
    views[DOCUMENT_ID][:] = rows.documents
    views[DOCUMENT_ID + OFFSETS_SUFFIX][:] = rows.bounds
    views[CU_SEQLENS][:-1], views[CU_SEQLENS][-1] = begins, num_rows * length
    bounds = views[CU_SEQLENS + OFFSETS_SUFFIX]
    bounds[0], bounds[1:] = 0, np.cumsum(counts + (filled < length))
    bounds[-1] += 1  # the end of the last sequence


def max_packed_bytes(packed: Packed, num_sequences: int) -> int:
    """An upper bound of the size of any batch of `num_sequences`."""
    places = num_sequences * packed.config.length
    num_parts = packed.most_parts(num_sequences)
    made = places * (packed.stored.dtype.itemsize + 4 + 1)
    ragged = num_parts * (8 + 4) + num_sequences * 4 + 4 + 2 * (num_sequences + 1) * 8
    return made + ragged + 13 * num_sequences + 11 * ALIGNMENT_BYTES


def max_packed_metadata_bytes(packed: Packed, num_sequences: int) -> int:
    """An upper bound of the memory that the daemon needs for such a batch beside its tensors."""
    num_parts = packed.most_parts(num_sequences)
    return num_parts * _PART_METADATA_BYTES + num_sequences * 16 + _BATCH_METADATA_BYTES
