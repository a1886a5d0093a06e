"""The loader against a real daemon."""

import gc
import multiprocessing
import os
import pickle
import threading
from collections.abc import Iterator
from itertools import chain, islice
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import psutil
import pytest
import torch
import webdataset
from gyre_client import Loader, objects, texts
from gyre_client.address import parse_address
from gyre_client.connection import Connection, error_from
from gyre_client.errors import (
    ConcurrentUse,
    CorruptSample,
    CursorRejected,
    Fenced,
    ForkedProcess,
    InvalidRequest,
    Overloaded,
    UnknownDataset,
)
from gyre_protos.v1 import loader_pb2 as pb
from gyre_protos.v1.loader_pb2_grpc import LoaderStub
from torch.utils.data import DataLoader

NUM_SAMPLES = 101
LENGTH = 8

Batch = dict[str, torch.Tensor]


@pytest.fixture
def tokens(tmp_path: Path) -> Path:
    """A token file in which sample i is [8i, 8i + 8)."""
    path = tmp_path / "tokens.bin"
    np.arange(NUM_SAMPLES * LENGTH, dtype=np.uint16).tofile(path)
    return path


@pytest.fixture
def address(gyred: Any, tokens: Path) -> str:
    half = tokens.with_name("half.bin")
    half.write_bytes(tokens.read_bytes()[: NUM_SAMPLES * LENGTH])
    common = {"format": "tokens", "dtype": "int16", "sequence_length": LENGTH}
    daemon = gyred({"datasets": {"numbers": {"uri": str(tokens), **common}, "half": {"uri": str(half), **common}}})
    address: str = daemon.address
    return address


def same(first: list[Batch], second: list[Batch]) -> bool:
    return len(first) == len(second) and all(
        list(one) == list(other) and all(torch.equal(one[name], other[name]) for name in one)
        for one, other in zip(first, second, strict=True)
    )


def test_a_request_that_is_too_long_is_refused_at_once(address: str) -> None:
    """Nothing about it changes by trying again: neither by our own check, nor where the daemon's gRPC refuses it."""
    long = f"/data/{{{','.join(f'shard-{number:08}' for number in range(8000))}}}.bin"
    sentence = r"the request has \d+ bytes, and a message to or from a daemon may have 65536: shorten"
    with pytest.raises(InvalidRequest, match=sentence) as refused:
        Loader(long, batch_size=4, format="tokens", options={"sequence_length": LENGTH}, address=address)
    assert int(refused.value.facts["num_bytes"]) > 65536
    with Connection(parse_address(address)) as connection, pytest.raises(InvalidRequest, match=sentence):
        list(connection.index(pb.DatasetRef(name=long)))
    with (
        Loader("numbers", batch_size=4, job="j" * 70000, address=address) as loader,
        pytest.raises(InvalidRequest, match=sentence),
    ):
        next(loader)


def test_what_the_daemon_s_grpc_finds_too_long_is_told_likewise(address: str) -> None:
    request = pb.DescribeDatasetRequest(dataset=pb.DatasetRef(name="x" * 70000))
    with grpc.insecure_channel(address) as channel, pytest.raises(grpc.RpcError) as refused:
        LoaderStub(channel).DescribeDataset(request, timeout=30)
    error = error_from(refused.value, parse_address(address))
    assert type(error) is InvalidRequest
    assert "may have 65536" in str(error)


def test_two_threads_at_once_are_told_and_one_after_the_other_is_fine(address: str) -> None:
    with Loader("numbers", batch_size=4, epochs=1, tail="drop", address=address) as loader:
        waiting, go_on = threading.Event(), threading.Event()
        stream = loader._stream()
        take = stream.take

        def slow_take() -> Any:
            waiting.set()
            assert go_on.wait(30)
            return take()

        stream.take = slow_take  # type: ignore[method-assign]
        first: list[Batch] = []
        reader = threading.Thread(target=lambda: first.append(next(loader)), name="evaluation")
        reader.start()
        try:
            assert waiting.wait(30)
            with pytest.raises(ConcurrentUse, match=r"thread 'MainThread' uses this Loader while thread 'evaluation' does"):
                next(loader)
            with pytest.raises(ConcurrentUse):
                loader.load_state_dict(loader.state_dict())
        finally:
            go_on.set()
            reader.join()
        stream.take = take  # type: ignore[method-assign]
        rest = list(loader)  # in this thread again
        with Loader("numbers", batch_size=4, epochs=1, tail="drop", address=address) as other:
            assert same(first + rest, list(other))


