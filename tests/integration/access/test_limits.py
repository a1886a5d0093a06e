"""Limits per user and job: nobody takes everything, and who is refused is told what it has."""

import contextlib
from pathlib import Path

import grpc
import numpy as np
import pytest
from gyre_client import Loader
from gyre_protos.v1 import loader_pb2 as pb
from gyre_protos.v1 import loader_pb2_grpc as pb_grpc

from tests.conftest import Daemon, StartDaemon
from tests.daemons import status
from tests.other_user import NEEDS_ROOT, OtherUser, other_user

LENGTH = 1024  # a sample is 2 KiB

pytestmark = NEEDS_ROOT


@pytest.fixture
def token_path(tmp_path: Path) -> Path:
    samples = np.arange(8000, dtype="<u2")[:, None] + np.zeros(LENGTH, "<u2")
    samples.tofile(tmp_path / "tokens.bin")
    return tmp_path / "tokens.bin"


def started(gyred: StartDaemon, path: Path, **config: object) -> Daemon:
    tokens = {"uri": str(path), "format": "tokens", "dtype": "uint16", "sequence_length": LENGTH}
    return gyred({"lease_s": 600.0, **config, "datasets": {"tokens": tokens}})


def open_session(
    stub: pb_grpc.LoaderStub, user: OtherUser, job: str, rank: int = 0, batch_size: int = 64
) -> pb.SessionOpened:
    order = pb.OrderSpec(global_batch_size=batch_size * 1000, seed=sum(job.encode()))
    request = pb.OpenSessionRequest(
        dataset=pb.DatasetRef(name="tokens"),
        order=order,
        reader=pb.Reader(job=job, rank=rank, world_size=1000),
    )
    opened: pb.SessionOpened = stub.OpenSession(request, metadata=user.metadata, timeout=120)
    return opened


def open_until_refused(stub: pb_grpc.LoaderStub, user: OtherUser) -> tuple[int, str]:
    """How many sessions were opened, each of a job of its own, and why no more are."""
    for number in range(1000):
        try:
            open_session(stub, user, f"job-{number}")
        except grpc.RpcError as refused:
            return number, str(refused.details())
    raise AssertionError("nothing bounds the sessions of one user")


def test_who_comes_later_finds_memory_whatever_one_user_takes(
    gyred: StartDaemon, token_path: Path
) -> None:
    daemon = started(gyred, token_path, memory_budget="48MiB")
    with other_user(daemon.address) as user, grpc.insecure_channel(daemon.address) as channel:
        num_opened, reason = open_until_refused(pb_grpc.LoaderStub(channel), user)
        assert num_opened >= 12
        assert "uid:65534" in reason
        assert "limits.user.memory" in reason
        now = status(daemon)
        assert now.memory_reserved_bytes <= 0.875 * now.memory_budget_bytes
        with Loader("tokens", batch_size=64, address=daemon.address) as loader:
            for _ in range(20):
                batch = next(loader)
                assert (batch["tokens"] == batch["sample_id"][:, None]).all()


def test_a_user_with_many_sessions_takes_nothing_from_another(
    gyred: StartDaemon, token_path: Path
) -> None:
    daemon = started(gyred, token_path, memory_budget="64MiB", session_memory="64MiB")
    with (
        Loader("tokens", batch_size=64, prefetch_batches=1000, address=daemon.address) as loader,
        other_user(daemon.address) as user,
        grpc.insecure_channel(daemon.address) as channel,
    ):
        next(loader)
        (before,) = status(daemon).sessions
        assert before.memory_limit_bytes > 12 << 20
        num_opened, _ = open_until_refused(pb_grpc.LoaderStub(channel), user)
        assert num_opened >= 12
        limits = {each.reader.job: each.memory_limit_bytes for each in status(daemon).sessions}
        assert limits[before.reader.job] == before.memory_limit_bytes
        assert sum(limits.values()) <= 64 << 20
        for _ in range(20):
            next(loader)


@pytest.fixture
def narrow(gyred: StartDaemon, token_path: Path) -> Daemon:
    limits = {
        "users": {
            "uid:65534": {"sessions": 5},
            "uid:65533": {"requests_per_s": 0.2},
            "uid:6553*": {"connections": 2},
        },
    }
    return started(gyred, token_path, limits=limits)


def refusal(stub: pb_grpc.LoaderStub, user: OtherUser, job: str, rank: int) -> str:
    with pytest.raises(grpc.RpcError) as refused:
        open_session(stub, user, job, rank)
    assert refused.value.code() == grpc.StatusCode.RESOURCE_EXHAUSTED
    return str(refused.value.details())


