"""The memory of batches: which tensors one has, where each lies, and where in them each sample goes. Pure arithmetic.

A batch buffer holds, each at a multiple of 64 bytes: `sample_id`, `mask` where the tail pads, and every field of the dataset. A
ragged field is two tensors: the samples' elements back to back, and `NAME.offsets`, int64 [B + 1], the element each begins at.
Fields that the index knows come last. A strip is several successive batches in one piece of memory.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt

from gyre_daemon.datasets.formats import MASK, OFFSETS_SUFFIX, SAMPLE_ID, FieldSpec, SampleIndex, known_fields, stored_fields
from gyre_daemon.memory.pages import whole_pages
from gyre_daemon.order.steps import StripPlan

ALIGNMENT_BYTES = 64
_INT64, _BOOL = np.dtype("<i8"), np.dtype(np.bool_)

Known = Mapping[str, npt.NDArray[np.generic]]
NOTHING_KNOWN: Known = {}


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """One tensor of a batch.

    Attributes:
        name: its key.
        dtype: numpy's name.
        shape: of the tensor.
        offset_bytes: in the batch buffer.
    """

    name: str
    dtype: np.dtype[np.generic]
    shape: tuple[int, ...]
    offset_bytes: int

    @property
    def num_bytes(self) -> int:
        """Of the tensor."""
        return math.prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True, slots=True)
class BatchLayout:
    """Where everything lies in one batch's buffer.

    Attributes:
        tensors: in the order of their offsets.
        places: int64 [B, F, 2], first and end byte of each sample's part in each stored field.
        gaps: byte ranges between the tensors.
        num_bytes: of the buffer.
    """

    tensors: tuple[TensorSpec, ...]
    places: npt.NDArray[np.int64]
    gaps: tuple[tuple[int, int], ...]
    num_bytes: int


@dataclass(frozen=True)
class StripLayout:
    """Where K batches lie in one piece of memory, each on pages of its own.

    Attributes:
        batches: K layouts.
        offsets: int64 [K], where each batch begins, in bytes.
        num_bytes: of the memory, up to the last batch's end.
    """

    batches: tuple[BatchLayout, ...]
    offsets: npt.NDArray[np.int64]
    num_bytes: int

    @cached_property
    def shared(self) -> BatchLayout | None:
        """The layout that all batches have, if there is one."""
        first = self.batches[0]
        return first if all(each is first for each in self.batches) else None

    @property
    def places(self) -> npt.NDArray[np.int64]:
        """Of all samples, int64 [K * B, F, 2]: as a batch's, but in the strip's memory."""
        offsets = self.offsets[:, None, None, None]
        places = self.shared.places[None] if self.shared else np.stack([each.places for each in self.batches])
        return (places + offsets).reshape(-1, *places.shape[2:])

    def part(self, begin: int, end: int) -> "StripLayout":
        """Some of the batches, where they are."""
        last = self.offsets[end - 1]
        return StripLayout(self.batches[begin:end], self.offsets[begin:end], int(last) + self.batches[end - 1].num_bytes)


class LayoutMaker:
    """Lays out the batches of one dataset; where no field is ragged, those of one size share a layout."""

    def __init__(self, fields: Sequence[FieldSpec]) -> None:
        self._fields = fields
        self._fixed = not any(spec.ragged for spec in fields)
        self._made: dict[tuple[int, int, bool], StripLayout] = {}

    def make(self, plan: StripPlan, sizes: npt.NDArray[np.int64]) -> StripLayout:
        """Lay out batches before their samples are there.

        Args:
            plan: the samples of K batches.
            sizes: int64 [K * B, F], what each sample takes in each stored field that is ragged, in bytes.
        """
        key = (*plan.sample_ids.shape, plan.mask is not None)
        if not self._fixed:
            return self._make(sizes, *key)
        if key not in self._made:
            self._made[key] = self._make(sizes, *key)
        return self._made[key]

    def _make(self, sizes: npt.NDArray[np.int64], num_batches: int, num_samples: int, pads: bool) -> StripLayout:
        first = _make_layout(sizes[:num_samples], self._fields, pads=pads)
        rest = range(num_samples, num_batches * num_samples, num_samples)
        if self._fixed:
            batches = [first] * num_batches
        else:
            batches = [first, *(_make_layout(sizes[begin : begin + num_samples], self._fields, pads=pads) for begin in rest)]
        ends = np.cumsum([whole_pages(batch.num_bytes) for batch in batches])
        offsets = np.concatenate(([0], ends[:-1]))
        return StripLayout(tuple(batches), offsets, int(offsets[-1]) + batches[-1].num_bytes)


def max_batch_bytes(index: SampleIndex, num_samples: int) -> int:
    """An upper bound of the buffer of any batch of so many samples."""
    fixed = sum(num_samples * spec.element_bytes for spec in index.fields if not spec.ragged)
    offsets = sum((num_samples + 1) * 8 for spec in index.fields if spec.ragged)
    num_tensors = 3 + 2 * len(index.fields)
    return fixed + offsets + index.max_ragged_bytes(num_samples) + 9 * num_samples + num_tensors * ALIGNMENT_BYTES


def max_note_bytes(index: SampleIndex, num_samples: int) -> int:
    """An upper bound of what the daemon notes of a batch of so many samples beside its buffer, until it is released.

    Measured with small samples: ids, where samples are until they are read, and, where no two batches need have the same one,
    a layout. See `benchmarks/loader/notes.py`.
    """
    of_sample, of_batch = (32, 900) if any(spec.ragged for spec in index.fields) else (8, 64)
    return num_samples * (8 + of_sample * len(index.fields)) + 128 + of_batch * len(index.fields)


def write_own_tensors(plan: StripPlan, layout: StripLayout, memory: memoryview, known: Known = NOTHING_KNOWN) -> None:
    """Fill in what is not read: sample ids, mask, the offsets of ragged fields, and the fields that the index knows.

    The gaps between a batch's tensors are zeroed: a payload is the same bytes on every run.

    Args:
        plan: the samples.
        layout: of their batches.
        memory: of the strip.
        known: by field, the values of all samples, [K * B, *shape].
    """
    if known:
        _write_known(layout, memory, known)
    shared = layout.shared
    if shared and len(layout.batches) > 1:
        _write_alike(plan, shared, layout.offsets, memory)
        return
    for row, (batch, offset) in enumerate(zip(layout.batches, layout.offsets.tolist(), strict=True)):
        _write_alike(plan[row : row + 1], batch, layout.offsets[row : row + 1], memory)
        _write_offsets(batch, memory[offset : offset + batch.num_bytes])


def _write_alike(plan: StripPlan, layout: BatchLayout, offsets: npt.NDArray[np.int64], memory: memoryview) -> None:
    """What has the same size in every batch; they lie at equal distances."""
    first, num_batches = int(offsets[0]), len(offsets)
    stride = int(offsets[1]) - first if num_batches > 1 else 0
    for begin, end in layout.gaps:
        np.ndarray((num_batches, end - begin), np.uint8, memory, first + begin, (stride, 1))[:] = 0
    for spec in layout.tensors[:2]:
        values = {SAMPLE_ID: plan.sample_ids, MASK: plan.mask}.get(spec.name)
        if values is not None:
            strides = (stride, spec.dtype.itemsize)
            np.ndarray(values.shape, spec.dtype, memory, first + spec.offset_bytes, strides)[:] = values


def _write_known(layout: StripLayout, memory: memoryview, known: Known) -> None:
    size = len(layout.batches[0].places)
    for row, (batch, offset) in enumerate(zip(layout.batches, layout.offsets.tolist(), strict=True)):
        for spec in batch.tensors:
            if spec.name in known:
                tensor = np.ndarray(spec.shape, spec.dtype, memory, offset + spec.offset_bytes)
                tensor[:] = known[spec.name][row * size : (row + 1) * size]


def _write_offsets(layout: BatchLayout, payload: memoryview) -> None:
    column, element_bytes = -1, 1
    for spec in layout.tensors:
        if spec.name.endswith(OFFSETS_SUFFIX):
            offsets = np.frombuffer(payload, spec.dtype, spec.shape[0], spec.offset_bytes)
            offsets[0] = 0
            offsets[1:] = (layout.places[:, column, 1] - layout.places[0, column, 0]) // element_bytes
            continue
        element_bytes = math.prod(spec.shape[1:]) * spec.dtype.itemsize
        if spec.name not in (SAMPLE_ID, MASK):
            column += 1


def _make_layout(sizes: npt.NDArray[np.int64], fields: Sequence[FieldSpec], *, pads: bool) -> BatchLayout:
    num_samples = len(sizes)
    tensors: list[TensorSpec] = []
    gaps: list[tuple[int, int]] = []
    stored = stored_fields(fields)
    places = np.empty((num_samples, len(stored), 2), np.int64)
    end = 0

    def align() -> None:
        nonlocal end
        before, end = end, _aligned(end)
        if before < end:
            gaps.append((before, end))

    def add(name: str, dtype: np.dtype[np.generic], shape: tuple[int, ...]) -> int:
        nonlocal end
        align()
        begin = end
        tensors.append(TensorSpec(name, dtype, shape, begin))
        end += tensors[-1].num_bytes
        return begin

    add(SAMPLE_ID, _INT64, (num_samples,))
    if pads:
        add(MASK, _BOOL, (num_samples,))
    for column, spec in enumerate(stored):
        ends = sizes[:, column].cumsum() if spec.ragged else np.arange(1, num_samples + 1) * spec.element_bytes
        num_elements = int(ends[-1]) // spec.element_bytes if spec.ragged else num_samples
        base = add(spec.name, spec.dtype, (num_elements, *spec.shape))
        if spec.ragged:
            add(spec.name + OFFSETS_SUFFIX, _INT64, (num_samples + 1,))
        ends += base
        places[:, column, 1] = ends
        places[0, column, 0] = base
        places[1:, column, 0] = ends[:-1]
    for spec in known_fields(fields):
        add(spec.name, spec.dtype, (num_samples, *spec.shape))
    align()
    return BatchLayout(tuple(tensors), places, tuple(gaps), end)


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
