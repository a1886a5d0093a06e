"""Clients that ask for progress and do not read it: they hold up nobody else."""

import contextlib
import io
import tarfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from gyre_client.transport.channel import CredentialFiles, Identity, parse_address
from gyre_protos.v1 import loader_pb2 as pb
from gyre_protos.v1.loader_pb2_grpc import LoaderStub

from tests.channels import identified_channel
from tests.conftest import Daemon, StartDaemon
from tests.other_user import NEEDS_ROOT, other_user

# Names that are long, so that the progress does not fit into what a connection takes unread.
_NUM_SHARDS = 700
_LONG = "x" * 200
_DATASET = pb.DatasetRef(name="tars")
# The least window of HTTP/2, which does not grow.
_SMALL_WINDOW = [("grpc.http2.bdp_probe", 0), ("grpc.http2.lookahead_bytes", 1)]


@pytest.fixture
def daemon(gyred: StartDaemon, tmp_path: Path) -> Daemon:
    shards = tmp_path / "shards"
    shards.mkdir()
    shard = io.BytesIO()
    with tarfile.open(fileobj=shard, mode="w") as tar:
        member = tarfile.TarInfo("0.bin")
        member.size = 8
        tar.addfile(member, io.BytesIO(bytes(8)))
    for number in range(_NUM_SHARDS):
        (shards / f"{number:04}-{_LONG}.tar").write_bytes(shard.getvalue())
    return gyred({"datasets": {"tars": {"uri": str(shards), "format": "webdataset"}}})


@contextlib.contextmanager
def asked(daemon: Daemon, ask: Callable[[LoaderStub, Any], Any]) -> Iterator[Any]:
    """A call that is answered and whose answers nobody has read."""
    identity = Identity(parse_address(daemon.address), CredentialFiles())
    with (
        contextlib.closing(identity),
        grpc.insecure_channel(daemon.address, options=_SMALL_WINDOW) as channel,
    ):
        call = ask(LoaderStub(channel), identity.metadata())
        next(iter(call))
        yield call
        call.cancel()


def test_a_client_that_does_not_read_its_progress_holds_up_nobody(daemon: Daemon) -> None:
    request = pb.IndexDatasetRequest(dataset=_DATASET)
    opening = pb.OpenSessionRequest(
        dataset=_DATASET,
        order=pb.OrderSpec(global_batch_size=8),
        reader=pb.Reader(job="other", world_size=1),
    )
    with (
        asked(daemon, lambda stub, who: stub.IndexDataset(request, metadata=who)) as call,
        identified_channel(daemon.address) as channel,
    ):
        stub = LoaderStub(channel)
        assert stub.OpenSession(opening, timeout=60).session_id
        assert len(list(stub.IndexDataset(request, timeout=60))) == _NUM_SHARDS
        assert len(list(call)) == _NUM_SHARDS - 1, "what waited for the client is still there"


@NEEDS_ROOT
def test_one_user_has_few_calls_that_read_a_whole_dataset(daemon: Daemon) -> None:
    """Who opens it for the first time waits for those that came before."""
    request = pb.IndexDatasetRequest(dataset=_DATASET)
    linting = pb.LintDatasetRequest(dataset=_DATASET)
    with (
        asked(daemon, lambda stub, who: stub.IndexDataset(request, metadata=who)),
        asked(daemon, lambda stub, who: stub.LintDataset(linting, metadata=who)),
        identified_channel(daemon.address) as channel,
        other_user(daemon.address) as user,
    ):
        stub = LoaderStub(channel)
        for call in (stub.IndexDataset(request), stub.LintDataset(linting)):
            with pytest.raises(grpc.RpcError, match="has 2 calls that index or check") as refused:
                next(iter(call))
            assert refused.value.code() == grpc.StatusCode.RESOURCE_EXHAUSTED
        plain = grpc.insecure_channel(daemon.address)
        its = LoaderStub(plain).IndexDataset(request, metadata=user.metadata, timeout=60)
        assert len(list(its)) == _NUM_SHARDS
        plain.close()
    assert _ends_being_refused(daemon, request)


def _ends_being_refused(daemon: Daemon, request: pb.IndexDatasetRequest) -> bool:
    """Whether the same user may call again, once its calls are over."""
    deadline = time.monotonic() + 60
    with identified_channel(daemon.address) as channel:
        while time.monotonic() < deadline:
            with contextlib.suppress(grpc.RpcError):
                return bool(list(LoaderStub(channel).IndexDataset(request, timeout=60)))
            time.sleep(0.05)
    return False


def test_who_does_not_read_what_is_wrong_with_a_dataset_holds_up_nobody(daemon: Daemon) -> None:
    request = pb.LintDatasetRequest(dataset=_DATASET)
    with (
        asked(daemon, lambda stub, who: stub.LintDataset(request, metadata=who)),
        identified_channel(daemon.address) as channel,
    ):
        findings = LoaderStub(channel).LintDataset(request, timeout=60)
        assert len(list(findings)) == 2 * _NUM_SHARDS
