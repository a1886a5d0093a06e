"""The client against daemons that lie: every wrong answer is a clear error, and nothing else."""

import os
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from gyre_client import Loader
from gyre_client.errors import (
    CursorRejected,
    DaemonFault,
    DaemonUnavailable,
    StorageUnavailable,
    UntrustedDaemon,
)
from gyre_client.transport.address import parse_address
from gyre_client.transport.connection import Connection
from gyre_protos.v1 import loader_pb2 as pb

from tests import stub_daemon
from tests.stub_daemon import (
    BATCH_SIZE,
    END,
    StubDaemon,
    batches,
    frame,
    group,
    heartbeats,
    layout,
    memory_file,
    payload,
)

NOBODY = 65534
HUGE = 1 << 63

Change = Callable[[Any], object]


@pytest.fixture
def stub(tmp_path: Path) -> StubDaemon:
    return StubDaemon(tmp_path)


def loader_of(stub: StubDaemon, **arguments: Any) -> Loader:
    return Loader(
        "d", batch_size=BATCH_SIZE, address=stub.address, reattach_timeout_s=0.5, **arguments
    )


def read_all(stub: StubDaemon, num_batches: int, **arguments: Any) -> list[dict[str, torch.Tensor]]:
    with stub, loader_of(stub, **arguments) as loader:
        stream = loader.stream()
        return [next(stream) for _ in range(num_batches)]


def put(path: str, value: Any) -> Change:
    """Sets a field; a path like `tensors.1.dtype` goes through messages and lists."""

    def change(message: Any) -> None:
        *way, last = path.split(".")
        for name in way:
            message = message[int(name)] if name.isdigit() else getattr(message, name)
        if isinstance(value, list):
            del getattr(message, last)[:]
            getattr(message, last).extend(value)
        else:
            setattr(message, last, value)

    return change


def test_the_stub_itself_is_read_as_a_daemon_would_be(stub: StubDaemon) -> None:
    for batch in read_all(stub, 2):
        assert list(batch) == ["sample_id", "tokens", "txt", "txt.offsets"]
        assert batch["tokens"].tolist() == [[0, 1, 2, 3], [4, 5, 6, 7]]
        assert bytes(batch["txt"].tolist()) == b"helloyou"


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        (put("num_samples", 0), "without samples"),
        (put("num_samples", HUGE), f"num_samples is {HUGE}"),
        (put("num_shards", 2**64 - 1), "num_shards"),
        (put("fingerprint", ""), "fingerprint"),
        (put("fields", []), "fields"),
        (put("fields.0.dtype", "object"), "'object'"),
        (put("fields.0.dtype", "<U9"), "'<U9'"),
        (put("fields.0.name", ""), "''"),
        (put("fields.0.name", "txt"), "'txt'"),
        (put("fields.0.name", "txt.offsets"), "'txt'"),
        (put("fields.0.name", "sample_id"), "'sample_id'"),
        (put("fields.0.shape", [2**40, 2**40]), "fits into no memory"),
    ],
)
def test_descriptions_that_no_dataset_has(stub: StubDaemon, change: Change, complaint: str) -> None:
    description = stub_daemon.description()
    change(description)
    stub.answers["DescribeDataset"] = lambda request: description
    with stub, pytest.raises(DaemonFault, match=complaint):
        loader_of(stub)


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        (put("session_id", ""), "calls a session ''"),
        (put("session_id", "x" * 4000), "calls a session"),
        (put("lease_s", 0.0), "lease of 0.0 s"),
        (put("lease_s", -1.0), "lease of -1.0 s"),
        (put("lease_s", float("nan")), "lease_s is nan"),
        (put("lease_s", float("inf")), "lease_s is inf"),
        (put("lease_s", 1e9), "lease of"),
        (put("cursor", b""), "cursor of 0 bytes"),
        (put("cursor", b"x" * 5000), "cursor of 5000 bytes"),
        (put("first_step", HUGE), f"first step is {HUGE}"),
        (put("num_samples", 0), "num_samples is 0"),
        (put("num_samples", 7), "in two ways"),
        (put("max_queued_batches", 0), "max_queued_batches is 0"),
        (put("max_queued_batches", 2**32 - 1), "max_queued_batches is 4294967295"),
        (put("max_kept_batches", 2**32 - 1), "max_kept_batches"),
        (put("arena_bytes", HUGE), "arena_bytes"),
        (put("arena_bytes", 65537), "not whole pages"),
        (put("arena_bytes", 1 << 20), "65536 bytes and announced 1048576"),
        (put("fields.0.dtype", "int64"), "in two ways"),
        (put("fields.1.ragged", False), "in two ways"),
    ],
)
def test_sessions_that_no_daemon_grants(stub: StubDaemon, change: Change, complaint: str) -> None:
    def answer(request: pb.OpenSessionRequest) -> pb.SessionOpened:
        opened = stub.session(request)
        change(opened)
        return opened

    stub.answers["OpenSession"] = answer
    with pytest.raises(DaemonFault, match=complaint):
        read_all(stub, 1)
    assert len(stub.opened) == 1, "what is wrong once is not asked for again"


