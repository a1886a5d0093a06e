"""The order of hops and computations, and what remains in memory afterwards."""

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from gyre_trainer.comm.mesh import make_mesh
from gyre_trainer.comm.ring import Direction, Hop, Ring, Stream, ring_of
from gyre_trainer.layers.mlp import MLP, MLPRule
from gyre_trainer.rotate import RotationPolicy, rotate
from gyre_trainer.rotation.rotated_module import RotatedModule
from torch import Tensor, nn

from tests.distributed.conftest import StartRanks
from tests.distributed.training import UNEVEN, Variant, batch, rotated_gpt, train_step


class Numbered(MLP):
    """An MLP that records when it computes, and with which rank's slice.

    All entries of rank r's slice are r.
    """

    def __init__(self, number: int) -> None:
        super().__init__(4, 6)
        self.number = number
        self.seen: Callable[[str], None] | None = None

    def forward(self, x: Tensor) -> Tensor:
        assert self.seen is not None
        self.seen(f"compute {self.number} with {int(self.up.weight[0, 0].nan_to_num(-1))}")
        return super().forward(x)


@contextmanager
def hops_told_to(seen: Callable[[str], None]) -> Iterator[None]:
    shift = Ring.shift

    def told(
        ring: Ring,
        outgoing: Tensor,
        incoming: Tensor,
        direction: Direction,
        stream: Stream,
        identity: int = 0,
    ) -> Hop:
        seen(f"hop {stream.name.lower()} {direction.name.lower()}")
        return shift(ring, outgoing, incoming, direction, stream, identity)

    with patch.object(Ring, "shift", told):
        yield


def events_of_two_modules() -> tuple[list[str], list[list[str]]]:
    """Hops and computations of one forward and two backwards of two modules with recomputation."""
    events: list[str] = []
    mesh = make_mesh("cpu")
    modules = [Numbered(0), Numbered(1)]
    for module in modules:
        module.seen = events.append
        rotate(module, mesh=mesh, policy=RotationPolicy(recompute="block"), rule=MLPRule())
    for parameter in nn.ModuleList(modules).parameters():
        nn.init.constant_(parameter.to_local(), mesh.get_local_rank())  # type: ignore[attr-defined]
    model = nn.Sequential(*modules)
    with torch.no_grad():
        model(torch.ones(1, 4))  # the first call, which puts the rule to the proof
    events.clear()
    backwards = []
    with hops_told_to(events.append):
        for _ in range(2):
            output = model(torch.ones(1, 4)).sum()
            forward = events[:]
            events.clear()
            output.backward()
            backwards.append(events[:])
            events.clear()
    return forward, backwards


FORWARD = "hop weights clockwise"
BACKWARD = "hop weights counter_clockwise"
GRADIENTS = "hop gradients counter_clockwise"


def test_the_next_slice_is_in_flight_while_one_computes(ranks: StartRanks) -> None:
    for rank, (forward, _) in enumerate(ranks(3).run(events_of_two_modules)):
        own, first, second = rank, (rank - 1) % 3, (rank - 2) % 3
        assert forward == [
            event
            for number in (0, 1)
            for event in (
                FORWARD,
                f"compute {number} with {own}",
                FORWARD,
                f"compute {number} with {first}",
                f"compute {number} with {second}",
            )
        ]


def test_backward_sends_the_next_module_off_before_the_own_slice_computes(
    ranks: StartRanks,
) -> None:
    """This holds from the second backward on; the first one learns the order of modules."""
    for rank, (_, backwards) in enumerate(ranks(3).run(events_of_two_modules)):
        own, first, second = rank, (rank + 1) % 3, (rank + 2) % 3

        def rest(
            number: int, own: int = own, first: int = first, second: int = second
        ) -> list[str]:
            return [
                BACKWARD,
                f"compute {number} with {first}",
                GRADIENTS,
                f"compute {number} with {second}",
                GRADIENTS,
                f"compute {number} with {own}",
            ]

        assert backwards[0] == [BACKWARD, *rest(1), BACKWARD, *rest(0)]
        assert backwards[1] == [BACKWARD, *rest(1)[:-1], BACKWARD, rest(1)[-1], *rest(0)]


def where_hops_begin_and_end() -> list[tuple[bool, bool]]:
    """For each hop of weights: whether it sends the own slice, and whether it sends on.

    A hop sends on if it sends the buffer that the previous hop filled.
    """
    mlp = rotate(MLP(4, 6), mesh=make_mesh("cpu"))
    assert isinstance(mlp, RotatedModule)
    own_slice = mlp.rotation.sharded.flat.data_ptr()
    hops: list[tuple[int, int]] = []
    shift = Ring.shift

    def noted(
        ring: Ring,
        outgoing: Tensor,
        incoming: Tensor,
        direction: Direction,
        stream: Stream,
        identity: int = 0,
    ) -> Hop:
        if stream is Stream.WEIGHTS:
            hops.append((outgoing.data_ptr(), incoming.data_ptr()))
        return shift(ring, outgoing, incoming, direction, stream, identity)

    with patch.object(Ring, "shift", noted):
        mlp(torch.ones(1, 4)).sum().backward()
    before = [0] + [incoming for _, incoming in hops]
    return [
        (outgoing == own_slice, outgoing == last)
        for (outgoing, _), last in zip(hops, before, strict=False)
    ]


def test_a_hop_sends_what_arrived_without_a_copy_in_between(ranks: StartRanks) -> None:
    """In both passes the own slice is sent first, then the buffer that the previous hop filled."""
    assert ranks(3).run(where_hops_begin_and_end) == [[(True, False), (False, True)] * 2] * 3


def memory_after_each_step(policy: RotationPolicy) -> list[tuple[int, set[int]]]:
    """Bytes of all tensors of this rank, and the addresses of the transient buffers."""
    gc.collect()
    gc.freeze()  # what is there already is not looked through again and again
    variant = Variant(UNEVEN, policy)
    model = rotated_gpt(variant)
    optimizer = torch.optim.AdamW(model.parameters())
    pool = ring_of(make_mesh("cpu")).pool
    found = []
    for step in range(4):
        tokens, targets = (
            part.chunk(dist.get_world_size())[dist.get_rank()] for part in batch(step, 37)
        )
        train_step(model, optimizer, tokens, targets, variant)
        with torch.no_grad():
            model.loss(tokens, targets)
        del tokens, targets
        gc.collect()
        storages = {
            t.untyped_storage()._cdata: t.untyped_storage().nbytes()
            for t in gc.get_objects()
            if type(t) is Tensor and t.nbytes > 8  # a thread of gloo may still have a number
        }
        buffers = {buffer.data_ptr() for free in pool._free.values() for buffer in free}
        found.append((sum(storages.values()), buffers))
    gc.unfreeze()
    return found


@pytest.mark.parametrize("num_ranks", [2, 3])
def test_nothing_grows_and_no_buffer_is_made_after_the_first_step(
    ranks: StartRanks, num_ranks: int
) -> None:
    """The second step allocates nothing, though it is the first that starts hops ahead of time."""
    for policy in (
        RotationPolicy(),
        RotationPolicy(compute_dtype=torch.bfloat16),
        RotationPolicy(recompute="block"),
    ):
        for found in ranks(num_ranks).run(memory_after_each_step, policy):
            (num_bytes, buffers), *later = found
            assert num_bytes > 0
            # of weights and of gradients, two each where there are remote slices
            assert len(buffers) >= 2 * (num_ranks - 1)
            assert later == [(num_bytes, buffers)] * 3
