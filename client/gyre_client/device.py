"""Batches on a device: the next one is copied while its user computes with this one.

A thread takes batches from the stream, begins the copy of each and hands it on at once; whoever computes with it is made to
wait on the device, not here. At most `NUM_AHEAD` batches are on the device beyond those that the user holds. A batch's memory
on the host, its slot of the arena, is released as soon as the copy has read it; its memory on the device is its own, and stays
as long as one of its tensors does.
"""

import contextlib
import queue
import threading
import time
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch
from gyre_protos.v1 import loader_pb2 as pb

from gyre_client.batch import Layout
from gyre_client.errors import GyreError, InvalidRequest
from gyre_client.stream import JOIN_TIMEOUT_S, BatchStream
from gyre_client.tokens import widen

NUM_AHEAD = 2

Memory = npt.NDArray[np.uint8]


class Copy(Protocol):
    """One payload on its way to the device."""

    def wait_until_read(self) -> None:
        """Returns when the memory that it is copied from is no longer needed."""

    def result(self) -> torch.Tensor:
        """Returns the payload on the device, uint8 [num_bytes]; what the caller computes with it from now on finds it whole."""


class Copier(Protocol):
    """Copies payloads to a device, in the order in which they are begun; called from one thread."""

    def begin(self, memory: Memory) -> Copy:
        """Begins the copy of a payload, uint8 [num_bytes]."""


@dataclass(frozen=True, slots=True)
class DeviceBatch:
    """One rank's part of one global step, on its way to the device; see `batch.Batch`."""

    step: int
    cursor: bytes
    layout: Layout
    copy: Copy

    @property
    def tensors(self) -> dict[str, torch.Tensor]:
        """By name; views of the batch's own memory on the device, or copies, where one is widened there.

        To be asked for where they will be used.
        """
        payload, layout = self.copy.result(), self.layout
        tensors = {place.name: place.view_on_device(payload) for place in layout.places}
        return widen(tensors, layout.widened) if layout.widened else tensors


class DeviceStream:
    """A stream of batches whose tensors are on a device; otherwise a BatchStream, which it owns."""

    def __init__(self, stream: BatchStream, copier: Copier) -> None:
        """Begins to copy."""
        self._stream = stream
        self._copier = copier
        self._copied: queue.SimpleQueue[DeviceBatch | Exception | None] = queue.SimpleQueue()
        self._room = threading.Semaphore(NUM_AHEAD)
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="gyre-copier", daemon=True)
        self._thread.start()

    @property
    def opened(self) -> pb.SessionOpened:
        """What the daemon granted when the stream began."""
        return self._stream.opened

    def take(self) -> DeviceBatch | None:
        """Returns the next batch, None after the last; waits for it until its copy has begun.

        Raises:
            GyreError: Why there is no next batch; again on every further call.
        """
        try:
            item = self._copied.get_nowait()
        except queue.Empty:
            began_s = time.monotonic()
            item = self._copied.get()
            self._stream.note_wait(time.monotonic() - began_s)
        if isinstance(item, DeviceBatch):
            self._room.release()
            return item
        self._copied.put(item)  # the end stays the end
        if item is None:
            return None
        raise item

    def close(self) -> None:
        """Ends the stream and the copying. Batches taken stay valid."""
        self._closing.set()
        self._room.release()
        self._stream.close()
        if threading.current_thread() is not self._thread:
            self._thread.join(JOIN_TIMEOUT_S)
        with contextlib.suppress(queue.Empty):
            while True:  # what nobody took lets go of its memory
                self._copied.get_nowait()
        self._copied.put(InvalidRequest("this stream was closed while it was being read"))

    def _run(self) -> None:
        end: Exception | None = None
        try:
            while self._copy_next():
                pass
        except GyreError as failure:
            end = failure
        except Exception as failure:  # the device is out of memory, or broken: whoever takes the next batch learns it
            end = failure
        if end is not None and self._closing.is_set():
            end.__traceback__ = None  # its frames would keep batches until a garbage collection
        self._copied.put(end)

    def _copy_next(self) -> bool:
        """Whether there was a batch to copy."""
        self._room.acquire()
        if self._closing.is_set():
            return False
        batch = self._stream.take(is_ahead=True)
        if batch is None:
            return False
        copy = self._copier.begin(batch.memory)
        self._copied.put(DeviceBatch(batch.step, batch.cursor, batch.layout, copy))
        copy.wait_until_read()
        return True  # and this frame lets go of the batch


