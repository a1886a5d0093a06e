"""What would be wrong in silence is refused by name, or computed as without rotation."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from gyre_trainer.comm.mesh import make_mesh
from gyre_trainer.layers.mlp import MLP, MLPRule
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


WIDTH, NUM_ROWS = 8, 30


class Perceptron(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 12), nn.Linear(12, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.down(F.gelu(self.up(x)))
        return output


class Model(nn.Module):
    """An embedding, blocks, a norm that stays whole, and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(NUM_ROWS, WIDTH)
        self.blocks = nn.ModuleList(Perceptron() for _ in range(2))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, NUM_ROWS)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = x + block(x)
        output: Tensor = self.head(self.norm(x))
        return output


def made() -> Any:
    torch.manual_seed(0)
    return Model().double()


def rotated() -> Any:
    model = made()
    rotate_all(model, mesh=make_mesh("cpu"), rules={Perceptron: MLPRule()})
    return model


def told_of_hooks() -> list[str]:
    model, x, messages = rotated(), torch.arange(10), []
    model(x).sum().backward()
    registering: tuple[Callable[[Any], Any], ...] = (
        lambda block: block.down.register_forward_hook(lambda module, args, y: y + 1),
        lambda block: block.up.register_forward_pre_hook(lambda module, args: None),
        lambda block: block.down.register_full_backward_hook(lambda module, grads, of: None),
    )
    for register in registering:
        hook = register(model.blocks[1])
        messages.append(told(lambda: model(x)))
        hook.remove()
    model.blocks[1].register_forward_hook(lambda module, args, y: 2 * y)
    plain = made()
    plain.blocks[1].register_forward_hook(lambda module, args, y: 2 * y)
    assert torch.allclose(model(x), plain(x), rtol=1e-12)
    return messages


def test_hooks_inside_of_a_block_that_rotates_are_refused(ranks: StartRanks) -> None:
    for messages in ranks(2).run(told_of_hooks):
        assert len(messages) == 3
        for message in messages:
            assert message.startswith("a hook was registered inside of Perceptron")


def told_of_tokens() -> list[str]:
    model, messages = rotated(), []
    for tokens in (torch.tensor([1.5]), torch.tensor([True]), torch.tensor([3], dtype=torch.int16)):
        with pytest.raises(TypeError) as refused:
            model(tokens)
        messages.append(str(refused.value))
    return messages


def test_tokens_that_torch_would_refuse_are_refused(ranks: StartRanks) -> None:
    for messages in ranks(2).run(told_of_tokens):
        assert [each.rpartition(".")[2] for each in messages] == ["float32", "bool", "int16"]
