"""A stream of batches that outlives daemons: one receiver thread, one session after another, no batch lost or doubled.

The receiver opens a session, takes its batches into a queue that the credits bound, and when the session ends early opens the
next one at the cursor of the last batch it received whole. Batches already in the queue stay valid whatever becomes of the
daemon: their memory is the client's.
"""

import contextlib
import logging
import queue
import threading
import time

from gyre_protos.v1 import loader_pb2 as pb

from gyre_client.arena import Arenas
from gyre_client.attachment import Attachment, Session
from gyre_client.batch import Batch, Strip
from gyre_client.connection import Connection
from gyre_client.endpoint import Endpoint
from gyre_client.errors import DaemonFault, GyreError
from gyre_client.outage import Outage
from gyre_client.outbox import LONG_WAIT_S
from gyre_client.sidechannel import NotShared, SideChannel
from gyre_client.tokens import widened

JOIN_TIMEOUT_S = 10.0

_log = logging.getLogger(__name__)


class BatchStream:
    """The batches of one reader from a cursor on.

    Attributes:
        opened: What the daemon granted when the stream began.
    """

    def __init__(
        self, endpoint: Endpoint, request: pb.OpenSessionRequest, reattach_timeout_s: float, token_dtype: str = "int64"
    ) -> None:
        """Opens a session and starts to receive; waits up to `reattach_timeout_s` for a daemon to be there.

        Args:
            endpoint: Where the daemon is.
            request: What to open. The stream keeps it and moves its cursor and generation on.
            reattach_timeout_s: How long the daemon may be away, now or later.
            token_dtype: What unsigned token ids become; see `tokens.widened`.

        Raises:
            GyreError: The daemon refuses, or stays away.
        """
        self._endpoint = endpoint
        self._request = request
        self._token_dtype = token_dtype
        self._connection = Connection(endpoint.address)
        self._outage = Outage(reattach_timeout_s)
        self._inbox: queue.SimpleQueue[Strip | GyreError | None] = queue.SimpleQueue()
        self._strip: Strip | None = None  # out of the inbox, and not all of it consumed
        self._must_copy = False  # its batches
        self._num_taken = 0
        self._closing = threading.Event()
        self._lock = threading.RLock()  # over those below; a garbage collection may close while its thread holds it
        self._attachment: Attachment | None = None
        self._session_id = ""
        self._num_unread = self._num_dequeued = 0  # batches, in the queue and out of it
        # Of sessions that are over, each with how many batches are out of the queue when none of its own is unread.
        self._retired: list[tuple[int, Arenas]] = []
        self._is_closed = False
        self._shares_memory = True  # as far as is known
        self._has_told = False  # that it does not
        try:
            session = self._open_session()
        except BaseException:
            self._connection.close()
            raise
        self.opened = session.opened
        self._request.cursor = self.opened.cursor
        self._request.ClearField("step")  # from now on the cursor moves
        self._thread = threading.Thread(target=self._run, args=(session,), name="gyre-receiver", daemon=True)
        self._thread.start()

    def take(self, *, is_ahead: bool = False) -> Batch | None:
        """Returns the next batch, None after the last; waits for it as long as the daemon is alive.

        Args:
            is_ahead: Whoever consumes the batches has others to go on with, and does not wait for this one.

        Raises:
            GyreError: Why there is no next batch; again on every further call.
        """
        strip = self._strip
        if strip is None:
            strip = self._take_strip(is_ahead=is_ahead)
            if strip is None:
                return None
        batch = strip.take()
        self._num_taken += 1
        self._strip = None if strip.is_taken else strip
        return batch.copied() if self._must_copy and not batch.layout.widened else batch  # widened, it holds no slot

    def _take_strip(self, *, is_ahead: bool) -> Strip | None:
        """Returns the batches that came next; None where there are none any more."""
        waited_s = 0.0
        if self._retired:
            self._close_retired()
        try:
            item = self._inbox.get_nowait()
        except queue.Empty:
            item, waited_s = self._wait_for_item(is_ahead=is_ahead)
        if isinstance(item, Strip):
            self._account_for(len(item), waited_s)
            return item
        self._inbox.put(item)  # the end stays the end
        if item is None:
            return None
        raise item

    def _wait_for_item(self, *, is_ahead: bool) -> tuple[Strip | GyreError | None, float]:
        """Returns what comes, and how long it was waited for beyond what the daemon was told meanwhile."""
        since_s = time.monotonic()
        while True:
            is_alive = self._thread.is_alive()  # asked first: what it put before it ended is in the queue
            try:
                item = self._inbox.get(timeout=LONG_WAIT_S)
            except queue.Empty:
                if not is_alive:
                    raise DaemonFault("this stream was closed while it was being read") from None
                now_s = time.monotonic()
                if not is_ahead:
                    self.note_wait(now_s - since_s)
                since_s = now_s
            else:
                return item, 0.0 if is_ahead else time.monotonic() - since_s

    def note_wait(self, seconds: float) -> None:
        """Whoever consumes the batches had none to go on with for so long."""
        with self._lock:
            if self._attachment is not None:
                self._attachment.outbox.note_wait(seconds)

    def close(self) -> None:
        """Ends the session and the receiver. Batches taken stay valid."""
        self._closing.set()
        with self._lock:
            attachment, session_id = self._attachment, self._session_id
        if attachment is not None:
            attachment.close()
            with contextlib.suppress(GyreError):  # a daemon that is gone has forgotten the session anyway
                self._connection.close_session(session_id)
        self._connection.close()
        if threading.current_thread() is not self._thread:
            self._thread.join(JOIN_TIMEOUT_S)
        self._let_go_of_unread()
        with self._lock:
            self._is_closed = True
        self._close_retired()
        self._inbox.put(DaemonFault("this stream was closed while it was being read"))

    def _let_go_of_unread(self) -> None:
        """What nobody took lets go of its memory."""
        strip, self._strip = self._strip, None
        if strip is not None:
            strip.let_go()
        with contextlib.suppress(queue.Empty):
            while True:
                item = self._inbox.get_nowait()
                if isinstance(item, Strip):
                    item.let_go()

    def _retire(self, arenas: Arenas) -> None:
        """Their session is over. They are closed as soon as none of its batches is unread."""
        with self._lock:
            self._retired.append((self._num_dequeued + self._num_unread, arenas))
        if self._is_closed or not self._closing.is_set():  # while it is being closed, its unread batches are let go of first
            self._close_retired()

    def _close_retired(self) -> None:
        """Batches that are still held are moved out: see the note in `arena`."""
        with self._lock:
            over = [each for each in self._retired if self._is_closed or each[0] <= self._num_dequeued]
            self._retired = [each for each in self._retired if each not in over]
        for _, arenas in over:
            arenas.close()

    def _account_for(self, num_batches: int, waited_s: float) -> None:
        """The daemon may send as many more; batches are copied where their consumer holds on to too many."""
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
                    self._go_without_memory(failure)
                self._outage.pause(failure, self._closing.wait)
            session = self._open_session()

    def _receive(self, session: Session) -> None:
        attachment = self._attach(session)
        try:
            for strip in attachment.strips():
                self._outage.batch_received()
                self._request.cursor = strip.last_cursor
                with self._lock:
                    self._num_unread += len(strip)
                self._inbox.put(strip)
        finally:
            with self._lock:
                self._attachment = None
            attachment.close()
            if session.arenas is not None:
                self._retire(session.arenas)

    def _attach(self, session: Session) -> Attachment:
        """Starts on a session, with credit for what the queue still has room for."""
        with self._lock:
            num_credits = max(0, session.opened.prefetch_batches - self._num_unread)
            before = self._num_taken
            self._attachment = Attachment(
                self._connection, session, num_credits, self._outage.heard, lambda: self._num_taken - before
            )
            self._session_id = session.opened.session_id
            return self._attachment

    def _open_session(self) -> Session:
        """Opens a session at the cursor, however many attempts that takes within the limit."""
        return self._outage.patiently(self._attempt, self._closing.wait)

    def _attempt(self, timeout_s: float) -> Session:
        self._endpoint.ensure()
        side = SideChannel.connect(self._endpoint.address) if self._shares_memory else None
        if side is None:
            return self._open_without_memory(timeout_s)
        try:
            return self._open_beside(side, timeout_s)
        except BaseException as failure:
            side.close()
            if not isinstance(failure, NotShared):
                raise
            self._go_without_memory(failure)
        return self._open_without_memory(timeout_s)

    def _open_beside(self, side: SideChannel, timeout_s: float) -> Session:
        opened = self._open_one(timeout_s, side.token)
        if opened.arena_bytes:
            return self._session(opened, Arenas(side, opened.session_id))
        side.close()
        self._tell_of_transport("there is no memory to share")
        return self._session(opened, None)

    def _open_without_memory(self, timeout_s: float) -> Session:
        opened = self._open_one(timeout_s)
        self._tell_of_transport("there is no memory to share")
        return self._session(opened, None)

    def _session(self, opened: pb.SessionOpened, arenas: Arenas | None) -> Session:
        return Session(opened, arenas, widened(opened.fields, self._token_dtype))

    def _open_one(self, timeout_s: float, side_token: str = "") -> pb.SessionOpened:
        self._request.reader.generation += 1  # so that one that was not answered, or is not used, is fenced by the next
        return self._connection.open_session(self._request, timeout_s, side_token)

    def _go_without_memory(self, failure: NotShared) -> None:
        """It would fail each time: batches come through gRPC from now on."""
        self._shares_memory = False
        self._tell_of_transport(str(failure))

    def _tell_of_transport(self, reason: str) -> None:
        if not self._has_told:
            _log.info("batches from %s come through gRPC: %s", self._endpoint.address.text, reason)
            self._has_told = True