def ids(batches: list[Batch]) -> list[int]:
    return [number for batch in batches for number in batch["sample_id"].tolist()]


def take(loader: Loader, num: int) -> list[Batch]:
    return list(islice(loader.stream(), num))


def test_batches_hold_their_samples_and_are_the_same_on_every_run(address: str) -> None:
    runs = []
    for _ in range(2):
        with Loader("numbers", batch_size=10, seed=3, address=address) as loader:
            runs.append(take(loader, 25))
    assert same(*runs)
    for batch in runs[0]:
        expected = batch["sample_id"][:, None] * LENGTH + torch.arange(LENGTH)
        assert batch["tokens"].dtype == torch.int16
        assert torch.equal(batch["tokens"].to(torch.int64), expected)
    assert sorted(ids(runs[0])[:NUM_SAMPLES]) == list(range(NUM_SAMPLES))


def test_ranks_share_each_batch_and_their_number_changes_nothing(address: str) -> None:
    def read(rank: int, world_size: int) -> list[list[int]]:
        with Loader("numbers", batch_size=12, rank=rank, world_size=world_size, address=address, job="one") as loader:
            return [batch["sample_id"].tolist() for batch in take(loader, 20)]

    whole = read(0, 1)
    for world_size in (2, 3):
        parts = [read(rank, world_size) for rank in range(world_size)]
        assert [list(chain(*step)) for step in zip(*parts, strict=True)] == whole
    with Connection(parse_address(address)) as connection:
        order = pb.OrderSpec(seed=0, global_batch_size=12)
        planned = connection.plan_step(
            pb.PlanStepRequest(dataset=pb.DatasetRef(name="numbers"), order=order, step=19, world_size=1)
        )
    assert list(planned.sample_ids) == whole[19]


def test_inside_a_torch_dataloader(address: str) -> None:
    with (
        Loader("numbers", batch_size=10, epochs=2, address=address) as bare,
        Loader("numbers", batch_size=10, epochs=2, address=address) as wrapped,
    ):
        dataloader: DataLoader[Batch] = DataLoader(wrapped, batch_size=None, num_workers=0)
        assert len(dataloader) == 21
        assert same(list(bare), list(dataloader))


