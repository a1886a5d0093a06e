"""A stream of batches that outlives daemons: one session after another, none lost or repeated.

One receiver thread opens a session and puts its batches into a queue that credits bound. When the
session ends early, it opens the next one at the cursor of the last batch that it received whole.
Batches in the queue stay valid whatever happens to the daemon: their memory is mapped here.

On a CUDA device, the next batch is transferred while the trainer computes with this one. A thread
takes batches from the stream, begins the transfer of each and hands it on at once. The device, not
the host, waits for a transfer that has not finished when its batch is used. At most `NUM_AHEAD`
batches are on the device beyond those that the user holds. A batch's memory on the host (its slot
of the arena) is released as soon as it was copied to pinned memory; its memory on the device is its
own and lives as long as one of its tensors.
"""

import contextlib
import itertools
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Generic, Self, TypeVar

import torch
from gyre_protos.v1 import loader_pb2 as pb

from gyre_client.batches.arena import Arenas, Memory
from gyre_client.batches.attachment import LONG_WAIT_S, NEVER, Attachment, Consumed, Session, Wakeup
from gyre_client.batches.batch import Batch, BatchGroup, Layout, Position, widen, widened
from gyre_client.errors import DaemonFault, GyreError, InvalidRequest
from gyre_client.transport.answers import BatchTensors, check_same_dataset
from gyre_client.transport.arguments import shown
from gyre_client.transport.channel import NotShared, SideChannel
from gyre_client.transport.connection import Connection, Outage
from gyre_client.transport.target import Target

STALL_TIMEOUT_S = 600.0
JOIN_TIMEOUT_S = 10.0  # for a thread that ends at once unless the processor is overloaded
CLOSED = "this stream was closed while it was being read"

_log = logging.getLogger("gyre_client")
_Batch = TypeVar("_Batch")


@dataclass(frozen=True, slots=True)
class Terms:
    """How a loader reads.

    Attributes:
        reattach_timeout_s: How long the daemon may be away, now or later.
        stall_timeout_s: How long the consumer waits for a batch while the daemon only talks.
        token_dtype: The dtype for unsigned token ids; see `widened`.
        device: To transfer batches to; None for host memory.
    """

    reattach_timeout_s: float
    stall_timeout_s: float = STALL_TIMEOUT_S
    token_dtype: str = "int64"
    device: torch.device | None = None


class _Queue(Generic[_Batch]):
    """Batches that one thread puts into a queue, and another one takes.

    The thread that takes batches may be interrupted at any line. It only looks at the front of the
    queue and replaces `position`; all else follows from that position, or is the other thread's.

    Attributes:
        position: Where the consumer stands.
        is_ahead: Whether the thread that takes batches has others to go on with, so that its time
            in `peek` does not count as waiting.
    """

    position: Position
    is_ahead = False
    _thread: threading.Thread  # puts batches into the queue

    def __init__(self) -> None:
        # In the end, None or the error that ended the stream, which stays at the front.
        self._inbox: deque[Any] = deque()
        self._has_arrived, self._ended = Wakeup(), Wakeup()
        self._first_queued = 0  # the number of the first batch that did not leave the inbox
        self._is_closing = self._has_ended = False

    def peek(self) -> tuple[_Batch, Position] | None:
        """Returns the next batch, and the position behind it; None after the last batch.

        The batch is taken as soon as `position` is replaced by that one. Waits for a batch as long
        as the daemon is alive.

        Raises:
            Exception: Why there is no next batch, a GyreError unless the device failed; again on
                every further call.
        """
        raise NotImplementedError

    def take(self) -> _Batch | None:
        """Returns the next batch, None after the last, and goes on behind it; see `peek`."""
        found = self.peek()
        if found is None:
            return None
        batch, self.position = found
        return batch

    def note_wait(self, seconds: float) -> None:
        """Tells the daemon that the consumer had no batch to go on with for this time."""
        raise NotImplementedError

    def _dequeue(self) -> Any:
        """Moves the item of the next batch from the inbox to `position`, and returns it."""
        position, inbox = self.position, self._inbox
        self._first_queued = position.batch
        while True:
            try:
                item = inbox[0]
            except IndexError:
                began_s = time.monotonic()
                self._send_if_due(1)
                self._has_arrived.wait(LONG_WAIT_S)
                if not self.is_ahead:
                    self.note_wait(time.monotonic() - began_s)
                continue
            if item is None:
                return None
            if isinstance(item, Exception):
                raise item.with_traceback(None)
            if item.behind > position.batch:
                break
            self._drop_first()  # taken before, when an interrupt came between the next two lines
        self.position = Position(position.cursor, position.batch, item)
        self._drop_first()
        self._first_queued = item.behind
        return item

    def _drop_first(self) -> None:
        with contextlib.suppress(IndexError):  # `close` in another thread has emptied the inbox
            self._inbox.popleft()

    def _send_if_due(self, num_per_group: int) -> None:
        """Sends credits that are due."""

    def _wait_for_end(self, sender: threading.Thread | None = None) -> None:
        """Waits until the thread has ended, but not in a thread that it may need for that."""
        deadline_s = time.monotonic() + JOIN_TIMEOUT_S
        if threading.current_thread() in (self._thread, sender) or self._thread.ident is None:
            return
        while not self._has_ended and (left_s := deadline_s - time.monotonic()) > 0:
            self._ended.wait(left_s)


