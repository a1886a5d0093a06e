"""Batches on a device: a thread that transfers in order stands in for CUDA where there is none."""

import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gyre_client import Loader
from gyre_client.batches.arena import Memory
from gyre_client.batches.stream import NUM_AHEAD, BatchStream, DeviceStream, Terms, parse_device
from gyre_client.errors import CorruptSample, GyreError, InvalidRequest
from gyre_client.transport.channel import parse_address
from gyre_client.transport.connection import Connection
from gyre_client.transport.target import Target
from gyre_protos.v1 import loader_pb2 as pb
from torch import Tensor
from webdataset import TarWriter

from tests.conftest import Daemon, StartDaemon
from tests.waiting import until

DEADLINE_S = 150.0
Batch = dict[str, Tensor]


class ThreadDevice:
    """A device whose one stream is a thread. It transfers payloads while its gate is open.

    Attributes:
        num_begun: How many transfers were begun.
    """

    def __init__(self) -> None:
        self.gate = threading.Event()
        self.gate.set()
        self.num_begun = 0
        self._stream = ThreadPoolExecutor(1, thread_name_prefix="test-device")

    def begin(self, memory: Memory) -> Callable[[], Tensor]:
        self.num_begun += 1
        pinned = torch.from_numpy(memory).clone()
        return self._stream.submit(self._transfer, pinned).result

    def close(self) -> None:
        self.gate.set()
        self._stream.shutdown()

    def _transfer(self, pinned: Tensor) -> Tensor:
        assert self.gate.wait(DEADLINE_S)
        return pinned


@pytest.fixture
def daemon(gyred: StartDaemon, token_files: Path, tmp_path: Path) -> Daemon:
    with TarWriter(str(tmp_path / "texts.tar")) as writer:
        for n in range(8):
            writer.write({"__key__": f"{n:03d}", "json": b"{" if n == 3 else b"{}"})
    texts = {"uri": str(tmp_path / "texts.tar"), "format": "webdataset", "fields": ["json"]}
    tokens = {"uri": str(token_files), "format": "tokens", "dtype": "int16", "sequence_length": 10}
    return gyred({"datasets": {"tokens": tokens, "texts": texts}})


@pytest.fixture
def device() -> Iterator[ThreadDevice]:
    device = ThreadDevice()
    yield device
    device.close()


@contextlib.contextmanager
def device_stream(
    daemon: Daemon,
    device: ThreadDevice,
    dataset: str = "tokens",
    *,
    num_epochs: int = 0,
    prefetch_batches: int = 4,
) -> Iterator[DeviceStream]:
    request = pb.OpenSessionRequest(
        dataset=pb.DatasetRef(name=dataset),
        order=pb.OrderSpec(global_batch_size=8, seed=3),
        reader=pb.Reader(job="device", world_size=1),
        num_epochs=num_epochs,
        prefetch_batches=prefetch_batches,
    )
    source = BatchStream(Target(parse_address(daemon.address)), request, Terms(5.0))
    source.open()
    stream = DeviceStream(source, device.begin)
    try:
        yield stream
    finally:
        stream.close()


def take(stream: DeviceStream) -> Batch:
    batch = stream.take()
    assert batch is not None
    return batch.tensors


def expected(daemon: Daemon, num_batches: int) -> list[Batch]:
    with Loader("tokens", batch_size=8, seed=3, address=daemon.address) as loader:
        return [
            {name: tensor.clone() for name, tensor in batch.items()}
            for batch in islice(loader.stream(), num_batches)
        ]


def same(batch: Batch, other: Batch) -> bool:
    return list(batch) == list(other) and all(
        batch[name].dtype == other[name].dtype and torch.equal(batch[name].cpu(), other[name])
        for name in batch
    )


def num_held(daemon: Daemon) -> int:
    with Connection(parse_address(daemon.address)) as connection:
        return sum(session.num_held for session in connection.status().sessions)