def test_a_dataset_that_changed_since_it_was_described(stub: StubDaemon) -> None:
    def answer(request: pb.OpenSessionRequest) -> pb.SessionOpened:
        opened = stub.session(request)
        opened.fingerprint = "g"
        return opened

    stub.answers["OpenSession"] = answer
    with pytest.raises(CursorRejected, match="its fingerprint was f and is g now"):
        read_all(stub, 1)


def test_a_step_that_was_not_asked_for(stub: StubDaemon) -> None:
    with stub, loader_of(stub) as loader:
        stub.answers["OpenSession"] = lambda request: pb.SessionOpened.FromString(
            stub.session(pb.OpenSessionRequest()).SerializeToString()
        )
        with pytest.raises(DaemonFault, match="begins at step 0, but step 8 was asked for"):
            loader.set_epoch(2)


GROUPS = [
    (put("first_step", 1), "sent step 1 where step 0 comes next"),
    (put("first_step", 2**64 - 1), "where step 0 comes next"),
    (put("cursors.own", []), "sent 0 batches"),
    (put("cursors.own", [b"1", b"2", b"3"]), "sent 3 batches from step 0 on, but it may send 1 to"),
    (put("cursors.own", [b"x" * 4097]), "cursor of 4097 bytes"),
    (put("cursors.own", [b""]), "cursor of 0 bytes"),
    (put("cursors.common", b"x" * 5000), "cursor of 5001 bytes"),
    (put("cursors.num_before", 9), "shorter than their beginning"),
    (put("cursors.num_before", 2**32 - 1), "shorter than their beginning"),
    (put("layouts", []), "come with 0 layouts"),
    (put("layouts", [layout(), layout()]), "come with 2 layouts"),
    (put("layouts.0.tensors", []), "the tensors none"),
    (put("layouts.0.tensors", layout().tensors[:3]), "this session's batches have"),
    (put("layouts.0.tensors.0.name", "mask"), "'mask'"),
    (put("layouts.0.tensors.0.name", "tokens"), "this session's batches have"),
    (put("layouts.0.tensors.1.dtype", "int64"), "'tokens' as int64"),
    (put("layouts.0.tensors.1.dtype", "object"), "'tokens' as object"),
    (put("layouts.0.tensors.1.shape", [2, 5]), r"\[2, 5\], but it is int32 \[2, 4\]"),
    (put("layouts.0.tensors.1.shape", [3, 4]), r"\[3, 4\]"),
    (put("layouts.0.tensors.1.shape", []), r"\[\]"),
    (put("layouts.0.tensors.1.shape", [HUGE, 4]), "but it is int32"),
    (put("layouts.0.tensors.1.offset_bytes", 65), "not aligned"),
    (put("layouts.0.tensors.1.offset_bytes", 0), "overlaps another one"),
    (put("layouts.0.tensors.1.offset_bytes", 1 << 40), "overlaps another one"),
    (put("layouts.0.tensors.2.shape", [HUGE]), "overlaps another one"),
    (put("layouts.0.tensors.2.shape", [2, 4]), r"but it is uint8 \[\*\]"),
    (put("layouts.0.tensors.2.shape", [9]), "does not rise from 0 to 9"),
    (put("layouts.0.tensors.3.shape", [2]), r"it is int64 \[3\]"),
    (put("layouts.0.tensors.3.offset_bytes", 2**64 - 64), "announced a batch of 256 bytes"),
    (put("layouts.0.num_bytes", 255 - 64), "announced a batch of 191 bytes"),
    (put("layouts.0.num_bytes", 320), "announced a batch of 320 bytes"),
    (put("layouts.0.num_bytes", HUGE), f"announced a batch of {HUGE} bytes"),
]  # fmt: skip


