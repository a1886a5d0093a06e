"""Ranks of a device mesh: peers get the same batches, once in memory, and none ends another."""

import os
import signal
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from gyre_client import Loader
from gyre_client.errors import Fenced, InvalidRequest
from gyre_client.transport.channel import parse_address
from gyre_client.transport.connection import Connection
from torch.distributed.device_mesh import init_device_mesh

from tests.conftest import Daemon, StartDaemon
from tests.daemons import status
from tests.distributed.gloo_ranks import Ranks
from tests.integration.service.token_jobs import BATCH, LENGTH, ids_of, right, token_config
from tests.waiting import until

Read = list[tuple[list[int], list[list[int]], list[list[int]]]]  # ids, tokens and labels of batches


@pytest.fixture
def daemon(gyred: StartDaemon, tmp_path: Path) -> Daemon:
    return gyred(token_config(tmp_path))


def open_peer(address: str, rank: int, peer: int) -> Loader:
    return Loader(
        "tokens",
        batch_size=BATCH,
        seed=3,
        address=address,
        job="run",
        rank=rank,
        world_size=2,
        peer=peer,
        prefetch_batches=4,
    )


def read_in_mesh(
    address: str,
    sizes: dict[str, int],
    data_dims: Sequence[str],
    cp_dim: str | None,
    state: dict[str, Any] | None,
) -> tuple[Read, dict[str, Any], int]:
    """What a rank reads in eight steps, its state then, and what all ranks have reserved."""
    mesh = init_device_mesh("cpu", tuple(sizes.values()), mesh_dim_names=tuple(sizes))
    with Loader(
        "tokens",
        batch_size=BATCH,
        seed=3,
        address=address,
        job="run",
        prefetch_batches=4,
        mesh=mesh,
        data_dims=data_dims,
        cp_dim=cp_dim,
        cp_cut="zigzag" if cp_dim else "contiguous",
    ) as loader:
        if state:
            loader.load_state_dict(state)
        found = []
        for _ in range(8):
            batch = next(loader)
            labels = batch["labels"].tolist() if "labels" in batch else []
            found.append((batch["sample_id"].tolist(), batch["tokens"].tolist(), labels))
            dist.barrier()  # as a step of training is
        reserved_bytes = 0
        if dist.get_rank() == 0:
            with Connection(parse_address(address)) as connection:
                reserved_bytes = connection.status().memory_reserved_bytes
        dist.barrier()
        return found, loader.state_dict(), reserved_bytes


def test_a_state_moves_from_one_mesh_to_another(daemon: Daemon, tmp_path: Path) -> None:
    with Loader("tokens", batch_size=BATCH, seed=3, address=daemon.address) as alone:
        whole = [next(alone) for _ in range(16)]
    ranks = Ranks(4, tmp_path)
    try:
        first = ranks.run(read_in_mesh, daemon.address, {"dp": 2, "tp": 2}, ("dp",), None, None)
        state = first[0][1]
        second = ranks.run(read_in_mesh, daemon.address, {"cp": 2, "tp": 2}, (), "cp", state)
    finally:
        ranks.end()
    assert len({str(each[1]) for each in first}) == 1, "one state on all ranks"
    assert first[0][0] == first[1][0]
    assert first[2][0] == first[3][0]
    for step, batch in enumerate(whole[:8]):
        halves = [first[rank][0][step] for rank in (0, 2)]
        (ids, tokens, _), (other_ids, other_tokens, _) = halves
        assert [*ids, *other_ids] == batch["sample_id"].tolist()
        assert [*tokens, *other_tokens] == batch["tokens"].tolist()
    assert second[0][0] == second[1][0]
    for step, batch in enumerate(whole[8:]):
        ids, tokens = batch["sample_id"].tolist(), batch["tokens"]
        nexts = torch.cat((tokens[:, 1:], torch.full((BATCH, 1), -100)), dim=1)
        pieces, targets = tokens.chunk(4, dim=1), nexts.chunk(4, dim=1)
        for rank, (one, other) in {0: (0, 3), 2: (1, 2)}.items():
            cut = torch.cat((pieces[one], pieces[other]), dim=1).tolist()
            labels = torch.cat((targets[one], targets[other]), dim=1).tolist()
            assert second[rank][0][step] == (ids, cut, labels)
    # 2 data ranks of half a batch have reserved memory; then 1 of a whole batch
    with open_peer(daemon.address, 0, 0) as reading:
        next(reading)
        assert first[0][2] == 2 * status(daemon).memory_reserved_bytes
    with Loader(
        "tokens", batch_size=BATCH, seed=3, address=daemon.address, prefetch_batches=4
    ) as reading:
        next(reading)
        assert second[0][2] == status(daemon).memory_reserved_bytes


