"""Copies that a thread makes, with both ends of a link in one process.

One of the ends starts its transfers and waits for none.
"""

import ctypes
import gc
import os
import random
import select
import socket
import subprocess
import sys
import threading
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
from gyre_trainer.comm.shared_memory.copy_thread import CopyThread
from gyre_trainer.comm.shared_memory.files import SharedMemory
from gyre_trainer.comm.shared_memory.link import Link
from torch import Tensor

from tests.waiting import until

STREAM, OTHER = 1, 2
TIMEOUT_S = 20.0


@dataclass
class Side:
    memory: SharedMemory
    link: Link
    copy_thread: CopyThread


def made(end: socket.socket) -> Side:
    memory, calls = SharedMemory(), select.epoll()
    link = Link(end, memory, timedelta(seconds=TIMEOUT_S), calls)
    return Side(memory, link, CopyThread(calls, [link]))


@pytest.fixture
def sides() -> Iterator[tuple[Side, Side]]:
    one, other = map(made, socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET))
    yield one, other
    del one, other
    gc.collect()


def buffer_of(side: Side, *values: float) -> Tensor:
    return side.memory.allocate(len(values), torch.float32).copy_(torch.tensor(values))


def num_open() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


def threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "gyre hops"]


def test_a_thread_that_ends_before_it_is_woken_is_no_error() -> None:
    one, other = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    memory, calls = SharedMemory(), select.epoll()
    link = Link(one, memory, timedelta(seconds=TIMEOUT_S), calls)
    number, before = link.number, threads()

    class Noticed(threading.Event):
        """An event whose setter finds that the thread has ended in the meantime."""

        def set(self) -> None:
            super().set()
            calls.modify(number, select.EPOLLOUT | select.EPOLLONESHOT)
            until(lambda: threads() == before)

    plain = threading.Event
    events = iter([Noticed()])
    # a thread has one of its own
    with patch.object(threading, "Event", lambda: next(events, None) or plain()):
        copy_thread = CopyThread(calls, [link])
    del link, one
    del copy_thread
    gc.collect()
    assert threads() == before
    other.close()


@pytest.mark.parametrize("offered_first", [True, False])
@pytest.mark.parametrize("arrives", [True, False])
def test_a_copy_is_made_while_no_caller_waits(
    sides: tuple[Side, Side], arrives: bool, offered_first: bool
) -> None:
    one, other = sides
    offered, copied = buffer_of(one, 1, 2), torch.tensor([3.0, 4.0])
    if not offered_first:
        other.link.copy(STREAM, copied, arrives=arrives)
    transfer = one.link.offer(STREAM, offered, arrives=not arrives)
    if offered_first:
        other.link.copy(STREAM, copied, arrives=arrives)
    transfer.wait()
    assert torch.equal(offered, copied)
    assert offered.tolist() == ([1, 2] if arrives else [3, 4])


def test_a_copy_whose_offer_came_before_is_made_at_once(sides: tuple[Side, Side]) -> None:
    one, other = sides
    other.link.copy(OTHER, torch.ones(1), arrives=False)
    arriving = one.link.offer(STREAM, buffer_of(one, 0), arrives=True)
    until(lambda: other.link._offers[STREAM])
    other.link.copy(STREAM, torch.full((1,), 5.0), arrives=False)
    arriving.wait()
    assert arriving.tensor.item() == 5


def test_a_wait_for_a_copy_in_progress_lasts_until_its_end(
    sides: tuple[Side, Side],
) -> None:
    one, other = sides
    began, go_on, ended = threading.Event(), threading.Event(), threading.Event()

    def slowly(*args: int) -> None:
        assert threading.current_thread() is not threading.main_thread()
        began.set()
        assert go_on.wait(TIMEOUT_S)
        ended.set()

    with patch.object(ctypes, "memmove", slowly):
        one.link.offer(STREAM, buffer_of(one, 0), arrives=True)
        leaving = other.link.copy(STREAM, torch.ones(1), arrives=False)
        assert began.wait(TIMEOUT_S)
        threading.Timer(0.05, go_on.set).start()
        leaving.wait()
        assert ended.is_set()


def test_transfers_in_both_directions_arrive_in_their_places(sides: tuple[Side, Side]) -> None:
    """Transfers are waited for in random order, so copies are made in either thread."""
    draw = random.Random(0)
    buffers = [{stream: buffer_of(side, 0, 0) for stream in (STREAM, OTHER)} for side in sides]
    for step in range(300):
        started = []
        for stream in draw.sample((STREAM, OTHER), 2):
            for place in draw.sample((0, 1), 2):
                one, other = sides[place], sides[1 - place]
                value = torch.tensor([float(step), stream + 10.0 * place])
                offer = partial(one.link.offer, stream, buffers[place][stream], arrives=True)
                copy = partial(other.link.copy, stream, value, arrives=False)
                started += [start() for start in draw.sample([offer, copy], 2)]
        draw.shuffle(started)
        for transfer in started:
            transfer.wait()
        for place, by_stream in enumerate(buffers):
            for stream, buffer in by_stream.items():
                assert buffer.tolist() == [step, stream + 10 * place]


def test_a_waiting_caller_learns_that_the_other_process_has_ended(
    sides: tuple[Side, Side],
) -> None:
    one, other = sides
    leaving = other.link.copy(STREAM, torch.ones(1), arrives=False)
    one.link._end.shutdown(socket.SHUT_RDWR)
    until(lambda: other.link._failed)
    for _ in range(2):
        with pytest.raises(ConnectionError, match="its process is gone"):
            leaving.wait()


def test_nothing_is_left_of_a_copy_thread_that_was_released() -> None:
    gc.collect()
    before, there_before = num_open(), threads()
    one, other = map(made, socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET))
    arriving = one.link.offer(STREAM, buffer_of(one, 0), arrives=True)
    other.link.copy(STREAM, torch.ones(1), arrives=False)
    arriving.wait()
    assert len(threads()) == len(there_before) + 2
    del one, other, arriving
    gc.collect()
    assert threads() == there_before
    assert num_open() == before


def test_a_forked_process_leaves_the_thread_alone() -> None:
    one, other = map(made, socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET))
    with warnings.catch_warnings(action="ignore", category=DeprecationWarning):
        child = os.fork()
    if child == 0:
        try:
            del one, other
            gc.collect()
        finally:
            os._exit(len(threads()))
    assert os.waitpid(child, 0)[1] == 0
    other.link.copy(STREAM, torch.full((1,), 5.0), arrives=False)
    arriving = one.link.offer(STREAM, buffer_of(one, 0), arrives=True)
    arriving.wait()
    assert arriving.tensor.item() == 5


def test_an_interpreter_ends_in_the_middle_of_a_transfer() -> None:
    program = f"""
import sys
sys.path.insert(0, {str(Path(__file__).parent)!r})
from test_train_copy_thread import *
one, other = map(made, socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET))
other.link.copy(STREAM, torch.ones(1), arrives=False)
one.link.offer(OTHER, buffer_of(one, 0), arrives=True)
"""
    command = [sys.executable, "-W", "error", "-c", program]
    ended = subprocess.run(command, check=False, capture_output=True, timeout=3 * TIMEOUT_S)
    assert (ended.returncode, ended.stderr) == (0, b"")
