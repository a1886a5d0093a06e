"""What would be wrong in silence is refused by name, or computed as without rotation."""

import pytest
import torch
import torch.distributed as dist
from gyre_trainer.comm.mesh import make_mesh
from gyre_trainer.layers.mlp import MLP
from gyre_trainer.rotate import materialize, rotate_all
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from tests.distributed.conftest import StartRanks
from tests.distributed.refusals.refused_modules import told


class Normed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.mlp = nn.LayerNorm(4), MLP(4, 8)

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.mlp(self.norm(x))
        return output


def gradients_of_what_was_frozen(name: str) -> tuple[Tensor, Tensor]:
    """The gradient of a parameter that was frozen in rotating, and that of one process."""
    torch.manual_seed(0)
    model, alone = Normed().double(), Normed().double()
    alone.load_state_dict(model.state_dict())
    model.get_parameter(name).requires_grad_(False)
    rotate_all(model, mesh=make_mesh("cpu"))
    x = torch.randn(2 * dist.get_world_size(), 4, dtype=torch.float64)
    model(x[:2]).square().mean().backward()
    model.zero_grad()
    model.get_parameter(name).requires_grad_(True)
    model(x.chunk(dist.get_world_size())[dist.get_rank()]).square().mean().backward()
    alone(x).square().mean().backward()
    found, expected = model.get_parameter(name).grad, alone.get_parameter(name).grad
    assert isinstance(found, DTensor)
    assert expected is not None
    return found.full_tensor(), expected


@pytest.mark.parametrize("name", ["norm.weight", "mlp.up.weight", "mlp.down.weight"])
def test_a_parameter_that_is_unfrozen_after_rotating_has_the_gradient_of_one_process(
    ranks: StartRanks, name: str
) -> None:
    for found, expected in ranks(2).run(gradients_of_what_was_frozen, name):
        torch.testing.assert_close(found, expected)
        assert expected.abs().max() > 0


def told_of_early_optimizers() -> list[str]:
    """What each optimizer's step ends in: of all parameters, a late one, a norm's, one on meta."""
    mesh = make_mesh("cpu")
    texts = []
    for names in (("",), ("norm",), ("mlp.down",)):
        model = Normed()
        held = [p for name, p in model.named_parameters() if name.startswith(names)]
        early = torch.optim.AdamW(held)
        rotate_all(model, mesh=mesh, sync_from=0)
        late = torch.optim.AdamW(model.parameters())
        model(torch.ones(2, 4)).sum().backward()
        late.step()
        texts.append(told(early.step))
        early.param_groups.clear()
        early.add_param_group({"params": list(model.parameters())})
        early.step()  # it holds the present ones now
    with torch.device("meta"):
        model = Normed()
    early = torch.optim.AdamW(model.parameters())
    materialize(model, seed=0)
    return [*texts, told(early.step)]


def test_an_optimizer_that_was_made_before_rotating_is_refused(ranks: StartRanks) -> None:
    for of_all, of_a_norm, of_a_layer, on_meta in ranks(2).run(told_of_early_optimizers):
        assert "AdamW holds 4 parameters, first norm.weight, that the model has no" in of_all
        assert "AdamW holds 2 parameters, first norm.weight" in of_a_norm
        assert "AdamW holds 1 parameter, first down.weight of" in of_a_layer
        assert "AdamW holds 4 parameters" in on_meta
        for text in (of_all, of_a_norm, of_a_layer, on_meta):
            assert "Make the optimizer after these" in text


def told_of_an_added_layer() -> str:
    model = Normed()
    rotate_all(model, mesh=make_mesh("cpu"), sync_from=0)
    model.add_module("adapter", nn.Linear(4, 4))
    return told(lambda: model(torch.ones(1, 4)))


def test_a_layer_that_is_added_after_rotating_is_refused(ranks: StartRanks) -> None:
    for text in ranks(2).run(told_of_an_added_layer):
        assert "adapter.weight is another parameter than" in text