@pytest.mark.parametrize(("change", "complaint"), GROUPS)
@pytest.mark.parametrize("shares", [True, False], ids=["arena", "inline"])
def test_batches_that_do_not_fit(
    stub: StubDaemon, change: Change, complaint: str, shares: bool
) -> None:
    stub.shares = shares
    stub.frames = [frame(payload())]
    wrong = group(0)
    if not shares:
        wrong.inline.SetInParent()
    change(wrong)
    stub.responses = lambda stub, session: iter([batches(wrong)])
    with pytest.raises(DaemonFault, match=complaint):
        read_all(stub, 1)
    assert len(stub.opened) == 1


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        (put("arena.offsets_bytes", []), "step 0 cannot be where the daemon says"),
        (put("arena.offsets_bytes", [0, 4096]), "step 0 cannot be where the daemon says"),
        (put("arena.offsets_bytes", [64]), "byte 64 is not the first of a page"),
        (put("arena.offsets_bytes", [1 << 16]), "of a file of 65536"),
        (put("arena.offsets_bytes", [1 << 62]), "of a file of 65536"),
        (put("arena.offsets_bytes", [2**64 - 4096]), "of a file of 65536"),
        (put("arena.arena", 1 << 31), "next one of this session is arena 1"),
    ],
)
def test_memory_that_is_not_there(stub: StubDaemon, change: Change, complaint: str) -> None:
    wrong = group(0)
    change(wrong)
    stub.responses = lambda stub, session: iter([batches(wrong)])
    with pytest.raises(DaemonFault, match=complaint):
        read_all(stub, 1)


@pytest.mark.parametrize("offsets", [[4096, 0], [0, 0], [0, 128]])
def test_batches_of_a_group_that_overlap(stub: StubDaemon, offsets: list[int]) -> None:
    wrong = group(0, 2)
    put("arena.offsets_bytes", offsets)(wrong)
    stub.responses = lambda stub, session: iter([batches(wrong)])
    with pytest.raises(DaemonFault, match="belongs to the batch before"):
        read_all(stub, 1)


def test_a_slot_that_is_still_in_use(stub: StubDaemon) -> None:
    second = group(1)
    put("arena.offsets_bytes", [0])(second)
    stub.responses = lambda stub, session: iter([batches(group(0)), batches(second)])
    with stub, loader_of(stub) as loader:
        kept = next(loader)
        with pytest.raises(DaemonFault, match="is lent already"):
            next(loader)
        assert bytes(kept["txt"].tolist()) == b"helloyou"


@pytest.mark.parametrize("offsets", [(1, 5, 8), (0, 9, 8), (0, 5, 7), (0, -5, 8), (0, 5, 1 << 62)])
@pytest.mark.parametrize("shares", [True, False], ids=["arena", "inline"])
def test_offsets_that_leave_their_field(
    stub: StubDaemon, offsets: tuple[int, ...], shares: bool
) -> None:
    stub.shares = shares
    stub.make_memory = lambda: memory_file(data=payload(offsets))
    stub.frames = [frame(payload(offsets))]
    wrong = group(0)
    if not shares:
        wrong.inline.SetInParent()
    stub.responses = lambda stub, session: iter([batches(wrong)])
    with pytest.raises(DaemonFault, match=r"'txt\.offsets' does not rise from 0 to 8"):
        read_all(stub, 1)


