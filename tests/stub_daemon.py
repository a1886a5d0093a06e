"""A server that speaks the daemon's protocol as a test wants it, over real gRPC and real sockets.

Left alone, it answers as a daemon would that serves one dataset: per sample, four int32 `tokens`
and a ragged `txt`, in batches of two samples. A test changes what it answers.
"""

import contextlib
import fcntl
import itertools
import mmap
import os
import socket
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Self

import grpc
import numpy as np
from gyre_protos.v1 import loader_pb2 as pb

BATCH_SIZE = 2
LEASE_S = 0.4
TOKEN = b"t" * 32
FIELDS = (
    pb.Field(name="tokens", dtype="int32", shape=[4]),
    pb.Field(name="txt", dtype="uint8", ragged=True),
)
TEXTS = ("hello", "you")  # of the two samples of each batch
END = pb.StreamResponse(end_of_stream=pb.EndOfStream())
BEAT = pb.StreamResponse(heartbeat=pb.Heartbeat(waiting_for="the storage"))


def description() -> pb.DatasetDescription:
    return pb.DatasetDescription(
        name="d", format="webdataset", uri="/d", num_samples=8, num_shards=1, num_bytes=100,
        fingerprint="f", fields=FIELDS,
    )  # fmt: skip


def layout() -> pb.Layout:
    """The layout of every batch: tensors at multiples of 64 bytes."""
    tensors = [
        pb.Tensor(name="sample_id", dtype="int64", shape=[2], offset_bytes=0),
        pb.Tensor(name="tokens", dtype="int32", shape=[2, 4], offset_bytes=64),
        pb.Tensor(name="txt", dtype="uint8", shape=[8], offset_bytes=128),
        pb.Tensor(name="txt.offsets", dtype="int64", shape=[3], offset_bytes=192),
    ]
    return pb.Layout(tensors=tensors, num_bytes=256)


def payload(offsets: Sequence[int] = (0, 5, 8)) -> bytes:
    """The bytes of every batch."""
    data = bytearray(256)
    data[0:16] = np.arange(2, dtype=np.int64).tobytes()
    data[64:96] = np.arange(8, dtype=np.int32).tobytes()
    data[128:136] = "".join(TEXTS).encode()
    data[192:216] = np.array(offsets, np.int64).tobytes()
    return bytes(data)


def group(step: int, num_batches: int = 1) -> pb.BatchGroup:
    """Batches in the first arena, each on a page of its own."""
    return pb.BatchGroup(
        first_step=step,
        layouts=[layout()],
        cursors=pb.Cursors(own=[b"%d" % (step + row + 1) for row in range(num_batches)]),
        arena=pb.ArenaSlot(
            offsets_bytes=[mmap.PAGESIZE * (step + row) % (1 << 16) for row in range(num_batches)]
        ),
    )


def batches(*groups: pb.BatchGroup) -> pb.StreamResponse:
    return pb.StreamResponse(batches=pb.Batches(groups=groups))


def frame(data: bytes) -> bytes:
    return pb.PayloadChunk(data=data).SerializeToString()


def memory_file(num_bytes: int = 1 << 16, *, sealed: bool = True, data: bytes = b"") -> int:
    """A memory file in which each page begins with a batch."""
    descriptor = os.memfd_create("stub", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.ftruncate(descriptor, num_bytes)
    for begin in range(0, num_bytes - 256, mmap.PAGESIZE):
        os.pwrite(descriptor, data or payload(), begin)
    if sealed:
        fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK)
    return descriptor


