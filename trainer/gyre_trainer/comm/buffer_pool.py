"""Transient buffers that slices and their gradients travel in, and the room behind them.

[Note: The number behind a buffer]

Eight bytes follow every tensor that travels: the identity of its hop. So a number comes in one
message with the values that it belongs to. Memory of this file has room for it behind its last
element. Behind a part of larger memory there may be values: `framed` says which tensors have room.
Others travel as a copy.
"""

from collections.abc import Callable
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, UntypedStorage

from gyre_trainer.errors import RotationError

Allocate = Callable[[int, torch.dtype, torch.device], Tensor]
"""Makes a flat tensor: the number of its elements, its dtype, its device."""

CurrentStream = Callable[[torch.device], object]
"""The stream that a device computes on for the caller; None where it has none."""

_NUMBER_BYTES = 8
_ROOM_BYTES = 2 * _NUMBER_BYTES  # the number, where eight divide its address

# By storage: the first byte behind which a hop may write its number.
_ROOMS: WeakKeyDictionary[UntypedStorage, int] = WeakKeyDictionary()


def with_room(
    numel: int, dtype: torch.dtype, device: torch.device, *, is_scratch: bool = False
) -> Tensor:
    """A flat tensor, uninitialised, that travels without a copy.

    Args:
        numel: the number of its elements.
        dtype: of the tensor.
        device: of the tensor.
        is_scratch: whether a hop may also write behind a part of it, over other elements.
    """
    memory = torch.empty(numel + _ROOM_BYTES // dtype.itemsize, dtype=dtype, device=device)
    _ROOMS[memory.untyped_storage()] = 0 if is_scratch else numel * dtype.itemsize
    return memory[:numel]


def copy_with_room(flat: Tensor) -> Tensor:
    """A copy that travels without another copy."""
    return with_room(flat.numel(), flat.dtype, flat.device).copy_(flat)


def framed(flat: Tensor) -> Tensor | None:
    """A view of a flat tensor and of the number behind it; None where there is no room.

    The number is in the last eight bytes. Between it and the tensor are up to seven more.
    """
    first = _ROOMS.get(flat.untyped_storage())
    itemsize = flat.element_size()
    start = flat.storage_offset() * itemsize
    end = start + flat.numel() * itemsize
    if first is None or end < first:
        return None
    stop = -(-end // _NUMBER_BYTES) * _NUMBER_BYTES + _NUMBER_BYTES
    return flat.as_strided(((stop - start) // itemsize,), (1,))


def number_in(frame: Tensor) -> Tensor:
    """The number at the end of a frame: a view of one int64."""
    return frame[-(_NUMBER_BYTES // frame.element_size()) :].view(torch.int64)[0]


def current_stream(device: torch.device) -> object:
    """The stream of CUDA on which the caller's kernels run; None for a CPU."""
    return torch.cuda.current_stream(device) if device.type == "cuda" else None


class BufferPool:
    """Transient buffers of one ring, all as large as the largest that was asked for.

    Nothing is allocated once that size is known. Queued kernels may still use a buffer that was
    given back, so all buffers of a device are used on one stream.

    Attributes:
        largest_whole_numel: elements of the largest slice that cannot be divided. Larger slices
            that can be divided travel in pieces of about this size, so that they do not enlarge
            every buffer.
    """

    def __init__(
        self,
        allocate: Allocate | None = None,
        stream_of: CurrentStream = current_stream,
    ) -> None:
        """Make an empty pool.

        Args:
            allocate: makes the buffers; None for memory of torch with room behind them.
            stream_of: the present stream of a device.
        """
        self.largest_whole_numel = 0
        self._allocate = allocate or _scratch
        self._stream_of = stream_of
        self._streams: dict[torch.device, object] = {}
        self._free: dict[tuple[torch.dtype, torch.device], list[Tensor]] = {}
        self._numel: dict[tuple[torch.dtype, torch.device], int] = {}

    def take(self, numel: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        """A flat buffer of at least ``numel`` elements, which belongs to the caller until `put`.

        Raises:
            RotationError: other buffers of this device were used on another stream.
        """
        self._require_stream(device)
        key = (dtype, device)
        if numel > self._numel.get(key, -1):
            self._numel[key], self._free[key] = max(numel, self.largest_whole_numel), []
        if self._free[key]:
            return self._free[key].pop()
        # an inference tensor could not carry gradients later
        with torch.inference_mode(mode=False):
            return self._allocate(self._numel[key], dtype, device)

    def put(self, buffer: Tensor) -> None:
        """Give back a buffer of `take`. One that is smaller than buffers are now is dropped.

        Raises:
            RotationError: it was used on another stream.
        """
        self._require_stream(buffer.device)
        key = (buffer.dtype, buffer.device)
        if buffer.numel() == self._numel[key]:
            self._free[key].append(buffer)

    def _require_stream(self, device: torch.device) -> None:
        stream = self._stream_of(device)
        if self._streams.setdefault(device, stream) != stream:
            raise RotationError(
                f"{device}: rotated modules were called on one CUDA stream and now on another, "
                "but they share buffers. Call them, and backward, on one stream."
            )


def _scratch(numel: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    return with_room(numel, dtype, device, is_scratch=True)
