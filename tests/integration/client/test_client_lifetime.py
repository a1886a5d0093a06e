"""A Loader in threads, in forked processes, and at its end."""

import gc
import multiprocessing
import os
import pickle
import threading
from collections.abc import Iterator
from typing import Any

import psutil
import pytest
from gyre_client import Loader
from gyre_client.errors import (
    ConcurrentUse,
    ForkedProcess,
    InvalidRequest,
)
from gyre_client.transport.channel import parse_address
from gyre_client.transport.connection import Connection
from torch.utils.data import DataLoader, IterableDataset

from tests.batches import Batch, same, take


def test_a_second_thread_gets_an_error_while_the_first_one_reads(numbers: str) -> None:
    with Loader("numbers", batch_size=4, epochs=1, tail="drop", address=numbers) as loader:
        waiting, go_on = threading.Event(), threading.Event()
        stream = loader._place.stream()
        peek = stream.peek

        def slow_peek() -> Any:
            waiting.set()
            assert go_on.wait(30)
            return peek()

        stream.peek = slow_peek  # type: ignore[method-assign]
        first: list[Batch] = []
        reader = threading.Thread(target=lambda: first.append(next(loader)), name="evaluation")
        reader.start()
        try:
            assert waiting.wait(30)
            with pytest.raises(
                ConcurrentUse,
                match=r"thread 'MainThread' uses this Loader while thread 'evaluation' does",
            ):
                next(loader)
            with pytest.raises(ConcurrentUse):
                loader.load_state_dict(loader.state_dict())
        finally:
            go_on.set()
            reader.join()
        stream.peek = peek  # type: ignore[method-assign]
        rest = list(loader)  # in this thread again
        with Loader("numbers", batch_size=4, epochs=1, tail="drop", address=numbers) as other:
            assert same(first + rest, list(other))


def test_a_forked_child_gets_an_error(numbers: str) -> None:
    with Loader("numbers", batch_size=10, address=numbers) as loader:
        take(loader, 1)
        gc.collect()  # in a child, the end of a channel that a test left open can wait forever
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


def test_workers_of_a_dataloader_get_an_error(numbers: str) -> None:
    with Loader("numbers", batch_size=10, address=numbers) as loader:
        dataloader: DataLoader[Batch] = DataLoader(
            loader, batch_size=None, num_workers=1, multiprocessing_context="fork"
        )
        gc.collect()  # as above
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
    assert [
        thread for thread in threading.enumerate() if thread not in threads and thread.is_alive()
    ] == []


def test_closing_leaves_no_thread_connection_or_session(numbers: str, nothing_left: None) -> None:
    process = psutil.Process()
    num_before = process.num_fds()
    for _ in range(20):
        with Loader("numbers", batch_size=10, address=numbers) as loader:
            take(loader, 2)
    assert process.num_fds() <= num_before + NUM_SLOW_CLOSES
    with Connection(parse_address(numbers)) as connection:
        assert list(connection.status().sessions) == []


def test_a_loader_without_references_is_closed(numbers: str, nothing_left: None) -> None:
    loader = Loader("numbers", batch_size=10, address=numbers)
    take(loader, 2)
    del loader
    gc.collect()
    with Connection(parse_address(numbers)) as connection:
        assert list(connection.status().sessions) == []


def test_a_closed_loader_keeps_its_state_and_refuses_to_read(numbers: str) -> None:
    loader = Loader("numbers", batch_size=10, address=numbers)
    take(loader, 3)
    state = loader.state_dict()
    loader.close()
    loader.close()
    assert loader.state_dict() == state
    with pytest.raises(InvalidRequest, match="closed"):
        next(loader)


class InEachWorker(IterableDataset[Batch]):
    """Makes a Loader where it is read."""

    def __init__(self, address: str) -> None:
        self.address = address

    def __iter__(self) -> Iterator[Batch]:
        with Loader("numbers", batch_size=10, address=self.address) as loader:
            yield from loader


def test_workers_that_would_all_read_every_batch_are_refused(numbers: str) -> None:
    dataset, fork = InEachWorker(numbers), {"batch_size": None, "multiprocessing_context": "fork"}
    gc.collect()  # as above
    iterator = iter(DataLoader(dataset, num_workers=2, **fork))  # type: ignore[arg-type]
    with pytest.raises(InvalidRequest, match="one of 2 workers of a DataLoader"):
        next(iterator)
    iterator._shutdown_workers()  # type: ignore[attr-defined]  # torch raises for killed ones later
