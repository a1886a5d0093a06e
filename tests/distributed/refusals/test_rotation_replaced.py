"""What others put in the place of parameters, or inside of blocks, after a model was rotated."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from gyre_trainer.comm.mesh import make_mesh
from gyre_trainer.errors import RotationError
from gyre_trainer.layers.mlp import MLPRule
from gyre_trainer.rotate import rotate_all
from torch import Tensor, nn

from tests.distributed.conftest import StartRanks

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
        with pytest.raises(RotationError) as refused:
            model(x)
        messages.append(str(refused.value))
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