class CudaCopier:
    """Copies through pinned memory on a stream of its own.

    There are `NUM_AHEAD` pieces of pinned memory, used in turn, as large as the largest payload that each has seen: while the
    device reads one, the next payload is copied into the other. So a payload's own memory is free after one copy within the
    host, however busy the device is. (Copying straight out of the arena would need its pages pinned. The arena's mapping is
    private, and pinning pages for writing gives a private mapping copies of its own, which the daemon never fills again.)
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._pieces = [_Pinned() for _ in range(NUM_AHEAD)]
        self._next = 0

    def begin(self, memory: Memory) -> Copy:
        """See `Copier`."""
        piece = self._pieces[self._next]
        self._next = (self._next + 1) % NUM_AHEAD
        pinned = piece.fill(memory)
        with torch.cuda.device(self._device), torch.cuda.stream(self._stream):
            payload = torch.empty(len(memory), dtype=torch.uint8, device=self._device)
            payload.copy_(pinned, non_blocking=True)
            piece.done.record(self._stream)
            whole = _event()
            whole.record(self._stream)
        return _CudaCopy(payload, whole)


class _Pinned:
    """One piece of pinned memory.

    Attributes:
        done: The device has read what was last filled in.
    """

    def __init__(self) -> None:
        self._memory = torch.empty(0, dtype=torch.uint8)
        self.done = _event()

    def fill(self, memory: Memory) -> torch.Tensor:
        """Returns a copy of `memory`, pinned; waits until the device has read the one before."""
        self.done.synchronize()  # returns at once where nothing was recorded yet
        if len(memory) > len(self._memory):
            self._memory = torch.empty(len(memory), dtype=torch.uint8, pin_memory=True)
        return self._memory[: len(memory)].copy_(torch.from_numpy(memory))


class _CudaCopy:
    def __init__(self, payload: torch.Tensor, whole: torch.cuda.Event) -> None:
        self._payload = payload
        self._whole = whole

    def wait_until_read(self) -> None:
        """It was read when it was copied to pinned memory."""

    def result(self) -> torch.Tensor:
        """See `Copy`: the stream that is current here waits, the host does not."""
        stream = torch.cuda.current_stream(self._payload.device)
        stream.wait_event(self._whole)
        self._payload.record_stream(stream)  # freed, it is used again only after what this stream does with it
        return self._payload


def _event() -> torch.cuda.Event:
    return torch.cuda.Event()  # type: ignore[no-untyped-call]


def parse_device(device: str | torch.device | None) -> torch.device | None:
    """Returns the device to copy batches to; None to leave them where the daemon put them.

    Raises:
        InvalidRequest: It is neither the CPU nor a CUDA device of this machine.
    """
    if device is None:
        return None
    try:
        wanted = torch.device(device)
    except (RuntimeError, TypeError) as error:
        raise InvalidRequest(f"device is {device!r}, which torch does not know: {error}") from None
    if wanted.type == "cpu":
        return None
    if wanted.type != "cuda":
        raise InvalidRequest(f"device is {device!r}; batches can be had on the CPU and on CUDA devices")
    num_devices = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if (wanted.index or 0) >= num_devices:
        build = "" if torch.version.cuda else f"; this build of torch, {torch.__version__}, has no CUDA"
        raise InvalidRequest(f"device is {device!r}, but torch sees {num_devices} CUDA devices here{build}")
    return torch.device("cuda", torch.cuda.current_device() if wanted.index is None else wanted.index)
