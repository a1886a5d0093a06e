"""One session from attaching to its end: the control stream, the payload stream, and a watchdog."""

import logging
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import grpc
from gyre_protos.text import printable
from gyre_protos.v1 import loader_pb2 as pb

from gyre_client.batches.arena import Arenas, Memory
from gyre_client.batches.batch import (
    BatchGroup,
    Cursors,
    Layout,
    PayloadBuffer,
    Widened,
    read_cursors,
    read_layout,
    read_layouts,
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
from gyre_client.transport.outbox import NEVER, Consumed, Outbox

# A lease outlives three lost or late heartbeats. More heartbeats wake an idle client more often.
HEARTBEATS_PER_LEASE = 4
# Credits and releases travel when half of the daemon's grant is waiting, so that the daemon still
# has the other half to go on with. All of it would stall the daemon; a small part would cost a
# message per batch.
MESSAGES_PER_GRANT = 2
# A peer that computes longer than this between two batches is rare; one that reads no more is not.
_PEER_S = 30.0

_log = logging.getLogger("gyre_client")


@dataclass(frozen=True, slots=True)
class Session:
    """A session that the daemon opened.

    Attributes:
        opened: The daemon's answer.
        arenas: The memory of the batches; None if their payload comes through gRPC.
        widened: The tensors to convert when they are taken out of a batch.
        tensors: The dtypes and shapes of each batch.
        is_endless: Whether the batches never end.
        stall_timeout_s: How long the consumer waits for a batch while the daemon only talks.
    """

    opened: pb.SessionOpened
    arenas: Arenas | None
    widened: Widened
    tensors: BatchTensors
    is_endless: bool
    stall_timeout_s: float


@dataclass(frozen=True, slots=True)
class _Inline:
    """A batch whose payload came through gRPC: the daemon may forget it at once."""

    first_step: int
    num_batches: int

    def take_back(self) -> None:
        """Does nothing: the memory is this process's own."""


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

        Args:
            connection: To the daemon that opened the session.
            session: The session.
            num_credits: How many batches the daemon may send at first.
            on_message: Called for every message of the daemon on the control stream.
            consumed: Returns the consumer's totals since the session began.
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

        Args:
            num_unread: How many batches wait in the queue; the consumer does not hold these.
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
                    memory = self._read_payload(layout.num_bytes)
                    layout.check_offsets(memory)
                    cursor = replace(cursors, own=cursors.own[row : row + 1])
                    yield BatchGroup(group.first_step + row, cursor, [layout], memory)
                self.outbox.release(_Inline(group.first_step, len(layouts)))
            case "arena" if self._is_closed:  # the watchdog closed while gRPC held this message
                raise self._silence()
            case _:
                raise DaemonFault(
                    f"the payload of step {group.first_step} comes in a way that this client "
                    "does not know"
                )

    def _lent(
        self, group: pb.BatchGroup, arenas: Arenas, cursors: Cursors, layouts: Sequence[Layout]
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

    def _read_payload(self, num_bytes: int) -> Memory:
        buffer = PayloadBuffer(num_bytes)
        while buffer.num_missing:
            buffer.append(self._next_chunk())
        return buffer.memory

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
        """Notes a message of the daemon, and how long the consumer has waited for a batch.

        Raises:
            DaemonFault: It has only talked while the consumer waited for `stall_timeout_s`.
        """
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
