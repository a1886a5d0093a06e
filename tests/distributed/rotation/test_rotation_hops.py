"""Hops through shared memory and the process group move the same bits and as many bytes."""

import gc
import logging
import os
import socket
import threading
import time
from datetime import timedelta
from functools import partial
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from gyre_trainer.comm.mesh import ROTATE_AXIS
from gyre_trainer.comm.ring import Direction
from gyre_trainer.comm.ring_registry import ring_of
from gyre_trainer.comm.shared_memory import transport
from gyre_trainer.comm.transport import Stream
from gyre_trainer.layers.mlp import MLP
from gyre_trainer.rotate import rotate
from gyre_trainer.rotation.rule import RotationPolicy
from torch.distributed.device_mesh import DeviceMesh

from tests.distributed import training
from tests.distributed.conftest import StartRanks
from tests.distributed.gloo_ranks import HOP_TIMEOUT_S
from tests.distributed.training import UNEVEN, Outcome, Variant, train_rotated

NUM_STEPS = 3
VARIANTS = [
    Variant(),
    Variant(
        UNEVEN,
        RotationPolicy(compute_dtype=torch.bfloat16, recompute="block"),
        dtype=torch.float32,
        num_parts=2,
    ),
]
_connect_neighbours = transport.connect_neighbours