def of_file() -> int:
    with tempfile.TemporaryFile() as file:
        file.truncate(1 << 16)
        return os.dup(file.fileno())


def of_socket() -> int:
    one, other = socket.socketpair()
    other.close()
    return one.detach()


@pytest.mark.parametrize(
    ("make_memory", "complaint"),
    [
        (lambda: memory_file(sealed=False), "not sealed against shrinking"),
        (lambda: memory_file(1 << 12), "of 4096 bytes and announced 65536"),
        (lambda: memory_file(1 << 20), "of 1048576 bytes and announced 65536"),
        (lambda: memory_file(0), "of 0 bytes"),
        (lambda: memory_file(5000), "of 5000 bytes"),
        (lambda: os.open("/dev/zero", os.O_RDONLY), "that is none"),
        (of_file, "shared memory"),
        (of_socket, "that is none"),
    ],
    ids=["unsealed", "short", "long", "empty", "no pages", "device", "file", "socket"],
)
def test_memory_that_could_end_this_process(
    stub: StubDaemon, make_memory: Callable[[], int], complaint: str
) -> None:
    stub.make_memory = make_memory
    num_descriptors = len(list(Path("/proc/self/fd").iterdir()))
    with pytest.raises(DaemonFault, match=complaint):
        read_all(stub, 1)
    assert len(list(Path("/proc/self/fd").iterdir())) <= num_descriptors


def test_an_arena_of_another_session(stub: StubDaemon) -> None:
    stub.side_message = b"other 0"
    with pytest.raises(DaemonUnavailable, match="did not arrive on the side channel"):
        read_all(stub, 1)


@pytest.mark.parametrize("token", [b"", b"short", b"\n" * 32, b"\x1b" * 32, b"\xff" * 32])
def test_a_token_that_is_none_is_never_sent_on(stub: StubDaemon, token: bytes) -> None:
    stub.token = token
    stub.responses = lambda stub, session: iter([batches(inline(0))])
    stub.frames = [frame(payload())]
    stub.answers["OpenSession"] = without_arena(stub)
    assert len(read_all(stub, 1)) == 1


def inline(step: int) -> pb.BatchGroup:
    message = group(step)
    message.inline.SetInParent()
    return message


def without_arena(stub: StubDaemon) -> Callable[[Any], pb.SessionOpened]:
    def answer(request: pb.OpenSessionRequest) -> pb.SessionOpened:
        opened = stub.session(request)
        opened.arena_bytes = 0
        return opened

    return answer


@pytest.mark.parametrize(
    ("frames", "complaint"),
    [
        ([b"\x12\1a"], "not a PayloadChunk"),
        ([b"\x0a\xff\xff\xff\xff\xff\xff\xff\xff\x01"], "not a PayloadChunk"),
        ([frame(payload() + b"x")], "257 bytes came where 256 end the batch"),
        ([frame(payload()[:200]), frame(bytes(57))], "57 bytes came where 56 end the batch"),
    ],
)
def test_payload_that_is_too_long_or_none(
    stub: StubDaemon, frames: list[bytes | None], complaint: str
) -> None:
    stub.shares = False
    stub.frames = frames
    stub.responses = lambda stub, session: iter([batches(inline(0))])
    with pytest.raises(DaemonFault, match=complaint):
        read_all(stub, 1)


def grant(num_queued: int, num_kept: int = 4) -> pb.StreamResponse:
    return pb.StreamResponse(
        batches=pb.Batches(max_queued_batches=num_queued, max_kept_batches=num_kept)
    )


