"""Bytes that a rank sends, with the collective algorithms that send the fewest."""

from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from gyre_trainer.accounting.counters import Counters
from torch.testing._internal.distributed.fake_pg import FakeStore

NUM_RANKS = 4
NUM_BYTES = 480  # of a whole buffer


@pytest.fixture(autouse=True)
def group() -> Iterator[None]:
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=NUM_RANKS)
    yield
    dist.destroy_process_group()


def buffer(parts: int = 1) -> torch.Tensor:
    return torch.zeros(NUM_BYTES // parts, dtype=torch.uint8)


def test_a_send_counts_its_bytes_and_a_receive_none() -> None:
    with Counters() as counted:
        dist.send(buffer(), 1)
        dist.recv(buffer(2), 3)
        dist.barrier()
    assert counted.sent_bytes == NUM_BYTES


def test_a_gather_sends_all_parts_but_one_and_an_all_reduce_twice_that() -> None:
    sent = []
    with Counters() as counted:
        for collective in (
            lambda: dist.all_gather_single(buffer(), buffer(NUM_RANKS)),
            lambda: dist.all_gather(
                [buffer(NUM_RANKS) for _ in range(NUM_RANKS)], buffer(NUM_RANKS)
            ),
            lambda: dist.reduce_scatter_single(buffer(NUM_RANKS), buffer()),
            lambda: dist.all_reduce(buffer()),
            lambda: dist.broadcast(buffer(), 0),
        ):
            before = counted.sent_bytes
            collective()  # type: ignore[no-untyped-call]
            sent.append(counted.sent_bytes - before)
    share = NUM_BYTES * 3 // 4
    assert sent == [share, share, share, 2 * share, share]


@pytest.mark.parametrize(
    ("rows", "share"),
    [(None, 3 / 4), ([1, 2, 3, 4], 9 / 10), ([10, 0, 0, 0], 0)],
    ids=["equal parts", "uneven parts", "all to itself"],
)
def test_an_all_to_all_sends_all_rows_but_those_that_stay(
    rows: list[int] | None, share: float
) -> None:
    num_rows = sum(rows) if rows else NUM_RANKS
    outgoing = torch.zeros(num_rows, NUM_BYTES, dtype=torch.uint8)
    with Counters() as counted:
        dist.all_to_all_single(torch.zeros_like(outgoing), outgoing, rows, rows)
        dist.all_to_all_single(torch.zeros(0), torch.zeros(0), [0] * NUM_RANKS, [0] * NUM_RANKS)
    assert counted.sent_bytes == share * outgoing.nbytes


def test_an_unknown_collective_gives_no_figure() -> None:
    with (
        Counters(),
        pytest.raises(
            NotImplementedError, match="c10d::alltoall_ sends an unknown number of bytes"
        ),
    ):
        dist.all_to_all([buffer(4)] * NUM_RANKS, [buffer(4)] * NUM_RANKS)
