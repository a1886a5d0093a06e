"""Compiled slices and compiled models: the results of one process, and nothing compiled twice."""

import warnings
from collections.abc import Iterable
from contextlib import nullcontext
from dataclasses import replace
from typing import Any, NamedTuple

import torch
import torch._dynamo.utils
import torch.nn.functional as F
from gyre_trainer.rotate import RotationPolicy
from torch import nn

from tests.distributed.conftest import StartRanks
from tests.distributed.refusals.test_rotation_regressions import VARIANT, backward, mine, reference
from tests.distributed.training import (
    Variant,
    batch,
    distance,
    rotated_gpt,
    whole_parameters,
)

# The one backend that needs no C++ compiler and yet divides a graph into forward and backward.
BACKEND = "aot_eager"
NUM_STEPS = 2


def begin() -> None:
    """Forget all graphs, and ignore the compiler's own warnings."""
    warnings.simplefilter("ignore")
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()


def num_graphs() -> int:
    found: int = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    return found


class Trained(NamedTuple):
    """The distance of parameters from one process's, and the number of graphs after each step."""

    apart: float
    num_graphs: list[int]


def train(variant: Variant, compiled: str = "", *, autocast: bool = False) -> Trained:
    """Train on this rank with the model, its blocks or only its slices compiled."""
    # The compiler asks for the gradient of every tensor; errors of ranks include that warning.
    warnings.filterwarnings("ignore", "The .grad attribute of a Tensor that is not a leaf")
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    model = rotated_gpt(variant)
    alone = reference(model, variant)
    parts: dict[str, Iterable[nn.Module]] = {"": [], "blocks": model.blocks, "model": [model]}
    for module in parts[compiled]:
        module.compile(backend=BACKEND)
    both = [(each, torch.optim.SGD(each.parameters(), lr=0.1)) for each in (model, alone)]
    num_graphs = []
    for step in range(NUM_STEPS):
        data = batch(step, variant.config.vocab_size)
        for each, optimizer in both:
            tokens, targets = mine(data) if each is model else data
            with torch.autocast("cpu", torch.bfloat16) if autocast else nullcontext():
                logits = each(tokens)
            backward(F.cross_entropy(logits.flatten(0, 1).double(), targets.flatten()))
            optimizer.step()
            optimizer.zero_grad()
        num_graphs.append(torch._dynamo.utils.counters["stats"]["unique_graphs"])
    return Trained(distance(whole_parameters(model), whole_parameters(alone)), num_graphs)


def compiled(variant: Variant, **options: Any) -> Variant:
    return replace(variant, policy=RotationPolicy(compiler=BACKEND, **options))


def test_all_blocks_and_slices_share_one_graph_of_each_kind(ranks: StartRanks) -> None:
    deeper = replace(VARIANT, config=replace(VARIANT.config, num_layers=3))
    for apart, num_graphs in ranks(3).run(train, compiled(deeper)):
        assert apart <= 1e-12
        assert num_graphs == [2] * NUM_STEPS  # attention and MLP
