"""`rotate_all`: how it treats each module, and the plan that it returns."""

from dataclasses import asdict
from typing import Any

import torch
import torch.distributed as dist
from gyre_trainer.comm.mesh import make_mesh
from gyre_trainer.inspection.rotation_plan import plan_of
from gyre_trainer.layers.mlp import MLP, MLPRule
from gyre_trainer.rotate import rotate_all
from gyre_trainer.rotation.rotated_module import own_class
from torch import Tensor, nn
from torch.nn.utils.parametrizations import weight_norm

from tests.distributed.conftest import StartRanks
from tests.distributed.training import whole


class Named(nn.Module):
    """An MLP with names of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.fc1, self.fc2 = nn.Linear(4, 6), nn.Linear(6, 4)

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.fc2(self.fc1(x).tanh())
        return output


class LogProbabilities(nn.Linear):
    """A subclass of a linear layer that is none: its outputs depend on each other."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).log_softmax(-1)


class Model(nn.Module):
    """A model with one module for each way of treating modules."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(10, 4)
        self.blocks = nn.ModuleList([Named(), Named()])
        self.frozen = MLP(4, 8, bias=True)
        self.frozen.requires_grad_(False)
        self.norm = nn.BatchNorm1d(4)
        self.normed = weight_norm(nn.Linear(4, 4, bias=False))
        self.whole = nn.Linear(4, 4)
        self.probabilities = LogProbabilities(4, 10)
        self.head = nn.Linear(4, 10, bias=False)
        self.head.weight = self.embedding.weight
        self.scale = nn.Parameter(torch.ones(3))

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = x + block(x)
        x = self.whole(self.normed(self.norm(self.frozen(x))))
        output: Tensor = self.head(x) + self.probabilities(x) * self.scale.sum()
        return output


RULES: dict[Any, Any] = {"blocks.?": MLPRule(ups=("fc1",), down="fc2"), "whole": None}


def plan_and_gradients() -> tuple[list[dict[str, Any]], str, bool, dict[str, Tensor]]:
    """The plan, its table, whether `plan_of` finds it again, and the gradients of one step."""
    torch.manual_seed(0)
    model = Model()
    plan = rotate_all(model, mesh=make_mesh("cpu"), rules=RULES)
    tokens = torch.arange(8).chunk(dist.get_world_size())[dist.get_rank()]
    model(tokens).square().mean().backward()
    gradients = {name: whole(p.grad) for name, p in model.named_parameters() if p.grad is not None}
    assert own_class(model.norm) is nn.BatchNorm1d
    return [asdict(entry) for entry in plan.entries], str(plan), plan_of(model) == plan, gradients


def test_the_plan_lists_how_every_parameter_is_treated(ranks: StartRanks) -> None:
    for rank, (entries, text, again, _) in enumerate(ranks(3).run(plan_and_gradients)):
        assert again
        found = {(each["path"], each["how"]): each for each in entries}
        fates = {
            key: (each["module_class"], each["rule"], each["names"]) for key, each in found.items()
        }
        mlp = ("fc1.weight", "fc2.weight", "fc1.bias", "fc2.bias")
        assert fates == {
            ("", "replicated"): ("Model", "", ("scale",)),
            ("embedding", "rotated"): ("Embedding", "EmbeddingRule", ("weight",)),
            ("blocks.0", "rotated"): ("Named", "MLPRule", mlp),
            ("blocks.1", "rotated"): ("Named", "MLPRule", mlp),
            ("frozen", "rotated"): (
                "MLP",
                "MLPRule",
                ("up.weight", "down.weight", "up.bias", "down.bias"),
            ),
            ("norm", "replicated"): ("BatchNorm1d", "", ("weight", "bias")),
            ("norm", "local"): (
                "BatchNorm1d",
                "",
                ("running_mean", "running_var", "num_batches_tracked"),
            ),
            ("normed.parametrizations.weight", "replicated"): (
                "ParametrizationList",
                "",
                ("original0", "original1"),
            ),
            ("whole", "replicated"): ("Linear", "", ("weight", "bias")),
            ("probabilities", "replicated"): ("LogProbabilities", "", ("weight", "bias")),
        }
        embedding, frozen = found["embedding", "rotated"], found["frozen", "rotated"]
        assert (embedding["numel"], embedding["num_bytes"]) == (40, 160)
        assert embedding["num_local_bytes"] == 16 * (4, 4, 2)[rank]
        assert (frozen["numel"], frozen["num_trainable"]) == (76, 0)
        parameters = sum(each["numel"] for key, each in found.items() if key[1] != "local")
        assert parameters == sum(parameter.numel() for parameter in Model().parameters())
        assert "blocks.* x2" in text
        assert "whole on every rank" in text
        assert "total" in text
