"""A batch's payload in memory of its own, and the tensors in it."""

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from gyre_protos.v1 import loader_pb2 as pb

from gyre_client.errors import DaemonFault

_DTYPES = {
    "bool": torch.bool,
    "uint8": torch.uint8,
    "uint16": torch.uint16,
    "uint32": torch.uint32,
    "uint64": torch.uint64,
    "int8": torch.int8,
    "int16": torch.int16,
    "int32": torch.int32,
    "int64": torch.int64,
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
    "float32": torch.float32,
    "float64": torch.float64,
    "complex64": torch.complex64,
    "complex128": torch.complex128,
}


@dataclass(frozen=True)
class Batch:
    """One rank's part of one global step.

    Attributes:
        step: The global step.
        cursor: Resumes after this batch.
        tensors: By name; views of one buffer that belongs to this batch alone.
    """

    step: int
    cursor: bytes
    tensors: dict[str, torch.Tensor]


class PayloadBuffer:
    """Fresh memory for one batch's payload; written front to back."""

    def __init__(self, num_bytes: int) -> None:
        self._tensor = torch.empty(num_bytes, dtype=torch.uint8)  # torch aligns to 64 bytes, as the offsets are
        self._bytes: npt.NDArray[np.uint8] = self._tensor.numpy()
        self._num_filled = 0

    @property
    def num_missing(self) -> int:
        """The bytes still to come."""
        return len(self._bytes) - self._num_filled

    def append(self, data: memoryview) -> None:
        """Copies the next `data`; numpy copies without the interpreter's lock.

        Raises:
            DaemonFault: There is more than was announced.
        """
        if len(data) > self.num_missing:
            raise DaemonFault(f"a payload chunk of {len(data)} bytes came where {self.num_missing} end the batch")
        end = self._num_filled + len(data)
        self._bytes[self._num_filled : end] = np.frombuffer(data, np.uint8)
        self._num_filled = end

    def tensors(self, layout: Iterable[pb.Tensor]) -> dict[str, torch.Tensor]:
        """Returns the tensors that `layout` places in this buffer, in its order; writable views.

        Raises:
            DaemonFault: A tensor lies outside the payload, or torch knows no such dtype.
        """
        return {place.name: self._view(place) for place in layout}

    def _view(self, place: pb.Tensor) -> torch.Tensor:
        dtype = _DTYPES.get(place.dtype)
        if dtype is None:
            raise DaemonFault(f"the tensor {place.name!r} has dtype {place.dtype!r}, which torch does not know")
        num_bytes = dtype.itemsize
        for size in place.shape:
            num_bytes *= size
        end = place.offset_bytes + num_bytes
        if end > len(self._bytes) or place.offset_bytes % dtype.itemsize:
            raise DaemonFault(
                f"the tensor {place.name!r}, {num_bytes} bytes at {place.offset_bytes}, "
                f"does not fit its payload of {len(self._bytes)}"
            )
        return self._tensor[place.offset_bytes : end].view(dtype).reshape(tuple(place.shape))