def test_batches_are_the_same_and_may_be_held_and_written_to(
    daemon: Daemon, device: ThreadDevice
) -> None:
    wanted = expected(daemon, 200)
    with device_stream(daemon, device) as stream:
        held = []
        for batch in wanted:
            taken = take(stream)
            assert same(taken, batch)
            held.append({name: tensor.clone() for name, tensor in taken.items()})
            for tensor in taken.values():
                tensor.fill_(9)
    assert all(same(batch, other) for batch, other in zip(held, wanted, strict=True))
    with device_stream(daemon, device) as stream:
        held = [take(stream) for _ in wanted]
    daemon.kill()
    assert all(same(batch, other) for batch, other in zip(held, wanted, strict=True))


def test_slots_are_released_although_the_device_is_busy(
    daemon: Daemon, device: ThreadDevice
) -> None:
    device.gate.clear()
    with device_stream(daemon, device, prefetch_batches=1) as stream:
        until(lambda: device.num_begun == NUM_AHEAD)
        until(lambda: num_held(daemon) == 1)  # the batch that is transferred next
        device.gate.set()
        assert same(take(stream), expected(daemon, 1)[0])


def test_all_slots_are_back_while_every_batch_is_held(daemon: Daemon, device: ThreadDevice) -> None:
    with device_stream(daemon, device) as stream:
        held = [take(stream) for _ in range(100)]
        # What the client has received and not copied yet waits in its queue: at most as many as it
        # has credit for.
        until(lambda: num_held(daemon) <= stream.opened.max_queued_batches)
        assert len(held) == 100


def test_at_most_two_batches_are_transferred_ahead_of_the_trainer(
    daemon: Daemon, device: ThreadDevice
) -> None:
    with device_stream(daemon, device) as stream:
        until(lambda: device.num_begun == NUM_AHEAD)
        for num_taken in range(1, 20):
            take(stream)
            until(lambda wanted=num_taken + NUM_AHEAD: device.num_begun == wanted)  # type: ignore[misc]
        time.sleep(0.05)
        assert device.num_begun == 19 + NUM_AHEAD


def test_a_batch_is_handed_on_before_its_transfer_is_complete(
    daemon: Daemon, device: ThreadDevice
) -> None:
    device.gate.clear()
    with device_stream(daemon, device) as stream:
        batch = stream.take()
        assert batch
        assert batch.step == 0
        device.gate.set()
        assert same(batch.tensors, expected(daemon, 1)[0])


