"""Models that cap or scale their logits compute their own loss by slices, too."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from gyre_trainer.comm.mesh import make_mesh
from gyre_trainer.layers.head.deferred_logits import DeferredLogits
from gyre_trainer.rotate import RotationPolicy, rotate_all
from gyre_trainer.training.models.losses import loss_of
from torch import Tensor

from tests.distributed.comparing import apart
from tests.distributed.conftest import StartRanks
from tests.distributed.models.families import SIZES, made
from tests.distributed.models.test_rotation_own_loss import (
    NUM_CLASSES,
    Large,
    data,
    grads_of,
    mine,
)

CAP = 0.05  # about as large as the logits of these models, so that it bends them
# In the library's own code; it casts norms and logits to float32.
LIBRARY = {
    "Gemma2": SIZES | {"head_dim": 6, "final_logit_softcapping": CAP},
    "Cohere": SIZES | {"logit_scale": 3.5},
    "Granite": SIZES | {"logits_scaling": 0.3},
}
TIED = ["Gemma2", "Cohere"]
# In hooks on the heads of models that stay in float64. GPT-2's head is tied, and so is BERT's, with
# a bias of its own; GPT-NeoX's is not.
FUNCTIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "cap": lambda logits: CAP * torch.tanh(logits / CAP),
    "scale": lambda logits: logits * 3.5,
    "cap twice": lambda logits: (logits.div(0.1).tanh() * 2).tanh() / 0.5,
}
DOUBLE = ["GPT2", "GPTNeoX", "Bert"]


def library(family: str, **sizes: int) -> Any:
    import transformers  # seconds, for these tests alone

    torch.manual_seed(0)
    config = getattr(transformers, f"{family}Config")(**LIBRARY[family] | sizes)
    return getattr(transformers, f"{family}ForCausalLM")(config)


def hooked(family: str, function: Callable[[Tensor], Tensor]) -> Any:
    model = made(family)
    model.get_output_embeddings().register_forward_hook(
        lambda _module, _args, logits: function(logits)
    )
    return model


def whole_loss(family: str, model: Any) -> Tensor:
    """The loss in one process, from logits in float64 where the library has these."""
    rows, labels = data()
    if family not in DOUBLE:
        loss: Tensor = model(input_ids=rows, labels=labels).loss
        return loss
    logits, targets = model(input_ids=rows).logits, labels
    if family != "Bert":
        logits, targets = logits[:, :-1], labels[:, 1:]
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def distance(family: str, build: Callable[[], Any]) -> tuple[type, float, float]:
    """The class of the logits, and how far loss and gradients are from one process's."""
    alone = build()
    expected = whole_loss(family, alone)
    torch.autograd.backward(expected)
    grads = grads_of(alone)
    model = build()
    rotate_all(model, mesh=make_mesh("cpu"))
    rows, labels = mine()
    output = model(input_ids=rows, labels=labels)
    output.loss.backward()
    loss = output.loss.detach().double()
    dist.all_reduce(loss)
    parts = grads_of(model)
    assert parts.keys() == grads.keys(), family
    return (
        type(output.logits),
        apart(loss / dist.get_world_size(), expected.detach().double()),
        max(apart(parts[name], grads[name]) for name in grads),
    )


def distances() -> dict[str, tuple[type, float, float]]:
    found = {family: distance(family, lambda f=family: library(f).double()) for family in LIBRARY}  # type: ignore[misc]
    for family in DOUBLE:
        for name, function in FUNCTIONS.items():
            found[f"{family}, {name}"] = distance(
                family,
                lambda f=family, g=function: hooked(f, g),  # type: ignore[misc]
            )
    return found


@pytest.mark.parametrize("num_ranks", [2, 3])
def test_loss_and_gradients_are_those_of_one_process(ranks: StartRanks, num_ranks: int) -> None:
    for found in ranks(num_ranks).run(distances):
        assert len(found) == len(LIBRARY) + len(DOUBLE) * len(FUNCTIONS)
        for name, (logits, loss, gradients) in found.items():
            assert logits is DeferredLogits, name
            assert loss <= (1e-12 if name.startswith("Bert") else 1e-6), name
            assert gradients <= (1e-6 if name in LIBRARY else 1e-12), name


