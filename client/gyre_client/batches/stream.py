"""A stream of batches that outlives daemons: one session after another, none lost or repeated.

One receiver thread opens a session and puts its batches into a queue that credits bound. When the
session ends early, it opens the next one at the cursor of the last batch that it received whole.
Batches in the queue stay valid whatever happens to the daemon: their memory is mapped here.
"""

import contextlib
import itertools
import logging
import threading
import time
from collections import deque
from collections.abc import Iterator
from typing import Self

from gyre_protos.v1 import loader_pb2 as pb

from gyre_client.batches.arena import Arenas
from gyre_client.batches.attachment import LONG_WAIT_S, NEVER, Attachment, Consumed, Session, Wakeup
from gyre_client.batches.batch import Batch, BatchGroup, Position, widened
from gyre_client.errors import DaemonFault, GyreError
from gyre_client.transport.answers import BatchTensors, check_same_dataset
from gyre_client.transport.channel import NotShared, SideChannel
from gyre_client.transport.connection import Connection, Outage
from gyre_client.transport.target import Target

STALL_TIMEOUT_S = 600.0
JOIN_TIMEOUT_S = 10.0  # for a thread that ends at once unless the processor is overloaded
CLOSED = "this stream was closed while it was being read"

_log = logging.getLogger("gyre_client")


