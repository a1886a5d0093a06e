"""Models as they are: other layouts of layers, tied heads with a bias, parameters that are read."""

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from gyre_trainer.comm.mesh import make_mesh
from gyre_trainer.layers.linear import LinearRule
from gyre_trainer.layers.moe import ExpertsRule
from gyre_trainer.rotate import rotate_all
from torch import Tensor, nn

from tests.distributed.conftest import StartRanks
from tests.distributed.training import whole

SIZES = {"num_hidden_layers": 2, "num_attention_heads": 2, "vocab_size": 31, "use_cache": False}


def made(family: str) -> Any:
    """A tiny model in float64, with biases that are not zero."""
    import transformers  # seconds, for these tests alone

    library: Any = transformers
    torch.manual_seed(0)
    match family:
        case "GPT2":
            config = library.GPT2Config(
                n_embd=12, n_layer=2, n_head=2, vocab_size=31, n_positions=16, use_cache=False,
                resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0,
            )  # fmt: skip
            model = library.GPT2LMHeadModel(config)
        case "Bert":
            config = library.BertConfig(
                hidden_size=12, intermediate_size=20, hidden_dropout_prob=0.0,
                attention_probs_dropout_prob=0.0, max_position_embeddings=16, **SIZES,
            )  # fmt: skip
            model = library.BertForMaskedLM(config)
        case _:
            config = library.GptOssConfig(
                hidden_size=12, intermediate_size=10, num_local_experts=5, num_experts_per_tok=2,
                num_key_value_heads=1, head_dim=6, **SIZES,
            )  # fmt: skip
            model = library.GptOssForCausalLM(config)
    for parameter in model.parameters():
        if not parameter.any():
            nn.init.normal_(parameter, std=0.1)
    return model.double()


RULES: dict[str, Any] = {
    "GptOss": {
        "*.experts": ExpertsRule(
            weights=("gate_up_proj", "gate_up_proj_bias", "down_proj", "down_proj_bias"),
            chosen="router_indices",
            scores="routing_weights",
            last=("down_proj", "down_proj_bias"),
        )
    }
}


def tokens() -> Tensor:
    return torch.randint(31, (6, 5), generator=torch.Generator().manual_seed(1))


def outcome(model: Any, rows: Tensor) -> dict[str, Tensor]:
    loss = model(input_ids=rows, labels=rows).loss
    loss.backward()
    grads = {name: whole(p.grad) for name, p in model.named_parameters() if p.grad is not None}
    return {"loss": loss.detach(), **grads}


def rotated(family: str) -> tuple[float, dict[str, Tensor]]:
    """The share of parameters that rotate, and the outcome of this rank's rows."""
    model = made(family)
    plan = rotate_all(model, mesh=make_mesh("cpu"), rules=RULES.get(family))
    rotating = sum(entry.numel for entry in plan.entries if entry.how == "rotated")
    total = sum(entry.numel for entry in plan.entries if entry.how != "local")
    rows = tokens().chunk(dist.get_world_size())[dist.get_rank()]
    return rotating / total, outcome(model, rows)


@pytest.mark.parametrize("num_ranks", [2, 3])
@pytest.mark.parametrize("family", ["GPT2", "Bert", "GptOss"])
def test_families_train_exactly(ranks: StartRanks, family: str, num_ranks: int) -> None:
    expected = outcome(made(family), tokens())
    found = ranks(num_ranks).run(rotated, family)
    for share, parts in found:
        assert share > 0.85
        assert parts.keys() == expected.keys()
        for name in expected.keys() - {"loss"}:
            torch.testing.assert_close(parts[name], expected[name], rtol=1e-4, atol=1e-7)
    mean = torch.stack([parts["loss"] for _, parts in found]).mean()
    torch.testing.assert_close(mean, expected["loss"], rtol=1e-6, atol=0)


class Reads(nn.Module):
    """Reads the parameters of a list, of a dict and of a layer, instead of calling these."""

    def __init__(self) -> None:
        super().__init__()
        self.gains = nn.ParameterList([nn.Parameter(torch.rand(4)) for _ in range(2)])
        self.shifts = nn.ParameterDict({"one": nn.Parameter(torch.rand(4))})
        self.layer, self.called = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        y = x * self.gains[0] + self.shifts["one"] * self.gains[1]
        output: Tensor = self.called(F.linear(y, self.layer.weight, self.layer.bias))
        return output


def gradients_of_reads(num_parts: int, part: int) -> dict[str, Tensor]:
    torch.manual_seed(0)
    model = nn.Sequential(Reads()).double()
    x = torch.rand(6, 4, dtype=torch.float64)
    if num_parts > 1:
        rotate_all(model, mesh=make_mesh("cpu"), rules={"0.layer": None})
    model(x.chunk(num_parts)[part]).sin().mean().backward()
    return {name: whole(p.grad) for name, p in model.named_parameters() if p.grad is not None}


def gradients_of_reads_here() -> dict[str, Tensor]:
    return gradients_of_reads(dist.get_world_size(), dist.get_rank())


def test_parameters_may_be_read(ranks: StartRanks) -> None:
    expected = gradients_of_reads(1, 0)
    for found in ranks(2).run(gradients_of_reads_here):
        assert found.keys() == expected.keys()
        for name, grad in expected.items():
            torch.testing.assert_close(found[name], grad)


def rotating_and_gradients(min_numel: int) -> tuple[list[str], dict[str, Tensor]]:
    """Paths of the modules that rotate, and gradients."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 12), nn.Linear(12, 4), nn.Linear(4, 4))
    plan = rotate_all(model, mesh=make_mesh("cpu"), rules={"3": LinearRule()}, min_numel=min_numel)
    model(torch.ones(2, 4)).sum().backward()
    rotating = [entry.path for entry in plan.entries if entry.how == "rotated"]
    return rotating, {
        name: whole(p.grad) for name, p in model.named_parameters() if p.grad is not None
    }


def test_small_modules_stay_whole_where_that_is_wanted(ranks: StartRanks) -> None:
    ((_, expected), *_) = ranks(2).run(rotating_and_gradients, 0)
    for rotating, found in ranks(2).run(rotating_and_gradients, 48):
        assert rotating == ["1", "2", "3"]  # the last one has a rule
        assert found.keys() == expected.keys()
        for name, grad in expected.items():
            torch.testing.assert_close(found[name], grad)


class Computes(nn.Module):
    """Two thirds of its parameters belong to no known kind of module."""

    def __init__(self) -> None:
        super().__init__()
        self.matrix = nn.Parameter(torch.zeros(1024, 1024))
        self.kept, self.layer = nn.Linear(1024, 1024), nn.Linear(1024, 1024)


def warned(build: Callable[[], nn.Module]) -> list[str]:
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        rotate_all(build(), mesh=make_mesh("cpu"), rules={"kept": None})
    return [str(each.message) for each in seen]


def test_a_model_that_hardly_rotates_is_a_warning(ranks: StartRanks) -> None:
    for (message,) in ranks(2).run(warned, Computes):
        assert "only 33% of the parameters rotate" in message
        assert "1,048,576 as in the model: no rule is known for Computes" in message
        assert "1,049,600 as in kept: a rule of None keeps them whole" in message
