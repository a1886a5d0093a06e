"""A batch: tensors over one piece of memory, its own or a slot of the session's arena."""

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from gyre_protos.v1 import loader_pb2 as pb

from gyre_client.errors import DaemonFault


@dataclass(frozen=True, slots=True)
class Batch:
    """One rank's part of one global step.

    Attributes:
        step: The global step.
        cursor: Resumes after this batch.
        tensors: By name; views of one piece of memory that nobody else writes to.
    """

    step: int
    cursor: bytes
    tensors: dict[str, torch.Tensor]

    def copied(self) -> "Batch":
        """Returns the same batch in memory of its own."""
        return Batch(self.step, self.cursor, {name: tensor.clone() for name, tensor in self.tensors.items()})


class PayloadBuffer:
    """Fresh memory for one batch's payload; written front to back.

    Attributes:
        memory: uint8 [num_bytes].
    """

    def __init__(self, num_bytes: int) -> None:
        self.memory: npt.NDArray[np.uint8] = torch.empty(num_bytes, dtype=torch.uint8).numpy()  # torch aligns to 64 bytes
        self._num_filled = 0

    @property
    def num_missing(self) -> int:
        """The bytes still to come."""
        return len(self.memory) - self._num_filled

    def append(self, data: memoryview) -> None:
        """Copies the next `data`; numpy copies without the interpreter's lock.

        Raises:
            DaemonFault: There is more than was announced.
        """
        if len(data) > self.num_missing:
            raise DaemonFault(f"a payload chunk of {len(data)} bytes came where {self.num_missing} end the batch")
        end = self._num_filled + len(data)
        self.memory[self._num_filled : end] = np.frombuffer(data, np.uint8)
        self._num_filled = end


@dataclass(frozen=True, slots=True)
class TensorPlace:
    """Where a tensor lies in a batch's memory."""

    name: str
    dtype: np.dtype[np.generic]
    shape: tuple[int, ...]
    offset_bytes: int

    def view(self, memory: npt.NDArray[np.uint8]) -> torch.Tensor:
        """Returns the tensor there, writable if the memory is.

        Raises:
            DaemonFault: It does not fit.
        """
        try:
            return torch.from_numpy(np.ndarray(self.shape, self.dtype, memory, self.offset_bytes))
        except (TypeError, ValueError) as error:
            raise DaemonFault(
                f"the tensor {self.name!r}, {self.dtype} {list(self.shape)} at {self.offset_bytes}, does not fit its payload "
                f"of {len(memory)} bytes: {error}"
            ) from None


def read_layout(tensors: Iterable[pb.Tensor]) -> list[TensorPlace]:
    """Returns the places of a batch's tensors.

    Raises:
        DaemonFault: A tensor has no dtype that torch knows, or is not aligned.
    """
    return [_place(tensor) for tensor in tensors]


def _place(tensor: pb.Tensor) -> TensorPlace:
    try:
        dtype = np.dtype(tensor.dtype)
        torch.from_numpy(np.empty(0, dtype))
    except TypeError:
        raise DaemonFault(f"the tensor {tensor.name!r} has dtype {tensor.dtype!r}, which torch does not know") from None
    if tensor.offset_bytes % dtype.itemsize:
        raise DaemonFault(f"the tensor {tensor.name!r} lies at {tensor.offset_bytes}, no place for {tensor.dtype}")
    return TensorPlace(tensor.name, dtype, tuple(tensor.shape), tensor.offset_bytes)
