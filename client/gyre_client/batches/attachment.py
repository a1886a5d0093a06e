"""One session from attaching to its end: the control stream, the payload stream, and a watchdog.

On the control stream the client sends credits, releases and heartbeats. They are coalesced:
everything that came up since the last message travels in the next one. Each number here is written
by one thread: the consumer's totals are read by gRPC's sending thread, so an interrupt of the
consumer neither loses nor doubles a credit. They also say how far the daemon may read ahead of the
trainer: to its iteration's end, and for some seconds.
"""

import contextlib
import logging
import math
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import grpc
from gyre_protos.text import printable
from gyre_protos.v1 import loader_pb2 as pb

from gyre_client.batches.arena import Arenas, Loan
from gyre_client.batches.batch import (
    BatchGroup,
    Layout,
    Widened,
    read_cursors,
    read_layout,
    read_layouts,
    read_payload,
)
from gyre_client.errors import (
    DaemonFault,
    DaemonUnavailable,
    GyreError,
    LeaseExpired,
    NotAuthenticated,
)
from gyre_client.transport.answers import BatchTensors, check_grant, check_group
from gyre_client.transport.channel import chunk_data
from gyre_client.transport.connection import RETRY_AFTER, Connection, error_from

# A lease outlives three lost or late heartbeats. More heartbeats wake an idle client more often.
HEARTBEATS_PER_LEASE = 4
# Credits and releases travel when half of the daemon's grant is waiting, so that the daemon still
# has the other half to go on with. All of it would stall the daemon; a small part would cost a
# message per batch.
MESSAGES_PER_GRANT = 2
# A peer that computes longer than this between two batches is rare; one that reads no more is not.
_PEER_S = 30.0

_log = logging.getLogger("gyre_client")


class Wakeup:
    """Wakes one thread that waits; a call before it waits counts.

    A signal may end any line of Python in the main thread. `threading.Event` and `Condition` are
    written in Python and hold a lock meanwhile, never to be released. A `SimpleQueue` is not.
    """

    __slots__ = ("_calls",)

    def __init__(self) -> None:
        self._calls: queue.SimpleQueue[None] = queue.SimpleQueue()

    def wake(self) -> None:
        """Wakes the thread; from any thread, and any finalizer."""
        if self._calls.empty():
            self._calls.put(None)

    def wait(self, timeout_s: float) -> None:
        """Waits for a call; it may also return early, so the caller looks for itself."""
        with contextlib.suppress(queue.Empty):
            self._calls.get(timeout=max(0.0, timeout_s))


NEVER = (1 << 63) - 1
# A trainer that computes for longer than it waits has batches for these seconds at its pace.
# With more, a slow trainer has samples decoded that it may never use, and memory that it does not
# need; with less, batches that take longer than others stop it.
_AHEAD_S, _LEAST = 5.0, 2
# The pace is that of the last seconds, from this often on. In a longer time a pause counts for
# longer; a shorter one has few batches.
_MEMORY_S, _INTERVAL_S = 2.0, 0.2
# A trainer that waits for a larger part of the time has no pace.
_WAITS = 0.1


class ReadAhead:
    """The first batch that need not be read yet, from the batches that a trainer took lately."""

    def __init__(self) -> None:
        # each a time, the next batch, and how long the trainer has waited in all
        self._marks: deque[tuple[float, int, float]] = deque()
        self._first = -1

    def until(self, now_s: float, next_batch: int, waited_s: float, stop: int) -> int:
        """Returns the first batch that need not be read yet.

        `now_s` never falls, `waited_s` is how long the trainer has waited in all, and `stop` is the
        batch behind the last one of its iteration.
        """
        if self._first < 0:
            self._first = next_batch
        if next_batch == self._first:  # it has not begun
            return stop
        marks = self._marks
        if not marks or now_s - marks[-1][0] >= _INTERVAL_S:
            marks.append((now_s, next_batch, waited_s))
        while now_s - marks[0][0] > _MEMORY_S and len(marks) > 1:
            marks.popleft()
        since_s, first, had_waited_s = marks[0]
        passed_s, lately_s = now_s - since_s, waited_s - had_waited_s
        if passed_s < _INTERVAL_S or lately_s > _WAITS * passed_s:
            return stop
        pace = (next_batch - first + 1) / (passed_s - lately_s)  # the batch in hand counts, too
        return min(stop, next_batch + max(_LEAST, math.ceil(_AHEAD_S * pace)))


