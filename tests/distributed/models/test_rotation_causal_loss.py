"""The loss of a model of `transformers` goes by slices of the vocabulary, with all of its terms."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from gyre_trainer.comm.mesh import make_mesh
from gyre_trainer.errors import RotationError
from gyre_trainer.rotate import (
    causal_loss,
    linear_cross_entropy,
    rotate_all,
    token_log_probs,
)
from gyre_trainer.training.build import loss_of
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from tests.distributed.comparing import apart
from tests.distributed.conftest import StartRanks
from tests.distributed.models.families import SIZES, VOCABULARY, made
from tests.distributed.training import whole

NUM_ROWS, NUM_TOKENS = 6, 5
NUM_CLASSES = 512  # so many that nothing but all logits is as large
CAP = 0.05  # about as large as the logits of these models, so that it bends them
# Their norms compute in the dtype of the model, so nothing but the loss is rounded to float32.
DOUBLE = ["GPT2", "GPTNeoX"]
# What their configuration says of logits and routers; the library casts norms and logits to
# float32.
CONFIGURED: dict[str, dict[str, Any]] = {
    "Gemma2": SIZES | {"head_dim": 6, "final_logit_softcapping": CAP},
    "Cohere": SIZES | {"logit_scale": 3.5},
    "Granite": SIZES | {"logits_scaling": 0.3},
    "Mixtral": SIZES
    | {"num_local_experts": 4, "output_router_logits": True, "router_aux_loss_coef": 0.5},
}
OTHERS = ["Llama", "T5", "Mamba"]


class Large(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts the operators that return numbers of at least so many elements."""

    def __init__(self, numel: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.numel, self.count = numel, 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        output = func(*args, **kwargs or {})
        self.count += any(
            isinstance(leaf, Tensor) and leaf.is_floating_point() and leaf.numel() >= self.numel
            for leaf in tree_leaves(output)
        )
        return output


def data() -> tuple[Tensor, Tensor]:
    """Tokens and labels; each row has one token without a loss."""
    rows = torch.randint(
        1, VOCABULARY, (NUM_ROWS, NUM_TOKENS), generator=torch.Generator().manual_seed(1)
    )
    return rows, rows.index_fill(1, torch.tensor([2]), -100)


def mine() -> tuple[Tensor, Tensor]:
    rows, labels = (each.chunk(dist.get_world_size())[dist.get_rank()] for each in data())
    return rows, labels


def library(family: str, **sizes: int) -> Any:
    if family not in CONFIGURED:
        return made(family, **sizes)
    import transformers  # seconds, for these tests alone

    of: Any = transformers
    torch.manual_seed(0)
    config = getattr(of, f"{family}Config")(**CONFIGURED[family] | sizes)
    return getattr(of, f"{family}ForCausalLM")(config).double()


def rotated(family: str, **sizes: int) -> Any:
    model = library(family, **sizes)
    rotate_all(model, mesh=make_mesh("cpu"))
    return model


def grads_of(model: nn.Module) -> dict[str, Tensor]:
    return {name: whole(p.grad) for name, p in model.named_parameters() if p.grad is not None}


def one_process(family: str, num_parts: int) -> tuple[Tensor, dict[str, Tensor]]:
    """Loss and gradients, from logits in float64 where the library has these.

    A router's loss is not linear in the batch, so it is the mean over the ranks' parts.
    """
    model = library(family)
    losses = []
    for rows, labels in zip(*(each.chunk(num_parts) for each in data()), strict=True):
        if family in DOUBLE:
            logits, targets = model(input_ids=rows).logits[:, :-1], labels[:, 1:]
            losses.append(F.cross_entropy(logits.flatten(0, 1), targets.flatten()))
        else:
            losses.append(model(input_ids=rows, labels=labels).loss)
    loss = torch.stack(losses).mean()
    torch.autograd.backward(loss)
    return loss.detach(), grads_of(model)


def distances(families: list[str]) -> dict[str, tuple[float, float, float]]:
    """The distances of loss, gradients, and the loss of a given number of items."""
    found = {}
    rows, labels = mine()
    for family in families:
        model = rotated(family)
        loss = causal_loss(model, {"input_ids": rows, "labels": labels})
        torch.autograd.backward(loss)
        grads = grads_of(model)
        batch = {"input_ids": rows, "labels": labels, "num_items_in_batch": torch.tensor(7)}
        of_items = causal_loss(model, batch).detach()
        mean = loss.detach().double()
        dist.all_reduce(mean)
        expected, expected_grads = one_process(family, dist.get_world_size())
        assert grads.keys() == expected_grads.keys(), family
        alone = library(family)
        # T5 and Mamba divide by the number of labels all the same
        of_seven = alone(**batch).loss if family not in OTHERS[1:] else of_items
        found[family] = (
            apart(mean / dist.get_world_size(), expected.double()),
            max(apart(grads[name], expected_grads[name]) for name in grads),
            apart(of_items, of_seven.detach().to(of_items.dtype)),
        )
    return found


@pytest.mark.parametrize(
    ("num_ranks", "families"),
    [(2, [*DOUBLE, *CONFIGURED, *OTHERS]), (3, ["GPT2", "Gemma2", "Mixtral"])],
)
def test_loss_and_gradients_are_those_of_the_library(
    ranks: StartRanks, num_ranks: int, families: list[str]
) -> None:
    for found in ranks(num_ranks).run(distances, families):
        for family, (loss, gradients, of_items) in found.items():
            exact = family in DOUBLE
            assert loss <= (1e-12 if exact else 1e-6), family
            assert gradients <= (1e-12 if exact else 1e-5), family
            assert of_items <= 1e-6, family


def large_tensors(family: str) -> tuple[int, int]:
    """How often an operator returned as much as all logits: without labels, and with them, too."""
    rows, labels = (each.repeat(1, 2) for each in mine())  # more tokens than features
    model = rotated(family, vocab_size=NUM_CLASSES)
    batch = {"input_ids": rows, "labels": labels}
    train = loss_of(model)
    torch.autograd.backward(causal_loss(model, batch))  # once
    with Large(rows.numel() * NUM_CLASSES) as large:
        torch.autograd.backward(causal_loss(model, batch))
        if family != "T5":
            torch.autograd.backward(train(rows, rows, torch.ones_like(rows)))
        during = large.count
        model(**batch)
    return during, large.count


@pytest.mark.parametrize("family", ["Llama", "T5", "Gemma2"])
def test_no_tensor_has_all_logits(ranks: StartRanks, family: str) -> None:
    for during, with_labels in ranks(2).run(large_tensors, family):
        assert during == 0
        assert with_labels > 0


def tripled(model: Any) -> Any:
    """A model whose code does something to its logits that no configuration says."""
    own: Any = type(model)

    class Tripled(own):  # type: ignore[misc]
        def forward(self, *args: Any, labels: Tensor | None = None, **kwargs: Any) -> Any:
            output = own.forward(self, *args, **kwargs)
            output.logits = output.logits * 3
            if labels is not None:
                logits = output.logits[:, :-1].flatten(0, 1)
                output.loss = F.cross_entropy(logits, labels[:, 1:].flatten())
            return output

    model.__class__ = Tripled
    return model


def hooked(model: Any) -> Any:
    model.lm_head.register_forward_hook(lambda _module, _args, logits: 2 * logits)
    return model


REFUSED: dict[str, tuple[Callable[[], Any], str]] = {
    "not causal": (lambda: made("Bert"), "BertForMaskedLM: causal_loss does not know the loss"),
    "a factor in the code": (lambda: tripled(made("Llama")), "Tripled: causal_loss does not know"),
    "a hook": (lambda: hooked(made("Llama")), "a hook is registered on the head"),
    "no head": (lambda: nn.Linear(3, 3), "needs an nn.Linear as head"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_an_unknown_loss_is_refused(case: str) -> None:
    build, message = REFUSED[case]
    rows, labels = data()
    with pytest.raises(RotationError, match=message) as refused:
        causal_loss(build(), {"input_ids": rows, "labels": labels})
    assert "model(labels=...)" in str(refused.value)


def by_token(num_classes: int) -> tuple[float, float]:
    """How far three numbers of each token, and gradients of them, are from those of all logits."""
    torch.manual_seed(0)
    head, x = nn.Linear(4, num_classes).double(), torch.randn(2, 3, 4).double().requires_grad_()
    targets = torch.tensor([[0, 1, -100], [num_classes - 1, 0, 1]])
    weights = torch.randn(3, 2, 3).double()
    distribution: Any = torch.distributions.Categorical(logits=3 * head(x))
    expected = torch.stack(
        [
            distribution.log_prob(targets.clamp(min=0)) * (targets >= 0),
            (3 * head(x)).logsumexp(-1),
            distribution.entropy(),
        ]
    )
    wanted = [x, *head.parameters()]
    expected_grads = torch.autograd.grad((expected * weights).sum(), wanted)
    rotate_all(head, mesh=make_mesh("cpu"), min_numel=0)
    found = token_log_probs(head, x, targets, entropy=True, scale=3.0)
    assert torch.equal(
        -found.log_probs, linear_cross_entropy(head, x, targets, reduction="none", scale=3.0)
    )
    assert found.entropy is not None
    numbers = torch.stack([found.log_probs, found.log_sum_exp, found.entropy])
    x.grad = None
    torch.autograd.backward((numbers * weights).sum())
    grads = [whole(each.grad) for each in (x, *head.parameters()) if each.grad is not None]
    return apart(numbers.detach(), expected.detach()), max(
        apart(one, other) for one, other in zip(grads, expected_grads, strict=True)
    )


@pytest.mark.parametrize("num_ranks", [2, 3])
@pytest.mark.parametrize("num_classes", [2, 11])  # of two, one of three ranks has none
def test_numbers_of_tokens_are_those_of_all_logits(
    ranks: StartRanks, num_classes: int, num_ranks: int
) -> None:
    for distance, of_gradients in ranks(num_ranks).run(by_token, num_classes):
        assert distance <= 1e-13
        assert of_gradients <= 1e-13
