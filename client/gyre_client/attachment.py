"""One session, from attaching to its end: the control stream, the payload stream, and a watch over both."""

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial

import grpc
import numpy as np
import numpy.typing as npt
from gyre_protos.v1 import loader_pb2 as pb

from gyre_client.arena import Arenas
from gyre_client.batch import Cursors, Layout, PayloadBuffer, Strip, read_cursors, read_layouts
from gyre_client.connection import RETRY_AFTER, Connection, error_from
from gyre_client.errors import DaemonFault, DaemonUnavailable, GyreError
from gyre_client.outbox import Outbox
from gyre_client.tokens import Widened
from gyre_client.wire import chunk_data

HEARTBEATS_PER_LEASE = 4
TOGETHER_PER_GRANT = 2


@dataclass(frozen=True, slots=True)
class Session:
    """What the daemon opened.

    Attributes:
        opened: Its answer.
        arenas: Where the batches lie; None where their payload comes through gRPC.
        widened: Which tensors are converted when they are taken out.
    """

    opened: pb.SessionOpened
    arenas: Arenas | None
    widened: Widened


class Attachment:
    """Receives the batches of one session.

    Neither stream can wait with a time-out of its own, so the sending side, which wakes for its heartbeats anyway, ends both
    when the daemon has said nothing for longer than the lease: then both sides agree that the session is over.
    """

    def __init__(
        self,
        connection: Connection,
        session: Session,
        num_credits: int,
        on_word: Callable[[], None],
        num_taken: Callable[[], int],
    ) -> None:
        """Attaches to the session.

        Args:
            connection: To the daemon that opened it.
            session: What it opened.
            num_credits: How many batches may come at first.
            on_word: Called whenever the daemon says something on the control stream.
            num_taken: Tells how many batches the consumer has taken since the session began.
        """
        opened = session.opened
        self._connection = connection
        self._session_id = opened.session_id
        self._lease_s = opened.lease_s
        self._arenas = session.arenas
        self._widened = session.widened
        self._num_granted = opened.prefetch_batches
        self._max_kept = opened.max_kept_batches
        self._on_word = on_word
        self._silent_for_s: float | None = None
        self._heard_at_s = time.monotonic()
        num_together = max(1, self._num_granted // TOGETHER_PER_GRANT)
        self.outbox = Outbox(opened.session_id, num_credits, num_together, num_taken)
        self._payload: grpc.CallIterator[bytes] | None = None
        self._is_closed = False
        self._stream = connection.stream(self.outbox.messages(opened.lease_s / HEARTBEATS_PER_LEASE, self._watch))

    def strips(self) -> Iterator[Strip]:
        """Yields the session's batches as they arrive whole, in strips; ends where the stream of batches does.

        Raises:
            GyreError: Why the session ended before that.
        """
        if self._arenas is not None:
            self._arenas.ready()  # while the daemon reads
        try:
            for response in self._stream:
                self._heard_at_s = time.monotonic()
                self._on_word()
                match response.WhichOneof("event"):
                    case "batches":
                        if response.batches.prefetch_batches:
                            self._take_grant(response.batches)
                        for strip in response.batches.strips:
                            yield from self._receive(strip)
                    case "arenas_left" if arenas := self._arenas:
                        self.outbox.unmapped(arenas.leave(response.arenas_left.arenas))
                    case "end_of_stream":
                        return
                    case "goodbye":
                        raise self._goodbye(response.goodbye)
        except grpc.RpcError as failure:
            raise self._error(failure) from None
        raise DaemonUnavailable(f"the daemon at {self._connection.address.text} ended the session without a word")

    def close(self) -> None:
        """Ends both streams, and with them the session."""
        self._is_closed = True
        self.outbox.close()
        self._cancel()
        self._arenas = None

    def must_copy(self, num_unread: int) -> bool:
        """Whether so many slots are in use, beside those of unread batches, that the daemon may soon have none to fill."""
        arenas = self._arenas
        return arenas is not None and arenas.num_lent - num_unread > self._max_kept

    def _take_grant(self, batches: pb.Batches) -> None:
        """From now on the daemon has room for more batches, or for fewer."""
        more = batches.prefetch_batches - self._num_granted
        self._num_granted, self._max_kept = batches.prefetch_batches, batches.max_kept_batches
        self.outbox.grant(more, max(1, self._num_granted // TOGETHER_PER_GRANT))

    def _receive(self, strip: pb.Strip) -> Iterator[Strip]:
        cursors, layouts = read_cursors(strip.cursors), read_layouts(strip, self._widened)
        match strip.WhichOneof("payload"):
            case "arena" if arenas := self._arenas:
                yield self._lent(strip, arenas, cursors, layouts)
            case "inline":
                for row, layout in enumerate(layouts):
                    memory = self._read_payload(layout.num_bytes)
                    yield Strip(strip.first_step + row, replace(cursors, own=cursors.own[row : row + 1]), [layout], memory)
                self.outbox.release(strip.first_step, len(layouts))
            case "arena" if self._is_closed:  # by the watch, while this was still in gRPC's hands
                raise self._silence()
            case _:
                raise DaemonFault(f"the payload of step {strip.first_step} comes in a way that this client does not know")

    def _lent(self, strip: pb.Strip, arenas: Arenas, cursors: Cursors, layouts: Sequence[Layout]) -> Strip:
        """All its memory is lent as one piece, and released when the last tensor in it is gone."""
        offsets = list(strip.arena.offsets_bytes)
        returned = partial(self.outbox.release, strip.first_step, len(layouts))
        try:
            begin, end = offsets[0], offsets[-1] + layouts[-1].num_bytes
            memory = arenas.get(strip.arena.arena).lend(begin, end, len(layouts), returned)
            return Strip(strip.first_step, cursors, layouts, memory, [offset - begin for offset in offsets])
        except (IndexError, ValueError):
            raise DaemonFault(f"step {strip.first_step} lies outside its arena") from None

    def _read_payload(self, num_bytes: int) -> npt.NDArray[np.uint8]:
        buffer = PayloadBuffer(num_bytes)
        while buffer.num_missing:
            buffer.append(self._next_chunk())
        return buffer.memory

    def _next_chunk(self) -> memoryview:
        if self._payload is None:
            self._payload = self._connection.read_payload(self._session_id)
            if self._is_closed:  # by another thread, which did not see this call
                self._cancel()
        frame = next(iter(self._payload), None)
        self._heard_at_s = time.monotonic()
        if frame is None:
            raise DaemonUnavailable(f"the daemon at {self._connection.address.text} ended the payload inside a batch")
        return chunk_data(frame)

    def _watch(self) -> None:
        silent_for_s = time.monotonic() - self._heard_at_s
        if silent_for_s > self._lease_s:
            self._silent_for_s = silent_for_s
            self.close()

    def _cancel(self) -> None:
        for call in (self._stream, self._payload):
            if call is not None:
                call.cancel()  # type: ignore[no-untyped-call]

    def _error(self, failure: grpc.RpcError) -> GyreError:
        return error_from(failure, self._connection.address) if self._silent_for_s is None else self._silence()

    def _silence(self) -> DaemonUnavailable:
        return DaemonUnavailable(
            f"the daemon at {self._connection.address.text} was silent for {self._silent_for_s or 0.0:.1f} s, "
            f"longer than the lease of {self._lease_s:.1f} s"
        )

    def _goodbye(self, goodbye: pb.Goodbye) -> GyreError:
        return DaemonUnavailable(
            f"the daemon at {self._connection.address.text} says goodbye: {goodbye.reason}",
            {RETRY_AFTER: str(goodbye.retry_after_s)},
        )
