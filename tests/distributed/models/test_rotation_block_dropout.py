"""Blocks that drop out rotate as a whole: which masks they have, and that backward has the same."""

from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from gyre_trainer.comm.mesh import make_mesh
from gyre_trainer.rotate import RotationPolicy, rotate_all
from torch import Tensor, nn

from tests.distributed.comparing import apart
from tests.distributed.conftest import StartRanks
from tests.distributed.models.dropping import (
    TIME,
    WIDTH,
    GivenMasks,
    Layers,
    masks_of_whole,
    masks_recorded,
)
from tests.distributed.models.dropping import rules as rules_of
from tests.distributed.training import whole

KEPT, RECOMPUTED = RotationPolicy(), RotationPolicy(recompute="block")
LAYERS = RotationPolicy(recompute="layer")
MODELS = pytest.mark.models


def made(num_heads: int, *, fused: bool = False) -> Layers:
    torch.manual_seed(3)
    return Layers(num_heads, fused=fused).double()


def rotated(policy: RotationPolicy, num_heads: int, *, fused: bool = False) -> Layers:
    """A model all of whose modules are blocks, called in each mode."""
    model = made(num_heads, fused=fused)
    plan = rotate_all(model, mesh=make_mesh("cpu"), policy=policy, rules=rules_of(num_heads))
    rules = {entry.path.rpartition(".")[2]: entry.rule for entry in plan.entries}
    assert rules == {"attention": "AttentionRule", "mlp": "MLPRule"}, rules
    for training in (False, True):
        model.train(training)(given())
    return model


def given() -> Tensor:
    """This rank's part of a batch."""
    generator = torch.Generator().manual_seed(dist.get_rank())
    return torch.randn(3, TIME, WIDTH, dtype=torch.float64, generator=generator)


