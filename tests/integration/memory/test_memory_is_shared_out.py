"""One budget for many sessions: those that come later find memory, and no batch is lost."""

import contextlib
import itertools
import threading
from collections.abc import Iterator
from pathlib import Path

import grpc
import numpy as np
import pytest
import torch
from gyre_client import Loader
from gyre_protos.v1 import loader_pb2 as pb
from gyre_protos.v1 import loader_pb2_grpc as pb_grpc

from tests.channels import identified_channel
from tests.conftest import Daemon, StartDaemon
from tests.daemons import status
from tests.waiting import until

LENGTH = 1024  # a sample is 2 KiB


@pytest.fixture
def token_path(tmp_path: Path) -> Path:
    """8,000 samples, each full of its number."""
    samples = np.arange(8000, dtype="<u2")[:, None] + np.zeros(LENGTH, "<u2")
    samples.tofile(tmp_path / "tokens.bin")
    return tmp_path / "tokens.bin"


def started(gyred: StartDaemon, path: Path, **config: object) -> Daemon:
    tokens = {"uri": str(path), "format": "tokens", "dtype": "uint16", "sequence_length": LENGTH}
    return gyred({**config, "datasets": {"tokens": tokens}})


def silence(is_over: threading.Event) -> Iterator[pb.StreamRequest]:
    """A client that says nothing more until it goes."""
    is_over.wait()
    yield from ()


class RawSession:
    """A session by the bare gRPC contract; its payload comes through gRPC."""

    def __init__(
        self,
        stub: pb_grpc.LoaderStub,
        job: str,
        rank: int,
        world_size: int,
        batch_size: int,
        num_local: int = 0,
    ) -> None:
        self._stub = stub
        request = pb.OpenSessionRequest(
            dataset=pb.DatasetRef(name="tokens"),
            order=pb.OrderSpec(global_batch_size=batch_size * world_size, seed=5),
            reader=pb.Reader(job=job, rank=rank, world_size=world_size, num_local=num_local),
        )
        self.opened: pb.SessionOpened = stub.OpenSession(request, timeout=60)

    def read(self, num_batches: int) -> Iterator[tuple[pb.Layout, bytes]]:
        """The next batches; then the session is over."""
        said = [
            pb.StreamRequest(attach=pb.Attach(session_id=self.opened.session_id)),
            pb.StreamRequest(credit=pb.Credit(num_batches=num_batches)),
        ]
        is_over = threading.Event()
        control = self._stub.Stream(itertools.chain(said, silence(is_over)), timeout=60)
        payload = self._stub.ReadPayload(
            pb.ReadPayloadRequest(session_id=self.opened.session_id), timeout=60
        )
        num_read = 0
        for response in control:
            for group in response.batches.groups:
                layouts = list(group.layouts) * (
                    len(group.cursors.own) if len(group.layouts) == 1 else 1
                )
                for layout in layouts:
                    data = b""
                    while len(data) < layout.num_bytes:
                        data += next(iter(payload)).data
                    yield layout, data
                    num_read += 1
            if num_read >= num_batches:
                break
        is_over.set()
        control.cancel()  # type: ignore[no-untyped-call]
        payload.cancel()  # type: ignore[no-untyped-call]


def tensor(layout: pb.Layout, data: bytes, name: str) -> np.ndarray:
    place = next(tensor for tensor in layout.tensors if tensor.name == name)
    size = int(np.prod(place.shape)) * np.dtype(place.dtype).itemsize
    return np.frombuffer(data[place.offset_bytes : place.offset_bytes + size], place.dtype).reshape(
        place.shape
    )