@pytest.mark.parametrize("num_read", [0, 1, 13])
def test_a_state_resumes_after_the_last_batch_yielded(address: str, num_read: int) -> None:
    with Loader("numbers", batch_size=10, seed=5, address=address) as loader:
        uninterrupted = take(loader, 20)
    with Loader("numbers", batch_size=10, seed=5, address=address) as loader:
        take(loader, num_read)
        state = pickle.loads(pickle.dumps(loader.state_dict()))
        assert (loader.step, loader.epoch) == (num_read, num_read * 10 // NUM_SAMPLES)
    with Loader("numbers", batch_size=10, seed=5, address=address) as loader:
        loader.load_state_dict(state)
        assert loader.state_dict() == state
        assert loader.step == num_read
        assert same(take(loader, 20 - num_read), uninterrupted[num_read:])


def test_a_state_can_be_loaded_between_batches(address: str) -> None:
    with Loader("numbers", batch_size=10, address=address) as loader:
        first = take(loader, 4)
        state = loader.state_dict()
        second = take(loader, 4)
        loader.load_state_dict(state)
        assert same(take(loader, 4), second)
        assert loader.step == 8
        assert not same(first, second)


def test_iteration_goes_on_where_it_was_left(address: str) -> None:
    with Loader("numbers", batch_size=10, address=address) as loader:
        left = [batch for batch, _ in zip(loader, range(3), strict=False)]  # zip takes a fourth and drops it
        rest = list(loader)
        assert len(left) + 1 + len(rest) == 11
        assert len(list(loader)) == 10, "and then with the next epoch"


def test_a_state_of_something_else_is_refused_and_changes_nothing(address: str) -> None:
    others = (
        Loader("half", batch_size=10, address=address),
        Loader("numbers", batch_size=20, address=address),
        Loader("numbers", batch_size=10, seed=1, address=address),
        Loader("numbers", batch_size=10, tail="drop", address=address),
    )
    strange = []
    for other in others:
        with other:
            strange.append(other.state_dict())
    with Loader("numbers", batch_size=10, address=address) as loader:
        expected = loader.state_dict()
        for state in (*strange, {"cursor": b"GYRE"}, {"cursor": "text"}, {"step": 3}, {}):
            with pytest.raises(CursorRejected):
                loader.load_state_dict(state)
            assert loader.state_dict() == expected
        assert loader.step == 0
        assert len(take(loader, 1)) == 1


@pytest.mark.parametrize(("tail", "num_steps"), [("wrap", 21), ("drop", 20), ("pad", 22)])
def test_the_tail_of_an_epoch(address: str, tail: str, num_steps: int) -> None:
    with Loader("numbers", batch_size=10, epochs=2, tail=tail, address=address) as loader:
        assert loader.num_samples == NUM_SAMPLES
        assert loader.steps_per_epoch == (10 if tail == "drop" else 11)
        assert len(loader) == num_steps
        epochs = []
        batches = []
        for batch in loader:
            epochs.append(loader.epoch)
            batches.append(batch)
    assert len(batches) == num_steps
    assert epochs[-1] == 2
    assert all(("mask" in batch) == (tail == "pad") for batch in batches)
    if tail == "pad":
        assert [int(batch["mask"].sum()) for batch in batches] == ([10] * 10 + [1]) * 2


def test_an_endless_loader_has_no_length(address: str) -> None:
    with Loader("numbers", batch_size=10, epochs=None, address=address) as loader:
        with pytest.raises(TypeError, match="never ends"):
            len(loader)
        assert sum(1 for _ in islice(loader, 50)) == 50


def test_batches_are_the_caller_s(address: str) -> None:
    with Loader("numbers", batch_size=10, address=address) as loader:
        kept = next(loader)
        copy = {name: tensor.clone() for name, tensor in kept.items()}
        spoilt = next(loader)
        for tensor in spoilt.values():
            tensor.zero_()
        take(loader, 30)
        assert same([kept], [copy])
        del loader.__dict__["_step"]  # nothing of the loader is needed any more
    gc.collect()
    assert same([kept], [copy])


def test_ragged_fields(gyred: Any, tmp_path: Path) -> None:
    samples = [{"__key__": f"{n:03d}", "txt": f"text {n}" * n, "json": {"n": n}} for n in range(30)]
    with webdataset.TarWriter(str(tmp_path / "shard-000.tar")) as writer:
        for sample in samples:
            writer.write(sample)
    dataset = {"uri": str(tmp_path / "shard-000.tar"), "format": "webdataset", "fields": ["txt", "json"]}
    daemon = gyred({"datasets": {"texts": dataset}})
    with Loader("texts", batch_size=10, address=daemon.address) as loader:
        batches = list(loader)
    assert sorted(ids(batches)) == list(range(30))
    for batch in batches:
        numbers = batch["sample_id"].tolist()
        assert texts(batch, "txt") == [samples[n]["txt"] for n in numbers]
        assert objects(batch, "json") == [{"n": n} for n in numbers]


def test_refusals_of_the_daemon_arrive_as_what_they_are(address: str) -> None:
    with pytest.raises(UnknownDataset, match="wiki"):
        Loader("wiki", batch_size=10, address=address)
    with (
        Loader("numbers", batch_size=1000, tail="drop", address=address) as loader,
        pytest.raises(InvalidRequest, match="1000"),
    ):
        next(loader)


def test_a_corrupt_sample_is_an_error_after_all_batches_before_it(gyred: Any, tmp_path: Path) -> None:
    with webdataset.TarWriter(str(tmp_path / "shard-000.tar")) as writer:
        for n in range(30):
            writer.write({"__key__": f"{n:03d}", "json": b"{" if n == 17 else b"{}"})
    dataset = {"uri": str(tmp_path / "shard-000.tar"), "format": "webdataset", "fields": ["json"]}
    daemon = gyred({"datasets": {"texts": dataset}})
    with Loader("texts", batch_size=1, seed=1, address=daemon.address, prefetch_batches=30) as loader:
        seen: list[int] = []
        with pytest.raises(CorruptSample, match=r"shard-000\.tar"):
            seen.extend(loader.step for _ in loader)
        assert loader.step == len(seen)
    with Connection(parse_address(daemon.address)) as connection:
        order = pb.OrderSpec(seed=1, global_batch_size=30)
        planned = connection.plan_step(pb.PlanStepRequest(dataset=pb.DatasetRef(name="texts"), order=order, world_size=1))
    assert list(planned.sample_ids).index(17) == len(seen) > 3


def test_no_room_is_waited_for_and_then_an_error(gyred: Any, tokens: Path) -> None:
    dataset = {"uri": str(tokens), "format": "tokens", "dtype": "int16", "sequence_length": LENGTH}
    daemon = gyred({"memory_budget": 300 << 10, "datasets": {"numbers": dataset}})

    def loader(batch_size: int) -> Loader:
        return Loader("numbers", batch_size=batch_size, address=daemon.address, reattach_timeout_s=0.3)

    with loader(3000) as hopeless, pytest.raises(Overloaded, match=r"needs 388160 bytes, .* only 307200 are free"):
        next(hopeless)
    with loader(10) as first, loader(10) as second:
        next(first)
        with pytest.raises(Overloaded, match=r"only 40608 are free.*gave up after 0\.\d s"):
            next(second)
        first.close()
        assert len(take(second, 5)) == 5


def test_the_younger_of_two_readers_takes_over(address: str) -> None:
    with Loader("numbers", batch_size=10, address=address, job="train", prefetch_batches=1) as older:
        take(older, 1)
        with Loader("numbers", batch_size=10, address=address, job="train") as younger:
            take(younger, 1)
            with pytest.raises(Fenced, match="taken over"):
                take(older, 10)
            with pytest.raises(Fenced):
                next(older)
            assert len(take(younger, 20)) == 20


def test_a_forked_child_is_told(address: str) -> None:
    with Loader("numbers", batch_size=10, address=address) as loader:
        take(loader, 1)
        pid = os.fork()
        if pid == 0:
            try:
                next(loader)
            except ForkedProcess as error:
                os._exit(7 if "make the Loader in the process that reads" in str(error) else 1)
            finally:
                os._exit(2)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 7
        assert len(take(loader, 20)) == 20


def test_dataloader_workers_are_told(address: str) -> None:
    with Loader("numbers", batch_size=10, address=address) as loader:
        dataloader: DataLoader[Batch] = DataLoader(loader, batch_size=None, num_workers=1, multiprocessing_context="fork")
        iterator = iter(dataloader)
        with pytest.raises(ForkedProcess, match="num_workers=0"):
            next(iterator)
        for worker in multiprocessing.active_children():
            worker.terminate()  # torch would wait five seconds for it
        with pytest.raises(ForkedProcess, match="num_workers=0"):
            pickle.dumps(loader)
        assert len(take(loader, 3)) == 3


NUM_SLOW_CLOSES = 6  # gRPC closes a channel's descriptors in the background, some a moment later


@pytest.fixture
def nothing_left() -> Iterator[None]:
    """No thread and no connection is left by the test."""
    threads = set(threading.enumerate())
    yield
    gc.collect()
    assert [thread for thread in threading.enumerate() if thread not in threads and thread.is_alive()] == []


def test_closing_leaves_nothing(address: str, nothing_left: None) -> None:
    process = psutil.Process()
    num_before = process.num_fds()
    for _ in range(20):
        with Loader("numbers", batch_size=10, address=address) as loader:
            take(loader, 2)
    assert process.num_fds() <= num_before + NUM_SLOW_CLOSES
    with Connection(parse_address(address)) as connection:
        assert list(connection.status().sessions) == []


def test_a_forgotten_loader_is_closed_when_it_is_collected(address: str, nothing_left: None) -> None:
    loader = Loader("numbers", batch_size=10, address=address)
    take(loader, 2)
    del loader
    gc.collect()
    with Connection(parse_address(address)) as connection:
        assert list(connection.status().sessions) == []


def test_a_closed_loader_says_so(address: str) -> None:
    loader = Loader("numbers", batch_size=10, address=address)
    take(loader, 3)
    state = loader.state_dict()
    loader.close()
    loader.close()
    assert loader.state_dict() == state
    with pytest.raises(InvalidRequest, match="closed"):
        next(loader)