class StubDaemon:
    """One server on a socket, with a side channel beside it.

    Attributes:
        answers: What a unary call is answered, by the name of its method: a function of the
            request. One that is missing is not implemented.
        responses: What is sent on the control stream of a session, given the number of its session.
        frames: The payload frames.
        token: What a client receives that connects to the side channel.
        make_memory: Makes the memory file of the first arena.
        side_message: What comes with the descriptor; None for what belongs there.
        shares: Whether there is a side channel.
        max_queued_batches: How many batches a client takes ahead.
        opened: The requests for sessions.
        said: What clients said on control streams.
    """

    def __init__(self, folder: Path) -> None:
        self.path = folder / "gyre.sock"
        self.side_path = folder / "gyre.sock.side"
        self.address = f"unix:{self.path}"
        self.answers: dict[str, Callable[[Any], Any]] = {
            "DescribeDataset": lambda request: description(),
            "OpenSession": self.session,
            "CloseSession": lambda request: pb.CloseSessionResponse(),
            "GetStatus": lambda request: pb.DaemonStatus(version="1"),
        }
        self.responses: Callable[[StubDaemon, int], Iterator[pb.StreamResponse]] = (
            lambda stub, session: iter([batches(group(step)) for step in range(2)])
        )
        self.frames: list[bytes | None] = []
        self.token = TOKEN
        self.make_memory: Callable[[], int | None] = memory_file
        self.side_message: bytes | None = None
        self.shares = True
        self.max_queued_batches = 2
        self.opened: list[pb.OpenSessionRequest] = []
        self.said: list[pb.StreamRequest] = []
        self.stopping = threading.Event()
        self._peers: list[socket.socket] = []

    def session(self, request: pb.OpenSessionRequest) -> pb.SessionOpened:
        """The session that a daemon would open."""
        step = request.step if request.HasField("step") else int(request.cursor or b"0")
        return pb.SessionOpened(
            session_id=f"session{len(self.opened)}",
            first_step=step,
            num_samples=8,
            fingerprint="f",
            cursor=b"%d" % step,
            lease_s=LEASE_S,
            max_queued_batches=self.max_queued_batches,
            max_kept_batches=4,
            fields=FIELDS,
            arena_bytes=1 << 16 if self.shares else 0,
        )

    def __enter__(self) -> Self:
        self._pool = ThreadPoolExecutor(16)
        self._server = grpc.server(self._pool)
        self._server.add_registered_method_handlers("gyre_protos.v1.Loader", self._handlers())  # type: ignore[attr-defined]
        self._server.add_insecure_port(f"unix:{self.path}")
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        if self.shares:
            self._listener.bind(str(self.side_path))
            self._listener.listen()
        self._accepting = threading.Thread(target=self._accept)
        self._accepting.start()
        self._server.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self.stopping.set()
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self._accepting.join()
        self._server.stop(0).wait()
        self._pool.shutdown()
        for peer in self._peers:
            peer.close()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                peer, _ = self._listener.accept()
                self._peers.append(peer)
                with contextlib.suppress(BrokenPipeError):
                    peer.send(self.token)

    def _handlers(self) -> dict[str, Any]:
        handlers: dict[str, Any] = {}
        for method in pb.DESCRIPTOR.services_by_name["Loader"].methods:
            take = getattr(pb, method.input_type.name).FromString
            if method.name == "Stream":
                handlers[method.name] = grpc.stream_stream_rpc_method_handler(
                    self._stream, take, pb.StreamResponse.SerializeToString
                )
            elif method.name == "ReadPayload":
                handlers[method.name] = grpc.unary_stream_rpc_method_handler(self._payload, take)
            elif method.server_streaming:
                handlers[method.name] = grpc.unary_stream_rpc_method_handler(
                    self._several(method.name), take, lambda message: message.SerializeToString()
                )
            else:
                handlers[method.name] = grpc.unary_unary_rpc_method_handler(
                    self._unary(method.name), take, lambda message: message.SerializeToString()
                )
        return handlers

    def _unary(self, name: str) -> Callable[[Any, grpc.ServicerContext], Any]:
        def answer(request: Any, context: grpc.ServicerContext) -> Any:
            if name not in self.answers:
                context.abort(grpc.StatusCode.UNIMPLEMENTED, name)
            if name == "OpenSession":
                self._hand_over(request)
            return self.answers[name](request)

        return answer

    def _several(self, name: str) -> Callable[[Any, grpc.ServicerContext], Any]:
        return lambda request, context: self.answers[name](request)

    def _hand_over(self, request: pb.OpenSessionRequest) -> None:
        self.opened.append(request)
        if self.shares and self._peers:
            message = self.side_message or b"session%d 0" % len(self.opened)
            descriptor = self.make_memory()
            descriptors = [] if descriptor is None else [descriptor]
            with contextlib.suppress(OSError):
                socket.send_fds(self._peers[-1], [message], descriptors)
            for each in descriptors:
                os.close(each)

    def _stream(
        self, requests: Iterator[pb.StreamRequest], context: grpc.ServicerContext
    ) -> Iterator[pb.StreamResponse]:
        self.said.append(next(requests))
        for response in self.responses(self, len(self.opened) - 1):
            yield response
            if response == END:
                self.said.extend(requests)
        if self.shares:  # as a daemon that has nothing to send yet
            while context.is_active() and not self.stopping.wait(LEASE_S / 4):
                yield BEAT

    def _payload(
        self, request: pb.ReadPayloadRequest, context: grpc.ServicerContext
    ) -> Iterator[bytes]:
        for data in self.frames:
            if data is None:
                self.stopping.wait(20)
            else:
                yield data


def heartbeats(stub: StubDaemon, session: int) -> Iterator[pb.StreamResponse]:
    """Heartbeats without an end."""
    for _ in itertools.count():
        yield BEAT
        if stub.stopping.wait(LEASE_S / 8):
            return
