"""The client against daemons whose streams break the protocol, or never send anything."""

import itertools
from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from gyre_client.errors import (
    DaemonFault,
    DaemonUnavailable,
    StorageUnavailable,
)
from gyre_client.transport.channel import parse_address
from gyre_client.transport.connection import Connection
from gyre_protos.v1 import loader_pb2 as pb

from tests.stub_daemon import (
    END,
    StubDaemon,
    batches,
    frame,
    group,
    heartbeats,
    layout,
    payload,
)
from tests.stubbed_loader import inline, loader_of, read_all


@pytest.fixture
def stub(tmp_path: Path) -> StubDaemon:
    return StubDaemon(tmp_path)


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


def grant(max_queued: int, num_kept: int = 4) -> pb.StreamResponse:
    return pb.StreamResponse(
        batches=pb.Batches(max_queued_batches=max_queued, max_kept_batches=num_kept)
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


@pytest.mark.parametrize("num_queued", [1, 2])
def test_a_trainer_that_takes_nothing_stalls_nobody(stub: StubDaemon, num_queued: int) -> None:
    """The queue is full, or has as much as the trainer needs at its pace: the daemon only talks."""

    def some_and_then_heartbeats(stub: StubDaemon, session: int) -> Iterator[pb.StreamResponse]:
        yield batches(*map(group, range(num_queued)))
        for beats, beat in enumerate(heartbeats(stub, session)):
            if beats == 20:
                if num_queued == 1:
                    yield batches(group(1))
                talked.set()
            yield beat

    import threading

    talked = threading.Event()
    stub.responses = some_and_then_heartbeats
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


def progress(number: int, num_shards: int, **more: Any) -> pb.IndexProgress:
    return pb.IndexProgress(
        shards_done=number, num_shards=num_shards, shard=f"{number}.tar", **more
    )


@pytest.mark.parametrize(
    "message",
    [
        pb.LintProgress(num_shards=3),
        pb.LintProgress(num_shards=2**63),
        pb.LintProgress(num_shards=3, num_checked=4),
        pb.LintProgress(num_shards=3, num_samples=2**63),
        pb.LintProgress(num_shards=1 << 20, findings=[pb.LintFinding(reason="x")] * 1000),
    ],
    ids=[
        "for ever",
        "too many shards",
        "more than shards",
        "too many samples",
        "too many findings",
    ],
)
def test_findings_about_a_dataset_come_to_an_end(
    stub: StubDaemon, message: pb.LintProgress
) -> None:
    stub.answers["LintDataset"] = lambda request: itertools.repeat(message)
    address = parse_address(stub.address)
    with (
        stub,
        Connection(address) as connection,
        pytest.raises(DaemonFault, match=r"checks|shards"),
    ):
        deque(connection.lint(pb.DatasetRef(name="d")), maxlen=0)


@pytest.mark.parametrize(
    "messages",
    [
        lambda: (progress(number, 3) for number in itertools.count(1)),
        lambda: (progress(1, 3) for _ in itertools.count()),
        lambda: (progress(number, number) for number in itertools.count(1)),
        lambda: (progress(number, 2**63) for number in itertools.count(1)),
        lambda: (progress(number, 0) for number in itertools.count(1)),
        lambda: iter([progress(1, 2, removed=["x.tar"])]),
    ],
    ids=["more than shards", "one again and again", "ever more", "too many", "none", "removed"],
)
def test_progress_of_an_index_comes_to_an_end(
    stub: StubDaemon, messages: Callable[[], Iterator[pb.IndexProgress]]
) -> None:
    stub.answers["IndexDataset"] = lambda request: messages()
    with stub, Connection(parse_address(stub.address)) as connection:
        with pytest.raises(DaemonFault, match=r"an index of 3 shards|num_shards|an index of [12]"):
            for _ in connection.index(pb.DatasetRef(name="d")):
                pass
        stub.answers["IndexDataset"] = lambda request: (progress(1 + each, 2) for each in range(2))
        assert len(list(connection.index(pb.DatasetRef(name="d")))) == 2
