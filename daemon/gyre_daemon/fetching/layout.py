"""The layout of batches in memory: their tensors, and where in these each sample goes. Pure.

A batch has `sample_id`, `mask` if the tail pads, and every field of the dataset, each at a multiple
of 64 bytes. A ragged field is two tensors: the elements of all samples back to back, and
`NAME.offsets`, int64 [B + 1], the element at which each sample begins. Indexed fields come last. A
batch group is several successive batches in one piece of memory.

A batch of B packed sequences of L tokens has `sample_id` [B], the packed field [B, L], `position`
and `loss_mask` [B, L], `document_id` and its offsets, and `cu_seqlens` and its offsets. Documents
are read straight into their places; all else is computed once they are there.
"""

import math
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt
from msgspec import Struct

from gyre_daemon.datasets.dataset import CU_SEQLENS, DOCUMENT_ID, LOSS_MASK, POSITION, Packed
from gyre_daemon.datasets.formats import (
    MASK,
    OFFSETS_SUFFIX,
    SAMPLE_ID,
    Extents,
    FieldSpec,
    SampleIndex,
    indexed_fields,
    stored_fields,
)
from gyre_daemon.datasets.formats.concat import SOURCE
from gyre_daemon.memory.arenas import whole_pages
from gyre_daemon.order.permutation import Int64Array
from gyre_daemon.order.steps import BatchPlan, GroupPlan

ALIGNMENT_BYTES = 64
_INT64, _BOOL = np.dtype("<i8"), np.dtype(np.bool_)

_NO_VALUES: Mapping[str, npt.NDArray[np.generic]] = {}


class TensorSpec(Struct, frozen=True):
    """One tensor of a batch.

    Attributes:
        name: its key.
        dtype: of its elements.
        shape: of the tensor.
        offset_bytes: where it begins in the batch.
    """

    name: str
    dtype: np.dtype[np.generic]
    shape: tuple[int, ...]
    offset_bytes: int

    @property
    def num_bytes(self) -> int:
        """The size of the tensor."""
        return math.prod(self.shape) * self.dtype.itemsize


class BatchLayout(Struct, frozen=True):
    """The place of each tensor in one batch of B samples with F stored fields.

    Attributes:
        tensors: in the order of their offsets.
        destinations: int64 [n, F, 2], first byte and end of each stored field: of each sample read,
            or of each document of packed sequences.
        gaps: byte ranges between the tensors.
        num_bytes: of the batch.
    """

    tensors: tuple[TensorSpec, ...]
    destinations: Int64Array
    gaps: tuple[tuple[int, int], ...]
    num_bytes: int


class GroupLayout(Struct, frozen=True, dict=True):
    """The places of K batches in one piece of memory, each on separate pages.

    Attributes:
        batches: K layouts.
        offsets: int64 [K], where each batch begins, in bytes.
        num_bytes: of the memory, up to the end of the last batch.
    """

    batches: tuple[BatchLayout, ...]
    offsets: Int64Array
    num_bytes: int

    @classmethod
    def at(cls, offsets: Int64Array, batches: Sequence[BatchLayout]) -> "GroupLayout":
        """Batches that begin at these offsets."""
        return cls(tuple(batches), offsets, int(offsets[-1]) + batches[-1].num_bytes)

    @cached_property
    def shared(self) -> BatchLayout | None:
        """The layout of every batch, if they have one layout."""
        first = self.batches[0]
        return first if all(each is first for each in self.batches) else None

    @property
    def destinations(self) -> Int64Array:
        """Int64 [n, F, 2]: those of all batches, from the beginning of the memory."""
        if self.shared:
            absolute = self.shared.destinations + self.offsets[:, None, None, None]
            num_batches, num_samples, *places = absolute.shape  # -1 needs a stored field
            return absolute.reshape(num_batches * num_samples, *places)
        counts = [len(each.destinations) for each in self.batches]
        destinations = np.concatenate([each.destinations for each in self.batches])
        return destinations + np.repeat(self.offsets, counts)[:, None, None]

    def part(self, begin: int, end: int) -> "GroupLayout":
        """Some of the batches, where they are."""
        return GroupLayout.at(self.offsets[begin:end], self.batches[begin:end])