class BatchStream(_Queue[Batch]):
    """The batches of one reader from a cursor on.

    Attributes:
        opened: The daemon's grants when the stream began.
        position: Where the consumer stands.
    """

    opened: pb.SessionOpened

    def __init__(
        self,
        target: Target,
        request: pb.OpenSessionRequest,
        terms: Terms,
        generations: Iterator[int] | None = None,
    ) -> None:
        """Makes a closed stream.

        `generations` numbers the sessions of the reader, where several streams share it.
        """
        super().__init__()
        self._target = target
        self._request = pb.OpenSessionRequest()
        self._request.CopyFrom(request)
        self._generations = generations or itertools.count(request.reader.generation + 1)
        self._terms = terms
        self._connection = Connection(target.address)
        self._outage = Outage(terms.reattach_timeout_s)
        # Of the thread that takes batches.
        self._waited_s = 0.0
        self._stop = NEVER  # the batch behind the last one of the consumer's iteration
        self._must_copy = False  # whether the consumer gets copies, because it holds too many slots
        # Of the receiver.
        self._go_on = Wakeup()
        self._attachment: Attachment | None = None
        # The arenas of ended sessions, each with the number of the first batch behind it.
        self._retired: list[tuple[int, Arenas]] = []
        self._shares_memory = True  # until an attempt fails
        self._has_logged_transport = False
        self._first: pb.SessionOpened | None = None
        self._next_step = 0
        self._is_open = False
        self._opened_s = 0.0  # when the first session was open
        self._thread = threading.Thread(target=self._run, name="gyre-receiver", daemon=True)

    def open(self) -> None:
        """Opens a session and starts to receive; close the stream also where this fails.

        The receiver does it, so that an interrupt ends the waiting alone.

        Raises:
            GyreError: The daemon refuses, or stays away for longer than `reattach_timeout_s`.
        """
        self._thread.start()
        while not self._is_open:
            if self._inbox and not isinstance(end := self._inbox[0], BatchGroup):
                self.close()
                raise end or DaemonFault(CLOSED)
            self._has_arrived.wait(LONG_WAIT_S)
        # The receiver goes on meanwhile, so the first batch may be here before it is asked for.
        self.note_wait(time.monotonic() - self._opened_s)

    @property
    def source(self) -> Self:
        """Itself; a `DeviceStream` has another."""
        return self

    def peek(self) -> tuple[Batch, Position] | None:
        """See `_Queue`."""
        position = self.position
        group = position.rest
        if group is None:
            group = self._dequeue()
            if group is None:
                return None
            position = self.position
        attachment = self._attachment
        if attachment is not None and attachment.outbox.returned:
            attachment.outbox.send_if_due(len(group))
        step = position.batch
        batch = group.batch(step, copies=self._must_copy)
        rest = group if step + 1 < group.behind else None
        return batch, Position(batch.cursor, step + 1, rest)

    def _dequeue(self) -> BatchGroup | None:
        item: BatchGroup | None = super()._dequeue()
        if item is None:
            return None
        attachment = self._attachment
        if attachment is not None:
            self._must_copy = attachment.must_copy(self._next_step - item.behind)
            self._send_if_due(len(item))
        elif item.behind == self._next_step:
            self._go_on.wake()  # the receiver waits until its arenas are not needed any more
        return item

    def _send_if_due(self, num_per_group: int) -> None:
        attachment = self._attachment
        if attachment is not None:
            attachment.outbox.send_if_due(num_per_group)

    def iterate_until(self, stop: int) -> None:
        """Lets the daemon read up to this batch, where an iteration ends."""
        if stop == self._stop:
            return
        self._stop = stop
        attachment = self._attachment
        if attachment is not None:
            attachment.outbox.wake()

    def note_wait(self, seconds: float) -> None:
        """See `_Queue`."""
        self._waited_s += seconds

    def close(self) -> None:
        """Ends the session and the receiver. Batches that were taken stay valid.

        A second call finishes an interrupted one.
        """
        self._is_closing = True
        if self._is_open:
            self.position = Position(self.position.cursor, self.position.batch)
        self._go_on.wake()
        attachment = self._attachment
        if attachment is not None:
            attachment.outbox.close()  # its thread ends the streams, and the receiver the session
            self._wait_for_end(attachment.sender)
        self._connection.close()  # ends all calls
        self._wait_for_end(None if attachment is None else attachment.sender)
        self._inbox.clear()
        self._inbox.append(DaemonFault(CLOSED))

    def _run(self) -> None:
        end: GyreError | None = None
        try:
            self._receive_all(self._begin())
        except GyreError as failure:
            end = self._target.with_log(failure)
        except BaseException as defect:
            end = DaemonFault(f"the receiver failed: {defect!r}")
            end.__cause__ = defect
        while not self._close_retired():
            self._go_on.wait(LONG_WAIT_S)
        if self._is_closing:
            self._connection.close()
        self._has_ended = True
        self._inbox.append(DaemonFault(CLOSED) if self._is_closing else end)
        self._has_arrived.wake()
        self._ended.wake()

    def _begin(self) -> Session:
        """Opens the first session; from then on the consumer has a position."""
        session = self._open_session()
        self.opened = self._first = opened = session.opened
        self._next_step = self._first_queued = opened.first_step
        self._request.cursor = opened.cursor
        # from now on the cursor says where to go on, and with which samples and transforms
        self._request.ClearField("step")
        self._request.ClearField("grow")
        self._request.ClearField("weights")
        self._request.changed_transforms = False
        self.position = Position(opened.cursor, opened.first_step)
        self._stop = opened.iteration_stop or NEVER
        self._opened_s = time.monotonic()
        self._is_open = True
        self._has_arrived.wake()
        return session

    def _close_retired(self) -> bool:
        """Moves out batches still held: see [Note: Tensors after a session].

        Returns:
            Whether no ended session has an unread batch.
        """
        if self._is_closing:
            self._inbox.clear()  # so that they need not be moved out
        is_over = [self._is_closing or each <= self._first_queued for each, _ in self._retired]
        for is_unused, (_, arenas) in zip(is_over, self._retired, strict=True):
            if is_unused:
                arenas.close()
        self._retired = [
            each for is_unused, each in zip(is_over, self._retired, strict=True) if not is_unused
        ]
        return not self._retired

    def _receive_all(self, session: Session) -> None:
        while True:
            try:
                return self._receive(session)
            except GyreError as failure:
                if isinstance(failure, NotShared):
                    self._use_grpc_payload(str(failure))
                self._outage.pause(failure, self._pause)
            session = self._open_session()

    def _receive(self, session: Session) -> None:
        attachment: Attachment | None = None
        try:
            attachment = self._attach(session)
            for group in attachment.groups():
                self._outage.batch_received()
                self._request.cursor = group.last_cursor
                self._next_step = group.behind
                self._inbox.append(group)
                del group  # otherwise this frame keeps its memory until the next one comes
                self._has_arrived.wake()
        finally:
            self._attachment = None
            if attachment is not None:
                attachment.close()
            if session.arenas is not None:
                self._retired.append((self._next_step, session.arenas))
            self._close_retired()
            if self._is_closing:
                # A dead daemon has forgotten the session anyway.
                with contextlib.suppress(GyreError):
                    self._connection.close_session(session.opened.session_id)

    def _attach(self, session: Session) -> Attachment:
        """Attaches with credit for as many batches as the inbox has room for."""
        first_queued, waited_s = self._first_queued, self._waited_s
        first_batch = self.position.batch
        num_queued = self._next_step - first_queued
        num_credits = max(0, session.opened.max_queued_batches - num_queued)
        attachment = Attachment(
            self._connection,
            session,
            num_credits,
            self._heard,
            lambda: Consumed(
                self._first_queued - first_queued,
                self.position.batch - first_batch,
                self._waited_s - waited_s,
                self.position.batch,
                self._stop,
            ),
        )
        self._attachment = attachment
        if self._is_closing:  # `close` did not see it
            attachment.outbox.close()
        return attachment

    def _heard(self) -> None:
        self._outage.heard()
        if self._retired:
            self._close_retired()

    def _pause(self, seconds: float) -> bool:
        """Waits for so long; returns whether the stream is closing."""
        deadline_s = time.monotonic() + seconds
        while not self._is_closing and (left_s := deadline_s - time.monotonic()) > 0:
            self._go_on.wait(left_s)
        return self._is_closing

    def _open_session(self) -> Session:
        """Opens a session at the cursor; tries again until the limit of the outage is reached."""
        return self._outage.retry(self._attempt, self._pause)

    def _attempt(self, timeout_s: float) -> Session:
        self._target.ensure()
        side = SideChannel.connect(self._target.address) if self._shares_memory else None
        if side is not None:
            try:
                opened = self._call_open(timeout_s, side.token)
                if opened.arena_bytes:
                    return self._session(opened, side)
                side.close()
            except BaseException as failure:
                side.close()
                if not isinstance(failure, NotShared):
                    raise
                self._use_grpc_payload(str(failure))
                opened = self._call_open(timeout_s)
        else:
            opened = self._call_open(timeout_s)
        self._log_transport("there is no memory to share")
        return self._session(opened, None)

    def _session(self, opened: pb.SessionOpened, side: SideChannel | None) -> Session:
        order, world_size = self._request.order, self._request.reader.world_size or 1
        num_samples = order.global_batch_size // world_size
        return Session(
            opened,
            widened(opened.fields, self._terms.token_dtype),
            BatchTensors(opened.fields, num_samples, has_mask=order.tail == pb.TAIL_PAD),
            # last: nothing fails after the arenas are mapped
            None if side is None else Arenas(side, opened.session_id, opened.arena_bytes),
            is_endless=not self._request.num_epochs,
            stall_timeout_s=self._terms.stall_timeout_s,
        )

    def _call_open(self, timeout_s: float, side_token: str = "") -> pb.SessionOpened:
        # A session whose answer was lost, or is unused, is fenced off by the next one.
        self._request.reader.generation = next(self._generations)
        self._request.transport = pb.TRANSPORT_ARENA if side_token else pb.TRANSPORT_INLINE
        opened = self._connection.open_session(self._request, timeout_s, side_token)
        if self._first is not None:
            check_same_dataset(opened, self._first)
            if opened.first_step != self._next_step:
                raise DaemonFault(
                    f"the daemon resumed at step {opened.first_step}, "
                    f"but step {self._next_step} comes next"
                )
        return opened

    def _use_grpc_payload(self, reason: str) -> None:
        """Takes all further payloads through gRPC: sharing memory would fail again."""
        self._shares_memory = False
        self._log_transport(reason)

    def _log_transport(self, reason: str) -> None:
        if not self._has_logged_transport:
            _log.info("batches from %s come through gRPC: %s", self._target.address.text, reason)
            self._has_logged_transport = True