@pytest.mark.parametrize(
    ("num_ranks", "budget"), [(32, {"memory_budget": "1GiB"}), (128, {})], ids=["1GiB", "default"]
)
def test_ranks_of_small_batches_get_equal_shares(
    gyred: StartDaemon, token_path: Path, num_ranks: int, budget: dict[str, object]
) -> None:
    daemon, batch_size = started(gyred, token_path, lease_s=600.0, **budget), 8
    with identified_channel(daemon.address) as channel:
        stub = pb_grpc.LoaderStub(channel)
        ranks: list[RawSession] = []
        for rank in range(num_ranks):
            ranks.append(RawSession(stub, "wide", rank, num_ranks, batch_size, num_ranks))
            if rank == 0:
                first = status(daemon)
                assert first.memory_reserved_bytes <= first.memory_budget_bytes // 4
        now = status(daemon)
        assert now.memory_reserved_bytes == first.memory_reserved_bytes, "for all ranks at once"
        assert len(now.sessions) == num_ranks
        shares = {session.memory_limit_bytes for session in now.sessions}
        assert shares == {now.memory_reserved_bytes // num_ranks}
        assert min(session.window_batches for session in now.sessions) >= 3
        seen = []
        for session in ranks:
            for layout, data in session.read(3):
                ids, tokens = tensor(layout, data, "sample_id"), tensor(layout, data, "tokens")
                assert ids.shape == (batch_size,)
                assert (tokens == ids[:, None]).all()
                seen += ids.tolist()
        assert len(set(seen)) == len(seen) == 3 * num_ranks * batch_size, (
            "each sample once, of steps 0 to 2"
        )
    until(lambda: status(daemon).memory_reserved_bytes == 0)
    assert status(daemon).memory_abandoned_bytes == 0


def right(batch: dict[str, torch.Tensor]) -> bool:
    ids = batch["sample_id"].numpy()
    return bool((batch["tokens"].numpy() == ids[:, None]).all())


def loader_of(daemon: Daemon, job: str, batch_size: int = 64, prefetch_batches: int = 0) -> Loader:
    """A loader whose order depends on its job's name."""
    seed = sum(job.encode())
    return Loader(
        "tokens",
        batch_size=batch_size,
        seed=seed,
        job=job,
        prefetch_batches=prefetch_batches,
        address=daemon.address,
    )


def ids_of(loader: Loader, num_batches: int) -> list[list[int]]:
    batches = [next(loader) for _ in range(num_batches)]
    assert all(right(batch) for batch in batches)
    return [batch["sample_id"].tolist() for batch in batches]


@pytest.mark.parametrize("prefetch_batches", [0, 1000])
def test_jobs_that_wait_for_each_other_all_find_memory(
    gyred: StartDaemon, token_path: Path, prefetch_batches: int
) -> None:
    """No job reads on before all are open."""
    daemon = started(gyred, token_path, memory_budget="128MiB")
    with contextlib.ExitStack() as stack:
        first = stack.enter_context(loader_of(daemon, "0", prefetch_batches=prefetch_batches))
        kept = [next(first) for _ in range(40)]
        (alone,) = status(daemon).sessions
        assert 20 << 20 < alone.memory_limit_bytes <= 32 << 20, "a fourth of what was free"
        until(lambda: status(daemon).sessions[0].num_in_flight == 0)  # its window is full
        others = []
        for number in range(1, 11):
            others.append(stack.enter_context(loader_of(daemon, str(number))))
            ids_of(others[-1], 1)
        now = status(daemon)
        assert now.memory_reserved_bytes + now.memory_abandoned_bytes <= now.memory_budget_bytes
        limits = [session.memory_limit_bytes for session in now.sessions]
        assert len(limits) == 11
        assert limits[0] == alone.memory_limit_bytes
        for each in (first, *others):
            ids_of(each, 200)
        assert all(right(batch) for batch in kept)
    until(lambda: status(daemon).memory_reserved_bytes + status(daemon).memory_abandoned_bytes == 0)


def test_a_rank_finds_its_share_again_although_other_jobs_want_more(
    gyred: StartDaemon, token_path: Path
) -> None:
    daemon = started(gyred, token_path, memory_budget="16MiB")
    with identified_channel(daemon.address) as channel:
        stub = pb_grpc.LoaderStub(channel)
        ranks = [RawSession(stub, "first", rank, 2, 64, num_local=2) for rank in range(2)]
        before = [each.memory_limit_bytes for each in status(daemon).sessions]
        stub.CloseSession(pb.CloseSessionRequest(session_id=ranks[1].opened.session_id))
        with contextlib.suppress(grpc.RpcError):
            for number in range(100):
                RawSession(stub, f"job-{number}", 0, 1, 64)
        RawSession(stub, "first", 1, 2, 64, num_local=2)
        now = status(daemon)
        assert [each.memory_limit_bytes for each in now.sessions if each.reader.job == "first"] == (
            before
        )
        assert now.memory_reserved_bytes <= now.memory_budget_bytes


def test_what_can_never_fit_is_refused_with_figures_and_takes_nothing_from_others(
    gyred: StartDaemon, token_path: Path
) -> None:
    daemon = started(gyred, token_path, memory_budget="8MiB", session_memory="8MiB")
    with Loader("tokens", batch_size=64, job="small", address=daemon.address) as small:
        assert right(next(small))
        before = status(daemon).sessions[0].memory_limit_bytes
        with (
            identified_channel(daemon.address) as channel,
            pytest.raises(grpc.RpcError) as refused,
        ):
            RawSession(pb_grpc.LoaderStub(channel), "huge", 0, 1, 8000)
        assert refused.value.code() == grpc.StatusCode.RESOURCE_EXHAUSTED
        assert "than the daemon's memory_budget of 8388608 bytes" in str(refused.value.details())
        assert status(daemon).sessions[0].memory_limit_bytes == before
        assert right(next(small))


def test_window_that_was_asked_for_stays(gyred: StartDaemon, token_path: Path) -> None:
    daemon = started(gyred, token_path)
    with loader_of(daemon, "short", prefetch_batches=2) as loader:
        ids_of(loader, 100)
        assert status(daemon).sessions[0].window_batches == 2
