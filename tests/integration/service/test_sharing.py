"""Jobs that want the same batches share them, and none of them can do another any harm."""

import contextlib
import queue
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from gyre_client import Loader
from gyre_protos.v1 import loader_pb2 as pb
from gyre_protos.v1 import loader_pb2_grpc as pb_grpc

from tests.channels import identified_channel
from tests.conftest import Daemon, StartDaemon
from tests.daemons import WITH_STALL, status
from tests.integration.service.token_jobs import (
    BATCH,
    LENGTH,
    WINDOW,
    ids_of,
    loader,
    right,
    token_config,
)


@pytest.fixture
def config(tmp_path: Path) -> dict[str, Any]:
    return token_config(tmp_path)


@pytest.fixture
def daemon(gyred: StartDaemon, config: dict[str, Any]) -> Daemon:
    return gyred(config)


def num_bytes_read(daemon: Daemon) -> int:
    return sum(count.num_bytes for count in status(daemon).storage if count.kind == "read")


def events(daemon: Daemon, name: str) -> list[dict[str, object]]:
    return [event for event in daemon.events() if event["event"] == name]


def test_second_job_reads_nothing(daemon: Daemon) -> None:
    with loader(daemon, "a") as first, loader(daemon, "b") as second:
        for _ in range(400):
            one, other = next(iter(first)), next(iter(second))
            assert one["sample_id"].tolist() == other["sample_id"].tolist()
            assert torch.equal(one["tokens"], other["tokens"])
        assert right(daemon, one)
        assert [session.num_sharing for session in status(daemon).sessions] == [2, 2]
        bytes_per_batch = BATCH * LENGTH * 4
        assert num_bytes_read(daemon) <= (400 + 3 * WINDOW) * bytes_per_batch


def test_other_orders_share_nothing(daemon: Daemon) -> None:
    with (
        loader(daemon, "a") as first,
        Loader("tokens", batch_size=BATCH, seed=4, address=daemon.address) as seed,
        Loader("tokens", batch_size=BATCH, seed=3, tail="drop", address=daemon.address) as tail,
        Loader(
            "tokens", batch_size=BATCH * 2, seed=3, rank=0, world_size=2, address=daemon.address
        ) as rank,
    ):
        batches = [next(iter(each)) for each in (first, seed, tail, rank)]
        assert [session.num_sharing for session in status(daemon).sessions] == [1, 1, 1, 1]
        assert all(right(daemon, batch) for batch in batches)
        assert len({str(batch["sample_id"].tolist()) for batch in (batches[0], batches[1])}) == 2


def test_job_that_comes_a_little_late_catches_up(
    gyred: StartDaemon, config: dict[str, Any]
) -> None:
    daemon = gyred(config, command=("-c", WITH_STALL.format(60.0)))
    with loader(daemon, "a") as first:
        ahead = [next(iter(first))["sample_id"].tolist() for _ in range(100)]
        with loader(daemon, "b") as second:
            behind = [next(iter(second))["sample_id"].tolist() for _ in range(100)]
            assert behind == ahead
            both = [(next(iter(first)), next(iter(second))) for _ in range(200)]
            assert all(
                ids_of([one]) == ids_of([other]) and right(daemon, one) and right(daemon, other)
                for one, other in both
            )
            assert [session.num_sharing for session in status(daemon).sessions] == [2, 2]
    assert not events(daemon, "reader falls behind")


def test_job_that_falls_behind_goes_on_alone(daemon: Daemon) -> None:
    with loader(daemon, "fast") as fast, loader(daemon, "slow") as slow:
        kept = [next(iter(slow)) for _ in range(5)]
        batches = [next(iter(fast)) for _ in range(1000)]
        wanted = ids_of(batches)
        del batches
        assert [event["job"] for event in events(daemon, "reader falls behind")] == ["slow"]
        assert [session.num_sharing for session in status(daemon).sessions] == [1, 1]
        assert ids_of(kept) == wanted[:5]
        assert all(right(daemon, batch) for batch in kept)
        for step in range(5, 1000):
            batch = next(iter(slow))
            assert batch["sample_id"].tolist() == wanted[step]
            assert right(daemon, batch)


def test_job_that_stops_does_not_stop_a_client_that_asks_for_one_batch_at_a_time(
    daemon: Daemon,
) -> None:
    messages: queue.SimpleQueue[pb.StreamRequest | None] = queue.SimpleQueue()
    request = pb.OpenSessionRequest(
        dataset=pb.DatasetRef(name="tokens"),
        order=pb.OrderSpec(global_batch_size=BATCH, seed=3),
        reader=pb.Reader(job="hand", world_size=1),
        prefetch_batches=WINDOW,
    )
    with loader(daemon, "stopped") as stopped, identified_channel(daemon.address) as channel:
        next(iter(stopped))
        stub = pb_grpc.LoaderStub(channel)
        session = stub.OpenSession(request, timeout=120).session_id
        assert [session.num_sharing for session in status(daemon).sessions] == [2, 2]
        messages.put(pb.StreamRequest(attach=pb.Attach(session_id=session)))
        messages.put(pb.StreamRequest(credit=pb.Credit(num_batches=1)))
        stream: Any = stub.Stream(iter(messages.get, None), timeout=120)
        for step in range(500):
            response = next(stream)
            while not response.HasField("batches"):
                response = next(stream)
            assert [group.first_step for group in response.batches.groups] == [step]
            messages.put(pb.StreamRequest(credit=pb.Credit(num_batches=1, released_steps=[step])))
        messages.put(None)
        stream.cancel()
    assert [event["job"] for event in events(daemon, "reader falls behind")] == ["stopped"]