# Fewer credits than `num_together` wait this long for more before they travel. Shorter
# wakes a thread here and one in the daemon for every batch; longer delays a slow trainer's credit.
LONG_WAIT_S = 0.25
# While batches are taken, the daemon is told how many at least this often, so that it can show a
# rate. Each message wakes a thread on both sides; after a few of these intervals without a message
# the daemon takes it that no batch was taken.
REPORT_S = 1.0
# In one message: about three bytes per step, well below the limit of a control message.
MAX_RELEASES = 4096


@dataclass(frozen=True, slots=True)
class Consumed:
    """The consumer's totals since the session began.

    It had no batch to go on with for `waited_s`. The script takes `next_batch` next, and `stop` is
    the batch behind the last one of its iteration.
    """

    num_dequeued: int = 0
    num_taken: int = 0
    waited_s: float = 0.0
    next_batch: int = 0
    stop: int = NEVER


@dataclass(frozen=True, slots=True)
class Inline:
    """A batch whose payload came through gRPC: the daemon may forget it at once."""

    first_step: int
    num_batches: int

    def take_back(self) -> None:
        """Does nothing: the memory is this process's own."""


class Outbox:
    """Filled by the consumer and the receiver, drained by gRPC's sending thread.

    Attributes:
        returned: The memory of batches gone but not reported to the daemon yet.
        is_closed: Whether the messages end.
    """

    def __init__(
        self,
        session_id: str,
        num_credits: int,
        num_together: int = 1,
        consumed: Callable[[], Consumed] = Consumed,
        returned: deque[Any] | None = None,
        read_until: int = NEVER,
    ) -> None:
        """Queues the first credits.

        Half of the daemon's grant as `num_together`, the later credits or released batches that are
        worth a message, leaves it the other half to go on with. `returned` is where finalizers put
        loans. The daemon reads up to `read_until` before it is told otherwise.
        """
        self._session_id = session_id
        self._num_granted = num_credits  # by the receiver
        self._num_together = num_together
        self._consumed = consumed
        self.returned: deque[Loan | Inline] = deque() if returned is None else returned
        self._unmapped: deque[int] = deque()
        self._wakeup = Wakeup()
        self.is_closed = False
        # of the sending thread
        self._released: list[int] = []
        self._num_sent = 0  # credits
        self._waited_s = 0.0
        self._sent_at_s = 0.0  # when a message last had credits or releases
        self._read_ahead = ReadAhead()
        self._read_until = read_until  # as the daemon knows
        self._wakeup.wake()

    @property
    def num_given(self) -> int:
        """How many batches in all the daemon may have sent by now, at most."""
        return max(self._num_sent, self._num_granted + self._consumed().num_dequeued)

    def send_if_due(self, num_per_group: int) -> None:
        """Wakes the sending thread if a message is due, with about this many batches a group."""
        num_credits = self._num_granted + self._consumed().num_dequeued - self._num_sent
        num_waiting = max(num_credits, len(self.returned) * num_per_group)
        if num_waiting >= self._num_together or (
            num_waiting > 0 and time.monotonic() > self._sent_at_s + LONG_WAIT_S
        ):
            self._wakeup.wake()

    def grant(self, num_more: int, num_together: int) -> None:
        """Changes the number of batches that may be under way by `num_more`.

        If it is negative, that many of the next credits are kept back.
        """
        self._num_granted += num_more
        self._num_together = num_together
        self._wakeup.wake()

    def wake(self) -> None:
        """Wakes the sending thread, because the script's iteration has begun or changed its end."""
        self._wakeup.wake()

    def release(self, returned: Loan | Inline) -> None:
        """Gives memory back that no finalizer returns."""
        self.returned.append(returned)
        self.send_if_due(returned.num_batches)

    def unmapped(self, arenas: Sequence[int]) -> None:
        """Tells the daemon that this process no longer maps these arenas."""
        self._unmapped += arenas
        self._wakeup.wake()

    def close(self) -> None:
        """Ends the messages; the client then half-closes its stream."""
        self.is_closed = True
        self._wakeup.wake()

    def messages(
        self, heartbeat_s: float, on_wake: Callable[[], None]
    ) -> Iterator[pb.StreamRequest]:
        """Yields the attachment, then messages as they become due, until `close`.

        Args:
            heartbeat_s: The longest silence; a heartbeat ends it.
            on_wake: Called before each message, at the end, and at least every `heartbeat_s`.
        """
        yield pb.StreamRequest(attach=pb.Attach(session_id=self._session_id))
        sent_at_s, num_reported = time.monotonic(), 0
        while not self.is_closed:
            if not self._released:
                self._wakeup.wait(min(heartbeat_s, LONG_WAIT_S))
            consumed = self._consumed()
            credit, unmapped = self._take_queued(consumed)
            on_wake()
            num_taken, silent_s = consumed.num_taken, time.monotonic() - sent_at_s
            next_batch, told = consumed.next_batch, self._read_until
            until = self._read_ahead.until(
                time.monotonic(), next_batch, consumed.waited_s, consumed.stop
            )
            moves_bound = until < told or 2 * (told - next_batch) < until - next_batch
            has_news = credit.ByteSize() or unmapped or moves_bound
            is_due = silent_s >= (REPORT_S if num_taken != num_reported else heartbeat_s)
            if not (has_news or is_due) or self.is_closed:
                continue
            sent_at_s, num_reported = time.monotonic(), num_taken
            about = {"num_taken": num_taken, "read_until": until if until != told else 0}
            self._read_until = until
            request = pb.StreamRequest(**about)  # type: ignore[arg-type]
            if unmapped:
                request.unmapped.arenas.extend(unmapped)
                yield request
                request = pb.StreamRequest(**about)  # type: ignore[arg-type]
            if credit.num_batches or credit.waited_s:
                request.credit.CopyFrom(credit)
                yield request
            elif credit.released_steps:
                request.release.steps.extend(credit.released_steps)
                yield request
            elif not unmapped:
                request.heartbeat.SetInParent()
                yield request
        on_wake()

    def _take_queued(self, consumed: Consumed) -> tuple[pb.Credit, list[int]]:
        """Returns all that waits, as one message."""
        while self.returned:
            returned = self.returned.popleft()
            returned.take_back()
            self._released.append(returned.first_step)
        released, self._released = self._released[:MAX_RELEASES], self._released[MAX_RELEASES:]
        num_credits = max(0, self._num_granted + consumed.num_dequeued - self._num_sent)
        waited_s = consumed.waited_s - self._waited_s
        if not num_credits and waited_s < LONG_WAIT_S:
            waited_s = 0.0  # it travels with the next credit
        self._num_sent += num_credits
        self._waited_s += waited_s
        unmapped = [self._unmapped.popleft() for _ in range(len(self._unmapped))]
        if released or num_credits or waited_s:
            self._sent_at_s = time.monotonic()
        credit = pb.Credit(num_batches=num_credits, waited_s=waited_s, released_steps=released)
        return credit, unmapped


