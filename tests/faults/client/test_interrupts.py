"""An exception inside `next` takes no batch: the loader stands where it was, and reads on.

A signal may raise KeyboardInterrupt at any line, and memory may run out. A trace function stands in
for a signal where every line is to be tried in turn.
"""

import os
import random
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path
from types import FrameType
from typing import Any

import gyre_client
import numpy as np
import pytest
import torch
from gyre_client import Loader
from torch.utils.data import DataLoader

from tests.conftest import StartDaemon

PACKAGE = str(Path(gyre_client.__file__).parent)
NUM_SAMPLES, BATCH_SIZE = 4000, 8
NUM_INTERRUPTS = 1000


@pytest.fixture(scope="module")
def address(shared_gyred: StartDaemon, tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("data") / "tokens.bin"
    np.arange(NUM_SAMPLES * 4, dtype="<u2").tofile(path)
    tokens = {
        "uri": str(path),
        "format": "tokens",
        "dtype": "uint16",
        "sequence_length": 4,
    }
    address: str = shared_gyred({"datasets": {"tokens": tokens}}).address
    return address


def open_loader(address: str, token_dtype: str = "int64", **arguments: Any) -> Loader:
    arguments = {"batch_size": BATCH_SIZE, "epochs": None, **arguments}
    return Loader("tokens", address=address, token_dtype=token_dtype, **arguments)


def ids(batch: dict[str, torch.Tensor]) -> list[int]:
    found: list[int] = batch["sample_id"].tolist()
    return found


def expected(address: str, num_batches: int) -> list[list[int]]:
    with open_loader(address) as loader:
        return [ids(batch) for batch in islice(loader.stream(), num_batches)]


class InterruptLine:
    """A trace function that interrupts the n-th line that runs in the client, once."""

    def __init__(self, num_lines: int) -> None:
        self.num_left = num_lines

    def __call__(self, frame: FrameType, event: str, argument: object) -> "InterruptLine | None":
        if not frame.f_code.co_filename.startswith(PACKAGE):
            return None
        if event == "line":
            self.num_left -= 1
            if self.num_left == 0:
                raise KeyboardInterrupt
        return self


def traced(num_lines: int, call: Callable[[], Any]) -> tuple[bool, Any]:
    """Whether a line was interrupted, and otherwise the result; without any coverage's trace."""
    before = sys.gettrace()
    sys.settrace(InterruptLine(num_lines))
    try:
        return False, call()
    except KeyboardInterrupt:
        return True, None
    finally:
        sys.settrace(before)


@pytest.mark.parametrize("token_dtype", ["int64", "stored"])
def test_each_line_of_next_may_be_interrupted(address: str, token_dtype: str) -> None:
    want = expected(address, 600)
    with open_loader(address, token_dtype) as loader:
        stream, num_lines, num_interrupted = loader.stream(), 1, 0
        for step, wanted in enumerate(want):
            interrupted, batch = traced(num_lines, lambda: next(stream))
            num_lines = num_lines + 1 if interrupted else 1
            num_interrupted += interrupted
            if interrupted:
                assert loader.step == step
                batch = next(stream)
            assert ids(batch) == wanted
            assert loader.last_step == step
    assert num_interrupted > 100


def test_each_line_of_a_move_may_be_interrupted(address: str) -> None:
    """Afterwards the loader stands at the one place or at the other, and can be moved again."""
    want = expected(address, 600)
    with open_loader(address, epochs=1) as loader:
        state = loader.state_dict()
        moves: list[tuple[Callable[[], Any], int | None]] = [
            (lambda: iter(loader), None),
            (lambda: loader.load_state_dict(state), 0),
            (lambda: loader.set_epoch(1), NUM_SAMPLES // BATCH_SIZE),
            (loader.reset, 0),
        ]
        lines = random.Random(1).sample(range(1, 200), 24)
        for num_lines, (move, target) in zip(lines, 6 * moves, strict=True):
            place = loader.num_batches
            assert ids(next(loader)) == want[place]
            interrupted, _ = traced(num_lines, move)
            now = loader.num_batches
            assert now in ((place + 1, target) if interrupted or target is None else (target,))
            assert ids(next(loader)) == want[now]
            loader.set_epoch(0)


def test_a_loader_whose_close_was_interrupted_can_be_closed(address: str) -> None:
    for num_lines in range(1, 60, 6):
        loader = open_loader(address)
        next(loader)
        traced(num_lines, loader.close)
        loader.close()
        assert "gyre-receiver" not in {thread.name for thread in threading.enumerate()}


@pytest.fixture
def interrupts() -> Iterator[list[int]]:
    """Sends SIGINT at random; it raises KeyboardInterrupt where the client is running.

    Yields:
        One number, how many it raised.
    """
    num_raised, stopping = [0], threading.Event()

    def interrupt(number: int, frame: FrameType | None) -> None:
        while frame is not None:
            if frame.f_code.co_filename.startswith(PACKAGE):
                num_raised[0] += 1
                raise KeyboardInterrupt
            frame = frame.f_back

    def shoot() -> None:
        pauses = random.Random(7)
        while not stopping.is_set():
            time.sleep(pauses.uniform(0, 0.002))
            os.kill(os.getpid(), signal.SIGINT)

    before = signal.signal(signal.SIGINT, interrupt)
    shooter = threading.Thread(target=shoot)
    shooter.start()
    yield num_raised
    stopping.set()
    shooter.join()
    signal.signal(signal.SIGINT, before)


@pytest.mark.parametrize("token_dtype", ["int64", "stored"])
def test_thousands_of_interrupts_lose_and_repeat_nothing(
    address: str, token_dtype: str, request: pytest.FixtureRequest
) -> None:
    with open_loader(address, token_dtype, order="sequential") as loader:
        stream = loader.stream()
        want = [list(range(n, n + BATCH_SIZE)) for n in range(0, NUM_SAMPLES, BATCH_SIZE)]
        num_raised = request.getfixturevalue("interrupts")
        step = 0
        while num_raised[0] < NUM_INTERRUPTS:
            try:
                for batch in stream:
                    assert ids(batch) == want[step % len(want)], step
                    step += 1
                    if num_raised[0] >= NUM_INTERRUPTS:
                        break
            except KeyboardInterrupt:
                pass
        signal.signal(signal.SIGINT, signal.SIG_IGN)


def test_memory_that_runs_out_takes_no_batch(address: str, monkeypatch: pytest.MonkeyPatch) -> None:
    want = expected(address, 20)
    with open_loader(address) as loader:
        assert ids(next(loader)) == want[0]

        def fail(*_: object) -> None:
            raise MemoryError

        with monkeypatch.context() as patched:
            patched.setattr("gyre_client.batches.batch.widen", fail)
            for _ in range(3):
                with pytest.raises(MemoryError):
                    next(loader)
        assert loader.last_step == 0
        state = loader.state_dict()
        assert [ids(batch) for batch in islice(loader.stream(), 19)] == want[1:]
        loader.load_state_dict(state)
        assert ids(next(loader)) == want[1]


def test_a_dataloader_reads_on_after_an_error_of_the_loader(
    address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    want = expected(address, 4)
    with open_loader(address) as loader:
        batches: DataLoader[Any] = DataLoader(loader, batch_size=None)
        assert ids(next(iter(batches))) == want[0]
        with monkeypatch.context() as patched:
            patched.setattr("gyre_client.batches.batch.widen", lambda *_: 1 / 0)
            with pytest.raises(ZeroDivisionError):
                next(iter(batches))
        assert [ids(batch) for batch in islice(batches, 3)] == want[1:]


def test_no_code_of_python_runs_when_a_batch_dies(address: str) -> None:
    """It could be interrupted there, and what it does be left undone."""
    with open_loader(address, "stored") as loader:
        batch = next(loader)
        ran: list[str] = []

        def trace(frame: FrameType, event: str, argument: object) -> None:
            ran.append(frame.f_code.co_qualname)

        before = sys.gettrace()
        sys.settrace(trace)
        del batch
        sys.settrace(before)
    assert ran == []
