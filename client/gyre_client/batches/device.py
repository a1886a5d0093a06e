"""Batches on a CUDA device: the next one is transferred while the trainer computes with this one.

A thread takes batches from the stream, begins the transfer of each and hands it on at once. The
device, not the host, waits for a transfer that has not finished when its batch is used. At most
`NUM_AHEAD` batches are on the device beyond those that the user holds. A batch's memory on the host
(its slot of the arena) is released as soon as it was copied to pinned memory; its memory on the
device is its own and lives as long as one of its tensors.
"""

import contextlib
import threading
import time
from collections import deque
from dataclasses import dataclass
from typing import Protocol

import torch
from gyre_protos.v1 import loader_pb2 as pb

from gyre_client.batches.arena import Memory
from gyre_client.batches.attachment import LONG_WAIT_S, Wakeup
from gyre_client.batches.batch import Layout, Position, widen
from gyre_client.batches.stream import CLOSED, JOIN_TIMEOUT_S, BatchStream
from gyre_client.errors import InvalidRequest
from gyre_client.transport.arguments import shown

# Two transfers overlap with each other and with the computation: one fills pinned memory while the
# device reads the other. More only cost pinned and device memory.
NUM_AHEAD = 2


class Transfer(Protocol):
    """One payload on its way to the device."""

    def result(self) -> torch.Tensor:
        """Returns the payload on the device, uint8 [num_bytes].

        Work that the caller enqueues from now on runs after the transfer.
        """


class DeviceTransfer(Protocol):
    """Transfers payloads to a device, in the order in which they are begun, from one thread."""

    def begin(self, memory: Memory) -> Transfer:
        """Begins to transfer a payload, uint8 [num_bytes], which may be reused on return."""


@dataclass(frozen=True, slots=True)
class DeviceBatch:
    """One rank's part of one global step, on its way to the device; see `batch.Batch`."""

    step: int
    cursor: bytes
    layout: Layout
    transfer: Transfer

    @property
    def tensors(self) -> dict[str, torch.Tensor]:
        """The tensors by name, in the batch's own memory on the device.

        They must be asked for in the thread, and with the CUDA stream, that will use them.
        """
        payload, layout = self.transfer.result(), self.layout
        tensors = {place.name: place.view_on_device(payload) for place in layout.places}
        return widen(tensors, layout.widened) if layout.widened else tensors


class DeviceStream:
    """A BatchStream, which it owns, whose batches are transferred to a device.

    Attributes:
        source: The stream.
        position: Where the consumer stands; see `BatchStream`.
    """

    def __init__(self, stream: BatchStream, device: DeviceTransfer) -> None:
        """Begins to transfer; the stream is open."""
        self.source = stream
        self._device = device
        self.position = stream.position
        self._ready: deque[DeviceBatch | Exception | None] = deque()
        self._is_ready = Wakeup()
        self._num_dequeued = stream.position.batch  # as in `BatchStream`
        self._has_room = Wakeup()
        self._is_closing = self._has_ended = False
        self._ended = Wakeup()
        self._thread = threading.Thread(target=self._run, name="gyre-transfer", daemon=True)
        self._thread.start()

    @property
    def opened(self) -> pb.SessionOpened:
        """The daemon's grants when the stream began."""
        return self.source.opened

    def take(self) -> DeviceBatch | None:
        """Returns the next batch, None after the last, and goes on behind it; see `peek`."""
        found = self.peek()
        if found is None:
            return None
        batch, self.position = found
        return batch

    def peek(self) -> tuple[DeviceBatch, Position] | None:
        """Returns the next batch, as soon as its transfer has begun, and the position behind it.

        The batch is taken as soon as `position` is replaced by that one.

        Returns:
            Both; None after the last batch.

        Raises:
            GyreError: Why there is no next batch; again on every further call.
        """
        batch = self.position.rest or self._dequeue()
        if batch is None:
            return None
        return batch, Position(batch.cursor, batch.step + 1)

    def _dequeue(self) -> DeviceBatch | None:
        position, ready = self.position, self._ready
        while True:
            try:
                item = ready[0]
            except IndexError:
                began_s = time.monotonic()
                self._is_ready.wait(LONG_WAIT_S)
                self.source.note_wait(time.monotonic() - began_s)
                continue
            if not isinstance(item, DeviceBatch):
                if item is None:
                    return None
                raise item.with_traceback(None)
            if item.step >= position.batch:
                break
            self._drop_first()  # taken before, when an interrupt came between the next two lines
        self.position = Position(position.cursor, position.batch, item)
        self._drop_first()
        self._num_dequeued = item.step + 1
        self._has_room.wake()
        return item

    def _drop_first(self) -> None:
        with contextlib.suppress(IndexError):  # `close` in another thread has emptied the queue
            self._ready.popleft()

    def close(self) -> None:
        """Ends the stream and the transfers. Batches that were taken stay valid."""
        self._is_closing = True
        self.position = Position(self.position.cursor, self.position.batch)
        self._has_room.wake()
        self.source.close()
        deadline_s = time.monotonic() + JOIN_TIMEOUT_S
        if self._thread.ident is not None and threading.current_thread() is not self._thread:
            while not self._has_ended and (left_s := deadline_s - time.monotonic()) > 0:
                self._ended.wait(left_s)
        self._ready.clear()  # batches that were not taken give their memory back
        self._ready.append(InvalidRequest(CLOSED))

    def _run(self) -> None:
        end: Exception | None = None
        try:
            while self._transfer_next():
                pass
        # A GyreError, or the device is out of memory or broken: the next `take` raises it.
        except Exception as failure:
            end = failure
        if end is not None and self._is_closing:
            end.__traceback__ = None  # its frames would keep batches until a garbage collection
        self._has_ended = True
        self._ready.append(end)
        self._is_ready.wake()
        self._ended.wake()

    def _transfer_next(self) -> bool:
        """Begins the next batch's transfer; returns False after the last batch."""
        batch_number = self.source.position.batch
        while batch_number >= max(self._num_dequeued, self.position.batch) + NUM_AHEAD:
            if self._is_closing:
                return False
            self._has_room.wait(LONG_WAIT_S)
        if self._is_closing:
            return False
        batch = self.source.take(is_ahead=True)
        if batch is None:
            return False
        transfer = self._device.begin(batch.memory)
        self._ready.append(DeviceBatch(batch.step, batch.cursor, batch.layout, transfer))
        self._is_ready.wake()
        return True