class LayoutMaker:
    """Lays out the batches of one dataset.

    Without ragged fields, all batches of one size share a layout.
    """

    def __init__(self, fields: Sequence[FieldSpec]) -> None:
        self._fields = fields
        self._is_fixed = not any(spec.ragged for spec in fields)
        self._made: dict[tuple[int, int, bool], GroupLayout] = {}

    def make(self, plan: GroupPlan, sizes: Int64Array) -> GroupLayout:
        """Lay out batches before their samples are there.

        Args:
            plan: the samples of K batches.
            sizes: int64 [K * B, F], bytes that each stored field of each sample takes if ragged.
        """
        key = (*plan.sample_ids.shape, plan.mask is not None)
        if not self._is_fixed:
            return self._make(sizes, *key)
        if key not in self._made:
            self._made[key] = self._make(sizes, *key)
        return self._made[key]

    def _make(
        self, sizes: Int64Array, num_batches: int, num_samples: int, pads: bool
    ) -> GroupLayout:
        batches = [
            _make_layout(sizes[begin : begin + num_samples], self._fields, pads=pads)
            for begin in range(0, num_samples if self._is_fixed else len(sizes), num_samples)
        ]
        return joined(batches * num_batches if self._is_fixed else batches)


def joined(batches: Sequence[BatchLayout]) -> GroupLayout:
    """The layout of a batch group of these batches."""
    ends = np.cumsum([whole_pages(batch.num_bytes) for batch in batches])
    offsets = np.concatenate(([0], ends[:-1]))
    return GroupLayout.at(offsets, batches)


