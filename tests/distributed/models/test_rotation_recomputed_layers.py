"""Layers that backward computes again from their inputs: exactly, with less memory, more bytes."""

import gc
from typing import Any

import pytest
import torch
import torch.distributed as dist
from gyre_trainer.comm.mesh import make_mesh
from gyre_trainer.comm.ring import ring_of
from gyre_trainer.errors import RotationError
from gyre_trainer.layers.mlp import MLP
from gyre_trainer.layers.recomputed_layers import RecomputedLayer
from gyre_trainer.rotate import RotationPolicy, plan_of, rotate_all
from torch import Tensor, nn

from tests.distributed.comparing import apart
from tests.distributed.conftest import StartRanks
from tests.distributed.models.families import VOCABULARY, made
from tests.distributed.settled_bytes import SettledBytes
from tests.distributed.training import whole

BLOCKS = RotationPolicy(recompute="block")
LAYERS = RotationPolicy(recompute="layer")
NUM_LAYERS = 3
# Pre-norm; a packed attention; layers that rotate one by one, with a norm at each end; an argument
# with a gradient that all layers share; norms around the blocks.
DEPTH = {"GPT2": "n_layer", "T5": "num_layers"}
CLASSES = {
    "Llama": "LlamaDecoderLayer",
    "GPT2": "GPT2Block",
    "Bert": "BertLayer",
    "T5": "T5Block",
    "Gemma2": "Gemma2DecoderLayer",
}


def rotated(family: str, policy: RotationPolicy, **sizes: Any) -> Any:
    model = made(family, **{DEPTH.get(family, "num_hidden_layers"): NUM_LAYERS}, **sizes)
    rotate_all(model, mesh=make_mesh("cpu"), policy=policy)
    return model


def step(
    family: str, policy: RotationPolicy, **sizes: Any
) -> tuple[dict[str, Tensor], int, int, int]:
    """Loss and gradients of a second step; bytes that forward keeps, and backward; bytes sent."""
    model = rotated(family, policy, **sizes)
    rows = torch.randint(
        1, VOCABULARY, (4, 8), generator=torch.Generator().manual_seed(dist.get_rank())
    )
    model(input_ids=rows, labels=rows).loss.backward()
    model.zero_grad()
    ring = ring_of(make_mesh("cpu"))
    before = ring.bytes_sent
    torch.manual_seed(dist.get_rank())
    with SettledBytes() as live:
        loss = model(input_ids=rows, labels=rows).loss
        after_forward = live.live_bytes
        loss.backward()
        gc.collect()
        after_backward = live.settled()
    found = {n: whole(p.grad) for n, p in model.named_parameters() if p.grad is not None}
    found["loss"] = loss.detach()
    return found, after_forward, after_backward, ring.bytes_sent - before


def compared(family: str) -> tuple[float, int, int, int, list[str]]:
    """How far values are off; what is kept and sent more; the lines of the plan."""
    (blocks, kept, left, sent), (layers, *others) = step(family, BLOCKS), step(family, LAYERS)
    assert blocks.keys() == layers.keys()
    off = max(apart(layers[name], blocks[name]) for name in blocks)
    more = [one - other for one, other in zip(others, (kept, left, sent), strict=True)]
    plan = str(plan_of(rotated(family, LAYERS)))
    return off, more[0], more[1], more[2], plan.splitlines()


@pytest.mark.parametrize("family", CLASSES)
def test_gradients_are_the_same_and_less_is_kept(ranks: StartRanks, family: str) -> None:
    for off, kept, left, sent, lines in ranks(2).run(compared, family):
        assert off <= 1e-12
        assert kept < 0
        assert left <= 0
        assert sent > 0
        begin = f"{CLASSES[family]}: computed again in backward"
        assert any(line.startswith(begin) for line in lines)


def recomputed(find_blocks: bool) -> list[str]:
    model = made("Mixtral", num_hidden_layers=NUM_LAYERS)
    rotate_all(model, mesh=make_mesh("cpu"), policy=LAYERS, find_blocks=find_blocks)
    return [n for n, module in model.named_modules() if isinstance(module, RecomputedLayer)]


def test_layers_with_experts_are_computed_again(ranks: StartRanks) -> None:
    layers = [f"model.layers.{number}" for number in range(NUM_LAYERS)]
    for find_blocks in (False, True):
        assert ranks(2).run(recomputed, find_blocks) == [layers, layers]


def checkpointed() -> tuple[int, bool]:
    """Layers that are computed again by us; whether the library computes any."""
    model: Any = made("Llama", num_hidden_layers=NUM_LAYERS)
    model.gradient_checkpointing_enable()
    rotate_all(model, mesh=make_mesh("cpu"))
    layers = [module for module in model.modules() if isinstance(module, RecomputedLayer)]
    return len(layers), model.is_gradient_checkpointing


def test_checkpoints_of_the_library_imply_layers(ranks: StartRanks) -> None:
    assert ranks(2).run(checkpointed) == [(NUM_LAYERS, False)] * 2


class Dropping(nn.Module):
    """A layer that drops out what its MLP returned, and then computes with it."""

    def __init__(self, then: str) -> None:
        super().__init__()
        self.norm, self.mlp, self.then = nn.LayerNorm(8), MLP(8, 12), then
        self.dropout = nn.Dropout(0.2)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.dropout(self.mlp(self.norm(x)))
        if self.then == "reads":
            y = y * y.detach().square().mean().sqrt()
        elif self.then == "squares":
            y = y.square()
        return x + y


class Counting(Dropping):
    """A layer that counts its calls."""

    def __init__(self) -> None:
        super().__init__("")
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return super().forward(x) * self.calls


def counted() -> None:
    layer = Counting()
    model = nn.ModuleDict({"layers": nn.ModuleList([layer])})
    rotate_all(model, mesh=make_mesh("cpu"), policy=LAYERS, min_numel=0, sync_from=0)
    with pytest.raises(RotationError, match="writes to its attribute calls"):
        layer(torch.randn(4, 8))


def test_a_layer_that_writes_to_an_attribute_is_refused(ranks: StartRanks) -> None:
    ranks(2).run(counted)
