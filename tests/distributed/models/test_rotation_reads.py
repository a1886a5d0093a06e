"""Parameters that a forward reads: sharded, gathered for the read, and exact."""

import gc
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from gyre_trainer.comm.mesh import make_mesh
from gyre_trainer.errors import RotationError
from gyre_trainer.rotate import ReadRule, RotationPolicy, rotate_all
from gyre_trainer.rotation.call import cast
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.distributed.checkpoint.state_dict import get_state_dict
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_leaves

from tests.distributed.conftest import StartRanks
from tests.distributed.models.reading import BATCH, CASES, DIM, TIME
from tests.distributed.training import distance, whole, whole_parameters


@dataclass(frozen=True)
class Run:
    """What a model did.

    Attributes:
        outputs: in training, and at the end in evaluation.
        parameters: at the end.
        num_whole: of its parameters, those that every rank has whole.
    """

    outputs: list[Tensor]
    parameters: dict[str, Tensor]
    num_whole: int = 0


def trained(
    name: str,
    part: int = 0,
    num_parts: int = 1,
    *,
    frozen: str = "",
    policy: RotationPolicy | None = None,
    replicate: int = 1,
) -> Run:
    """Train a model on this process's part of each batch; without parts as it is."""
    case = CASES[name]
    torch.manual_seed(0)
    model = case.build().double()
    for path, parameter in model.named_parameters():
        parameter.requires_grad_(not frozen or frozen not in path)
    if num_parts > 1 or policy is not None:
        mesh = make_mesh("cpu", replicate=replicate)
        policy = policy or RotationPolicy()
        rotate_all(model, mesh=mesh, rules=case.read_rules(), policy=policy, verify=True)
    trainable = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trainable, lr=1e-2)
    outputs, dtype = [], None if policy is None else policy.compute_dtype
    for step in range(3):
        for half in range(2):
            torch.manual_seed(10 * step + half)
            x = torch.rand(BATCH, TIME, DIM, dtype=torch.float64)
            output = model(cast(x.chunk(num_parts)[part], dtype))
            (output.sin().mean() / 2).backward()
            outputs.append(output.detach())
        torch.nn.utils.clip_grad_norm_(trainable, 0.05)
        optimizer.step()
        optimizer.zero_grad()
    model.eval()
    with torch.no_grad():
        outputs.append(model(cast(x.chunk(num_parts)[part], dtype)))
    with torch.inference_mode():
        outputs.append(model(cast(x.chunk(num_parts)[part], dtype)))
    num_whole = sum(
        isinstance(p, DTensor) and p.placements[-1].is_replicate() for p in model.parameters()
    )
    return Run(outputs, whole_parameters(model), num_whole)


def trained_here(name: str, **options: Any) -> Run:
    return trained(name, dist.get_rank(), dist.get_world_size(), **options)


def require_equal(found: list[Run], expected: Run, limit: float = 1e-11) -> None:
    for rank, run in enumerate(found):
        assert distance(run.parameters, expected.parameters) <= limit
        for one, other in zip(run.outputs, expected.outputs, strict=True):
            torch.testing.assert_close(one, other.chunk(len(found))[rank], rtol=limit, atol=limit)


@pytest.mark.parametrize("num_ranks", [2, 3])
@pytest.mark.parametrize("name", CASES)
def test_what_is_read_trains_exactly(ranks: StartRanks, name: str, num_ranks: int) -> None:
    found = ranks(num_ranks).run(trained_here, name)
    require_equal(found, trained(name))
    assert {run.num_whole for run in found} == {CASES[name].num_whole}


def kept(name: str) -> tuple[list[int], list[str]]:
    """How many whole matrices live after forward and after backward, and what autograd saved."""
    torch.manual_seed(0)
    model, saved = CASES[name].build(), []
    rotate_all(model, mesh=make_mesh("cpu"), rules=CASES[name].read_rules())
    shapes = {parameter.shape for parameter in model.parameters()}

    def pack(tensor: Tensor) -> Tensor:
        if tensor.shape in shapes or tensor.t().shape in shapes:
            saved.append(type(tensor).__name__)
        return tensor

    with saved_tensors_hooks(pack, lambda tensor: tensor):
        loss = model(torch.rand(BATCH, TIME, DIM)).sum()
    alive = [num_alive(shapes)]
    loss.backward()
    return [*alive, num_alive(shapes)], saved


