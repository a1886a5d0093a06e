"""The memory of a batch: which tensors it has, where each lies, and where in them each sample goes. Pure arithmetic.

A batch buffer holds, each at a multiple of 64 bytes: `sample_id`, `mask` where the tail pads, and every field of the dataset. A
ragged field is two tensors: the samples' elements back to back, and `NAME.offsets`, int64 [B + 1], where each begins.
"""

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from gyre_daemon.formats import MASK, OFFSETS_SUFFIX, SAMPLE_ID, FieldSpec, SampleIndex
from gyre_daemon.plan import BatchPlan

ALIGNMENT_BYTES = 64


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
        places: int64 [B, F, 2], first and end byte of each sample's part in each field.
        gaps: byte ranges between the tensors.
        num_bytes: of the buffer.
    """

    tensors: tuple[TensorSpec, ...]
    places: npt.NDArray[np.int64]
    gaps: tuple[tuple[int, int], ...]
    num_bytes: int


class LayoutMaker:
    """Lays out the batches of one dataset; where no field is ragged, batches of one size share one layout."""

    def __init__(self, fields: Sequence[FieldSpec]) -> None:
        self._fields = fields
        self._fixed = not any(spec.ragged for spec in fields)
        self._made: dict[tuple[int, bool], BatchLayout] = {}

    def make(self, plan: BatchPlan, sizes: npt.NDArray[np.int64]) -> BatchLayout:
        """Lay out a batch before its samples are there.

        Args:
            plan: the samples.
            sizes: int64 [B, F], stored bytes of each field, which are a ragged field's length.
        """
        if not self._fixed:
            return _make_layout(plan, self._fields, sizes)
        key = len(plan.sample_ids), plan.mask is not None
        if key not in self._made:
            self._made[key] = _make_layout(plan, self._fields, sizes)
        return self._made[key]


def max_batch_bytes(index: SampleIndex, num_samples: int) -> int:
    """An upper bound of the buffer of any batch of so many samples."""
    fixed = sum(num_samples * _sample_bytes(spec) for spec in index.fields if not spec.ragged)
    offsets = sum((num_samples + 1) * 8 for spec in index.fields if spec.ragged)
    num_tensors = 3 + 2 * len(index.fields)
    return fixed + offsets + index.max_ragged_bytes(num_samples) + 9 * num_samples + num_tensors * ALIGNMENT_BYTES


def write_own_tensors(plan: BatchPlan, layout: BatchLayout, payload: memoryview) -> None:
    """Fill in what the plan alone decides: sample ids, mask, and the offsets of ragged fields.

    The gaps between tensors are zeroed: a payload is the same bytes on every run.
    """
    for begin, end in layout.gaps:
        payload[begin:end] = bytes(end - begin)
    column = -1
    for spec in layout.tensors:
        if spec.name == SAMPLE_ID:
            _view(payload, spec)[:] = plan.sample_ids
        elif spec.name == MASK and plan.mask is not None:
            _view(payload, spec)[:] = plan.mask
        elif spec.name.endswith(OFFSETS_SUFFIX):
            offsets = _view(payload, spec)
            offsets[0] = 0
            offsets[1:] = layout.places[:, column, 1] - layout.places[0, column, 0]
        else:
            column += 1


def _view(payload: memoryview, spec: TensorSpec) -> npt.NDArray[Any]:
    return np.frombuffer(payload, spec.dtype, spec.shape[0], spec.offset_bytes)


def _make_layout(plan: BatchPlan, fields: Sequence[FieldSpec], sizes: npt.NDArray[np.int64]) -> BatchLayout:
    num_samples = len(plan.sample_ids)
    tensors: list[TensorSpec] = []
    places = np.empty((num_samples, len(fields), 2), np.int64)

    def add(name: str, dtype: np.dtype[np.generic], shape: tuple[int, ...]) -> int:
        offset = _aligned(tensors[-1].offset_bytes + tensors[-1].num_bytes) if tensors else 0
        tensors.append(TensorSpec(name, dtype, shape, offset))
        return offset

    add(SAMPLE_ID, np.dtype("<i8"), (num_samples,))
    if plan.mask is not None:
        add(MASK, np.dtype(np.bool_), (num_samples,))
    for column, spec in enumerate(fields):
        ends = np.cumsum(sizes[:, column]) if spec.ragged else np.arange(1, num_samples + 1) * _sample_bytes(spec)
        length = int(ends[-1])
        base = add(spec.name, spec.dtype, (length,) if spec.ragged else (num_samples, *spec.shape))
        if spec.ragged:
            add(spec.name + OFFSETS_SUFFIX, np.dtype("<i8"), (num_samples + 1,))
        places[:, column, 1] = base + ends
        places[:, column, 0] = np.concatenate(([base], places[:-1, column, 1]))
    num_bytes = _aligned(tensors[-1].offset_bytes + tensors[-1].num_bytes)
    edges = [(spec.offset_bytes, spec.offset_bytes + spec.num_bytes) for spec in tensors] + [(num_bytes, num_bytes)]
    gaps = tuple((before[1], after[0]) for before, after in itertools.pairwise(edges) if before[1] < after[0])
    return BatchLayout(tuple(tensors), places, gaps, num_bytes)


def _sample_bytes(spec: FieldSpec) -> int:
    return math.prod(spec.shape) * spec.dtype.itemsize


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
