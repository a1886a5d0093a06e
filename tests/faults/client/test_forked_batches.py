"""A forked child's batches stay as they are, whatever its parent and the daemon go on to do."""

import faulthandler
import fcntl
import gc
import mmap
import multiprocessing
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np
import psutil
import pytest
import torch
from gyre_client import Loader
from gyre_client.batches.arena import Arena
from torch.utils.data import DataLoader, Dataset

from tests.conftest import Daemon, StartDaemon
from tests.waiting import until

PAGE = mmap.PAGESIZE
FORK = multiprocessing.get_context("fork")


@pytest.fixture
def arena() -> Iterator[tuple[Arena, int]]:
    """An arena of eight pages, each full of its number, and its file."""
    file = os.memfd_create("gyre-arena", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.write(file, b"".join(bytes([page]) * PAGE for page in range(8)))
    fcntl.fcntl(file, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK)
    arena = Arena(os.dup(file))
    yield arena, file
    arena.close()
    os.close(file)


def in_child(check: Callable[[], bool]) -> int:
    """Forks, and returns 0 if the check holds in the child."""
    pid = os.fork()
    if pid == 0:
        faulthandler.disable()
        status = 2
        try:
            status = 0 if check() else 1
        finally:
            os._exit(status)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def mapped_arenas() -> int:
    return Path("/proc/self/maps").read_text().count("gyre-arena")


def test_what_is_read_is_copied_and_nothing_else_is_mapped(arena: tuple[Arena, int]) -> None:
    lender, file = arena
    memory, loan = lender.lend(PAGE, 3 * PAGE)
    unread, _ = lender.lend(4 * PAGE, 5 * PAGE)
    loan.is_read = True
    memory[0] = 99
    held = [memory]
    del memory

    def check() -> bool:
        os.pwrite(file, bytes([7]) * (8 * PAGE), 0)  # as the daemon fills slots again
        read = held[0]
        is_same = set(read[1:PAGE].tolist()) == {1} and set(read[PAGE:].tolist()) == {2}
        again = in_child(lambda: read[0] == 99 and read[PAGE] == 2)  # a nested fork
        return is_same and read[0] == 99 and mapped_arenas() == 0 and again == 0

    assert in_child(check) == 0
    assert in_child(lambda: int(unread[0]) >= 0) < 0, "the kernel ends it: it shows nothing wrong"
    assert (held[0][0], held[0][PAGE]) == (99, 2)
    assert unread[0] == 7, "what nobody reads is the file, still"
    held.clear()
    assert loan() is None
    loan.take_back()
    again, _ = lender.lend(PAGE, 3 * PAGE)
    assert set(again.tolist()) == {7}, "the slot shows the file again"


def test_a_child_frees_what_it_drops(arena: tuple[Arena, int]) -> None:
    lender, _ = arena
    held = []
    memory, loan = lender.lend(0, PAGE)
    loan.is_read = True
    address = memory.ctypes.data
    held.append(memory)
    del memory

    def is_mapped() -> bool:
        lines = Path("/proc/self/maps").read_text().splitlines()
        pairs = (line.split()[0].split("-") for line in lines)
        return any(int(begin, 16) <= address < int(end, 16) for begin, end in pairs)

    def check() -> bool:
        was_mapped = is_mapped()
        held.clear()
        return was_mapped and not is_mapped()

    assert in_child(check) == 0


@pytest.fixture
def daemon(gyred: StartDaemon, tmp_path: Path) -> Daemon:
    np.random.default_rng(0).integers(0, 30000, 8000 * 64, dtype="<i2").tofile(tmp_path / "a.bin")
    tokens = {
        "uri": str(tmp_path / "a.bin"),
        "format": "tokens",
        "dtype": "int16",
        "sequence_length": 64,
    }
    return gyred({"datasets": {"tokens": tokens}})


def count_changed(tensor: torch.Tensor, expected: torch.Tensor, go_on: Any, results: Any) -> None:
    assert go_on.wait(60)
    results.put(int((tensor != expected).sum()))


def test_children_keep_batches_views_and_those_of_ended_sessions(daemon: Daemon) -> None:
    """They read what they hold after the parent has read everything else over its slot."""
    go_on, results, children = FORK.Event(), FORK.Queue(), []

    def start(tensor: torch.Tensor) -> None:
        child = FORK.Process(target=count_changed, args=(tensor, tensor.clone(), go_on, results))
        child.start()
        child._args = ()  # type: ignore[attr-defined]  # the parent keeps nothing of the batch
        children.append(child)

    gc.collect()  # in a child, the end of a channel that a test left open can wait forever
    loaders = [
        Loader("tokens", batch_size=32, seed=seed, epochs=None, address=daemon.address)
        for seed in range(3)
    ]
    for number, loader in enumerate(loaders):
        batch = list(islice(loader, 30))[-1]
        start((batch["tokens"], batch["tokens"][3:7, ::2], batch["sample_id"])[number])
    kept = next(loaders[2])["tokens"]
    loaders[2].close()
    start(kept)
    del kept, batch
    for loader in loaders[:2]:
        for _ in islice(loader, 2000):
            pass
    go_on.set()
    assert [results.get(timeout=60) for _ in children] == [0] * 4
    for child in children:
        child.join()
        assert child.exitcode == 0
    loaders[0].close()
    loaders[1].close()


class Batches(Dataset[int]):
    """What a worker sees of one batch, each time it is asked."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor, self.expected = tensor, tensor.clone()

    def __len__(self) -> int:
        return 40

    def __getitem__(self, number: int) -> int:
        time.sleep(0.005)
        return int((self.tensor != self.expected).sum())


def test_workers_of_another_dataloader_keep_the_batch_that_they_were_forked_with(
    daemon: Daemon,
) -> None:
    gc.collect()
    with Loader("tokens", batch_size=32, epochs=None, address=daemon.address) as loader:
        dataset = Batches(next(loader)["tokens"])
        workers = DataLoader(dataset, num_workers=2, multiprocessing_context="fork")
        found = iter(workers)
        dataset.tensor = torch.zeros(1)
        for _ in islice(loader.stream(), 1000):
            pass
        assert sum(int(each) for each in found) == 0


def test_to_start_a_program_copies_nothing(daemon: Daemon, monkeypatch: pytest.MonkeyPatch) -> None:
    copies: list[int] = []
    monkeypatch.setattr(Arena, "copy_for_child", lambda self: copies.append(1))
    with Loader("tokens", batch_size=32, epochs=None, address=daemon.address) as loader:
        batch = next(loader)
        subprocess.run([sys.executable, "-c", ""], check=True)
        assert copies == []
        assert in_child(lambda: True) == 0
        assert copies
    assert len(batch["tokens"]) == 32


def test_a_child_that_lives_on_keeps_no_session_of_its_parent(daemon: Daemon) -> None:
    """The daemon sees that the parent hung up, although the child has its descriptors."""
    assert daemon.process
    process = psutil.Process(daemon.process.pid)

    def num_sides() -> int:
        return sum(str(each.laddr).endswith(".side") for each in process.net_connections("unix"))

    before = num_sides()
    with Loader("tokens", batch_size=32, address=daemon.address) as loader:
        next(loader)
        assert num_sides() > before
        reading, writing = os.pipe()
        pid = os.fork()
        if pid == 0:
            os.close(writing)
            os.read(reading, 1)  # until the parent closes its end
            os._exit(0)
    until(lambda: num_sides() == before)
    os.close(writing)
    os.close(reading)
    os.waitpid(pid, 0)


def test_a_fork_at_any_line_of_an_arena_s_end_keeps_what_is_read() -> None:
    """Another thread may fork there; each time it is an arena that no fork has copied yet."""
    statuses: list[int] = []
    num_lines = 0
    while len(statuses) == num_lines:
        num_lines += 1
        file = os.memfd_create("gyre-arena", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        os.write(file, b"".join(bytes([page]) * PAGE for page in range(4)))
        fcntl.fcntl(file, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK)
        lender = Arena(file)
        held = []
        for page in (1, 3):
            memory, loan = lender.lend(page * PAGE, (page + 1) * PAGE)
            loan.is_read = True
            held.append(memory)
        del memory
        num_left = num_lines

        def forking(frame: FrameType, event: str, argument: object, held: list[Any] = held) -> Any:
            nonlocal num_left
            if frame.f_code is not Arena.close.__code__:
                return None
            num_left -= event == "line"
            if event == "line" and num_left == 0:
                sys.settrace(None)
                statuses.append(in_child(lambda: [int(each[0]) for each in held] == [1, 3]))
            return forking

        before = sys.gettrace()
        sys.settrace(forking)
        try:
            lender.close()
        finally:
            sys.settrace(before)
    assert len(statuses) > 10
    assert set(statuses) == {0}