@dataclass(frozen=True, slots=True)
class Session:
    """A session that the daemon opened.

    `arenas` is None if payloads come through gRPC. The consumer waits for `stall_timeout_s` for a
    batch while the daemon only talks.
    """

    opened: pb.SessionOpened
    widened: Widened
    tensors: BatchTensors
    arenas: Arenas | None
    is_endless: bool
    stall_timeout_s: float


class Attachment:
    """Receives the batches of one session.

    Neither stream can wait with its own time-out. So the sending side, which wakes for its
    heartbeats anyway, ends both streams when the daemon has said nothing for longer than the lease.
    Then both sides agree that the session is over.

    Attributes:
        outbox: The side that sends.
        sender: The thread of the sending side, once it has woken.
    """

    def __init__(
        self,
        connection: Connection,
        session: Session,
        num_credits: int,
        on_message: Callable[[], None],
        consumed: Callable[[], Consumed],
    ) -> None:
        """Attaches to the session.

        `on_message` is called for every message of the daemon on the control stream, and `consumed`
        returns the consumer's totals since the session began.
        """
        opened = session.opened
        self._connection = connection
        self._session_id = opened.session_id
        self._lease_s = opened.lease_s
        self._arenas = session.arenas
        self._session = session
        self._next_step = opened.first_step
        self._num_received = 0
        self._waited_s = self._stalled_s = 0.0
        self._has_told_of_peer = False
        self._last_layout = b"", Layout([], 0)  # as it came, and as it was read
        self._max_queued = opened.max_queued_batches
        self._max_kept = opened.max_kept_batches
        self._on_message = on_message
        self._consumed = consumed
        self._silent_for_s: float | None = None  # set when the watchdog ended the streams
        self._heard_at_s = time.monotonic()
        self._payload: grpc.CallIterator[bytes] | None = None
        self._is_closed = False
        self.sender: threading.Thread | None = None
        returned = None if session.arenas is None else session.arenas.returned
        self.outbox = Outbox(
            opened.session_id,
            num_credits,
            self._num_together,
            consumed,
            returned,
            opened.iteration_stop or NEVER,
        )
        self._stream = connection.stream(
            self.outbox.messages(opened.lease_s / HEARTBEATS_PER_LEASE, self._watch)
        )

    def groups(self) -> Iterator[BatchGroup]:
        """Yields batch groups as they arrive whole, until the stream of batches ends.

        Raises:
            GyreError: Why the session ended before that.
        """
        if self._arenas is not None:
            self._arenas.map_first()
        try:
            for response in self._stream:
                self._heard(response.heartbeat.waiting_for, is_news=bool(response.batches.groups))
                self._on_message()
                match response.WhichOneof("event"):
                    case "batches":
                        if response.batches.max_queued_batches:
                            self._change_grant(response.batches)
                        for group in response.batches.groups:
                            yield from self._receive(group)
                    case "arenas_left" if arenas := self._arenas:
                        self.outbox.unmapped(arenas.leave(response.arenas_left.arenas))
                    case "end_of_stream":
                        return self._check_end()
                    case "goodbye":
                        raise self._goodbye(response.goodbye)
        except grpc.RpcError as failure:
            raise self._error(failure) from None
        raise DaemonUnavailable(
            f"the daemon at {self._connection.address.text} ended the session without a word"
        )

    def close(self) -> None:
        """Ends both streams, and with them the session; for a background thread.

        gRPC holds locks meanwhile. Another thread closes the outbox, whose thread then closes.
        """
        self._is_closed = True
        self.outbox.close()
        self._cancel()
        self._arenas = None

    def must_copy(self, num_unread: int) -> bool:
        """Whether the consumer holds too many slots, so that the daemon may soon have none to fill.

        It does not hold the `num_unread` batches that wait in the queue.
        """
        arenas, most = self._arenas, self._max_kept + num_unread
        return arenas is not None and arenas.num_lent(most) > most

    @property
    def _num_together(self) -> int:
        return max(1, self._max_queued // MESSAGES_PER_GRANT)

    def _check_end(self) -> None:
        if self._session.is_endless:
            raise DaemonFault(
                f"the daemon at {self._connection.address.text} ended a stream that has no end, "
                f"before step {self._next_step}"
            )

    def _change_grant(self, batches: pb.Batches) -> None:
        """The daemon's window has grown or shrunk: more batches, or fewer, may be under way."""
        check_grant(batches)
        num_more = batches.max_queued_batches - self._max_queued
        self._max_queued, self._max_kept = batches.max_queued_batches, batches.max_kept_batches
        self.outbox.grant(num_more, self._num_together)

    def _receive(self, group: pb.BatchGroup) -> Iterator[BatchGroup]:
        check_group(group, self._next_step, self.outbox.num_given - self._num_received)
        cursors, layouts = read_cursors(group.cursors), read_layouts(group, self._read_layout)
        self._num_received += len(layouts)
        self._next_step += len(layouts)
        match group.WhichOneof("payload"):
            case "arena" if arenas := self._arenas:
                yield self._lent(group, arenas, cursors, layouts)
            case "inline":
                for row, layout in enumerate(layouts):
                    memory = read_payload(layout.num_bytes, self._next_chunk)
                    layout.check_offsets(memory)
                    yield BatchGroup(group.first_step + row, [cursors[row]], [layout], memory)
                self.outbox.release(Inline(group.first_step, len(layouts)))
            case "arena" if self._is_closed:  # the watchdog closed while gRPC held this message
                raise self._silence()
            case _:
                raise DaemonFault(
                    f"the payload of step {group.first_step} comes in a way that this client "
                    "does not know"
                )

    def _lent(
        self, group: pb.BatchGroup, arenas: Arenas, cursors: list[bytes], layouts: Sequence[Layout]
    ) -> BatchGroup:
        """Returns the group over its slot, which is released when its last tensor is gone."""
        offsets = list(group.arena.offsets_bytes)
        try:
            end = 0
            for offset, layout in zip(offsets, layouts, strict=True):
                if offset < end:
                    raise ValueError(f"byte {offset} belongs to the batch before")
                end = offset + layout.num_bytes
            begin = offsets[0]
            arena = arenas.get(group.arena.arena)
            memory, loan = arena.lend(begin, end, len(layouts), group.first_step)
        except ValueError as error:
            raise DaemonFault(
                f"the memory of step {group.first_step} cannot be where the daemon says: {error}"
            ) from None
        offsets = [offset - begin for offset in offsets]
        for offset, layout in zip(offsets, layouts, strict=True):
            layout.check_offsets(memory, offset)
        return BatchGroup(group.first_step, cursors, layouts, memory, offsets, loan)

    def _read_layout(self, layout: pb.Layout) -> Layout:
        """Returns a layout that fits the session; the same one again if it equals the last."""
        data = layout.SerializeToString()
        if data != self._last_layout[0]:
            tensors = self._session.tensors
            tensors.check(layout)
            self._last_layout = data, read_layout(layout, self._session.widened, tensors.ragged)
        return self._last_layout[1]

    def _next_chunk(self) -> memoryview:
        if self._payload is None:
            self._payload = self._connection.read_payload(self._session_id)
            if self._is_closed:  # another thread closed, and did not see this call
                self._cancel()
        frame = next(iter(self._payload), None)
        if frame is None:
            raise DaemonUnavailable(
                f"the daemon at {self._connection.address.text} ended the payload inside a batch"
            )
        chunk = chunk_data(frame)
        self._heard("", is_news=bool(chunk))
        return chunk

    def _heard(self, waiting_for: str, *, is_news: bool) -> None:
        """Notes a message of the daemon, and how long the consumer has waited for a batch."""
        now_s = time.monotonic()
        # At most a lease: longer, and this process was stopped meanwhile.
        silent_s = min(now_s - self._heard_at_s, self._lease_s)
        self._heard_at_s = now_s
        waited_s = self._consumed().waited_s
        waits_s, self._waited_s = waited_s - self._waited_s, waited_s
        if is_news:
            self._stalled_s = 0.0
            return
        self._stalled_s += min(waits_s, silent_s)
        if waiting_for.startswith("peer") and self._stalled_s > _PEER_S:
            if not self._has_told_of_peer:
                _log.warning(
                    "step %d waits for %s: all peers of a rank must read every batch",
                    self._next_step,
                    printable(waiting_for),
                )
            self._has_told_of_peer = True
        if self._stalled_s > self._session.stall_timeout_s:
            reason = f"; it says that it waits for {printable(waiting_for)}" if waiting_for else ""
            raise DaemonFault(
                f"the daemon at {self._connection.address.text} has sent nothing of step "
                f"{self._next_step} for {self._stalled_s:.1f} s, only heartbeats{reason}. Look at "
                "its log, or allow it more time with stall_timeout_s"
            )

    def _watch(self) -> None:
        self.sender = threading.current_thread()
        if self.outbox.is_closed:
            return self.close()
        silent_for_s = time.monotonic() - self._heard_at_s
        if silent_for_s > self._lease_s:
            self._silent_for_s = silent_for_s
            self.close()
        return None

    def _cancel(self) -> None:
        for call in (self._stream, self._payload):
            if call is not None:
                call.cancel()  # type: ignore[no-untyped-call]

    def _error(self, failure: grpc.RpcError) -> GyreError:
        if self._silent_for_s is not None:
            return self._silence()
        error = error_from(failure, self._connection.address)
        if isinstance(error, NotAuthenticated):
            # The token has expired or was taken away. The file may hold the next one by now.
            return LeaseExpired(f"{error}; the session is opened again")
        return error

    def _silence(self) -> DaemonUnavailable:
        return DaemonUnavailable(
            f"the daemon at {self._connection.address.text} was silent for "
            f"{self._silent_for_s or 0.0:.1f} s, longer than the lease of {self._lease_s:.1f} s"
        )

    def _goodbye(self, goodbye: pb.Goodbye) -> GyreError:
        # The reason's advice, behind a semicolon, a Loader follows by itself.
        return DaemonUnavailable(
            f"the daemon at {self._connection.address.text} ended the session: "
            f"{printable(goodbye.reason.partition('; ')[0])}",
            {RETRY_AFTER: str(goodbye.retry_after_s)},
        )