def of_half_precision() -> dict[str, tuple[type, bool, float, float, float]]:
    """By family: the distances of loss and gradients in bfloat16 from those of one process.

    The last one is that of the gradients where the same model computes all logits.
    """
    found = {}
    rows, labels = mine()
    for family in LIBRARY:
        alone = library(family)
        expected = whole_loss(family, alone)
        torch.autograd.backward(expected)
        grads = grads_of(alone)
        model = library(family)
        policy = RotationPolicy(compute_dtype=torch.bfloat16)
        rotate_all(model, mesh=make_mesh("cpu"), policy=policy)
        output = model(input_ids=rows, labels=labels)
        output.loss.backward()
        deferred = grads_of(model)
        model.zero_grad()
        logits = model(input_ids=rows).logits[:, :-1].float()
        torch.autograd.backward(F.cross_entropy(logits.flatten(0, 1), labels[:, 1:].flatten()))
        computed = grads_of(model)
        loss = output.loss.detach()
        dist.all_reduce(loss)
        found[family] = (
            type(output.logits),
            alone.get_input_embeddings().weight is alone.get_output_embeddings().weight,
            apart(loss / dist.get_world_size(), expected.detach()),
            together(deferred, grads),
            together(computed, grads),
        )
    return found


def together(parts: dict[str, Tensor], grads: dict[str, Tensor]) -> float:
    """The distance of all gradients, as one vector."""
    one, other = (torch.cat([each[name].flatten() for name in grads]) for each in (parts, grads))
    return float((one - other).norm() / other.norm())


def test_half_precision_is_as_near_as_with_all_logits(ranks: StartRanks) -> None:
    for found in ranks(2).run(of_half_precision):
        for family, (logits, tied, loss, gradients, of_all_logits) in found.items():
            assert logits is DeferredLogits, family
            assert tied == (family in TIED)
            assert loss <= 2**-8, family
            assert 0 < gradients <= 1.5 * of_all_logits, family


def of_training_steps() -> dict[str, tuple[float, int]]:
    """The distance of the loss of `gyre-train`, and how many tensors had all logits meanwhile."""
    found = {}
    rows = mine()[0].repeat(1, 2)  # more tokens than features
    weights = torch.linspace(0.5, 1.5, rows.numel()).view_as(rows)
    for family in LIBRARY:
        model = library(family, vocab_size=NUM_CLASSES)
        logits = model(input_ids=rows).logits.detach()
        losses = F.cross_entropy(logits.flatten(0, 1), rows.flatten(), reduction="none")
        expected = (losses.view_as(rows) * weights).sum() / weights.sum()
        rotate_all(model, mesh=make_mesh("cpu"))
        loss = loss_of(model)
        torch.autograd.backward(loss(rows, rows, weights))  # what happens once
        with Large(rows.numel() * NUM_CLASSES) as large:
            value = loss(rows, rows, weights)
            torch.autograd.backward(value)
        found[family] = apart(value.detach(), expected), large.count
    return found


def test_steps_of_gyre_train_have_no_tensor_of_all_logits(ranks: StartRanks) -> None:
    for found in ranks(2).run(of_training_steps):
        assert found.keys() == LIBRARY.keys()
        for family, (loss, num_large) in found.items():
            assert loss <= 1e-6, family
            assert num_large == 0, family


def logits_of_uses() -> dict[str, Tensor]:
    """Capped logits that are read, and what no slice can be given."""
    rows, labels = mine()
    model = hooked("GPT2", FUNCTIONS["cap"])
    rotate_all(model, mesh=make_mesh("cpu"))
    logits = model(input_ids=rows, labels=labels).logits
    return {
        "read": logits.detach(),
        "of a tensor": (model(input_ids=rows, labels=labels).logits * torch.tensor(2.0)).detach(),
        "rounded": torch.div(
            model(input_ids=rows, labels=labels).logits, CAP, rounding_mode="floor"
        ).detach(),
        "sum": (model(input_ids=rows, labels=labels).logits + 1).detach(),
    }


def test_capped_logits_may_be_read(ranks: StartRanks) -> None:
    rows, _ = (each.chunk(2)[0] for each in data())
    logits = FUNCTIONS["cap"](made("GPT2")(input_ids=rows).logits.detach())
    expected = {
        "read": logits,
        "of a tensor": 2 * logits,
        "rounded": torch.div(logits, CAP, rounding_mode="floor"),
        "sum": logits + 1,
    }
    found = ranks(2).run(logits_of_uses)[0]
    assert found.keys() == expected.keys()
    for use, value in expected.items():
        assert type(found[use]) is Tensor
        torch.testing.assert_close(found[use], value, msg=use)