class Said(logging.Handler):
    """Collects the lines that the transport logs."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


def reached(reach: str, group: dist.ProcessGroup, timeout: timedelta) -> dict[int, socket.socket]:
    """Connect neighbours as if only some of them were on one host.

    ``reach`` is "all"; "some": ranks 0 and 1, in one direction; "none"; or "refused": rank 1 gets
    no memory that can be shared.
    """
    if reach == "refused" and dist.get_rank() == 1:
        with patch.object(os, "memfd_create", side_effect=PermissionError("memfd_create")):
            return _connect_neighbours(group, timeout)
    found = _connect_neighbours(group, timeout)
    kept = {"some": {0: (1,), 1: (-1,)}.get(dist.get_rank(), ()), "none": ()}.get(reach, (1, -1))
    for offset in found.keys() - set(kept):
        found.pop(offset).close()
    return found


def trained(variant: Variant, reach: str) -> tuple[Outcome, list[str]]:
    """The outcome of a short training on this rank, and the lines that its transport logged."""
    mesh = DeviceMesh.from_group(dist.new_group(), "cpu", mesh_dim_names=(ROTATE_AXIS,))
    said, log = Said(), logging.getLogger(transport.__name__)
    log.setLevel(logging.INFO)
    log.addHandler(said)
    with (
        patch.object(
            transport, "connect_neighbours", lambda group, timeout: reached(reach, group, timeout)
        ),
        patch.object(training, "make_mesh", lambda device_type, replicate: mesh),
    ):
        outcome = train_rotated(variant, NUM_STEPS)
    log.removeHandler(said)
    return outcome, said.lines


@pytest.mark.parametrize("num_ranks", [2, 3])
@pytest.mark.parametrize("variant", VARIANTS)
def test_hops_through_memory_and_through_the_group_give_the_same_bits(
    ranks: StartRanks, num_ranks: int, variant: Variant
) -> None:
    told = {
        reach: ranks(num_ranks).run(trained, variant, reach)
        for reach in ("none", "all", "some", "refused")
    }
    for (plain, _), *others in zip(*told.values(), strict=True):
        for outcome, _ in others:
            assert outcome.losses == plain.losses
            assert outcome.bytes_sent == plain.bytes_sent
            assert all(
                torch.equal(outcome.parameters[name], plain.parameters[name])
                for name in plain.parameters
            )
    for rank in range(num_ranks):
        hops = f"rank {rank}: hops go "
        assert told["all"][rank][1] == [hops + "through memory that is shared with both neighbours"]
        assert told["none"][rank][1] == [
            hops + "through the process group: memory can be shared with no neighbour"
        ]
    assert told["refused"][1][1] == told["none"][1][1]
    assert (told["refused"][0][1] == told["none"][0][1]) == (num_ranks == 2)
    memory, group = (
        "memory that is shared with the next rank",
        "the process group with the one before",
    )
    assert told["some"][0][1] == [f"rank 0: hops go through {memory}, and through {group}"]


def carried(stream: Stream, direction: Direction) -> bool:
    """Whether a hop of this rank completes while the rank computes and does not wait for it."""
    mesh = DeviceMesh.from_group(dist.new_group(), "cpu", mesh_dim_names=(ROTATE_AXIS,))
    ring, store = ring_of(mesh), dist.distributed_c10d._get_default_store()
    outgoing, incoming = (
        ring.pool.take(2**20, torch.float32, torch.device("cpu")) for _ in range(2)
    )
    outgoing.fill_(ring.rank)
    hop = ring.shift(outgoing, incoming, direction, stream)
    if ring.rank == 0:
        deadline_s = time.monotonic() + HOP_TIMEOUT_S / 2
        matrix = torch.eye(256)
        while store.add(f"{stream} arrived", 0) < ring.size - 1:
            matrix = matrix @ matrix
            if time.monotonic() > deadline_s:
                return False
    hop.wait()
    store.add(f"{stream} arrived", 1)
    return bool((incoming == (ring.rank - direction) % ring.size).all())


@pytest.mark.parametrize("num_ranks", [2, 3])
def test_a_hop_comes_to_its_end_while_the_slice_computes(ranks: StartRanks, num_ranks: int) -> None:
    for stream, direction in (
        (Stream.WEIGHTS, Direction.CLOCKWISE),
        (Stream.GRADIENTS, Direction.COUNTER_CLOCKWISE),
    ):
        assert all(ranks(num_ranks).run(carried, stream, direction))


def kept(*, by: str) -> list[list[int]]:
    """The counts of `of_hops` before a ring exists, while it does, and after its owner is gone."""
    gc.collect()
    counts = [of_hops()]
    mesh = DeviceMesh.from_group(dist.new_group(), "cpu", mesh_dim_names=(ROTATE_AXIS,))
    if by == "model":  # torch keeps the mesh then, in its caches, and with it the group
        model = rotate(MLP(4, 8), mesh=mesh)
        model(torch.ones(2, 4)).sum().backward()
        counts.append(of_hops()[:1])
        del model, mesh
        gc.collect()
        return [counts[0][:1], counts[1], of_hops()[:1]]
    ring = ring_of(mesh)
    outgoing, incoming = (ring.pool.take(8, torch.float32, torch.device("cpu")) for _ in range(2))
    ring.shift(outgoing, incoming, Direction.CLOCKWISE, Stream.WEIGHTS).wait()
    counts.append(of_hops())
    dist.destroy_process_group(mesh.get_group())
    del mesh, ring, outgoing, incoming
    gc.collect()
    return [*counts, of_hops()]


def of_hops() -> list[int]:
    """Numbers of copying threads, of mapped memory files, and of open descriptors of both."""
    kinds = "memfd:gyre", "eventpoll"
    targets = [
        str(each.readlink()) for each in Path("/proc/self/fd").iterdir() if each.is_symlink()
    ]
    return [
        sum(thread.name == "gyre hops" for thread in threading.enumerate()),
        Path("/proc/self/maps").read_text().count("/memfd:gyre"),
        sum(any(kind in target for kind in kinds) for target in targets),
    ]


@pytest.mark.parametrize("by", ["ring", "model"])
def test_nothing_is_left_of_a_ring_that_is_gone(ranks: StartRanks, by: str) -> None:
    for before, meanwhile, after in ranks(2).run(partial(kept, by=by)):
        assert after == before
        assert all(more > less for more, less in zip(meanwhile, before, strict=True))


def names_of_sockets(inodes: set[str]) -> set[str]:
    """The names of this host's Unix sockets that have one of these inodes."""
    rows = [line.split() for line in Path("/proc/net/unix").read_text().splitlines()[1:]]
    return {row[7] for row in rows if len(row) > 7 and row[6] in inodes}


def left_open() -> tuple[int, set[str]]:
    """The number of mapped memory files after a step, and the names of this rank's sockets."""
    gc.collect()
    train_rotated(Variant(), 1)
    files = {
        line.split()[4]
        for line in Path("/proc/self/maps").read_text().splitlines()
        if "/memfd:gyre" in line
    }
    targets = [
        str(each.readlink()) for each in Path("/proc/self/fd").iterdir() if each.is_symlink()
    ]
    inodes = {target.removeprefix("socket:[").removesuffix("]") for target in targets}
    return len(files), {name for name in names_of_sockets(inodes) if "gyre-" in name}


def test_nothing_is_left_of_ranks_that_were_killed(ranks: StartRanks) -> None:
    started = ranks(3)
    told = started.run(left_open)
    names = set().union(*(names for _, names in told))
    assert all(num_files > 0 for num_files, _ in told)
    assert names  # accepted connections keep the name of the socket that listened
    started.end()
    assert not [name for name in names if name in Path("/proc/net/unix").read_text()]
    assert not [each for each in Path("/dev/shm").iterdir() if "gyre" in each.name]