class BatchStream:
    """The batches of one reader from a cursor on.

    The thread that takes batches may be interrupted at any line. It only looks at the front of the
    queue and replaces `position`; all else follows from that position, or is the receiver's.

    Attributes:
        opened: The daemon's grants when the stream began.
        position: Where the consumer stands.
    """

    opened: pb.SessionOpened
    position: Position

    def __init__(
        self,
        target: Target,
        request: pb.OpenSessionRequest,
        reattach_timeout_s: float,
        token_dtype: str = "int64",
        stall_timeout_s: float = STALL_TIMEOUT_S,
        generations: Iterator[int] | None = None,
    ) -> None:
        """Makes a closed stream.

        Args:
            target: The daemon.
            request: Opens the session.
            reattach_timeout_s: How long the daemon may be away, now or later.
            token_dtype: The dtype for unsigned token ids; see `widened`.
            stall_timeout_s: How long the consumer waits for a batch while the daemon only talks.
            generations: Numbers the sessions of the reader, where several streams share it.
        """
        self._target = target
        self._request = pb.OpenSessionRequest()
        self._request.CopyFrom(request)
        self._generations = generations or itertools.count(request.reader.generation + 1)
        self._token_dtype = token_dtype
        self._stall_timeout_s = stall_timeout_s
        self._connection = Connection(target.address)
        self._outage = Outage(reattach_timeout_s)
        # Groups, and in the end None or the error that ended the stream, which stays at the front.
        self._inbox: deque[BatchGroup | GyreError | None] = deque()
        self._has_arrived = Wakeup()
        # Of the thread that takes batches.
        self._num_dequeued = 0  # the number of the first batch that did not leave the inbox
        self._waited_s = 0.0
        self._stop = NEVER  # the batch behind the last one of the consumer's iteration
        self._must_copy = False  # whether the consumer gets copies, because it holds too many slots
        self._is_closing = False
        # Of the receiver.
        self._go_on = Wakeup()
        self._attachment: Attachment | None = None
        self._session_id = ""
        # The arenas of ended sessions, each with the number of the first batch behind it.
        self._retired: list[tuple[int, Arenas]] = []
        self._shares_memory = True  # until an attempt fails
        self._has_logged_transport = False
        self._first: pb.SessionOpened | None = None
        self._next_step = 0
        self._is_open = self._has_ended = False
        self._opened_s = 0.0  # when the first session was open
        self._ended = Wakeup()
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

    def take(self, *, is_ahead: bool = False) -> Batch | None:
        """Returns the next batch, None after the last, and goes on behind it; see `peek`."""
        found = self.peek(is_ahead=is_ahead)
        if found is None:
            return None
        batch, self.position = found
        return batch

    def peek(self, *, is_ahead: bool = False) -> tuple[Batch, Position] | None:
        """Returns the next batch, and the position behind it; None after the last batch.

        The batch is taken as soon as `position` is replaced by that one. Waits for a batch as long
        as the daemon is alive.

        Args:
            is_ahead: The consumer has other batches to go on with, so that the time in this call
                does not count as waiting.

        Raises:
            GyreError: Why there is no next batch; again on every further call.
        """
        position = self.position
        group = position.rest
        if group is None:
            group = self._dequeue(is_ahead=is_ahead)
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

    def _dequeue(self, *, is_ahead: bool) -> BatchGroup | None:
        """Moves the group of the next batch from the inbox to `position`, and returns it."""
        position, inbox = self.position, self._inbox
        self._num_dequeued = position.batch
        since_s = 0.0
        while True:
            try:
                item = inbox[0]
            except IndexError:
                now_s = time.monotonic()
                if since_s and not is_ahead:
                    self.note_wait(now_s - since_s)
                since_s = now_s
                self._send_if_due(1)
                self._has_arrived.wait(LONG_WAIT_S)
                continue
            if not isinstance(item, BatchGroup):
                if item is None:
                    return None
                raise item.with_traceback(None)
            if item.behind > position.batch:
                break
            self._drop_first()  # taken before, when an interrupt came between the next two lines
        self.position = Position(position.cursor, position.batch, item)
        self._drop_first()
        self._num_dequeued = item.behind
        if since_s and not is_ahead:
            self.note_wait(time.monotonic() - since_s)
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

    def _drop_first(self) -> None:
        with contextlib.suppress(IndexError):  # `close` in another thread has emptied the inbox
            self._inbox.popleft()

    def iterate_until(self, stop: int) -> None:
        """Lets the daemon read up to this batch, where an iteration ends."""
        if stop == self._stop:
            return
        self._stop = stop
        attachment = self._attachment
        if attachment is not None:
            attachment.outbox.wake()

    def note_wait(self, seconds: float) -> None:
        """Tells the daemon that the consumer had no batch to go on with for this time."""
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
            self._wait_for_end()
        self._connection.close()  # ends all calls
        self._wait_for_end()
        self._inbox.clear()
        self._inbox.append(DaemonFault(CLOSED))

    def _wait_for_end(self) -> None:
        """Waits until the receiver has ended, but not in a thread that it may need for that."""
        deadline_s = time.monotonic() + JOIN_TIMEOUT_S
        attachment, thread = self._attachment, threading.current_thread()
        needed = (self._thread, None if attachment is None else attachment.sender)
        if thread in needed or self._thread.ident is None:
            return
        while not self._has_ended and (left_s := deadline_s - time.monotonic()) > 0:
            self._ended.wait(left_s)

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
        self._next_step = self._num_dequeued = opened.first_step
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
        is_over = [self._is_closing or each <= self._num_dequeued for each, _ in self._retired]
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
        num_dequeued, waited_s = self._num_dequeued, self._waited_s
        num_taken = self.position.batch
        num_credits = max(0, session.opened.max_queued_batches - self._next_step + num_dequeued)
        attachment = Attachment(
            self._connection,
            session,
            num_credits,
            self._heard,
            lambda: Consumed(
                self._num_dequeued - num_dequeued,
                self.position.batch - num_taken,
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
                return self._open_shared(side, timeout_s)
            except BaseException as failure:
                side.close()
                if not isinstance(failure, NotShared):
                    raise
                self._use_grpc_payload(str(failure))
        opened = self._call_open(timeout_s)
        self._log_transport("there is no memory to share")
        return self._session(opened, None)

    def _open_shared(self, side: SideChannel, timeout_s: float) -> Session:
        opened = self._call_open(timeout_s, side.token)
        if opened.arena_bytes:
            arenas = Arenas(side, opened.session_id, opened.arena_bytes)
            try:
                return self._session(opened, arenas)
            except BaseException:
                arenas.close()
                raise
        side.close()
        self._log_transport("there is no memory to share")
        return self._session(opened, None)

    def _session(self, opened: pb.SessionOpened, arenas: Arenas | None) -> Session:
        order, world_size = self._request.order, self._request.reader.world_size or 1
        num_samples = order.global_batch_size // world_size
        return Session(
            opened,
            arenas,
            widened(opened.fields, self._token_dtype),
            BatchTensors(opened.fields, num_samples, has_mask=order.tail == pb.TAIL_PAD),
            is_endless=not self._request.num_epochs,
            stall_timeout_s=self._stall_timeout_s,
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
