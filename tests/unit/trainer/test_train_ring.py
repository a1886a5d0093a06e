"""A ring hands hops to its transport, each number behind its buffer, and owns what is in flight."""

import re
from collections.abc import Iterator, Sequence
from functools import partial

import pytest
import torch
import torch.distributed as dist
from gyre_trainer.comm import identity
from gyre_trainer.comm.hang_diagnosis import HangDiagnosis
from gyre_trainer.comm.identity import (
    BufferPool,
    HopIdentity,
    Modules,
    StepChecks,
    copy_with_room,
    framed,
    number_in,
    with_room,
)
from gyre_trainer.comm.ring import Direction, Leg, ProcessGroupTransport, Ring, Stream, Wait
from gyre_trainer.errors import RotationError
from gyre_trainer.inspection.agreement import require_all_ranks
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.testing._internal.distributed.fake_pg import FakeStore

CPU = torch.device("cpu")
DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.uint8)


class Echo(ProcessGroupTransport):
    """A transport by which each hop receives what it sends, when it is waited for."""

    moves = True

    def __init__(self, number: int | None = None) -> None:
        """``number`` arrives instead of the one that is sent."""
        self.number = number
        self.batches: list[list[tuple[int, bool]]] = []
        self.gave_up = False

    def start(self, legs: Sequence[Leg], stream: Stream) -> list[tuple[Wait, str]]:
        self.batches.append([(leg.offset, leg.arrives) for leg in legs])
        incoming, outgoing = (leg.tensor for leg in legs)
        if self.number is not None:
            number_in(outgoing).fill_(self.number)
        return [(partial(incoming.copy_, outgoing), "rank 0: receiving")]

    def give_up(self) -> None:
        self.gave_up = True


@pytest.fixture
def group() -> Iterator[dist.ProcessGroup]:
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=3)
    try:
        yield dist.distributed_c10d._get_default_group()
    finally:
        dist.destroy_process_group()


def ring_with(group: dist.ProcessGroup, transport: Echo) -> Ring:
    modules = Modules()
    return Ring(group, transport, HangDiagnosis(group, modules), modules)


