"""One session, from attaching to its end: the control stream, the payload stream, and a watch over both."""

import time
from collections.abc import Callable, Iterator

import grpc
from gyre_protos.v1 import loader_pb2 as pb

from gyre_client.batch import Batch, PayloadBuffer
from gyre_client.connection import RETRY_AFTER, Connection, error_from
from gyre_client.errors import DaemonFault, DaemonUnavailable, GyreError
from gyre_client.outbox import Outbox
from gyre_client.wire import chunk_data

HEARTBEATS_PER_LEASE = 4


class Attachment:
    """Receives the batches of one session.

    Neither stream can wait with a time-out of its own, so the sending side, which wakes for its heartbeats anyway, ends both
    when the daemon has said nothing for longer than the lease: then both sides agree that the session is over.
    """

    def __init__(self, connection: Connection, opened: pb.SessionOpened, num_credits: int, on_word: Callable[[], None]) -> None:
        """Attaches to the session.

        Args:
            connection: To the daemon that opened it.
            opened: The session.
            num_credits: How many batches may come at first.
            on_word: Called whenever the daemon says something on the control stream.
        """
        self._connection = connection
        self._session_id = opened.session_id
        self._lease_s = opened.lease_s
        self._on_word = on_word
        self._silent_for_s: float | None = None
        self._heard_at_s = time.monotonic()
        self.outbox = Outbox(opened.session_id, num_credits)
        self._payload: grpc.CallIterator[bytes] | None = None
        self._is_closed = False
        self._stream = connection.stream(self.outbox.messages(opened.lease_s / HEARTBEATS_PER_LEASE, self._watch))

    def batches(self) -> Iterator[Batch]:
        """Yields the session's batches as they arrive whole; ends where the stream of batches does.

        Raises:
            GyreError: Why the session ended before that.
        """
        try:
            for response in self._stream:
                self._heard_at_s = time.monotonic()
                self._on_word()
                match response.WhichOneof("event"):
                    case "batches":
                        yield from map(self._receive, response.batches.batches)
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

    def _receive(self, batch: pb.Batch) -> Batch:
        if batch.WhichOneof("payload") != "inline":
            raise DaemonFault(f"the payload of step {batch.step} comes in a way that this client does not know")
        buffer = PayloadBuffer(batch.inline.num_bytes)
        while buffer.num_missing:
            buffer.append(self._next_chunk())
        self.outbox.release(batch.step)
        return Batch(batch.step, batch.cursor, buffer.tensors(batch.tensors))

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
        if self._silent_for_s is None:
            return error_from(failure, self._connection.address)
        return DaemonUnavailable(
            f"the daemon at {self._connection.address.text} was silent for {self._silent_for_s:.1f} s, "
            f"longer than the lease of {self._lease_s:.1f} s"
        )

    def _goodbye(self, goodbye: pb.Goodbye) -> GyreError:
        return DaemonUnavailable(
            f"the daemon at {self._connection.address.text} says goodbye: {goodbye.reason}",
            {RETRY_AFTER: str(goodbye.retry_after_s)},
        )