@pytest.mark.parametrize(
    ("responses", "complaint"),
    [
        ([END], "ended a stream that has no end, before step 0"),
        ([batches(group(0)), END], "before step 1"),
        ([batches(group(0)), batches(group(0))], "sent step 0 where step 1 comes next"),
        ([batches(group(0)), batches(group(2))], "sent step 2 where step 1 comes next"),
        ([batches(group(0), group(1), group(2))], "it may send 1 to 0"),
        ([grant(2**32 - 1)], "max_queued_batches is 4294967295"),
        ([grant(2, 2**32 - 1)], "max_kept_batches is 4294967295"),
        ([pb.StreamResponse(arenas_left=pb.ArenasLeft(arenas=[7]))], "left arena 7"),
        ([pb.StreamResponse(arenas_left=pb.ArenasLeft(arenas=[0, 0]))], "left arena 0"),
        ([batches(pb.BatchGroup(layouts=[layout()], cursors=pb.Cursors(own=[b"1"])))],
         "payload of step 0 comes in a way"),
    ],
)  # fmt: skip
def test_streams_that_break_the_protocol(
    stub: StubDaemon, responses: list[pb.StreamResponse], complaint: str
) -> None:
    stub.responses = lambda stub, session: iter(responses)
    with pytest.raises(DaemonFault, match=complaint):
        read_all(stub, 4)
    assert len(stub.opened) == 1


def test_an_iteration_does_not_end_before_its_epoch(stub: StubDaemon) -> None:
    stub.responses = lambda stub, session: iter([batches(group(0)), END])
    with stub, loader_of(stub, restart=True) as loader:
        iterator = iter(loader)
        next(iterator)
        with pytest.raises(DaemonFault, match=r"ended the batches before step 1, .* to step 4"):
            next(iterator)


def test_a_daemon_that_resumes_elsewhere(stub: StubDaemon) -> None:
    def answer(request: pb.OpenSessionRequest) -> pb.SessionOpened:
        opened = stub.session(request)
        opened.first_step += 3 * (len(stub.opened) > 1)
        return opened

    goodbye = pb.StreamResponse(goodbye=pb.Goodbye(reason="\x1b[2J", retry_after_s=float("nan")))
    stub.answers["OpenSession"] = answer
    stub.responses = lambda stub, session: iter([batches(group(0)), goodbye])
    with pytest.raises(DaemonFault, match="resumed at step 4, but step 1 comes next"):
        read_all(stub, 2)


@pytest.mark.parametrize("shares", [True, False], ids=["control", "payload"])
def test_a_daemon_that_talks_for_ever_and_sends_nothing(stub: StubDaemon, shares: bool) -> None:
    stub.shares = shares
    if shares:
        stub.responses = heartbeats
    else:
        stub.responses = lambda stub, session: iter([batches(inline(0))])
        stub.frames = [frame(b"")] * 1_000_000
    with pytest.raises(DaemonFault, match="has sent nothing of step") as caught:
        read_all(stub, 1, stall_timeout_s=0.2)
    assert "stall_timeout_s" in str(caught.value)
    assert ("it waits for the storage" in str(caught.value)) == shares
    assert len(stub.opened) == 1


def test_a_trainer_that_takes_nothing_stalls_nobody(stub: StubDaemon) -> None:
    """The queue is full, so the daemon may only talk."""

    def two_and_then_heartbeats(stub: StubDaemon, session: int) -> Iterator[pb.StreamResponse]:
        yield batches(group(0), group(1))
        for beats, beat in enumerate(heartbeats(stub, session)):
            if beats == 20:
                talked.set()
            yield beat

    import threading

    talked = threading.Event()
    stub.responses = two_and_then_heartbeats
    with stub, loader_of(stub, stall_timeout_s=0.1) as loader:
        stream = loader.stream()
        assert talked.wait(120)
        assert len([next(stream), next(stream)]) == 2


@pytest.mark.parametrize("retry_after_s", [float("nan"), float("inf"), -1.0, 1e308])
def test_goodbyes_that_ask_for_absurd_pauses(stub: StubDaemon, retry_after_s: float) -> None:
    goodbye = pb.StreamResponse(
        goodbye=pb.Goodbye(reason="\x1b]0;x\x07", retry_after_s=retry_after_s)
    )
    stub.responses = lambda stub, session: iter([goodbye])
    with pytest.raises(DaemonUnavailable, match=r"\\x1b\]0;x\\x07 \(gave up after"):
        read_all(stub, 1)