def test_every_take_after_the_end_returns_none(daemon: Daemon, device: ThreadDevice) -> None:
    with device_stream(daemon, device, num_epochs=1) as stream:
        steps = []
        while batch := stream.take():
            steps.append(batch.step)
        assert steps == list(range(-(-300 // 8)))
        assert stream.take() is None


def test_an_error_of_the_daemon_is_raised_after_the_batches_before_it(
    daemon: Daemon, device: ThreadDevice
) -> None:
    with device_stream(daemon, device, "texts") as stream:
        for _ in range(2):
            with pytest.raises(CorruptSample):
                while stream.take():
                    pass


def test_an_error_of_the_device_is_raised_by_the_next_take(daemon: Daemon) -> None:
    class Broken(ThreadDevice):
        def begin(self, memory: Memory) -> Callable[[], Tensor]:
            if self.num_begun == 2:
                raise torch.OutOfMemoryError("no memory on this device")
            return super().begin(memory)

    device = Broken()
    with device_stream(daemon, device) as stream:
        take(stream)
        take(stream)
        for _ in range(2):
            with pytest.raises(torch.OutOfMemoryError, match="no memory on this device"):
                stream.take()
    device.close()


def test_closing_leaves_no_thread_and_a_reader_learns_of_it(
    daemon: Daemon, device: ThreadDevice
) -> None:
    for num_taken in (0, 1, 5):
        with device_stream(daemon, device) as stream:
            for _ in range(num_taken):
                take(stream)
        with pytest.raises(GyreError, match="closed while it was being read"):
            while stream.take():
                pass
        names = {thread.name for thread in threading.enumerate()}
        assert not {"gyre-transfer", "gyre-receiver"} & names


@pytest.fixture
def on_thread(monkeypatch: pytest.MonkeyPatch, device: ThreadDevice) -> None:
    """A Loader with a device copies to the one of this test."""
    monkeypatch.setattr(
        "gyre_client.loader.loader.parse_device", lambda device: device and torch.device("cpu")
    )
    monkeypatch.setattr("gyre_client.loader.place.CudaTransfer", lambda _: device)


@pytest.mark.usefixtures("on_thread")
def test_a_loader_s_state_counts_what_was_yielded_and_not_what_was_copied(daemon: Daemon) -> None:
    wanted = expected(daemon, 30)
    with Loader("tokens", batch_size=8, seed=3, address=daemon.address, device="thread") as loader:
        first = list(islice(loader.stream(), 10))
        state = loader.state_dict()
        assert loader.step == 10
        rest = list(islice(loader.stream(), 20))
        loader.load_state_dict(state)
        again = list(islice(loader.stream(), 20))
    for batches in (first + rest, first + again):
        assert all(same(batch, other) for batch, other in zip(batches, wanted, strict=True))


@pytest.mark.usefixtures("on_thread")
def test_a_trainer_that_is_slower_than_its_copies_is_not_said_to_wait(
    daemon: Daemon, device: ThreadDevice
) -> None:
    with Loader(
        "tokens", batch_size=8, seed=3, prefetch_batches=4, address=daemon.address, device="thread"
    ) as loader:
        began_s = time.monotonic()
        next(loader)
        first_s = time.monotonic() - began_s
        for num_taken in range(1, 20):
            # The second copy begins when the first has been handed on, so the trainer finds one.
            until(lambda wanted=num_taken + NUM_AHEAD: device.num_begun == wanted)  # type: ignore[misc]
            next(loader)
        with Connection(parse_address(daemon.address)) as connection:
            (session,) = connection.status().sessions
    assert 0 < session.trainer_waited_s <= first_s


def test_a_device_that_is_not_there_is_refused_at_once(daemon: Daemon) -> None:
    assert parse_device(None) is None
    assert parse_device("cpu") is None
    for device, complaint in (
        ("cuda:99", "device is 'cuda:99', but torch sees [0-9]+ CUDA devices here"),
        ("gpu", "device is 'gpu', which torch does not know"),
        ("meta", "device is 'meta'; batches can be had on the CPU and on CUDA devices"),
    ):
        with pytest.raises(InvalidRequest, match=complaint):
            Loader("tokens", batch_size=8, address=daemon.address, device=device)
    if not torch.cuda.is_available():
        with pytest.raises(InvalidRequest, match="torch sees 0 CUDA devices here"):
            Loader("tokens", batch_size=8, address=daemon.address, device="cuda")


@pytest.mark.usefixtures("on_thread")
def test_ids_are_widened_where_they_were_copied_to(
    gyred: StartDaemon, token_files: Path, device: ThreadDevice
) -> None:
    unsigned = {
        "uri": str(token_files),
        "format": "tokens",
        "dtype": "uint16",
        "sequence_length": 10,
    }
    daemon = gyred({"datasets": {"tokens": unsigned}})
    for token_dtype, arrives in (
        ("int64", torch.int64),
        ("int32", torch.int32),
        ("stored", torch.uint16),
    ):
        arguments: dict[str, Any] = {
            "batch_size": 8,
            "seed": 3,
            "address": daemon.address,
            "token_dtype": token_dtype,
        }
        with (
            Loader("tokens", **arguments, device="thread") as copied,
            Loader("tokens", **arguments) as direct,
        ):
            for batch, wanted in islice(zip(copied, direct, strict=True), 30):
                assert batch["tokens"].dtype == arrives
                assert same(batch, wanted)
    assert device.num_begun


@pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no CUDA device")
def test_cuda(daemon: Daemon) -> None:
    wanted = expected(daemon, 200)
    with Loader("tokens", batch_size=8, seed=3, address=daemon.address, device="cuda") as loader:
        held = list(islice(loader.stream(), 100))
        assert all(tensor.is_cuda for batch in held for tensor in batch.values())
        sums = [batch["tokens"].long().sum() for batch in islice(loader.stream(), 100)]
    assert all(same(batch, other) for batch, other in zip(held, wanted[:100], strict=True))
    totals = np.array([int(total) for total in sums])
    assert totals.tolist() == [int(batch["tokens"].long().sum()) for batch in wanted[100:]]
