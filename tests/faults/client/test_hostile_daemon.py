"""The client against daemons whose answers are wrong: a clear error, and nothing else."""

from pathlib import Path

import pytest
from gyre_client.errors import (
    CursorRejected,
    DaemonFault,
)
from gyre_protos.v1 import loader_pb2 as pb

from tests import stub_daemon
from tests.stub_daemon import (
    StubDaemon,
    batches,
    frame,
    group,
    layout,
    memory_file,
    payload,
)
from tests.stubbed_loader import Change, loader_of, put, read_all

HUGE = 1 << 63


@pytest.fixture
def stub(tmp_path: Path) -> StubDaemon:
    return StubDaemon(tmp_path)


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
