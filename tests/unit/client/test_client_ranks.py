"""Which part of each batch a process reads: in a mesh, with ranks as given, or alone."""

import os
import warnings
from typing import Any

import pytest
import torch
from gyre_client import Loader
from gyre_client.errors import InvalidRequest
from gyre_client.loader.ranks import Ranks, ranks_at, ranks_of, ranks_of_loader

NOWHERE = "unix:/nowhere.sock"


def test_the_data_rank_counts_along_the_data_dims_in_the_order_of_the_mesh() -> None:
    sizes, place = {"pp": 2, "dp": 3, "cp": 2, "ep": 4}, {"pp": 1, "dp": 2, "cp": 1, "ep": 3}
    assert ranks_at(sizes, place, ("ep", "dp"), "cp", 47, 48) == Ranks(11, 12, 47, 1, 2)
    assert ranks_at(sizes, place, ("dp", "ep"), None, 47, 48) == Ranks(11, 12, 47)
    assert ranks_at({"dp": 4}, {"dp": 1}, "dp", None, 1, 4) == Ranks(1, 4), "no peers"
    assert ranks_at({"dp": 4}, {"dp": 1}, ("dp",), None, 9, 16) == Ranks(1, 4, 9), (
        "a part of a mesh"
    )
    assert ranks_at({"tp": 4}, {"tp": 1}, (), None, 1, 4) == Ranks(0, 1, 1)


def test_dims_that_look_like_data_are_told_of_once() -> None:
    sizes = {"dp": 2, "ep": 4}
    with pytest.warns(UserWarning, match="2 distinct batches a step") as told:
        ranks_at(sizes, {"dp": 0, "ep": 0}, ("dp",), None, 0, 8)
    assert "data_dims=('dp', 'ep')" in str(told[0].message)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        ranks_at(sizes, {"dp": 0, "ep": 1}, ("dp",), None, 1, 8)  # not the first rank
        ranks_at(sizes, {"dp": 0, "ep": 0}, ("dp", "ep"), None, 0, 8)
        ranks_at({"dp": 2, "ep": 1}, {"dp": 0, "ep": 0}, ("dp",), None, 0, 2)
        ranks_at(
            {"dp": 2, "tp": 2, "step": 2}, dict.fromkeys(("dp", "tp", "step"), 0), "dp", None, 0, 8
        )


@pytest.mark.parametrize(
    ("data_dims", "cp_dim", "complaint"),
    [
        (None, None, r"data_dims: missing, and the mesh has the dims dp, cp"),
        (("batch",), None, r"data_dims: the mesh has the dims dp, cp \(got 'batch'\)"),
        (("dp",), "sp", r"cp_dim: the mesh has the dims dp, cp \(got 'sp'\)"),
        (("dp", "cp"), "cp", "cp_dim: 'cp' is in data_dims"),
    ],
)
def test_dims_that_do_not_fit_are_refused(
    data_dims: tuple[str, ...] | None, cp_dim: str | None, complaint: str
) -> None:
    with pytest.raises(InvalidRequest, match=complaint):
        ranks_at({"dp": 2, "cp": 2}, {"dp": 0, "cp": 0}, data_dims, cp_dim, 0, 4)


def test_given_ranks_tell_peers_apart_by_the_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RANK", raising=False)
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    assert ranks_of(None, None) == Ranks(0, 1)
    assert ranks_of(1, 2) == Ranks(1, 2, os.getpid())
    assert ranks_of(1, 2, peer=7) == Ranks(1, 2, 7)
    assert ranks_of(1, 2, cp_rank=0, cp_size=1, peer=3) == Ranks(1, 2, 3, 0, 1)
    monkeypatch.setenv("RANK", "5")
    monkeypatch.setenv("WORLD_SIZE", "8")
    assert ranks_of(1, 2) == Ranks(1, 2, 5)
    assert ranks_of(5, 8) == Ranks(5, 8)


@pytest.mark.parametrize(("node", "rank_here", "num_here"), [(0, 3, 4), (1, 0, 4), (2, 1, 2)])
def test_tasks_of_slurm_are_counted_on_their_node(
    node: int, rank_here: int, num_here: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without torchrun; 10 tasks on three nodes."""
    rank = 4 * node + rank_here
    facts = {"PROCID": rank, "STEP_NUM_TASKS": 10, "NODEID": node, "LOCALID": rank_here}
    for name, value in {**facts, "STEP_TASKS_PER_NODE": "4(x2),2"}.items():
        monkeypatch.setenv(f"SLURM_{name}", str(value))
    given = (rank, 10, None, None, None)
    assert ranks_of_loader(None, None, None, given) == Ranks(rank, 10, num_local=num_here)
    torchrun = {"LOCAL_RANK": 0, "LOCAL_WORLD_SIZE": 8, "RANK": 8, "WORLD_SIZE": 16}  # in a task
    for name, value in torchrun.items():
        monkeypatch.setenv(name, str(value))
    assert ranks_of_loader(None, None, None, (8, 16, *given[2:])) == Ranks(8, 16, num_local=8)


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        ({"peer": 1}, "peer needs rank and world_size"),
        ({"cp_rank": 0, "cp_size": 2}, "cp_rank needs rank and world_size"),
        ({"rank": 0, "world_size": 1, "cp_rank": 0}, "cp_rank and cp_size go together"),
        ({"rank": 0, "world_size": 1, "cp_rank": 2, "cp_size": 2}, "cp_rank is 2"),
        ({"rank": 0, "world_size": 1, "peer": -1}, "peer is -1"),
        ({"data_dims": ("dp",)}, "data_dims: names dims of a mesh, and there is none"),
        ({"cp_dim": "cp"}, "cp_dim: names dims of a mesh, and there is none"),
        ({"mesh": "dp", "data_dims": ("dp",)}, r"mesh: not a DeviceMesh \(got 'dp'\)"),
        ({"mesh": "dp", "rank": 0, "world_size": 1}, "mesh: says which ranks read which batches"),
    ],
)
def test_arguments_that_contradict_each_other_are_refused(
    arguments: dict[str, Any], complaint: str
) -> None:
    with pytest.raises(InvalidRequest, match=complaint):
        Loader("d", batch_size=8, address=NOWHERE, **arguments)


def test_a_mesh_needs_names(monkeypatch: pytest.MonkeyPatch) -> None:
    mesh = torch.distributed.device_mesh.DeviceMesh(
        "cpu", torch.arange(2), _init_backend=False, _rank=1
    )
    with pytest.raises(InvalidRequest, match="its dims have no names"):
        Loader("d", batch_size=8, mesh=mesh, data_dims=("dp",), address=NOWHERE)
