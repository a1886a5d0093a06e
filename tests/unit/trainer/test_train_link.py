"""Tensors between two neighbours, with both ends of a link in one process."""

import gc
import select
import socket
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

import pytest
import torch
from gyre_trainer.comm.shared_memory.files import SharedMemory
from gyre_trainer.comm.shared_memory.link import Link

STREAM, OTHER = 1, 2
TIMEOUT_S = 0.05


@dataclass
class Side:
    memory: SharedMemory
    link: Link
    calls: select.epoll


def num_open() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


def made(end: socket.socket) -> Side:
    memory, calls = SharedMemory(), select.epoll()
    return Side(memory, Link(end, memory, timedelta(seconds=TIMEOUT_S), calls), calls)


@pytest.fixture
def sides() -> Iterator[tuple[Side, Side]]:
    ends = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    one, other = map(made, ends)
    yield one, other
    for end in ends:
        end.close()


def test_a_copy_into_an_offered_buffer_arrives_in_it(sides: tuple[Side, Side]) -> None:
    one, other = sides
    buffer = one.memory.allocate(6, torch.float32)
    arriving = one.link.offer(STREAM, buffer[:4], arrives=True)
    leaving = other.link.copy(STREAM, torch.arange(4.0), arrives=False)
    other.link.make_copies()
    assert leaving.is_done
    arriving.wait()
    assert buffer[:4].tolist() == [0, 1, 2, 3]


def test_a_copy_out_of_an_offered_buffer_arrives_in_the_target(
    sides: tuple[Side, Side],
) -> None:
    one, other = sides
    buffer = one.memory.allocate(4, torch.bfloat16)
    buffer.copy_(torch.arange(4))
    arrived = torch.zeros(4, dtype=torch.bfloat16)
    arriving = other.link.copy(STREAM, arrived, arrives=True)  # wanted before it is offered
    leaving = one.link.offer(STREAM, buffer, arrives=False)
    arriving.wait()
    leaving.wait()
    assert torch.equal(arrived, buffer)


def test_each_stream_keeps_its_order_whatever_the_other_does(sides: tuple[Side, Side]) -> None:
    one, other = sides
    buffers = [one.memory.allocate(1, torch.float32) for _ in range(4)]
    for stream, buffer in zip((STREAM, OTHER, STREAM, OTHER), buffers, strict=True):
        one.link.offer(stream, buffer, arrives=True)
    for stream, value in ((OTHER, 10.0), (OTHER, 11.0), (STREAM, 0.0), (STREAM, 1.0)):
        other.link.copy(stream, torch.tensor([value]), arrives=False).wait()
    assert torch.cat(buffers).tolist() == [0, 10, 1, 11]


def test_both_ends_offer_at_once(sides: tuple[Side, Side]) -> None:
    buffers = [side.memory.allocate(1, torch.float32) for side in sides]
    arriving = [
        side.link.offer(STREAM, buffer, arrives=True)
        for side, buffer in zip(sides, buffers, strict=True)
    ]
    leaving = [
        side.link.copy(STREAM, torch.ones(1) * place, arrives=False)
        for place, side in enumerate(sides)
    ]
    for transfer in (*leaving, *arriving):
        transfer.wait()
    assert torch.cat(buffers).tolist() == [1, 0]


def test_a_wait_ends_at_the_timeout(sides: tuple[Side, Side]) -> None:
    one, _ = sides
    with pytest.raises(TimeoutError, match=f"no answer within {TIMEOUT_S} s"):
        one.link.offer(STREAM, one.memory.allocate(1, torch.float32), arrives=True).wait()
    with pytest.raises(TimeoutError):
        one.link.copy(OTHER, torch.ones(1), arrives=False).wait()


def test_a_wait_ends_with_the_process_at_the_other_end(sides: tuple[Side, Side]) -> None:
    one, other = sides
    other.link._end.close()
    arriving = one.link.copy(STREAM, torch.zeros(1), arrives=True)
    for _ in range(2):
        with pytest.raises(ConnectionError, match="its process is gone"):
            arriving.wait()
    with pytest.raises(ConnectionError):
        one.link.offer(STREAM, one.memory.allocate(1, torch.float32), arrives=True)


def test_a_copy_made_before_the_other_process_ended_counts(sides: tuple[Side, Side]) -> None:
    one, other = sides
    buffer = one.memory.allocate(1, torch.float32)
    arriving = one.link.offer(STREAM, buffer, arrives=True)
    other.link.copy(STREAM, torch.ones(1), arrives=False).wait()
    other.link._end.close()
    arriving.wait()
    assert buffer.item() == 1


def test_files_close_with_their_tensors_and_the_other_end_unmaps_them(
    sides: tuple[Side, Side],
) -> None:
    one, other = sides
    gc.collect()
    before = num_open()
    small, large = one.memory.allocate(1, torch.float32), one.memory.allocate(2, torch.float32)
    one.link.offer(STREAM, small, arrives=True)
    other.link.copy(STREAM, torch.ones(1), arrives=False).wait()
    assert len(other.link._mapped) == 2  # also the one that was not offered yet
    one.link.make_copies()
    view = small[:0]
    del small
    gc.collect()
    assert len(one.memory.files) == 2  # a view holds it
    del view
    assert len(one.memory.files) == 1
    one.link.offer(STREAM, large, arrives=True)
    other.link.copy(STREAM, torch.ones(2), arrives=False).wait()
    assert len(other.link._mapped) == 1
    assert num_open() == before + 3  # the file, and one for each side's mapping


def test_an_offer_that_is_too_small_is_refused(sides: tuple[Side, Side]) -> None:
    one, other = sides
    one.link.offer(STREAM, one.memory.allocate(1, torch.float32), arrives=True)
    leaving = other.link.copy(STREAM, torch.ones(2), arrives=False)
    other.link.make_copies()
    with pytest.raises(
        ConnectionError, match="4 bytes were offered for 8; ranks make different calls"
    ):
        leaving.wait()
