"""Families of the library as one graph: the losses and gradients of one process, compiled once."""

from typing import Any, NamedTuple

import pytest
import torch
import torch._dynamo.utils
import torch.distributed as dist
import torch.nn.functional as F
from gyre_trainer.comm.mesh import make_mesh
from gyre_trainer.errors import RotationError
from gyre_trainer.rotate import compile_whole, rotate_all
from torch import Tensor

from tests.distributed.comparing import apart
from tests.distributed.conftest import StartRanks
from tests.distributed.models.families import VOCABULARY, made
from tests.distributed.models.test_rotation_whole_graph import BACKEND, begin, mine, num_graphs
from tests.distributed.training import whole

NUM_STEPS = 3


class Found(NamedTuple):
    """What the steps of one rank gave.

    Attributes:
        apart: the largest distance of losses and gradients from one process's.
        num_graphs: the number of graphs after each step.
        num_breaks: how often a graph was broken.
    """

    apart: float
    num_graphs: list[int]
    num_breaks: int


def steps(model: Any, family: str, rows: Tensor, graphs: list[int]) -> dict[str, Tensor]:
    """Losses and gradients of some steps; ``graphs`` takes the number of graphs after each."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    # the loss of the library for a GPT-2 logs a warning, which no graph can
    given = {} if family == "GPT2" else {"labels": rows}
    found = {}
    for step in range(NUM_STEPS):
        output = model(input_ids=rows, **given)
        loss = output.loss if given else F.cross_entropy(output.logits.mT, rows)
        loss.backward()
        found[f"{step}"] = loss.detach()
        for name, parameter in model.named_parameters():
            # of an expert without tokens a plain model has none, and a rotated one zeros
            grad = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
            found[f"{step} {name}"] = whole(grad)
        optimizer.step()
        optimizer.zero_grad()
        graphs.append(num_graphs())
    return found


def compiled(family: str, options: dict[str, Any], sizes: dict[str, Any]) -> Found:
    """Train a family as one graph on this rank, and in one process."""
    begin()
    shape = (6, 2) if family == "Olmoe" else (12, 5)
    rows = torch.randint(1, VOCABULARY, shape, generator=torch.Generator().manual_seed(1))
    expected = steps(made(family, **sizes), family, rows, [])
    model = made(family, **sizes)
    rotate_all(model, mesh=make_mesh("cpu"), **options)
    compile_whole(model, backend=BACKEND)
    graphs: list[int] = []
    found = steps(model, family, mine(rows), graphs)
    for step in range(NUM_STEPS):
        dist.all_reduce(found[f"{step}"])
        found[f"{step}"] /= dist.get_world_size()
    num_breaks = sum(torch._dynamo.utils.counters["graph_break"].values())
    return Found(max(apart(found[name], expected[name]) for name in expected), graphs, num_breaks)


@pytest.mark.parametrize(
    ("family", "num_ranks", "options", "sizes"),
    [
        # the encoder and the decoder, which the compiler enters one after the other, share a table
        ("T5", 2, {}, {}),
        pytest.param("T5", 3, {}, {}, marks=pytest.mark.models),
        pytest.param("T5", 2, {}, {"num_layers": 2}, marks=pytest.mark.models),
        ("GPT2", 3, {}, {}),
        # so few tokens that experts have none; their number is in no graph
        ("Olmoe", 2, {}, {}),
        pytest.param("Olmoe", 3, {}, {"num_experts_per_tok": 2}, marks=pytest.mark.models),
        pytest.param("GPT2", 2, {"find_blocks": False}, {"n_layer": 2}, marks=pytest.mark.models),
    ],
)
def test_a_family_trains_as_one_graph_and_compiles_once(
    ranks: StartRanks, family: str, num_ranks: int, options: dict[str, Any], sizes: dict[str, Any]
) -> None:
    for found in ranks(num_ranks).run(compiled, family, options, sizes):
        assert found.apart <= 5e-6  # norms and routers compute in float32
        assert found.num_graphs == [0, 1, 1]  # the first step runs without a compiler
        assert found.num_breaks == 0


def told_of_mixtral() -> str:
    begin()
    model = made("Mixtral")
    rotate_all(model, mesh=make_mesh("cpu"))
    compile_whole(model, backend=BACKEND)
    rows = mine(torch.ones(2, 3, dtype=torch.int64))
    model(input_ids=rows)
    with pytest.raises(RotationError) as refused:
        model(input_ids=rows)
    return str(refused.value)


@pytest.mark.models
def test_experts_that_are_called_as_tokens_say_are_refused_as_without_rotation(
    ranks: StartRanks,
) -> None:
    for told in ranks(2).run(told_of_mixtral):
        assert "MixtralForCausalLM cannot be called as one graph" in told
        assert "model.layers.0.block_sparse_moe" in told
        assert "fails without rotation, too; take torch.compile(model)" in told
