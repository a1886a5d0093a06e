"""The backward of a norm takes some rows at a time, where each row is its own."""

from collections.abc import Callable
from copy import deepcopy

import pytest
import torch
from gyre_trainer.accounting.counters import LiveBytes
from gyre_trainer.layers.recomputed_layers import recompute_norms
from gyre_trainer.rotation import recomputation
from torch import Tensor, nn

BATCH, TIME, DIM = 3, 64, 8


def layer_norm() -> nn.Module:
    return nn.LayerNorm(DIM, dtype=torch.float64)


def over_two_dims() -> nn.Module:
    return nn.LayerNorm((TIME, DIM), dtype=torch.float64)


def rms_norm() -> nn.Module:
    return nn.RMSNorm(DIM, eps=1e-6, dtype=torch.float64)


def outcome(norm: nn.Module, batch: int = BATCH) -> tuple[list[Tensor], int]:
    """The gradients, and the bytes that backward had alive beside what was there before."""
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(batch, TIME, DIM, generator=generator, dtype=torch.float64, requires_grad=True)
    with LiveBytes() as live:
        loss = (norm(x) * torch.arange(x.numel()).view(x.shape)).sum()
        live.mark("backward")
        before = live.total
        loss.backward()
        peak = live.timeline().since("backward").peak_bytes
    grads = [x.grad, *(parameter.grad for parameter in norm.parameters())]
    return [grad for grad in grads if grad is not None], peak - before


@pytest.mark.parametrize("batch", [2, 3])
@pytest.mark.parametrize("make", [layer_norm, rms_norm, over_two_dims])
def test_gradients_are_those_of_all_rows_at_once(
    monkeypatch: pytest.MonkeyPatch, make: Callable[[], nn.Module], batch: int
) -> None:
    plain = make()
    norm = deepcopy(plain)
    recompute_norms(norm)
    expected, _ = outcome(plain, batch)
    monkeypatch.setattr(recomputation, "_MAX_NUMEL", 10 * DIM)
    found, _ = outcome(norm, batch)
    assert len(found) == len(expected)
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)


def test_fewer_rows_take_less_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    norm = rms_norm()
    recompute_norms(norm)
    _, at_once = outcome(norm)
    norm.zero_grad()
    monkeypatch.setattr(recomputation, "_MAX_NUMEL", 10 * DIM)
    _, by_rows = outcome(norm)
    assert by_rows < at_once / 2