def test_jobs_that_keep_each_other_waiting_in_turns_stay_together(
    gyred: StartDaemon, config: dict[str, Any]
) -> None:
    """Together they wait for longer than one of them may cost the others."""
    daemon = gyred(config, command=("-c", WITH_STALL.format(2.0)))
    with ThreadPoolExecutor(5) as threads, contextlib.ExitStack() as stack:
        jobs = [stack.enter_context(loader(daemon, job, 4)) for job in "abcde"]

        def read(index: int) -> list[list[int]]:
            before = [
                next(iter(jobs[index]))["sample_id"].tolist() for _ in range(100 * (index + 1))
            ]
            time.sleep(0.6)
            return before + [
                next(iter(jobs[index]))["sample_id"].tolist() for _ in range(600 - len(before))
            ]

        first, *others = threads.map(read, range(5), timeout=120)
        assert all(other == first for other in others)
        assert not events(daemon, "reader falls behind")
        assert [session.num_sharing for session in status(daemon).sessions] == [5] * 5


def test_job_that_waits_for_others_as_they_for_it_stays(
    gyred: StartDaemon, config: dict[str, Any]
) -> None:
    """Both cost the other far more than a twentieth of the time, and 4 s in all."""
    daemon = gyred(config, command=("-c", WITH_STALL.format(3.0)))
    with ThreadPoolExecutor(2) as threads, loader(daemon, "a", 4) as a, loader(daemon, "b", 4) as b:

        def read(job: Loader, pauses: range) -> list[list[int]]:
            ids = []
            for turn in range(40):
                if turn in pauses:
                    time.sleep(0.2)
                ids += ids_of([next(iter(job)) for _ in range(20)])
            return ids

        first, second = threads.map(read, (a, b), (range(0, 40, 2), range(1, 40, 2)), timeout=120)
        assert first == second
        assert not events(daemon, "reader falls behind")


@pytest.mark.parametrize("prefetch_batches", [1, 4])
def test_jobs_that_keep_their_batches_do_not_keep_each_other_from_reading(
    daemon: Daemon, prefetch_batches: int
) -> None:
    """Each keeps different batches; together these are as many as there is memory for."""
    with ThreadPoolExecutor(5) as threads, contextlib.ExitStack() as stack:
        jobs = [stack.enter_context(loader(daemon, job, prefetch_batches)) for job in "abcde"]

        def read(index: int) -> list[dict[str, torch.Tensor]]:
            for _ in range(20 * index):
                next(iter(jobs[index]))
            return [next(iter(jobs[index])) for _ in range(200 - 20 * index)]

        first, *others = threads.map(read, range(5), timeout=120)
        assert all(right(daemon, batch) for batches in (first, *others) for batch in batches)
        for index, batches in enumerate(others, 1):
            assert ids_of(batches) == ids_of(first[20 * index :])


@pytest.mark.parametrize("prefetch_batches", [2, 4, 8])
def test_several_jobs_that_stop_do_not_stop_another(daemon: Daemon, prefetch_batches: int) -> None:
    """A job that is detached must not come back at once, though the others keep its next step."""
    with contextlib.ExitStack() as stack:
        jobs = [stack.enter_context(loader(daemon, job, prefetch_batches)) for job in "abcd"]
        *stopped, fast = jobs
        together = [ids_of([next(iter(each)) for each in jobs]) for _ in range(50)]
        assert all(ids == each[0] for each in together for ids in each)
        ahead = [
            ids_of([next(iter(each)) for _ in range(index)]) for index, each in enumerate(stopped)
        ]
        wanted = ids_of([next(iter(fast)) for _ in range(500)])
        assert len(events(daemon, "reader falls behind")) <= 3 * len(stopped)
        for index, each in enumerate(stopped):  # they go on where they stood
            assert ahead[index] == wanted[:index]
            assert ids_of([next(iter(each)) for _ in range(100)]) == wanted[index : index + 100]


def test_owner_of_a_shared_stream_may_leave_it(daemon: Daemon) -> None:
    first, second = loader(daemon, "a"), loader(daemon, "b")
    with second:
        wanted = [next(iter(first))["sample_id"].tolist() for _ in range(60)]
        assert [next(iter(second))["sample_id"].tolist() for _ in range(10)] == wanted[:10]
        first.close()
        share = status(daemon).sessions[0].memory_limit_bytes
        assert status(daemon).memory_reserved_bytes == share
        for step in range(10, 600):
            batch = next(iter(second))
            assert step >= 60 or batch["sample_id"].tolist() == wanted[step]
            assert right(daemon, batch)
    assert status(daemon).memory_reserved_bytes == 0