def explained(facts: dict[str, str], retry_s: int = 0) -> bytes:
    from google.protobuf.any_pb2 import Any as Packed
    from google.protobuf.duration_pb2 import Duration
    from google.rpc.error_details_pb2 import ErrorInfo, RetryInfo
    from google.rpc.status_pb2 import Status

    status = Status(code=14, message="\x1b[31mred\u202e")
    info = ErrorInfo(domain="gyre", reason="StorageUnavailable", metadata=facts)
    broken = Packed(type_url="type.googleapis.com/google.rpc.ErrorInfo", value=b"\xff\xff\xff")
    status.details.append(broken)
    for detail in (info, RetryInfo(retry_delay=Duration(seconds=retry_s))):
        packed = Packed()
        packed.Pack(detail)
        status.details.append(packed)
    return bytes(status.SerializeToString())


@pytest.mark.parametrize(
    ("facts", "retry_s"),
    [
        ({"needed_bytes": "many", "limit_bytes": "few"}, 0),
        ({"needed_bytes": "nan", "limit_bytes": "-inf"}, 0),
        ({"retry_after_s": "soon"}, 0),
        ({}, 2**62),
        ({}, -(2**62)),
    ],
)
def test_explanations_that_are_none(stub: StubDaemon, facts: dict[str, str], retry_s: int) -> None:
    import grpc

    class Failing(StubDaemon):
        def _unary(self, name: str) -> Any:
            def answer(request: Any, context: grpc.ServicerContext) -> Any:
                details = ("grpc-status-details-bin", explained(facts, retry_s))
                context.set_trailing_metadata((details,))
                context.abort(grpc.StatusCode.UNAVAILABLE, "\x1b[31mred\u202e")

            return answer

    failing = Failing(stub.path.parent)
    with failing, pytest.raises(StorageUnavailable) as caught:
        loader_of(failing)
    assert str(caught.value).startswith(r"\x1b[31mred\u202e")


@pytest.mark.parametrize(
    ("status", "complaint"),
    [
        (pb.DaemonStatus(uptime_s=float("inf")), "uptime_s is inf"),
        (
            pb.DaemonStatus(sessions=[pb.SessionState(lately=pb.Lately(elapsed_s=float("nan")))]),
            "elapsed_s is nan",
        ),
    ],
)
def test_status_with_numbers_that_are_none(
    stub: StubDaemon, status: pb.DaemonStatus, complaint: str
) -> None:
    stub.answers["GetStatus"] = lambda request: status
    with (
        stub,
        Connection(parse_address(stub.address)) as connection,
        pytest.raises(DaemonFault, match=complaint),
    ):
        connection.status()


# ---- who is at the other end

AS_NOBODY = """
import os, pathlib, sys
sys.path[:0] = {path!r}
from tests.stub_daemon import StubDaemon
os.setgroups([]); os.setresgid(*3 * [{user}]); os.setresuid(*3 * [{user}])
with StubDaemon(pathlib.Path(sys.argv[1])) as stub:
    stub.path.chmod(0o777); pathlib.Path(str(stub.path) + ".side").chmod(0o777)
    print("ready", flush=True)
    sys.stdin.read()
print(len(stub.opened), len(stub._peers), flush=True)
"""