def values(numel: int, dtype: torch.dtype) -> Tensor:
    return torch.arange(1, numel + 1).to(dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("numel", [1, 7, 8, 9])
def test_a_hop_is_one_batch_of_a_send_and_a_receive(
    group: dist.ProcessGroup, numel: int, dtype: torch.dtype
) -> None:
    ring = ring_with(group, transport := Echo())
    buffer = ring.pool.take(numel, dtype, CPU)[:numel]
    outgoing = copy_with_room(values(numel, dtype))
    hop = ring.shift(outgoing, buffer, Direction.CLOCKWISE, Stream.WEIGHTS, 2**55 + 3)
    assert list(ring.in_flight) == [hop]
    hop.wait()
    assert not ring.in_flight
    assert torch.equal(buffer, values(numel, dtype))
    assert transport.batches == [[(-1, True), (1, False)]]
    assert ring.bytes_sent == numel * dtype.itemsize


def test_a_part_of_other_values_travels_as_a_copy(group: dist.ProcessGroup) -> None:
    ring = ring_with(group, Echo())
    for memory in (torch.arange(20.0), copy_with_room(torch.arange(20.0))):
        target = torch.full((20,), -1.0)
        hop = ring.shift(memory[4:9], target[4:9], Direction.CLOCKWISE, Stream.WEIGHTS, 5)
        hop.wait()
        assert torch.equal(memory, torch.arange(20.0))
        assert target.tolist() == [-1.0] * 4 + [4.0, 5, 6, 7, 8] + [-1.0] * 11


@pytest.mark.parametrize("dtype", DTYPES)
def test_room_is_behind_the_end_and_in_scratch_behind_any_part(dtype: torch.dtype) -> None:
    flat = with_room(9, dtype, CPU).fill_(1)
    frame = framed(flat)
    assert frame is not None
    number_in(frame).fill_(-7)
    assert torch.equal(flat, torch.ones(9, dtype=dtype))
    assert frame.data_ptr() == flat.data_ptr()
    assert framed(flat[:5]) is None
    assert framed(torch.ones(9, dtype=dtype)) is None
    assert framed(with_room(9, dtype, CPU, is_scratch=True)[:5]) is not None


def test_another_identity_is_refused_and_ends_all_waits(group: dist.ProcessGroup) -> None:
    mine, theirs = (HopIdentity(n, True, False, 0, 1).pack() for n in (0, 1))
    ring = ring_with(group, transport := Echo(number=theirs))
    outgoing, incoming = (ring.pool.take(4, torch.float32, CPU) for _ in range(2))
    hop = ring.shift(outgoing, incoming, Direction.CLOCKWISE, Stream.WEIGHTS, mine)
    for _ in range(2):
        with pytest.raises(RotationError, match=r"rank 0 calls module 0 .* rank 2 calls module 1"):
            hop.wait()
    assert transport.gave_up


def test_hops_that_an_exception_lost_are_waited_for_before_an_all_reduce(
    group: dist.ProcessGroup,
) -> None:
    ring = ring_with(group, Echo())
    target = ring.pool.take(4, torch.float32, CPU).zero_()
    ring.shift(copy_with_room(torch.ones(4)), target, Direction.CLOCKWISE, Stream.WEIGHTS)
    assert not target.any()
    ring.settle()
    assert target.all()
    assert not ring.in_flight


def test_a_hop_of_empty_slices_counts_as_on_ranks_with_entries(group: dist.ProcessGroup) -> None:
    progress = []
    for numel in (0, 4):
        ring = ring_with(group, transport := Echo())
        outgoing, incoming = (ring.pool.take(4, torch.float32, CPU)[:numel] for _ in range(2))
        ring.shift(outgoing, incoming, Direction.CLOCKWISE, Stream.WEIGHTS, 5).wait()
        assert len(transport.batches) == bool(numel)
        diagnosis = ring.hang_diagnosis
        progress.append((diagnosis._hop, diagnosis._progress.num_waits_done))
    assert progress == [((1, 0), 1)] * 2


def test_a_pool_refuses_another_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    streams, pool = ["first"], BufferPool()
    monkeypatch.setattr(identity, "current_stream", lambda device: streams[-1])
    buffer = pool.take(4, torch.float32, CPU)
    pool.put(buffer)
    assert pool.take(4, torch.float32, CPU) is buffer
    streams.append("second")
    with pytest.raises(RotationError, match="one stream"):
        pool.take(4, torch.float32, CPU)
    with pytest.raises(RotationError, match="one stream"):
        pool.put(buffer)


def refused(found: int) -> None:
    raise RotationError(f"found {found}")


def test_numbers_of_a_device_are_compared_when_they_are_read() -> None:
    checks = StepChecks()
    number = torch.zeros((), dtype=torch.int64)
    for value in range(3_000):
        checks.note(number.fill_(value), value, refused)
    assert checks.is_pending
    checks.read()
    checks.note(torch.tensor(True), 0, refused)
    with pytest.raises(RotationError, match="found 1"):
        checks.read()
    checks.read()
    assert not checks.is_pending


def test_numbers_of_a_cpu_are_compared_at_once() -> None:
    checks = StepChecks()
    checks.require(torch.tensor(5), 5, refused)
    with pytest.raises(RotationError, match="found 5"):
        checks.require(torch.tensor(5), 4, refused)
    assert not checks.is_pending


@pytest.mark.usefixtures("group")
@pytest.mark.parametrize(("num_ranks", "rings"), [(2, ""), (1, ", replicate=3")])
def test_a_ring_of_a_part_of_the_ranks_is_told_a_mesh_that_can_be_made(
    num_ranks: int, rings: str
) -> None:
    mesh = DeviceMesh("cpu", list(range(num_ranks)), mesh_dim_names=("rotate",))
    with pytest.raises(RotationError, match=re.escape(f"make_mesh(device_type{rings}). Where")):
        require_all_ranks(mesh, independent=False)
