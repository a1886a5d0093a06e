"""The memory of a batch: which tensors it has, where each lies, and where in them each sample goes. Pure arithmetic.

A batch buffer holds, each at a multiple of 64 bytes: `sample_id`, `mask` where the tail pads, and every field of the dataset. A
ragged field is two tensors: the samples' elements back to back, and `NAME.offsets`, int64 [B + 1], where each begins.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from gyre_daemon.formats import FieldSpec, SampleIndex
from gyre_daemon.plan import BatchPlan

ALIGNMENT_BYTES = 64
SAMPLE_ID = "sample_id"
MASK = "mask"
OFFSETS_SUFFIX = ".offsets"


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
        return int(np.prod(self.shape, dtype=np.int64)) * self.dtype.itemsize


@dataclass(frozen=True, slots=True)
class BatchLayout:
    """Where everything lies in one batch's buffer.

    Attributes:
        tensors: in the order of their offsets.
        places: int64 [B, F, 2], first and end byte of each sample's part in each field.
        num_bytes: of the buffer.
    """

    tensors: tuple[TensorSpec, ...]
    places: npt.NDArray[np.int64]
    num_bytes: int


@dataclass(frozen=True, slots=True)
class Batch:
    """One step's batch, whole and never changed again.

    Attributes:
        plan: which samples it has.
        layout: where they lie.
        payload: the buffer, `layout.num_bytes` long.
    """

    plan: BatchPlan
    layout: BatchLayout
    payload: memoryview


def make_layout(plan: BatchPlan, fields: Sequence[FieldSpec], sizes: npt.NDArray[np.int64]) -> BatchLayout:
    """Lay out a batch before its samples are there.

    Args:
        plan: the samples.
        fields: the dataset's.
        sizes: int64 [B, F], stored bytes of each field, which are a ragged field's length.
    """
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
    return BatchLayout(tuple(tensors), places, _aligned(tensors[-1].offset_bytes + tensors[-1].num_bytes))


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
    end = 0
    for spec in layout.tensors:
        payload[end : spec.offset_bytes] = bytes(spec.offset_bytes - end)
        end = spec.offset_bytes + spec.num_bytes
    payload[end : layout.num_bytes] = bytes(layout.num_bytes - end)
    column = -1
    for spec in layout.tensors:
        array = np.frombuffer(payload, spec.dtype, count=int(np.prod(spec.shape)), offset=spec.offset_bytes)
        if spec.name == SAMPLE_ID:
            array[:] = plan.sample_ids
        elif spec.name == MASK and plan.mask is not None:
            array[:] = plan.mask
        elif spec.name.endswith(OFFSETS_SUFFIX):
            array[0] = 0
            array[1:] = layout.places[:, column, 1] - layout.places[0, column, 0]
        else:
            column += 1


def _sample_bytes(spec: FieldSpec) -> int:
    return int(np.prod(spec.shape, dtype=np.int64)) * spec.dtype.itemsize


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