def outcome(model: nn.Module, x: Tensor) -> dict[str, Tensor]:
    """The output, and all gradients for the mean of its sine."""
    x = x.clone().requires_grad_()
    output = model(x)
    output.sin().mean().backward()
    assert x.grad is not None
    grads = {name: whole(p.grad) for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    return {"output": output.detach(), "input": x.grad, **grads}


def off(policy: RotationPolicy, num_heads: int) -> float:
    """How far outputs and gradients are from those of plain modules with the same masks."""
    model, num_ranks = rotated(policy, num_heads), dist.get_world_size()
    torch.manual_seed(8)
    with masks_recorded() as seen:
        found = outcome(model, given())
    in_forward = seen[: num_ranks * 10]  # two layers, of which each drops out five times
    masks = masks_of_whole(in_forward, num_ranks, [3, 2, 3, 2])
    with GivenMasks(masks):
        expected = outcome(made(num_heads), given())
    for name in expected.keys() - {"output", "input"}:
        dist.all_reduce(expected[name])
        expected[name] /= num_ranks
    assert found.keys() == expected.keys()
    return max(apart(found[name], expected[name]) for name in expected)


@pytest.mark.parametrize(
    ("num_ranks", "policy", "num_heads"),
    [
        (2, KEPT, 4),
        (3, RECOMPUTED, 4),  # slices of 2, 1 and 1 heads
        (3, LAYERS, 3),
        pytest.param(2, RECOMPUTED, 4, marks=MODELS),
        pytest.param(2, LAYERS, 4, marks=MODELS),
        pytest.param(3, KEPT, 3, marks=MODELS),
    ],
)
def test_blocks_compute_what_a_plain_model_does_with_the_same_masks(
    ranks: StartRanks, num_ranks: int, policy: RotationPolicy, num_heads: int
) -> None:
    for found in ranks(num_ranks).run(off, policy, num_heads):
        assert found <= 1e-12


@dataclass(frozen=True)
class Drawn:
    """What one step of a model drew.

    Attributes:
        results: the output and the gradients.
        state: of the generator after the step.
        by_gradient: the derivative of the output's sum along one direction of the input.
        by_differences: the same, from two outputs with the same masks.
    """

    results: dict[str, Tensor]
    state: Tensor
    by_gradient: float
    by_differences: float


def drawn(policy: RotationPolicy, *, fused: bool) -> Drawn:
    model, x = rotated(policy, 4, fused=fused), given()
    along = torch.randn(x.shape, generator=torch.Generator().manual_seed(5)).double()

    def at(where: Tensor) -> Tensor:
        torch.manual_seed(8)
        output: Tensor = model(where).sin().mean()
        return output

    torch.manual_seed(8)
    results = outcome(model, x)
    state = torch.get_rng_state()
    with torch.no_grad():
        difference = (at(x + 1e-5 * along) - at(x - 1e-5 * along)) / 2e-5
    return Drawn(results, state, float((results["input"] * along).sum()), float(difference))


def drawn_in_each_way() -> dict[str, Drawn]:
    ways = {"kept": KEPT, "recomputed": RECOMPUTED, "layers": LAYERS}
    return {name: drawn(policy, fused=True) for name, policy in ways.items()}


def test_backward_has_the_masks_of_forward(ranks: StartRanks) -> None:
    """Attention by torch's kernel, which draws by itself; a call takes one number."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(8)
        for _ in range(4):  # blocks
            torch.randint(2**62, ())
        state = torch.get_rng_state()
    for found in ranks(2).run(drawn_in_each_way):
        for each in found.values():
            assert each.by_gradient == pytest.approx(each.by_differences, rel=1e-6)
            assert torch.equal(each.state, state)
            for name, result in each.results.items():
                assert apart(result, found["kept"].results[name]) <= 1e-12


SIZES: dict[str, dict[str, Any]] = {
    "GPT2LMHeadModel": {"n_embd": 16, "n_head": 4, "n_layer": 2, "n_positions": 16}
    | {"resid_pdrop": 0.1, "attn_pdrop": 0.5, "embd_pdrop": 0.2},
    "T5ForConditionalGeneration": {"d_model": 16, "d_kv": 4, "d_ff": 20, "num_layers": 2}
    | {"num_heads": 4, "dropout_rate": 0.2, "decoder_start_token_id": 0},
}
BLOCKS = {
    "GPT2LMHeadModel": {"attn", "mlp"},
    "T5ForConditionalGeneration": {"SelfAttention", "EncDecAttention", "DenseReluDense"},
}


def of_library(family: str, policy: RotationPolicy, keys: dict[str, Any]) -> Any:
    """A model of transformers whose blocks are found, in float64."""
    import transformers  # seconds, for these tests alone

    build: Any = getattr(transformers, family)
    torch.manual_seed(0)
    config = build.config_class(vocab_size=31, use_cache=False, **SIZES[family], **keys)
    model = build(config).double()
    plan = rotate_all(model, mesh=make_mesh("cpu"), policy=policy)
    found = {
        each.path.rpartition(".")[2]: each.rule
        for each in plan.entries
        if each.rule in ("AttentionRule", "MLPRule")
    }
    assert found.keys() == BLOCKS[family], found
    return model


def derivatives(family: str, **keys: Any) -> tuple[float, float, float]:
    """Along the gradient: its norm, differences with the same masks, and layers computed again."""
    if family.startswith("T5"):
        inputs = {"decoder_input_ids": torch.arange(10).view(2, 5) + 3 * dist.get_rank()}
    else:
        inputs = {}
    results, by_differences = [], 0.0
    for policy in (RECOMPUTED, LAYERS):
        model = of_library(family, policy, keys)
        embeds = torch.randn(2, 5, 16, generator=torch.Generator().manual_seed(1)).double()

        def loss(at: Tensor, model: Any = model) -> Tensor:
            torch.manual_seed(8)
            logits: Tensor = model(inputs_embeds=at, **inputs).logits
            return logits.sin().sum()

        for training in (False, True):
            loss(embeds, model.train(training))
        leaf = embeds.clone().requires_grad_()
        loss(leaf).backward()  # type: ignore[no-untyped-call]
        assert leaf.grad is not None
        results.append(leaf.grad)
        along = 3e-4 * leaf.grad / leaf.grad.norm()
        by_differences = float(((loss(embeds + along) - loss(embeds - along)) / 6e-4).detach())
    return float(results[0].norm()), by_differences, apart(*results)


@pytest.mark.parametrize(
    ("family", "keys"),
    [
        ("GPT2LMHeadModel", {}),
        ("T5ForConditionalGeneration", {}),
        pytest.param("GPT2LMHeadModel", {"attn_implementation": "eager"}, marks=MODELS),
    ],
)
def test_families_with_dropout_train_as_blocks(
    ranks: StartRanks, family: str, keys: dict[str, Any]
) -> None:
    for norm, by_differences, apart_by_layers in ranks(2).run(partial(derivatives, family, **keys)):
        assert norm == pytest.approx(by_differences, rel=1e-3)
        assert apart_by_layers <= 1e-7  # T5's norms compute in float32
