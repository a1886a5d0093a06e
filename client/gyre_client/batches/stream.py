"""A stream of batches that outlives daemons: one session after another, none lost or repeated.

One receiver thread opens a session and puts its batches into a queue that credits bound. When the
session ends early, it opens the next one at the cursor of the last batch that it received whole.
Batches in the queue stay valid whatever happens to the daemon: their memory is mapped here.
"""

import contextlib
import logging
import queue
import threading
import time
from collections.abc import Sequence

from gyre_protos.v1 import loader_pb2 as pb

from gyre_client.batches.attachment import Attachment, Session
from gyre_client.batches.batch import Batch, BatchGroup
from gyre_client.batches.tokens import widened
from gyre_client.errors import DaemonFault, GyreError
from gyre_client.memory.arena import Arenas
from gyre_client.messages.answers import check_same_dataset
from gyre_client.messages.layouts import BatchTensors
from gyre_client.targets.target import Target
from gyre_client.transport.connection import Connection
from gyre_client.transport.outage import Outage
from gyre_client.transport.outbox import LONG_WAIT_S
from gyre_client.transport.side_channel import NotShared, SideChannel

STALL_TIMEOUT_S = 600.0
JOIN_TIMEOUT_S = 10.0  # for a thread that ends at once unless the processor is overloaded
CLOSED = "this stream was closed while it was being read"

_log = logging.getLogger("gyre_client")