def test_sessions_are_bounded_for_each_user(narrow: Daemon) -> None:
    with other_user(narrow.address) as user, grpc.insecure_channel(narrow.address) as channel:
        stub = pb_grpc.LoaderStub(channel)
        for rank in range(3):
            open_session(stub, user, "wide", rank)
        opened = [open_session(stub, user, "other", rank) for rank in range(2)]
        assert "uid:65534 has 5 sessions, and may have 5" in refusal(stub, user, "third", 0)
        open_session(stub, user, "wide", 2)  # again: it takes the place of the older one
        request = pb.CloseSessionRequest(session_id=opened[0].session_id)
        stub.CloseSession(request, metadata=user.metadata, timeout=120)
        open_session(stub, user, "third", 0)


def test_who_calls_too_often_is_told_when_to_call_again(narrow: Daemon) -> None:
    with (
        other_user(narrow.address, 65533) as user,
        grpc.insecure_channel(narrow.address) as channel,
        contextlib.ExitStack() as stack,
    ):
        stub = pb_grpc.LoaderStub(channel)

        def ask() -> None:
            stub.GetStatus(pb.GetStatusRequest(), metadata=user.metadata, timeout=120)

        refused = stack.enter_context(pytest.raises(grpc.RpcError))
        for _ in range(100):
            ask()
    assert refused.value.code() == grpc.StatusCode.RESOURCE_EXHAUSTED
    assert "uid:65533 makes more than 0.2 requests per second" in str(refused.value.details())
    assert status(narrow).pid, "others are served"


def test_connections_are_bounded_for_each_user(narrow: Daemon) -> None:
    with contextlib.ExitStack() as stack:
        users = [stack.enter_context(other_user(narrow.address, 65532)) for _ in range(3)]
        assert [len(user.answer) for user in users[:2]] == [32, 32], "tokens"
        assert users[2].answer.startswith("refused: uid:65532 has 2 connections")
        assert len(stack.enter_context(other_user(narrow.address, 1)).answer) == 32
    assert [event["reason"] for event in narrow.events() if "refused" in event["event"]]


def test_who_asks_for_much_does_not_hold_up_what_others_ask(
    gyred: StartDaemon, tmp_path: Path
) -> None:
    """What is computed for calls has its turns by user, as what is read has."""
    (tmp_path / "lines.jsonl").write_text('{"text": "a"}\n' * 3_000_000)
    lines = {"uri": str(tmp_path / "lines.jsonl"), "format": "jsonl"}
    daemon = gyred({"datasets": {"lines": lines}})
    request = pb.DescribeDatasetRequest(dataset=pb.DatasetRef(name="lines"), lengths=True)
    with (
        other_user(daemon.address, 65534) as busy,
        other_user(daemon.address, 65533) as user,
        grpc.insecure_channel(daemon.address) as channel,
        contextlib.ExitStack() as stack,
    ):
        ask = pb_grpc.LoaderStub(channel).DescribeDataset
        assert ask(request, metadata=user.metadata, timeout=120).lengths
        asked = []
        for _ in range(64):  # connections, each of which may have some calls at once
            options = (("grpc.use_local_subchannel_pool", 1),)
            busy_channel = stack.enter_context(grpc.insecure_channel(daemon.address, options))
            describe = pb_grpc.LoaderStub(busy_channel).DescribeDataset
            asked += [
                describe.future(request, metadata=busy.metadata, timeout=120) for _ in range(8)
            ]
        asked[0].result()
        assert ask(request, metadata=user.metadata, timeout=120).lengths
        num_left = sum(not each.done() for each in asked)
        for each in asked:
            each.cancel()  # type: ignore[no-untyped-call]
    assert num_left > 100, "what was asked for later was answered before most of it"


def test_a_status_looks_at_no_large_batches(gyred: StartDaemon, tmp_path: Path) -> None:
    """It would take a second for each, and anybody may ask for it all the time."""
    (tmp_path / "lines.jsonl").write_text('{"text": "a"}\n{"text": "bcd"}\n' * 50_000)
    lines = {"uri": str(tmp_path / "lines.jsonl"), "format": "jsonl"}
    daemon = gyred({"datasets": {"lines": lines}})
    with grpc.insecure_channel(daemon.address) as channel, other_user(daemon.address) as user:
        stub = pb_grpc.LoaderStub(channel)
        for size in (64, 1 << 15):
            order = pb.OrderSpec(global_batch_size=size, balance=pb.Balance(linear=1, field="json"))
            reader = pb.Reader(job=f"job-{size}", world_size=2)
            request = pb.OpenSessionRequest(
                dataset=pb.DatasetRef(name="lines"), order=order, reader=reader, step=5
            )
            stub.OpenSession(request, metadata=user.metadata, timeout=120)
        shown = stub.GetStatus(pb.GetStatusRequest(), metadata=user.metadata, timeout=120).sessions
    assert {each.reader.job: each.HasField("spread") for each in shown} == {
        "job-64": True,
        "job-32768": False,
    }
