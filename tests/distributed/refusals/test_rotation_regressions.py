"""Defects of a public implementation of rotation, one test each, so that they cannot come back.

Gradients are compared, since an optimizer that normalises them may hide that they are wrong. This
file covers gradients that were wrong from the second step on, slices that were overwritten, norms
that drifted apart, second forwards, and accumulation.

Other files cover attention that lost heads and its last bias (test_rotation_layers); sizes that do
not divide, mixed precision, clipping, and tied weights (test_rotation_parity); groups other than
the world (test_rotation_uses); building the whole model first (test_rotation_construction); a copy
in every hop (test_rotation_schedule); and checkpoints for other numbers of ranks
(test_rotation_checkpoint).
"""

from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from gyre_trainer.rotation.rotated_module import RotatedModule
from gyre_trainer.training.gpt import GPT
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from tests.distributed.conftest import StartRanks
from tests.distributed.training import (
    EVEN,
    Variant,
    batch,
    build,
    default_dtype,
    distance,
    rotated_gpt,
    whole,
    whole_parameters,
)

VARIANT = Variant(replace(EVEN, norm="layer", bias=True))
NUM_RANKS = 3


def mine(tensors: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """This rank's part of a global batch."""
    tokens, targets = (tensor.chunk(dist.get_world_size())[dist.get_rank()] for tensor in tensors)
    return tokens, targets


def reference(model: GPT, variant: Variant = VARIANT) -> GPT:
    """A model in one process with the same weights."""
    with default_dtype(variant.dtype):
        alone = build(variant.config)
    alone.to_empty(device="cpu")
    alone.load_state_dict(whole_parameters(model))
    return alone


def gradients(model: GPT) -> dict[str, Tensor]:
    return {
        name: whole(parameter.grad)
        for name, parameter in model.named_parameters()
        if parameter.grad is not None
    }


def backward(loss: Tensor) -> None:
    loss.backward()  # type: ignore[no-untyped-call]


def gradients_of_every_step(num_steps: int) -> list[float]:
    """The distance of the gradients from one process's, step by step."""
    model = rotated_gpt(VARIANT)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    distances = []
    for step in range(num_steps):
        alone = reference(model)
        data = batch(step, VARIANT.config.vocab_size)
        backward(model.loss(*mine(data)))
        backward(alone.loss(*data))
        distances.append(distance(gradients(model), gradients(alone)))
        optimizer.step()
        optimizer.zero_grad()
    return distances


def test_gradients_are_right_at_every_step_not_just_the_first(ranks: StartRanks) -> None:
    for distances in ranks(NUM_RANKS).run(gradients_of_every_step, 5):
        assert max(distances) <= 1e-12


def own_slices_before_and_after() -> bool:
    """Whether any bit of this rank's own slices changed while slices rotated."""
    model = rotated_gpt(VARIANT)
    own_slices = [
        module.rotation.sharded.flat
        for module in model.modules()
        if isinstance(module, RotatedModule)
    ]
    before = [own_slice.clone() for own_slice in own_slices]
    backward(model.loss(*mine(batch(0, VARIANT.config.vocab_size))))
    assert len(own_slices) == 2 + 2 * VARIANT.config.num_layers
    return all(torch.equal(*pair) for pair in zip(before, own_slices, strict=True))


def test_own_slices_are_never_overwritten(ranks: StartRanks) -> None:
    assert all(ranks(NUM_RANKS).run(own_slices_before_and_after))


def norms_after_training() -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """This rank's replicated parameters before and after some steps on its own data."""
    model = rotated_gpt(VARIANT)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    replicated = {name: p for name, p in model.named_parameters() if "norm" in name}
    before = {name: p.detach().to_local().clone() for name, p in replicated.items()}  # type: ignore[attr-defined]
    for step in range(5):
        backward(model.loss(*mine(batch(step, VARIANT.config.vocab_size))))
        optimizer.step()
        optimizer.zero_grad()
    return before, {name: p.detach().to_local() for name, p in replicated.items()}  # type: ignore[attr-defined]


def test_replicated_parameters_do_not_drift(ranks: StartRanks) -> None:
    (before, first), *others = ranks(NUM_RANKS).run(norms_after_training)
    assert len(first) == 2 * (2 * VARIANT.config.num_layers + 1)
    for name in first:
        assert not torch.equal(before[name], first[name])
        assert all(torch.equal(first[name], other[name]) for _, other in others)


def gradients_around_other_forwards(case: str) -> float:
    """The distance of gradients from one process's after several forwards before one backward."""
    model = rotated_gpt(VARIANT)
    alone = reference(model)
    data, other = batch(0, VARIANT.config.vocab_size), batch(1, VARIANT.config.vocab_size)
    if case == "evaluation":
        loss = model.loss(*mine(data))
        with torch.no_grad():
            model.loss(*mine(other))
        with torch.inference_mode():
            model.loss(*mine(other))
        backward(loss)
        backward(alone.loss(*data))
    elif case == "two losses, first to last":
        first, second = model.loss(*mine(data)), model.loss(*mine(other))
        backward(first)
        backward(second)
        backward(alone.loss(*data) + alone.loss(*other))
    elif case == "two losses at once":
        backward(model.loss(*mine(data)) + model.loss(*mine(other)))
        backward(alone.loss(*data) + alone.loss(*other))
    elif case == "a loss without a backward":
        model.loss(*mine(other))
        backward(model.loss(*mine(data)))
        backward(alone.loss(*data))
    else:
        for block in model.blocks:
            block.forward = checkpointed(block, reentrant=case.endswith("reentrant"))
        for _ in range(2):
            backward(model.loss(*mine(data)))
        backward(2 * alone.loss(*data))
    return distance(gradients(model), gradients(alone))


class checkpointed:  # stands for a function  # noqa: N801
    """A block whose activations torch computes again in backward."""

    def __init__(self, block: torch.nn.Module, *, reentrant: bool) -> None:
        self.forward = block.forward
        self.reentrant = reentrant

    def __call__(self, *args: Tensor) -> object:
        return checkpoint(self.forward, *args, use_reentrant=self.reentrant)


@pytest.mark.parametrize(
    "case",
    [
        "evaluation",
        "two losses, first to last",
        "two losses at once",
        "a loss without a backward",
        "activation checkpointing",
        "activation checkpointing, reentrant",
    ],
)
def test_forwards_between_a_forward_and_its_backward_change_nothing(
    ranks: StartRanks, case: str
) -> None:
    assert max(ranks(NUM_RANKS).run(gradients_around_other_forwards, case)) <= 1e-12


def gradients_after_backwards_of_another_order() -> list[float]:
    """Distances by step if the first backward went from one loss's modules to the other's."""
    model = rotated_gpt(VARIANT)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    distances = []
    for num_losses in (2, 1, 1, 2):
        alone = reference(model)
        data = [batch(step, VARIANT.config.vocab_size) for step in range(num_losses)]
        backward(torch.stack([model.loss(*mine(each)) for each in data]).sum())
        backward(torch.stack([alone.loss(*each) for each in data]).sum())
        distances.append(distance(gradients(model), gradients(alone)))
        optimizer.step()
        optimizer.zero_grad()
    return distances


def test_weights_sent_ahead_are_those_of_the_present_step(ranks: StartRanks) -> None:
    for distances in ranks(NUM_RANKS).run(gradients_after_backwards_of_another_order):
        assert max(distances) <= 1e-12