def read_and_die(address: str) -> None:
    loader = open_peer(address, 0, 1)
    kept = [next(loader) for _ in range(3)]
    assert kept
    os.kill(os.getpid(), signal.SIGKILL)


def test_a_killed_peer_stops_nobody_and_its_successor_goes_on(
    daemon: Daemon, tmp_path: Path
) -> None:
    places = [(0, 0), (1, 2), (1, 3)]
    peers = [open_peer(daemon.address, *each) for each in places]
    try:
        for each in peers:
            assert next(each)
        Ranks(1, tmp_path).run_to_the_end(read_and_die, daemon.address)
        for _ in range(100):
            for each in peers:
                assert right(daemon, next(each))
        until(lambda: len(status(daemon).sessions) == 3)
        reserved_bytes = status(daemon).memory_reserved_bytes
        with open_peer(daemon.address, 0, 1) as successor:
            successor.load_state_dict(peers[0].state_dict())
            for _ in range(100):
                one, other, *_ = batches = [next(each) for each in (successor, *peers)]
                assert one["sample_id"].tolist() == other["sample_id"].tolist()
                assert torch.equal(one["tokens"], other["tokens"])
                assert all(right(daemon, each) for each in batches)
            sessions = status(daemon).sessions
            assert status(daemon).memory_reserved_bytes == reserved_bytes
            assert [each.num_sharing for each in sessions] == [2] * 4
            assert sorted((each.reader.rank, each.reader.peer) for each in sessions) == [
                (0, 0),
                (0, 1),
                (1, 2),
                (1, 3),
            ]
    finally:
        for each in peers:
            each.close()


def test_a_newer_session_of_one_peer_ends_the_older_one_alone(daemon: Daemon) -> None:
    with (
        open_peer(daemon.address, 0, 0) as older,
        open_peer(daemon.address, 0, 1) as other,
    ):
        first = ids_of([next(older)]), ids_of([next(other)])
        assert first[0] == first[1]
        with open_peer(daemon.address, 0, 0) as newer:
            assert ids_of([next(newer)]) == first[0]
            with pytest.raises(Fenced, match="rank 0, peer 0, of job 'run'"):
                list(older)
            for _ in range(100):  # in turns: peers wait for each other
                assert ids_of([next(other)]) == ids_of([next(newer)])


def test_a_peer_that_holds_batches_gets_them_all_after_the_others_have_left(
    daemon: Daemon,
) -> None:
    with open_peer(daemon.address, 0, 1) as slow:
        batches = [next(slow)]
        with open_peer(daemon.address, 0, 0) as fast:
            wanted = ids_of([next(fast) for _ in range(6)])
        batches += [next(slow) for _ in range(60)]
        assert ids_of(batches)[:6] == wanted
        assert all(right(daemon, each) for each in batches)


def test_sequences_that_do_not_divide_are_refused_when_the_loader_is_made(daemon: Daemon) -> None:
    with pytest.raises(InvalidRequest, match=f"{LENGTH} tokens do not divide into 3 chunks"):
        Loader(
            "tokens",
            batch_size=BATCH,
            rank=0,
            world_size=1,
            cp_rank=0,
            cp_size=3,
            address=daemon.address,
        )