def num_alive(shapes: set[torch.Size]) -> int:
    """The plain tensors of these shapes."""
    gc.collect()
    return sum(type(each) is Tensor and each.shape in shapes for each in gc.get_objects())


def test_nothing_whole_is_kept_between_forward_and_backward(ranks: StartRanks) -> None:
    for alive, saved in ranks(2).run(kept, "loop"):
        assert alive == [0, 0]
        assert not saved


class Writes(nn.Module):
    """Writes to what it reads, where ``change`` says so."""

    def __init__(self, change: str) -> None:
        super().__init__()
        self.change, self.table = change, nn.Parameter(torch.rand(DIM, DIM))

    def forward(self, x: Tensor) -> Tensor:
        y = x @ self.table
        if self.change == "forward":
            with torch.no_grad():
                self.table.mul_(2)
        return y


def told(change: str) -> str:
    torch.manual_seed(0)
    model: Any = nn.Sequential(Writes(change))
    rotate_all(model, mesh=make_mesh("cpu"), rules={"0": ReadRule()})
    with pytest.raises(RotationError) as refused:
        output = model(torch.rand(2, DIM, requires_grad=True))
        with torch.no_grad():
            model[0].table.mul_(2)
        output.sum().backward()
    return str(refused.value)


@pytest.mark.parametrize("change", ["forward", "before backward"])
def test_writes_are_refused_by_name(ranks: StartRanks, change: str) -> None:
    words = "changed between" if change == "before backward" else "is written to by a forward"
    for found in ranks(2).run(told, change):
        assert found.startswith(f"0.table {words}")


def apart_with_a_hook() -> float:
    """How far a layer is off whose weight a hook computes from a large parameter."""
    models = []
    for _ in range(2):
        torch.manual_seed(0)
        models.append(nn.Sequential(nn.utils.spectral_norm(nn.Linear(520, 520))))
    rotate_all(models[0], mesh=make_mesh("cpu"))
    one, other = (model(torch.ones(1, 520)).detach() for model in models)
    return float((one - other).abs().max())


def test_a_hook_reads_the_parameter_that_it_computes_from(ranks: StartRanks) -> None:
    assert max(ranks(2).run(apart_with_a_hook)) <= 1e-5


def test_states_go_to_other_numbers_of_ranks_and_to_fsdp2(
    ranks: StartRanks, tmp_path: Path
) -> None:
    ranks(2).run(save_state, str(tmp_path))
    for num_ranks in (1, 3):
        assert max(ranks(num_ranks).run(load_state, str(tmp_path))) == 0


def state_of(model: nn.Module) -> dict[str, Any]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    model(torch.rand(BATCH, TIME, DIM, generator=torch.Generator().manual_seed(1))).sum().backward()
    optimizer.step()
    return dict(zip(("model", "optimizer"), get_state_dict(model, optimizer), strict=True))


def rotated_raw() -> nn.Module:
    torch.manual_seed(dist.get_world_size())
    model = CASES["raw"].build()
    rotate_all(model, mesh=make_mesh("cpu"), sync_from=0, rules={"1": ReadRule()})
    return model


def save_state(folder: str) -> None:
    state = state_of(rotated_raw())
    save(state, checkpoint_id=folder)
    torch.save(_whole_state(state), f"{folder}/whole-{dist.get_rank()}.pt")


def _whole_state(state: dict[str, Any]) -> list[Tensor]:
    leaves = tree_leaves(state)
    return [whole(leaf) for leaf in leaves if isinstance(leaf, Tensor)]


def load_state(folder: str) -> float:
    """The largest difference of a loaded state, rotated and under FSDP2, to the saved one."""
    off = []
    sharded = CASES["raw"].build()
    fully_shard(sharded, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    for model in (rotated_raw(), sharded):
        state = state_of(model)
        load(state, checkpoint_id=folder)
        expected = torch.load(f"{folder}/whole-0.pt")
        for one, other in zip(_whole_state(state), expected, strict=True):
            off.append(float((one - other).abs().max()))
    return max(off)
