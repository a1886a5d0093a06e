"""Heads that tokens visit: what differs between ranks or calls, and memory."""

from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from gyre_trainer.comm.mesh import make_mesh
from gyre_trainer.comm.ring_registry import ring_of
from gyre_trainer.errors import RotationError
from gyre_trainer.layers.head.cross_entropy import linear_cross_entropy
from gyre_trainer.layers.head.logit_functions import Multiplied
from gyre_trainer.layers.head.visited_head import VisitedHead
from gyre_trainer.layers.mlp import MLP
from gyre_trainer.rotate import RotationPolicy, rotate_all
from torch import Tensor, nn

from tests.distributed.conftest import StartRanks
from tests.distributed.training import whole

ALONE = RotationPolicy()


class Head(nn.Module):
    """A head by itself."""

    def __init__(self, width: int, num_classes: int, dtype: torch.dtype, *, bias: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.head = nn.Linear(width, num_classes, bias=bias, dtype=dtype)


def features(rank: int, num_tokens: int, width: int, num_classes: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(rank)
    x = torch.randn(num_tokens, width, generator=generator, dtype=torch.float64)
    return x, torch.randint(num_classes, (num_tokens,), generator=generator)


@dataclass(frozen=True)
class Kind:
    """A head, how it travels, the dtype of its input, and the options of its loss."""

    own: torch.dtype
    policy: RotationPolicy
    given: torch.dtype
    options: dict[str, Any]
    tolerance: float


HALF = RotationPolicy(torch.bfloat16)
KINDS = {
    "bfloat16 travels": Kind(torch.float32, HALF, torch.bfloat16, {}, 0.02),
    "gradients in float32": Kind(
        torch.bfloat16,
        RotationPolicy(grad_dtype=torch.float32),
        torch.bfloat16,
        {},
        0.02,
    ),
    "float32 travels": Kind(
        torch.float64,
        RotationPolicy(torch.float32),
        torch.float32,
        {"label_smoothing": 0.1},
        1e-5,
    ),
}
ODD, MANY = 5, 401  # features, classes


def odd_sizes(kind: Kind) -> tuple[Tensor, Tensor]:
    """The gradients of an odd number of features of an odd number of tokens, and of the head."""
    model, mesh = Head(ODD, MANY, kind.own, bias=False), make_mesh("cpu")
    rotate_all(model, mesh=mesh, policy=kind.policy)
    x, targets = features(dist.get_rank(), 3 + 2 * dist.get_rank(), ODD, MANY)
    x = x.to(kind.given).requires_grad_()
    before = ring_of(mesh).bytes_sent
    loss = linear_cross_entropy(model.head, x, targets, reduction="sum", **kind.options)
    torch.autograd.backward(loss)
    assert ring_of(mesh).bytes_sent - before < ODD * MANY
    assert x.grad is not None
    assert model.head.weight.grad is not None
    return x.grad, whole(model.head.weight.grad)


@pytest.mark.parametrize("name", KINDS)
def test_numbers_of_tokens_and_features_may_be_odd(ranks: StartRanks, name: str) -> None:
    kind = KINDS[name]
    model, total = Head(ODD, MANY, kind.own, bias=False).double(), torch.zeros(())
    grads = []
    for rank in range(2):
        x, targets = features(rank, 3 + 2 * rank, ODD, MANY)
        x = x.to(kind.given).double().requires_grad_()
        loss = F.cross_entropy(model.head(x), targets, reduction="sum", **kind.options)
        total = total + loss / 2
        torch.autograd.backward(loss, retain_graph=True, inputs=[x])
        grads.append(x.grad)
    torch.autograd.backward(total, inputs=[model.head.weight])
    for (of_x, of_weight), expected in zip(ranks(2).run(odd_sizes, kind), grads, strict=True):
        for found, exact in ((of_x, expected), (of_weight, model.head.weight.grad)):
            assert exact is not None
            assert (found.double() - exact).norm() <= kind.tolerance * exact.norm()


def scaled_otherwise() -> tuple[Tensor, Tensor]:
    """The loss, and its gradient, of logits that each rank multiplies by its own number."""
    model = Head(ODD, MANY, torch.float64, bias=False)
    rotate_all(model, mesh=make_mesh("cpu"), policy=ALONE)
    rank = dist.get_rank()
    x, targets = features(rank, 3, ODD, MANY)
    x.requires_grad_()
    loss = linear_cross_entropy(model.head, x, targets, functions=(Multiplied(1.0 + rank),))
    torch.autograd.backward(loss)
    assert x.grad is not None
    return loss.detach(), x.grad


def test_each_rank_has_its_own_functions_of_logits(ranks: StartRanks) -> None:
    model = Head(ODD, MANY, torch.float64, bias=False)
    for rank, (found, grad) in enumerate(ranks(2).run(scaled_otherwise)):
        x, targets = features(rank, 3, ODD, MANY)
        x.requires_grad_()
        loss = F.cross_entropy(model.head(x) * (1.0 + rank), targets)
        torch.autograd.backward(loss)
        assert x.grad is not None
        assert torch.allclose(found, loss, rtol=1e-12, atol=0)
        assert torch.allclose(grad, x.grad, rtol=1e-12, atol=1e-13)


def told_of_replaced_bias() -> str:
    model = Head(4, 90, torch.float32, bias=True)
    rotate_all(model, mesh=make_mesh("cpu"), policy=ALONE)
    model.head.bias = nn.Parameter(model.head.bias.detach().clone())
    try:
        linear_cross_entropy(model.head, torch.ones(3, 4), torch.arange(3))
    except RotationError as error:
        return str(error)
    return ""


def test_a_bias_that_was_replaced_is_refused(ranks: StartRanks) -> None:
    for message in ranks(2).run(told_of_replaced_bias):
        assert "parameter bias is no longer in its rotated slice" in message


def largest_of_many_rounds() -> tuple[int, Tensor]:
    """Elements of the largest buffer that tokens ask for, and the losses."""
    model, mesh = Head(6, 301, torch.float64, bias=False), make_mesh("cpu")
    rotate_all(model, mesh=mesh, policy=ALONE)
    ring, asked = ring_of(mesh), []
    take = ring.pool.take

    def taken(numel: int, *others: Any) -> Tensor:
        asked.append(numel)
        return take(numel, *others)

    x, targets = features(dist.get_rank(), (3, 100)[dist.get_rank()], 6, 301)
    with (
        patch.object(ring.pool, "largest_whole_numel", 14),
        patch.object(ring.pool, "take", taken),
        torch.no_grad(),
    ):
        losses = linear_cross_entropy(model.head, x, targets, reduction="none")
    return max(asked), losses


def test_buffers_are_no_larger_with_more_rounds_than_have_numbers(ranks: StartRanks) -> None:
    model = Head(6, 301, torch.float64, bias=False)
    for rank, (largest, losses) in enumerate(ranks(2).run(largest_of_many_rounds)):
        x, targets = features(rank, (3, 100)[rank], 6, 301)
        assert largest <= 14
        expected = F.cross_entropy(model.head(x), targets, reduction="none")
        assert torch.allclose(losses, expected, rtol=1e-12, atol=0)


class Body(nn.Module):
    """A block, and a head."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.Sequential(MLP(6, 60), MLP(6, 60))
        self.head = nn.Linear(6, 301, bias=False)


def num_buffers(by_tokens: bool) -> list[int]:
    """How many buffers of each dtype the pool has after two steps."""
    model, mesh = Body(), make_mesh("cpu")
    rotate_all(model, mesh=mesh, policy=RotationPolicy(torch.bfloat16))
    pool = ring_of(mesh).pool
    pool._free.clear()
    pool._numel.clear()
    x, targets = features(dist.get_rank(), 9, 6, 301)
    with patch.object(VisitedHead, "_sends_less", lambda *_: by_tokens):
        for _ in range(2):
            found = model.blocks(x.to(torch.bfloat16))
            torch.autograd.backward(linear_cross_entropy(model.head, found, targets))
    return [len(pool._free.get((dtype, x.device), [])) for dtype in (torch.bfloat16, torch.float32)]


@pytest.mark.parametrize("num_ranks", [2, 3])
def test_tokens_need_no_more_buffers_than_slices(ranks: StartRanks, num_ranks: int) -> None:
    for slices in ranks(num_ranks).run(num_buffers, False):
        for tokens in ranks(num_ranks).run(num_buffers, True):
            assert all(one <= other for one, other in zip(tokens, slices, strict=True))


def bytes_of_bias_gradient() -> tuple[int, Tensor]:
    model = Head(6, 301, torch.float64, bias=True)
    model.head.weight.requires_grad_(False)
    rotate_all(model, mesh=make_mesh("cpu"), policy=ALONE)
    x, targets = features(dist.get_rank(), 4, 6, 301)
    torch.autograd.backward(linear_cross_entropy(model.head, x, targets))
    grad: Any = model.head.bias.grad
    return grad.to_local().untyped_storage().nbytes(), whole(grad)


def test_a_bias_that_is_trained_alone_has_a_gradient_of_its_own_size(ranks: StartRanks) -> None:
    model = Head(6, 301, torch.float64, bias=True)
    for rank in range(2):
        x, targets = features(rank, 4, 6, 301)
        torch.autograd.backward(F.cross_entropy(model.head(x), targets) / 2)
    for rank, (nbytes, grad) in enumerate(ranks(2).run(bytes_of_bias_gradient)):
        assert nbytes == 8 * (151, 150)[rank]
        assert model.head.bias.grad is not None
        assert torch.allclose(grad, model.head.bias.grad, rtol=1e-12, atol=1e-13)