def max_batch_bytes(
    index: SampleIndex,
    num_samples: int,
    num_corrupt: int = 0,
    fields: Sequence[FieldSpec] | None = None,
    least_epoch: int | None = None,
) -> int:
    """An upper bound of the size of any batch of `num_samples`.

    Where samples stand in for `num_corrupt` others, each may occur twice in an epoch. `fields` are
    those of the index, if they are not renamed, cast or transformed. The shortest epoch has
    `least_epoch` samples; by default, all have N.
    """
    fields = index.fields if fields is None else fields
    num_all = max(index.num_samples, 1)
    num_epochs = num_samples // (least_epoch or num_all) + 2
    num_substitutes = min(num_samples, num_epochs * num_corrupt)
    ragged = 0
    if any(spec.ragged for spec in fields):
        ragged = index.max_ragged_bytes(num_samples)
        if num_epochs > num_samples // num_all + 2:  # a sample comes more often than with N
            ragged = num_epochs * index.max_ragged_bytes(-(-num_samples // num_epochs))
        if num_substitutes:
            ragged += index.max_ragged_bytes(num_substitutes)
    fixed = sum(num_samples * spec.element_bytes for spec in fields if not spec.ragged)
    offsets = sum((num_samples + 1) * 8 for spec in fields if spec.ragged)
    own = 9 * num_samples  # sample ids and mask
    alignment = (3 + 2 * len(fields)) * ALIGNMENT_BYTES
    return fixed + offsets + ragged + own + alignment


def max_metadata_bytes(index: SampleIndex, num_samples: int) -> int:
    """An upper bound of the memory that the daemon needs for a batch, its tensors excepted.

    It covers sample ids, where the samples are until they are read, and a layout if batches may
    differ in theirs. The figures are measured with small samples; see
    `benchmarks/loader/parts/metadata.py`.
    """
    per_sample, per_batch = (32, 900) if any(spec.ragged for spec in index.fields) else (8, 64)
    num_fields = len(index.fields)
    return num_samples * (8 + per_sample * num_fields) + 128 + per_batch * num_fields


def write_own_tensors(
    plan: GroupPlan,
    layout: GroupLayout,
    memory: memoryview,
    indexed: Mapping[str, npt.NDArray[np.generic]] = _NO_VALUES,
) -> None:
    """Write all values that storage does not have: sample ids, masks, offsets, indexed fields.

    The gaps between tensors are zeroed, so that a batch is the same bytes on every run.

    Args:
        plan: the samples.
        layout: of their batches.
        memory: of the batch group.
        indexed: by field, the values of all samples, [K * B, *shape].
    """
    if indexed:
        _write_indexed(layout, memory, indexed)
    shared = layout.shared
    if shared and len(layout.batches) > 1:
        write_ids(plan, shared, layout.offsets, memory)
        return
    for row, (batch, offset) in enumerate(
        zip(layout.batches, layout.offsets.tolist(), strict=True)
    ):
        write_ids(plan[row : row + 1], batch, layout.offsets[row : row + 1], memory)
        _write_offsets(batch, memory[offset : offset + batch.num_bytes])


def write_ids(
    plan: GroupPlan, layout: BatchLayout, offsets: Int64Array, memory: memoryview
) -> None:
    """Write ids, masks and gaps, in one assignment for batches at equal distances.

    Args:
        plan: the samples.
        layout: of every batch.
        offsets: int64 [K], where each begins in the memory.
        memory: of the batch group.
    """
    first, num_batches = int(offsets[0]), len(offsets)
    stride = int(offsets[1]) - first if num_batches > 1 else 0
    for begin, end in layout.gaps:
        np.ndarray((num_batches, end - begin), np.uint8, memory, first + begin, (stride, 1))[:] = 0
    for spec in layout.tensors[:2]:
        values = {SAMPLE_ID: plan.sample_ids, MASK: plan.mask}.get(spec.name)
        if values is not None:
            begin, strides = first + spec.offset_bytes, (stride, spec.dtype.itemsize)
            np.ndarray(values.shape, spec.dtype, memory, begin, strides)[:] = values


def _write_indexed(
    layout: GroupLayout, memory: memoryview, indexed: Mapping[str, npt.NDArray[np.generic]]
) -> None:
    size = len(layout.batches[0].destinations)
    for row, (batch, offset) in enumerate(
        zip(layout.batches, layout.offsets.tolist(), strict=True)
    ):
        for spec in batch.tensors:
            if spec.name in indexed:
                tensor = np.ndarray(spec.shape, spec.dtype, memory, offset + spec.offset_bytes)
                tensor[:] = indexed[spec.name][row * size : (row + 1) * size]


def _write_offsets(layout: BatchLayout, memory: memoryview) -> None:
    """Write the offsets of ragged fields; each offsets tensor follows that of its field."""
    column, element_bytes = -1, 1
    for spec in layout.tensors:
        if spec.name.endswith(OFFSETS_SUFFIX):
            offsets = np.frombuffer(memory, spec.dtype, spec.shape[0], spec.offset_bytes)
            ends = layout.destinations[:, column, 1] - layout.destinations[0, column, 0]
            offsets[0] = 0
            offsets[1:] = ends // element_bytes
            continue
        element_bytes = math.prod(spec.shape[1:]) * spec.dtype.itemsize
        if spec.name not in (SAMPLE_ID, MASK):
            column += 1


class TensorPlaces:
    """Places the tensors of a batch one behind the other, first the ids and the mask.

    Attributes:
        end: the byte behind the last tensor.
    """

    def __init__(self, num_samples: int, *, pads: bool) -> None:
        self.end = 0
        self._tensors: list[TensorSpec] = []
        self._gaps: list[tuple[int, int]] = []
        self.add(SAMPLE_ID, _INT64, (num_samples,))
        if pads:
            self.add(MASK, _BOOL, (num_samples,))

    def add(self, name: str, dtype: np.dtype[np.generic], shape: tuple[int, ...]) -> int:
        """Place one more tensor; returns where it begins."""
        self._align()
        begin = self.end
        self._tensors.append(TensorSpec(name, dtype, shape, begin))
        self.end += self._tensors[-1].num_bytes
        return begin

    def finished(self, destinations: Int64Array) -> BatchLayout:
        """The layout of the batch, with these destinations of the stored fields."""
        self._align()
        return BatchLayout(tuple(self._tensors), destinations, tuple(self._gaps), self.end)

    def _align(self) -> None:
        before, self.end = self.end, -(-self.end // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
        if before < self.end:
            self._gaps.append((before, self.end))


def _make_layout(sizes: Int64Array, fields: Sequence[FieldSpec], *, pads: bool) -> BatchLayout:
    num_samples = len(sizes)
    places = TensorPlaces(num_samples, pads=pads)
    stored = stored_fields(fields)
    destinations = np.empty((num_samples, len(stored), 2), np.int64)
    for column, spec in enumerate(stored):
        if spec.ragged:
            ends = sizes[:, column].cumsum()
            base = places.add(
                spec.name, spec.dtype, (int(ends[-1]) // spec.element_bytes, *spec.shape)
            )
            places.add(spec.name + OFFSETS_SUFFIX, _INT64, (num_samples + 1,))
        else:
            ends = np.arange(1, num_samples + 1) * spec.element_bytes
            base = places.add(spec.name, spec.dtype, (num_samples, *spec.shape))
        destinations[:, column, 1] = base + ends
        destinations[0, column, 0] = base
        destinations[1:, column, 0] = destinations[:-1, column, 1]
    for spec in indexed_fields(fields):
        places.add(spec.name, spec.dtype, (num_samples, *spec.shape))
    return places.finished(destinations)


# Metadata of each part of a document, next to the batch: its number, its place and
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
