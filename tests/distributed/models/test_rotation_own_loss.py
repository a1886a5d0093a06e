"""The loss that a model of `transformers` computes from `labels` goes through slices."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from gyre_trainer.comm.mesh import make_mesh
from gyre_trainer.errors import RotationError
from gyre_trainer.layers.head.deferred_logits import DeferredLogits
from gyre_trainer.rotate import rotate_all
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from tests.distributed.comparing import apart
from tests.distributed.conftest import StartRanks
from tests.distributed.models.families import VOCABULARY, made
from tests.distributed.training import whole

NUM_ROWS, NUM_TOKENS = 6, 5
NUM_CLASSES = 512  # so many that nothing but all logits is as large
# Their norms compute in the dtype of the model, so nothing but the loss is rounded to float32.
DOUBLE = ["GPT2", "GPTNeoX", "Bert"]
UNROUNDED = ["Bert", "T5"]  # the library casts the logits of all others to float32
FAMILIES = [*DOUBLE, "Llama", "T5", "Mamba", "Gemma2"]


class Large(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts the tensors of at least so many elements that operators return."""

    def __init__(self, numel: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.numel, self.count = numel, 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        output = func(*args, **kwargs or {})
        self.count += any(
            isinstance(leaf, Tensor) and leaf.numel() >= self.numel for leaf in tree_leaves(output)
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


def rotated(family: str, *, verify: bool | None = None, **sizes: Any) -> Any:
    model = made(family, **sizes)
    rotate_all(model, mesh=make_mesh("cpu"), verify=verify)
    return model


def grads_of(model: Any) -> dict[str, Tensor]:
    return {name: whole(p.grad) for name, p in model.named_parameters() if p.grad is not None}


def one_process(family: str) -> tuple[Tensor, dict[str, Tensor]]:
    """Loss and gradients, from logits in float64 where the library has these."""
    rows, labels = data()
    model = made(family)
    if family in DOUBLE:
        logits, targets = model(input_ids=rows).logits, labels
        if family != "Bert":
            logits, targets = logits[:, :-1], labels[:, 1:]
        loss = F.cross_entropy(logits.flatten(0, 1), targets.flatten())
    else:
        loss = model(input_ids=rows, labels=labels).loss
    torch.autograd.backward(loss)
    return loss.detach(), grads_of(model)


def distances(families: list[str]) -> dict[str, tuple[type, torch.dtype, float, float]]:
    """The class of the logits, the dtype of the loss, the distances of loss and gradients."""
    found = {}
    rows, labels = mine()
    for family in families:
        model = rotated(family, verify=True)
        output = model(input_ids=rows, labels=labels)
        output.loss.backward()
        loss = output.loss.detach().double()
        dist.all_reduce(loss)
        expected, grads = one_process(family)
        parts = grads_of(model)
        assert parts.keys() == grads.keys(), family
        found[family] = (
            type(output.logits),
            output.loss.dtype,
            apart(loss / dist.get_world_size(), expected.double()),
            max(apart(parts[name], grads[name]) for name in grads),
        )
    return found


@pytest.mark.parametrize("num_ranks", [2, 3])
def test_own_loss_is_that_of_one_process(ranks: StartRanks, num_ranks: int) -> None:
    for found in ranks(num_ranks).run(distances, FAMILIES):
        for family, (logits, dtype, loss, gradients) in found.items():
            assert logits is DeferredLogits, family
            assert dtype == (torch.float64 if family in UNROUNDED else torch.float32), family
            assert loss <= (1e-12 if family == "Bert" else 1e-6), family
            assert gradients <= (1e-12 if family in DOUBLE else 1e-5), family


def large_tensors(family: str) -> tuple[int, int]:
    """How often an operator returned a tensor as large as all logits: in a step, and afterwards."""
    rows, labels = (each.repeat(1, 2) for each in mine())  # more tokens than features
    model = rotated(family, vocab_size=NUM_CLASSES)
    model(input_ids=rows, labels=labels).loss.backward()  # what happens once
    with Large(rows.numel() * NUM_CLASSES) as large:
        output = model(input_ids=rows, labels=labels)
        output.loss.backward()
        during = large.count
        output.logits.argmax(-1)
    return during, large.count


@pytest.mark.parametrize("family", ["Llama", "T5", "Gemma2"])
def test_no_tensor_has_all_logits(ranks: StartRanks, family: str) -> None:
    for during, afterwards in ranks(2).run(large_tensors, family):
        assert during == 0
        assert afterwards > 0


def logits_of_uses() -> dict[str, Any]:
    """The logits of calls of several kinds, and the messages of refusals."""
    rows, labels = mine()
    model = rotated("GPT2")
    found: dict[str, Any] = {"unlabelled": model(input_ids=rows).logits}
    output = model(input_ids=rows, labels=labels, num_items_in_batch=torch.tensor(7))
    found["sum"] = output.loss * 7
    found["text"] = repr(output.logits)
    found["read"] = output.logits.detach()
    found["again"] = output.logits[..., 0]
    capped = model(input_ids=rows, labels=labels).logits
    flat = capped.view(-1, VOCABULARY)
    flat.mul_(2)  # in place, and so in what it is a view of
    found["doubled"] = capped.detach()
    weighted = model(input_ids=rows, labels=labels).logits.view(-1, VOCABULARY)
    found["smoothed"] = F.cross_entropy(weighted, labels.flatten(), label_smoothing=0.1)
    found["weighted"] = F.cross_entropy(
        weighted, labels.flatten(), weight=torch.arange(VOCABULARY).double()
    )
    with torch.no_grad():
        found["without gradients"] = model(input_ids=rows, labels=labels).logits
    model.eval()
    found["evaluated"] = model(input_ids=rows, labels=labels).logits
    return {k: each.detach() if isinstance(each, Tensor) else each for k, each in found.items()}


def test_logits_may_be_read(ranks: StartRanks) -> None:
    rows, labels = (each.chunk(2)[0] for each in data())
    logits = made("GPT2")(input_ids=rows).logits.detach()
    flat, targets = logits.view(-1, VOCABULARY), labels.flatten()
    weight = torch.arange(VOCABULARY).double()
    expected = {
        **dict.fromkeys(("unlabelled", "read", "without gradients", "evaluated"), logits),
        "again": logits[..., 0],
        "doubled": 2 * logits,
        "smoothed": F.cross_entropy(flat, targets, label_smoothing=0.1),
        "weighted": F.cross_entropy(flat, targets, weight=weight),
        "sum": F.cross_entropy(
            logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten(), reduction="sum"
        ).float(),
    }
    found = ranks(2).run(logits_of_uses)[0]
    assert found.pop("text") == "DeferredLogits(shape=(3, 5, 31), dtype=torch.float64)"
    assert {type(each) for each in found.values()} == {Tensor}
    assert found.keys() == expected.keys()
    for use, value in expected.items():
        torch.testing.assert_close(found[use], value, msg=use)


class Opaque(torch.autograd.Function):
    """A loss that torch does not announce to tensors of other classes."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor) -> Tensor:
        ctx.shape = logits.shape
        return logits.sum()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad.expand(ctx.shape)


def refusals() -> list[str]:
    rows, labels = mine()
    model = rotated("GPT2")
    messages = []
    opaque: Any = Opaque.apply
    with pytest.raises(RotationError) as refused:
        opaque(model(input_ids=rows, labels=labels).logits).backward()
    messages.append(str(refused.value))
    output = model(input_ids=rows, labels=labels)
    output.loss.backward()
    torch.optim.SGD(model.parameters(), lr=0.1).step()
    with pytest.raises(RotationError) as refused:
        output.logits.argmax(-1)
    return [*messages, str(refused.value)]


def test_what_would_be_wrong_is_refused(ranks: StartRanks) -> None:
    for gradient, changed in ranks(2).run(refusals):
        assert "a gradient was computed for logits that the model did not compute" in gradient
        assert "the head's weights, or its input, have changed since" in changed
        for message in (gradient, changed):
            assert "call the model without `labels`" in message