class CudaTransfer:
    """Transfers through pinned memory, on a separate CUDA stream.

    There are `NUM_AHEAD` pinned buffers, used in turn, each as large as the largest payload it has
    seen. While the device reads one, the next payload is copied into the other. So a payload's own
    memory is free after one copy within the host, however busy the device is. To transfer straight
    out of the arena, its pages would have to be pinned; but the arena's mapping is private, and a
    pinned page of a private mapping is a copy that the daemon never fills again.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._buffers = [_PinnedBuffer() for _ in range(NUM_AHEAD)]
        self._next = 0

    def begin(self, memory: Memory) -> Transfer:
        """Copies the payload to pinned memory and enqueues its transfer."""
        buffer = self._buffers[self._next]
        self._next = (self._next + 1) % NUM_AHEAD
        pinned = buffer.fill(memory)
        with torch.cuda.device(self._device), torch.cuda.stream(self._stream):
            payload = torch.empty(len(memory), dtype=torch.uint8, device=self._device)
            payload.copy_(pinned, non_blocking=True)
            buffer.was_read.record(self._stream)
            complete = _event()
            complete.record(self._stream)
        return _CudaPayload(payload, complete)


class _PinnedBuffer:
    """Pinned memory for one payload.

    Attributes:
        was_read: Recorded after the device read the payload that was filled in last.
    """

    def __init__(self) -> None:
        self._memory = torch.empty(0, dtype=torch.uint8)
        self.was_read = _event()

    def fill(self, memory: Memory) -> torch.Tensor:
        """Returns a pinned copy of `memory`; first waits until the device read the one before."""
        self.was_read.synchronize()  # returns at once if nothing was recorded yet
        if len(memory) > len(self._memory):
            self._memory = torch.empty(len(memory), dtype=torch.uint8, pin_memory=True)
        return self._memory[: len(memory)].copy_(torch.from_numpy(memory))


class _CudaPayload:
    def __init__(self, payload: torch.Tensor, complete: torch.cuda.Event) -> None:
        self._payload = payload
        self._complete = complete

    def result(self) -> torch.Tensor:
        """See `Transfer`: the current CUDA stream waits, the host does not."""
        stream = torch.cuda.current_stream(self._payload.device)
        stream.wait_event(self._complete)
        # Freed memory is then used again only after this stream's work with it.
        self._payload.record_stream(stream)
        return self._payload


def _event() -> torch.cuda.Event:
    return torch.cuda.Event()  # type: ignore[no-untyped-call]


def parse_device(device: object) -> torch.device | None:
    """Returns the device to transfer batches to; None if they stay in host memory.

    Raises:
        InvalidRequest: `device` is neither the CPU nor a CUDA device of this machine.
    """
    if device is None:
        return None
    if isinstance(device, bool | bytes):
        raise InvalidRequest(f"device is {device!r}; it must be a device or its name")
    try:
        wanted = torch.device(device)  # type: ignore[call-overload]
    except (RuntimeError, TypeError, ValueError, OverflowError) as error:
        reason = str(error).partition("\n")[0]
        raise InvalidRequest(
            f"device is {shown(device)}, which torch does not know: {reason}"
        ) from None
    if wanted.type == "cpu":
        return None
    if wanted.type != "cuda":
        raise InvalidRequest(
            f"device is {shown(device)}; batches can be had on the CPU and on CUDA devices"
        )
    num_devices = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if (wanted.index or 0) >= num_devices:
        build = f"; this build of torch, {torch.__version__}, has no CUDA"
        raise InvalidRequest(
            f"device is {shown(device)}, but torch sees {num_devices} CUDA devices here"
            f"{'' if torch.version.cuda else build}"
        )
    index = torch.cuda.current_device() if wanted.index is None else wanted.index
    return torch.device("cuda", index)