# Two transfers overlap with each other and with the computation: one fills pinned memory while the
# device reads the other. More only cost pinned and device memory.
NUM_AHEAD = 2


# Returns a payload on the device, uint8 [num_bytes]. Work that the caller enqueues from then on
# runs after the transfer.
Transfer = Callable[[], torch.Tensor]


@dataclass(frozen=True, slots=True)
class DeviceBatch:
    """One rank's part of one global step, on its way to the device; see `batch.Batch`."""

    step: int
    cursor: bytes
    layout: Layout
    transfer: Transfer

    @property
    def behind(self) -> int:
        """The step after it."""
        return self.step + 1

    @property
    def tensors(self) -> dict[str, torch.Tensor]:
        """The tensors by name, in the batch's own memory on the device.

        They must be asked for in the thread, and with the CUDA stream, that will use them.
        """
        payload, layout = self.transfer(), self.layout
        tensors = {place.name: place.view_on_device(payload) for place in layout.places}
        return widen(tensors, layout.widened) if layout.widened else tensors


class DeviceStream(_Queue[DeviceBatch]):
    """A BatchStream, which it owns, whose batches are transferred to a device.

    Attributes:
        source: The stream.
        position: Where the consumer stands; see `BatchStream`.
    """

    def __init__(self, stream: BatchStream, begin: Callable[[Memory], Transfer]) -> None:
        """Begins to transfer; the stream is open.

        `begin` begins to transfer a payload, uint8 [num_bytes], which may be reused on return; it
        is called in one thread, and transfers follow each other.
        """
        super().__init__()
        self.source = stream
        self._begin = begin
        self.position = stream.position
        self._first_queued = stream.position.batch
        self._has_room = Wakeup()
        stream.is_ahead = True
        self._thread = threading.Thread(target=self._run, name="gyre-transfer", daemon=True)
        self._thread.start()

    @property
    def opened(self) -> pb.SessionOpened:
        """The daemon's grants when the stream began."""
        return self.source.opened

    def peek(self) -> tuple[DeviceBatch, Position] | None:
        """See `_Queue`; a batch is there as soon as its transfer has begun."""
        batch: DeviceBatch | None = self.position.rest
        if batch is None:
            batch = self._dequeue()
            self._has_room.wake()
        if batch is None:
            return None
        return batch, Position(batch.cursor, batch.behind)

    def note_wait(self, seconds: float) -> None:
        """See `_Queue`."""
        self.source.note_wait(seconds)

    def close(self) -> None:
        """Ends the stream and the transfers. Batches that were taken stay valid."""
        self._is_closing = True
        self.position = Position(self.position.cursor, self.position.batch)
        self._has_room.wake()
        self.source.close()
        self._wait_for_end()
        self._inbox.clear()  # batches that were not taken give their memory back
        self._inbox.append(InvalidRequest(CLOSED))

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
        self._inbox.append(end)
        self._has_arrived.wake()
        self._ended.wake()

    def _transfer_next(self) -> bool:
        """Begins the next batch's transfer; returns False after the last batch."""
        batch_number = self.source.position.batch
        while batch_number >= max(self._first_queued, self.position.batch) + NUM_AHEAD:
            if self._is_closing:
                return False
            self._has_room.wait(LONG_WAIT_S)
        if self._is_closing:
            return False
        batch = self.source.take()
        if batch is None:
            return False
        transfer = self._begin(batch.memory)
        self._inbox.append(DeviceBatch(batch.step, batch.cursor, batch.layout, transfer))
        self._has_arrived.wake()
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

        def result() -> torch.Tensor:
            """See `Transfer`: the current CUDA stream waits, the host does not."""
            stream = torch.cuda.current_stream(self._device)
            stream.wait_event(complete)
            # Freed memory is then used again only after this stream's work with it.
            payload.record_stream(stream)
            return payload

        return result


class _PinnedBuffer:
    """Pinned memory for one payload.

    `was_read` is recorded after the device read the payload that was filled in last.
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