class BatchStream:
    """The batches of one reader from a cursor on.

    Attributes:
        opened: What the daemon granted when the stream began.
        mixture: What the last session said of the mixture that it reads; empty for none. It is true
            of all batches that came before, too.
    """

    def __init__(
        self,
        target: Target,
        request: pb.OpenSessionRequest,
        reattach_timeout_s: float,
        token_dtype: str = "int64",
        stall_timeout_s: float = STALL_TIMEOUT_S,
    ) -> None:
        """Opens a session and starts to receive.

        Args:
            target: The daemon.
            request: What to open. The stream owns it, and moves its cursor and generation on.
            reattach_timeout_s: How long the daemon may be away, now or later.
            token_dtype: What unsigned token ids become; see `tokens.widened`.
            stall_timeout_s: How long the daemon may talk without sending a batch that it may send.

        Raises:
            GyreError: The daemon refuses, or stays away for longer than `reattach_timeout_s`.
        """
        self._target = target
        self._request = request
        self._token_dtype = token_dtype
        self._stall_timeout_s = stall_timeout_s
        self._connection = Connection(target.address)
        self._outage = Outage(reattach_timeout_s)
        self._inbox: queue.SimpleQueue[BatchGroup | GyreError | None] = queue.SimpleQueue()
        self._group: BatchGroup | None = None  # out of the inbox, with batches that are not taken
        self._must_copy = False  # whether the consumer gets copies, because it holds too many slots
        self._num_taken = 0
        self._closing = threading.Event()
        # Guards the fields below. A garbage collection may call `close` in a thread that holds it.
        self._lock = threading.RLock()
        self._attachment: Attachment | None = None
        self._session_id = ""
        self._num_unread = self._num_dequeued = 0  # batches in the inbox, and taken out of it
        # The arenas of sessions that are over, each with the value of `_num_dequeued` at which no
        # batch of the session is unread.
        self._retired: list[tuple[int, Arenas]] = []
        self._is_closed = False
        self._shares_memory = True  # until an attempt fails
        self._has_logged_transport = False
        self._first: pb.SessionOpened | None = None
        self.mixture: Sequence[pb.MixtureDigest] = ()
        self._next_step = 0
        try:
            session = self._open_session()
        except BaseException:
            self._connection.close()
            raise
        self.opened = self._first = session.opened
        self._next_step = self.opened.first_step
        self._request.cursor = self.opened.cursor
        # from now on the cursor says where to go on, and with which samples and transforms
        self._request.ClearField("step")
        self._request.ClearField("grow")
        self._request.changed_transforms = False
        self._thread = threading.Thread(
            target=self._run, args=(session,), name="gyre-receiver", daemon=True
        )
        self._thread.start()

    def take(self, *, is_ahead: bool = False) -> Batch | None:
        """Returns the next batch, None after the last; waits for it as long as the daemon is alive.

        Args:
            is_ahead: The consumer has other batches to go on with, so that the time in this call
                does not count as waiting.

        Raises:
            GyreError: Why there is no next batch; again on every further call.
        """
        group = self._group
        if group is None:
            group = self._take_group(is_ahead=is_ahead)
            if group is None:
                return None
        batch = group.take()
        self._num_taken += 1
        self._group = None if group.is_taken else group
        # A batch that is widened is copied anyway, and holds no slot.
        return batch.copied() if self._must_copy and not batch.layout.widened else batch

    def _take_group(self, *, is_ahead: bool) -> BatchGroup | None:
        waited_s = 0.0
        if self._retired:
            self._close_retired()
        try:
            item = self._inbox.get_nowait()
        except queue.Empty:
            item, waited_s = self._wait_for_item(is_ahead=is_ahead)
        if isinstance(item, BatchGroup):
            self._give_credit(len(item), waited_s)
            return item
        self._inbox.put(item)  # every further call gets the same end
        if item is None:
            return None
        raise item

    def _wait_for_item(self, *, is_ahead: bool) -> tuple[BatchGroup | GyreError | None, float]:
        """Returns the next item, and the seconds of waiting that `note_wait` was not told."""
        since_s = time.monotonic()
        while True:
            # Asked before the queue: everything that the thread put there before it ended is found.
            is_alive = self._thread.is_alive()
            try:
                item = self._inbox.get(timeout=LONG_WAIT_S)
            except queue.Empty:
                if not is_alive:
                    raise DaemonFault(CLOSED) from None
                now_s = time.monotonic()
                if not is_ahead:
                    self.note_wait(now_s - since_s)
                since_s = now_s
            else:
                return item, 0.0 if is_ahead else time.monotonic() - since_s

    def note_wait(self, seconds: float) -> None:
        """Tells the daemon that the consumer had no batch to go on with for this time."""
        with self._lock:
            if self._attachment is not None:
                self._attachment.outbox.note_wait(seconds)

    def close(self) -> None:
        """Ends the session and the receiver. Batches that were taken stay valid."""
        self._closing.set()
        with self._lock:
            attachment, session_id = self._attachment, self._session_id
        if attachment is not None:
            attachment.close()
            # A daemon that is gone has forgotten the session anyway.
            with contextlib.suppress(GyreError):
                self._connection.close_session(session_id)
        self._connection.close()
        if threading.current_thread() is not self._thread:
            self._thread.join(JOIN_TIMEOUT_S)
        self._discard_unread()
        with self._lock:
            self._is_closed = True
        self._close_retired()
        self._inbox.put(DaemonFault(CLOSED))

    def _discard_unread(self) -> None:
        group, self._group = self._group, None
        if group is not None:
            group.discard()
        with contextlib.suppress(queue.Empty):
            while True:
                item = self._inbox.get_nowait()
                if isinstance(item, BatchGroup):
                    item.discard()

    def _retire(self, arenas: Arenas) -> None:
        """Closes a past session's arenas as soon as none of its batches is unread."""
        with self._lock:
            self._retired.append((self._num_dequeued + self._num_unread, arenas))
        # `close` first discards the unread batches, so that they need not be moved out.
        if self._is_closed or not self._closing.is_set():
            self._close_retired()

    def _close_retired(self) -> None:
        """Moves out batches that are still held: see [Note: What outlives its session]."""
        with self._lock:
            over = [
                each for each in self._retired if self._is_closed or each[0] <= self._num_dequeued
            ]
            self._retired = [each for each in self._retired if each not in over]
        for _, arenas in over:
            arenas.close()

    def _give_credit(self, num_batches: int, waited_s: float) -> None:
        """Lets the daemon send as many batches as the consumer took out of the inbox."""
        with self._lock:
            self._num_unread -= num_batches
            self._num_dequeued += num_batches
            attachment = self._attachment
            self._must_copy = attachment is not None and attachment.must_copy(self._num_unread)
            if attachment is not None:
                attachment.outbox.credit(num_batches, waited_s)

    def _run(self, session: Session) -> None:
        end: GyreError | None = None
        try:
            self._receive_all(session)
        except GyreError as failure:
            end = failure
        except BaseException as defect:
            end = DaemonFault(f"the receiver failed: {defect!r}")
            end.__cause__ = defect
        if not self._closing.is_set():
            self._inbox.put(end)

    def _receive_all(self, session: Session) -> None:
        while True:
            try:
                return self._receive(session)
            except GyreError as failure:
                if isinstance(failure, NotShared):
                    self._use_grpc_payload(str(failure))
                self._outage.pause(failure, self._closing.wait)
            session = self._open_session()

    def _receive(self, session: Session) -> None:
        attachment = self._attach(session)
        try:
            for group in attachment.groups():
                self._outage.batch_received()
                self._request.cursor = group.last_cursor
                self._next_step = group.first_step + len(group)
                with self._lock:
                    self._num_unread += len(group)
                self._inbox.put(group)
        finally:
            with self._lock:
                self._attachment = None
            attachment.close()
            if session.arenas is not None:
                self._retire(session.arenas)

    def _attach(self, session: Session) -> Attachment:
        """Attaches with credit for as many batches as the inbox has room for."""
        with self._lock:
            num_credits = max(0, session.opened.max_queued_batches - self._num_unread)
            before = self._num_taken
            self._attachment = Attachment(
                self._connection,
                session,
                num_credits,
                self._outage.heard,
                lambda: self._num_taken - before,
            )
            self._session_id = session.opened.session_id
            return self._attachment

    def _open_session(self) -> Session:
        """Opens a session at the cursor; tries again until the limit of the outage is reached."""
        return self._outage.retry(self._attempt, self._closing.wait)

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
            return self._session(opened, Arenas(side, opened.session_id, opened.arena_bytes))
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
        # A session whose answer was lost, or that is not used, is fenced off by the next one.
        self._request.reader.generation += 1
        self._request.transport = pb.TRANSPORT_ARENA if side_token else pb.TRANSPORT_INLINE
        opened = self._connection.open_session(self._request, timeout_s, side_token)
        if self._first is not None:
            check_same_dataset(opened, self._first)
            if opened.first_step != self._next_step:
                raise DaemonFault(
                    f"the daemon resumed at step {opened.first_step}, "
                    f"but step {self._next_step} comes next"
                )
        self.mixture = opened.mixture
        return opened

    def _use_grpc_payload(self, reason: str) -> None:
        """Takes all further payloads through gRPC: sharing memory would fail again."""
        self._shares_memory = False
        self._log_transport(reason)

    def _log_transport(self, reason: str) -> None:
        if not self._has_logged_transport:
            _log.info("batches from %s come through gRPC: %s", self._target.address.text, reason)
            self._has_logged_transport = True
