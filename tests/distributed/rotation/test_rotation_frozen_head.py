"""A frozen head with cross-entropy goes round the ring once: its input's gradient is found then."""

from copy import deepcopy
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from gyre_trainer.comm.mesh import make_mesh
from gyre_trainer.comm.ring import ring_of
from gyre_trainer.layers import head as head_module
from gyre_trainer.layers.head import linear_cross_entropy
from gyre_trainer.rotate import RotationPolicy, rotate_all
from torch import Tensor, nn

from tests.distributed.conftest import StartRanks

DIM, NUM_CLASSES, NUM_TOKENS = 5, 11, 8  # 4 ranks have 3, 3, 3 and 2 classes; 7 ranks some none
OPTIONS: dict[str, dict[str, Any]] = {
    "mean": {"reduction": "mean"},
    "sum": {"reduction": "sum"},
    "capped": {"reduction": "none", "soft_cap": 0.3},
}


def parts(bias: bool) -> tuple[nn.Linear, Tensor, Tensor]:
    torch.manual_seed(0)
    head = nn.Linear(DIM, NUM_CLASSES, bias=bias, dtype=torch.float64).requires_grad_(False)
    x = torch.randn(NUM_TOKENS, DIM, dtype=torch.float64, requires_grad=True)
    targets = torch.arange(NUM_TOKENS).index_fill(0, torch.tensor([2]), -100)
    return head, x, targets


def plain(head: nn.Linear, x: Tensor, targets: Tensor, options: dict[str, Any]) -> Tensor:
    logits: Tensor = head(x)
    if "soft_cap" in options:
        logits = (logits / 0.3).tanh() * 0.3
    losses: Tensor = F.cross_entropy(logits, targets, reduction="none")
    match options["reduction"]:
        case "none":
            return losses
        case "sum":
            return losses.sum()
    return losses.sum() / (targets >= 0).sum()


def weighted(loss: Tensor) -> Tensor:
    """One number, in which tokens have different weights."""
    return (loss * torch.arange(1, loss.numel() + 1).view(loss.shape)).sum()


def off(options: dict[str, Any], bias: bool, max_logits: int) -> tuple[float, int, int]:
    """How far loss and gradient are off, the hops' bytes, and those of one pass."""
    head, x, targets = parts(bias)
    alone, mesh = deepcopy(head), make_mesh("cpu")
    rotate_all(head, mesh=mesh, policy=RotationPolicy())
    ring = ring_of(mesh)
    with patch.object(head_module, "_MAX_LOGITS", max_logits):
        before = ring.bytes_sent
        loss = linear_cross_entropy(head, x, targets, **options)
        torch.autograd.backward(weighted(loss))
        sent = ring.bytes_sent - before
    same = x.detach().requires_grad_()
    expected = plain(alone, same, targets, options)
    torch.autograd.backward(weighted(expected))
    assert x.grad is not None
    assert same.grad is not None
    num_hops = dist.get_world_size() - 1
    rows = [len(part) for part in torch.arange(NUM_CLASSES).chunk(num_hops + 1)]
    one_pass = 8 * (DIM + bias) * (NUM_CLASSES - rows[(dist.get_rank() + 1) % (num_hops + 1)])
    distance = max((loss - expected).abs().max().item(), (x.grad - same.grad).abs().max().item())
    return distance, sent, one_pass


@pytest.mark.parametrize("num_ranks", [1, 2, 4])
@pytest.mark.parametrize("max_logits", [2**23, 6])
@pytest.mark.parametrize("case", OPTIONS)
def test_loss_and_gradient_are_those_of_one_process_in_one_pass(
    ranks: StartRanks, case: str, max_logits: int, num_ranks: int
) -> None:
    for bias in (False, True):
        for distance, sent, one_pass in ranks(num_ranks).run(off, OPTIONS[case], bias, max_logits):
            assert distance <= 1e-13
            assert sent == one_pass


def half_precision() -> tuple[torch.dtype, float]:
    """The gradient's dtype in bfloat16, and how far it is off, of the largest value."""
    head, x, targets = parts(bias=True)
    exact = x.detach().requires_grad_()
    torch.autograd.backward(plain(head, exact, targets, {"reduction": "mean"}))
    head, x = head.bfloat16(), x.detach().bfloat16().requires_grad_()
    rotate_all(head, mesh=make_mesh("cpu"))
    torch.autograd.backward(linear_cross_entropy(head, x, targets))
    assert x.grad is not None
    assert exact.grad is not None
    return x.grad.dtype, ((x.grad - exact.grad).abs().max() / exact.grad.abs().max()).item()


def test_half_precision(ranks: StartRanks) -> None:
    for dtype, distance in ranks(2).run(half_precision):
        assert dtype == torch.bfloat16
        assert distance <= 2e-2
