"""A batch: tensors over one piece of memory, its own or a slot of the session's arena."""

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import torch
from gyre_protos.v1 import loader_pb2 as pb

from gyre_client.errors import DaemonFault
from gyre_client.tokens import Widened, widen


@dataclass(slots=True)  # one is made for each batch, and a frozen one takes three times as long
class Batch:
    """One rank's part of one global step.

    Attributes:
        step: The global step.
        cursor: Resumes after this batch.
        memory: uint8 [num_bytes], one piece that nobody else writes to.
        layout: What is in it.
    """

    step: int
    cursor: bytes
    memory: npt.NDArray[np.uint8]
    layout: "Layout"

    @property
    def tensors(self) -> dict[str, torch.Tensor]:
        """By name; views of the memory, which lives as long as one of them. Where one is widened, all are copies instead.

        Raises:
            DaemonFault: One does not fit.
        """
        layout = self.layout
        tensors = {place.name: place.view(self.memory) for place in layout.places}
        return widen(tensors, layout.widened) if layout.widened else tensors

    def copied(self) -> "Batch":
        """Returns the same batch in memory of its own."""
        copy = PayloadBuffer(len(self.memory))
        copy.append(self.memory.data)
        return Batch(self.step, self.cursor, copy.memory, self.layout)


@dataclass(frozen=True, slots=True)
class Cursors:
    """The cursors of successive batches, as they travel.

    Attributes:
        common: What all have, behind their first `num_before` bytes.
        num_before: See there.
        own: What each has beside it.
    """

    common: bytes
    num_before: int
    own: Sequence[bytes]

    def at(self, row: int) -> bytes:
        """Returns the cursor that resumes after a batch."""
        own = self.own[row]
        return own[: self.num_before] + self.common + own[self.num_before :]


class Strip:
    """Successive batches in one piece of memory, which lives as long as a batch that is left, or a tensor in it."""

    def __init__(
        self,
        first_step: int,
        cursors: Cursors,
        layouts: "Sequence[Layout]",
        memory: npt.NDArray[np.uint8],
        offsets: Sequence[int] = (0,),
    ) -> None:
        """None of them is taken yet.

        Args:
            first_step: Of the first.
            cursors: One each.
            layouts: One each.
            memory: uint8, where all of them lie.
            offsets: Where each begins there.

        Raises:
            ValueError: They are not as many as the layouts.
        """
        if len(offsets) != len(layouts):
            raise ValueError(f"{len(layouts)} batches at {len(offsets)} places")
        self.first_step = first_step
        self._cursors = cursors
        self._layouts = layouts
        self._memory: npt.NDArray[np.uint8] | None = memory
        self._offsets = offsets
        self._num_taken = 0

    def __len__(self) -> int:
        """How many of them there are."""
        return len(self._offsets)

    @property
    def is_taken(self) -> bool:
        """None of them is left."""
        return self._num_taken == len(self._offsets)

    @property
    def last_cursor(self) -> bytes:
        """Resumes after all of them."""
        return self._cursors.at(len(self) - 1)

    def let_go(self) -> None:
        """None of those that are left will be taken."""
        self._memory = None

    def take(self) -> Batch:
        """Returns the next batch that is left."""
        row = self._num_taken
        self._num_taken = row + 1
        layout, offset = self._layouts[row], self._offsets[row]
        assert self._memory is not None
        memory = self._memory[offset : offset + layout.num_bytes]
        if self.is_taken:
            self.let_go()
        return Batch(self.first_step + row, self._cursors.at(row), memory, layout)


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

    def view_on_device(self, payload: torch.Tensor) -> torch.Tensor:
        """Returns the tensor there of a payload, uint8 [num_bytes], that has been copied to any device; see `view`.

        Raises:
            DaemonFault: It does not fit.
        """
        dtype = torch.from_numpy(np.empty(0, self.dtype)).dtype
        end_bytes = self.offset_bytes + math.prod(self.shape) * self.dtype.itemsize
        if end_bytes > len(payload):
            raise DaemonFault(
                f"the tensor {self.name!r}, {self.dtype} {list(self.shape)} at {self.offset_bytes}, does not fit its payload "
                f"of {len(payload)} bytes"
            )
        return payload[self.offset_bytes : end_bytes].view(dtype).view(self.shape)


@dataclass(frozen=True, slots=True)
class Layout:
    """What a batch's payload is made of.

    Attributes:
        places: Of its tensors.
        num_bytes: Of all of it.
        widened: What its tensors become when they are taken out, by name, where they do not stay as they are.
    """

    places: "Sequence[TensorPlace]"
    num_bytes: int
    widened: Widened = field(default_factory=dict)


def read_layouts(strip: pb.Strip, widened: Widened) -> list[Layout]:
    """Returns the layouts of a strip's batches, one each.

    Args:
        strip: As it came.
        widened: See `Layout`.

    Raises:
        DaemonFault: A tensor has no dtype that torch knows, or is not aligned; or they are not as many as the batches.
    """
    layouts = [Layout([_place(tensor) for tensor in each.tensors], each.num_bytes, widened) for each in strip.layouts]
    num_batches = len(strip.cursors.own)
    if len(layouts) == 1:
        return layouts * num_batches
    if len(layouts) != num_batches:
        raise DaemonFault(f"the {num_batches} batches from step {strip.first_step} on come with {len(layouts)} layouts")
    return layouts


def read_cursors(cursors: pb.Cursors) -> Cursors:
    """Returns a strip's cursors."""
    return Cursors(cursors.common, cursors.num_before, list(cursors.own))


def _place(tensor: pb.Tensor) -> TensorPlace:
    try:
        dtype = _dtype(tensor.dtype)
    except TypeError:
        raise DaemonFault(f"the tensor {tensor.name!r} has dtype {tensor.dtype!r}, which torch does not know") from None
    if tensor.offset_bytes % dtype.itemsize:
        raise DaemonFault(f"the tensor {tensor.name!r} lies at {tensor.offset_bytes}, no place for {tensor.dtype}")
    return TensorPlace(tensor.name, dtype, tuple(tensor.shape), tensor.offset_bytes)


@functools.lru_cache
def _dtype(name: str) -> np.dtype[np.generic]:
    """Raises a TypeError where torch has no such dtype."""
    dtype = np.dtype(name)
    torch.from_numpy(np.empty(0, dtype))
    return dtype