@pytest.fixture
def others_daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., Any]]:
    """Starts a daemon of the user `nobody` in a folder; returns its process."""
    if os.geteuid():
        pytest.skip("only root can start a process of another user")
    started: list[subprocess.Popen[str]] = []

    def start(folder: Path) -> "subprocess.Popen[str]":
        program = AS_NOBODY.format(path=[*filter(None, sys.path), str(Path.cwd())], user=NOBODY)
        process = subprocess.Popen(
            [sys.executable, "-c", program, str(folder)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        )  # fmt: skip
        started.append(process)
        assert process.stdout
        assert process.stdout.readline() == "ready\n"
        return process

    yield start
    for process in started:
        process.communicate(timeout=120)


@pytest.fixture
def open_folder() -> Iterator[Path]:
    """A folder that another user can reach, unlike those of pytest."""
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:
        path = Path(folder)
        path.chmod(0o755)
        yield path


def test_a_daemon_of_another_user_is_told_nothing(
    others_daemon: Callable[..., Any], open_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = open_folder / "run"
    folder.mkdir()
    os.chown(folder, NOBODY, NOBODY)
    process = others_daemon(folder)
    address = f"unix:{folder}/gyre.sock"
    with pytest.raises(UntrustedDaemon, match=f"uid {NOBODY} .*trusts only uid 0") as caught:
        Loader("d", batch_size=2, address=address)
    assert caught.value.facts == {"uid": str(NOBODY), "trusted_uids": "0"}

    # A folder of root's does not make that daemon root's.
    os.chown(folder, 0, 0)
    with pytest.raises(UntrustedDaemon, match=f"uid {NOBODY}"):
        Loader("d", batch_size=2, address=address)

    # Its socket file may belong to root, and the kernel still tells.
    os.chown(folder / "gyre.sock", 0, 0)
    with pytest.raises(UntrustedDaemon, match=f"is served by process {process.pid} of uid"):
        Loader("d", batch_size=2, address=address)
    os.chown(folder / "gyre.sock", NOBODY, NOBODY)

    for user in (NOBODY, str(NOBODY), "nobody"):
        with Loader("d", batch_size=2, address=address, daemon_user=user) as loader:
            assert len(next(loader.stream())) == 4
    monkeypatch.setenv("GYRE_DAEMON_USER", "nobody")
    with Loader("d", batch_size=2, address=address) as loader:
        next(loader.stream())
    answer, _ = process.communicate(timeout=120)
    num_opened, _ = map(int, answer.split())
    assert num_opened == 4


def test_the_command_names_the_user_to_trust(
    others_daemon: Callable[..., Any], open_folder: Path
) -> None:
    folder = open_folder / "run"
    folder.mkdir()
    os.chown(folder, NOBODY, NOBODY)
    others_daemon(folder)
    command = [sys.executable, "-m", "gyre_client", "status", f"--address=unix:{folder}/gyre.sock"]
    refused = subprocess.run(command, capture_output=True, text=True, check=False)
    assert refused.returncode == 1
    assert f"uid {NOBODY}" in refused.stderr
    assert "trusts only uid 0" in refused.stderr
    command.append("--daemon-user=nobody")
    assert subprocess.run(command, capture_output=True, check=False).returncode == 0


def test_a_side_channel_of_another_user_is_refused(
    others_daemon: Callable[..., Any], open_folder: Path
) -> None:
    """The main socket is root's, and the one beside it is not."""
    theirs, ours = open_folder / "theirs", open_folder / "ours"
    for folder in (theirs, ours):
        folder.mkdir()
    os.chown(theirs, NOBODY, NOBODY)
    others_daemon(theirs)
    stub = StubDaemon(ours)
    with stub:
        Path(f"{stub.path}.side").unlink()
        Path(f"{stub.path}.side").symlink_to(theirs / "gyre.sock.side")
        with (
            pytest.raises(UntrustedDaemon, match=f"uid {NOBODY}"),
            loader_of(stub) as loader,
        ):
            next(loader.stream())
    assert stub.opened == []


@pytest.mark.parametrize("mode", [0o777, 0o775, 0o722])
def test_a_folder_in_which_others_may_put_a_socket(stub: StubDaemon, mode: int) -> None:
    folder = stub.path.parent
    with stub:
        folder.chmod(mode)
        with pytest.raises(UntrustedDaemon, match=rf"mode {mode:04o}.*chmod go-w {folder}"):
            loader_of(stub)
        folder.chmod(0o1777)  # as /tmp: nobody else may replace a socket there
        with loader_of(stub) as loader:
            next(loader.stream())
        folder.chmod(0o700)
