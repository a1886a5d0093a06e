"""Models as they are: other layouts of layers, tied heads with a bias, parameters that are read."""

import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from gyre_trainer.comm.mesh import make_mesh
from gyre_trainer.errors import RotationError
from gyre_trainer.layers.linear import LinearRule
from gyre_trainer.layers.mlp import MLP
from gyre_trainer.rotate import rotate_all
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from tests.distributed.conftest import StartRanks
from tests.distributed.models.families import FAMILIES, VOCABULARY, compared, made
from tests.distributed.training import whole

# One of each kind: learned positions, rotary ones with grouped heads, encoder and decoder, a tied
# head with norms after blocks, stacked experts, a state-space mixer.
SIX = ["GPT2", "Llama", "T5", "Gemma2", "GptOss", "Mamba"]
OTHERS = [each for each in FAMILIES if each not in SIX]


@pytest.mark.parametrize("families", [SIX, OTHERS], ids=["six", "others"])
@pytest.mark.parametrize("num_ranks", [2, 3])
def test_families_train_exactly(ranks: StartRanks, num_ranks: int, families: list[str]) -> None:
    """As they rotate by default, in blocks where these are found."""
    found = ranks(num_ranks).run(compared, families)
    require_exact(found)
    assert families is OTHERS or all(each["GptOss"][0] > 0.96 for each in found)  # experts


@pytest.mark.models
@pytest.mark.parametrize("num_ranks", [2, 3])
def test_families_train_exactly_layer_by_layer(ranks: StartRanks, num_ranks: int) -> None:
    require_exact(ranks(num_ranks).run(partial(compared, find_blocks=False), list(FAMILIES)))


@pytest.mark.models
@pytest.mark.parametrize(("num_ranks", "recompute"), [(2, True), (3, True), (4, False), (4, True)])
def test_families_train_exactly_recomputed_and_on_more_ranks(
    ranks: StartRanks, num_ranks: int, recompute: bool
) -> None:
    run = partial(compared, recompute=recompute)
    require_exact(ranks(num_ranks).run(run, list(FAMILIES)))


def require_exact(found: list[dict[str, tuple[float, float, float]]]) -> None:
    """The library computes losses, and norms in places, in float32."""
    for each in found:
        for family, (share, loss, gradients) in each.items():
            # at this width, what a state-space mixer reads is a tenth of the model
            assert share > (0.8 if family == "Mamba" else 0.9), family
            assert loss <= 1e-6, family
            assert gradients <= 1e-5, family


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


class ReadsInside(nn.Module):
    """Asks for a dtype of what rotates, and reads it where ``does`` says so."""

    def __init__(self) -> None:
        super().__init__()
        self.mlp, self.head = MLP(4, 8), nn.Linear(4, 4)
        self.does = ""

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.head(self.mlp(x).to(self.mlp.up.weight.dtype))
        weight: Any = self.head.weight
        match self.does:
            case "mlp":
                return y + self.mlp.down.weight.sum()
            case "head":
                return F.linear(y, weight)
            case "only weights":
                y = weight.sum()
            case "whole head":
                return F.linear(y, weight.full_tensor() if isinstance(weight, DTensor) else weight)
            case "interrupt":
                raise KeyboardInterrupt
        return y


def reads_inside() -> tuple[Any, Any]:
    """The model without rotation and with it."""
    torch.manual_seed(0)
    plain, model = nn.Sequential(ReadsInside()), nn.Sequential(ReadsInside())
    model.load_state_dict(plain.state_dict())
    rotate_all(model, mesh=make_mesh("cpu"))
    return plain, model


def told_of_reads() -> list[str]:
    """What reads end in; an interrupt leaves nothing behind."""
    _, model = reads_inside()
    x, told = torch.ones(2, 4), []
    expected = model(x).detach()
    for does in ("mlp", "head", "only weights"):
        model[0].does = does
        with pytest.raises((RuntimeError, RotationError)) as refused:
            model(x)
        told.append("".join([str(refused.value), *getattr(refused.value, "__notes__", [])]))
    for look in (partial(model, x), model.state_dict):
        model[0].does = "interrupt"
        with pytest.raises(KeyboardInterrupt):
            model(x)
        model[0].does = ""
        look()
        assert all(isinstance(each, DTensor) for each in model.parameters())
    assert torch.equal(model(x), expected)
    return told


def test_a_read_of_what_rotates_names_the_rule(ranks: StartRanks) -> None:
    for found in ranks(2).run(told_of_reads):
        assert all("ReadRule(names=" in each for each in found), found


class ReadsTable(nn.Module):
    """Reads the weight of an embedding that it never calls, as DeBERTa-v2 does."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.norm = nn.Embedding(6, 4), nn.LayerNorm(4)

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.norm(self.table.weight).mT  # type: ignore[no-any-return]


def told_of_a_table() -> str:
    mesh, x = make_mesh("cpu"), torch.ones(2, 4)
    model, whole = nn.Sequential(ReadsTable()), nn.Sequential(ReadsTable())
    rotate_all(whole, mesh=mesh, rules={"*.table": None}, sync_from=0)
    whole(x).sum().backward()
    rotate_all(model, mesh=mesh, sync_from=0)
    with pytest.raises(RuntimeError) as refused:
        model(x)
    return " ".join(refused.value.__notes__)


def test_an_embedding_that_is_read_and_never_called_is_named(ranks: StartRanks) -> None:
    for told in ranks(2).run(told_of_a_table):
        assert told.endswith('0.table was never called: pass rules={"*.table": None}')


def apart_where_the_whole_head_is_asked_for() -> float:
    plain, model = reads_inside()
    x = torch.rand(2 * dist.get_world_size(), 4, generator=torch.Generator().manual_seed(1))
    plain[0].does = model[0].does = "whole head"
    plain(x).sin().mean().backward()
    model(x.chunk(dist.get_world_size())[dist.get_rank()]).sin().mean().backward()
    return max(
        float((whole(model.get_parameter(name).grad) - parameter.grad).abs().max())
        for name, parameter in plain.named_parameters()
    )


def test_a_whole_tensor_that_is_asked_for_has_the_mean_gradient(ranks: StartRanks) -> None:
    assert max(ranks(3).run(apart_where_the_whole_head_is_asked_for)) < 1e-5


def told_of_another_vocabulary() -> tuple[str, int]:
    model = made("Llama")
    rotate_all(model, mesh=make_mesh("cpu"))
    kept = model.resize_token_embeddings(VOCABULARY).num_embeddings
    with pytest.raises(RotationError) as refusal:
        model.resize_token_embeddings(VOCABULARY + 1)
    model(input_ids=torch.ones(1, 3, dtype=torch.int64))
    return str(refusal.value), kept


def test_a_rotated_model_keeps_its_vocabulary(ranks: StartRanks) -> None:
    for told, kept in ranks(2).run(told_of_another_vocabulary):
        assert told.startswith(
            f"LlamaForCausalLM was rotated with an embedding of {VOCABULARY} tokens"
        )
        assert "Resize the model first, then rotate it" in told
        assert kept == VOCABULARY


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
