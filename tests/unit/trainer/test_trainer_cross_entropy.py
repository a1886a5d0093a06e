"""A head fused with cross-entropy in one process equals torch's and bounds the logits."""

from collections.abc import Callable
from typing import Any, Literal

import pytest
import torch
import torch.nn.functional as F
from gyre_trainer.errors import RotationError
from gyre_trainer.layers import head as head_file
from gyre_trainer.layers.head import linear_cross_entropy, token_log_probs
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

NUM_TOKENS, DIM, NUM_CLASSES = (3, 7), 5, 11


def head(*, bias: bool = True, dtype: torch.dtype = torch.float64) -> nn.Linear:
    torch.manual_seed(0)
    return nn.Linear(DIM, NUM_CLASSES, bias=bias, dtype=dtype)


def data(dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(*NUM_TOKENS, DIM, generator=generator, dtype=dtype, requires_grad=True)
    targets = torch.randint(0, NUM_CLASSES, NUM_TOKENS, generator=generator)
    targets[0, 2] = targets[2, 6] = -1
    return x, targets


def plain(
    linear: nn.Linear,
    x: Tensor,
    targets: Tensor,
    *,
    reduction: str,
    applied: Callable[[Tensor], Tensor] = Tensor.clone,
) -> Tensor:
    """The same loss with all logits at once."""
    logits: Tensor = applied(linear(x)).flatten(0, -2)
    flat = targets.flatten()
    losses = F.cross_entropy(logits, flat, ignore_index=-1, reduction="none")
    if reduction == "none":
        return losses.view(targets.shape)
    return losses.sum() / ((flat != -1).sum() if reduction == "mean" else 1)


@pytest.mark.parametrize(
    ("max_logits", "bias"), [(2**23, True), (4 * NUM_CLASSES, True), (1, True), (2**23, False)]
)
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_loss_and_gradients_are_those_of_torch(
    monkeypatch: pytest.MonkeyPatch,
    max_logits: int,
    bias: bool,
    reduction: Literal["mean", "sum", "none"],
) -> None:
    monkeypatch.setattr(head_file, "_MAX_LOGITS", max_logits)
    options: dict[str, Any] = {"reduction": reduction}
    found = outcome(linear_cross_entropy, head(bias=bias), {**options, "ignore_index": -1})
    expected = outcome(plain, head(bias=bias), options)
    for one, other in zip(found, expected, strict=True):
        assert one.shape == other.shape
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-14)


TRANSFORMS: dict[str, tuple[dict[str, float], Callable[[Tensor], Tensor]]] = {
    "cap": ({"soft_cap": 0.3}, lambda logits: torch.tanh(logits / 0.3) * 0.3),
    "scale": ({"scale": -0.25}, lambda logits: logits * -0.25),
    "both": ({"scale": 2.0, "soft_cap": 0.5}, lambda logits: torch.tanh(logits * 2 / 0.5) * 0.5),
}


@pytest.mark.parametrize("max_logits", [2**23, 4 * NUM_CLASSES])
@pytest.mark.parametrize("transform", TRANSFORMS)
def test_logits_are_scaled_and_capped_before(
    monkeypatch: pytest.MonkeyPatch, max_logits: int, transform: str
) -> None:
    monkeypatch.setattr(head_file, "_MAX_LOGITS", max_logits)
    arguments, applied = TRANSFORMS[transform]
    options: dict[str, Any] = {"reduction": "none"}
    found = outcome(linear_cross_entropy, head(), {**options, **arguments, "ignore_index": -1})
    expected = outcome(plain, head(), {**options, "applied": applied})
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-14)


def by_token(linear: nn.Linear, x: Tensor, targets: Tensor, **options: Any) -> Tensor:
    found = token_log_probs(linear, x, targets, entropy=True, **options)
    assert found.entropy is not None
    return torch.stack([found.log_probs, found.log_sum_exp, found.entropy])


def by_token_plain(
    linear: nn.Linear, x: Tensor, targets: Tensor, *, applied: Callable[[Tensor], Tensor]
) -> Tensor:
    logits = applied(linear(x))
    distribution: Any = torch.distributions.Categorical(logits=logits)
    log_probs = distribution.log_prob(targets.clamp(min=0)) * (targets != -1)
    return torch.stack([log_probs, logits.logsumexp(-1), distribution.entropy()])


@pytest.mark.parametrize("max_logits", [2**23, 4 * NUM_CLASSES, 1])
@pytest.mark.parametrize("transform", TRANSFORMS)
def test_log_probs_and_entropies_of_tokens_are_those_of_all_logits(
    monkeypatch: pytest.MonkeyPatch, max_logits: int, transform: str
) -> None:
    monkeypatch.setattr(head_file, "_MAX_LOGITS", max_logits)
    arguments, applied = TRANSFORMS[transform]
    found = outcome(by_token, head(), {**arguments, "ignore_index": -1})
    expected = outcome(by_token_plain, head(), {"applied": applied})
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-13)
    assert token_log_probs(head(), *data(), ignore_index=-1).entropy is None


def outcome(function: Any, linear: nn.Linear, options: dict[str, Any]) -> list[Tensor]:
    """The loss, and the gradients of the input and the layer if tokens have different weights."""
    x, targets = data()
    loss = function(linear, x, targets, **options)
    (loss * torch.arange(1, loss.numel() + 1).view(loss.shape)).sum().backward()
    assert x.grad is not None
    return [loss.detach(), x.grad, *(p.grad for p in linear.parameters() if p.grad is not None)]


def test_large_logits_neither_overflow_nor_vanish() -> None:
    linear = head(bias=False, dtype=torch.float32)
    x, targets = data(torch.float32)
    expected = F.cross_entropy(
        linear.double()(x.double() * 1e4).flatten(0, -2), targets.flatten(), ignore_index=-1
    )
    found = linear_cross_entropy(linear.float(), x * 1e4, targets, ignore_index=-1)
    assert found.item() == pytest.approx(expected.item(), rel=1e-6)


def test_bfloat16_logits_are_summed_in_float32() -> None:
    linear, (x, targets) = head(dtype=torch.bfloat16), data(torch.bfloat16)
    expected = F.cross_entropy(linear(x).float().flatten(0, -2), targets.flatten(), ignore_index=-1)
    found = linear_cross_entropy(linear, x, targets, ignore_index=-1)
    assert found.dtype == torch.float32
    assert found.item() == pytest.approx(expected.item(), rel=1e-6)


def test_gradients_are_zero_if_all_tokens_are_ignored() -> None:
    x, targets = data()
    assert linear_cross_entropy(head(), x, torch.full_like(targets, -1), ignore_index=-1).isnan()
    assert (
        linear_cross_entropy(
            head(), x, torch.full_like(targets, -1), ignore_index=-1, reduction="sum"
        )
        == 0
    )


@pytest.mark.parametrize("target", [-2, NUM_CLASSES])
def test_a_target_outside_the_classes_is_refused(target: int) -> None:
    x, targets = data()
    targets[1, 1] = target
    with pytest.raises(IndexError, match=f"target {target} is not in the head .* 11 rows"):
        linear_cross_entropy(head(), x, targets, ignore_index=-1)


def test_a_head_that_another_library_sharded_is_refused() -> None:
    linear = head()
    linear.weight = nn.Parameter(linear.weight[:4].detach())
    with pytest.raises(RotationError, match="4 of its 11 rows on this rank"):
        linear_cross_entropy(linear, *data(), ignore_index=-1)


class LargestTensor(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Records the size of the largest tensor that is made inside this context."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.numel = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if isinstance(result, Tensor):
            self.numel = max(self.numel, result.numel())
        return result


def test_logits_of_all_tokens_never_exist(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(head_file, "_MAX_LOGITS", 4 * NUM_CLASSES)
    linear = head()
    x = torch.randn(200, DIM, dtype=torch.float64, requires_grad=True)
    targets = torch.randint(0, NUM_CLASSES, (200,))
    with LargestTensor() as seen:
        loss = linear_cross_entropy(linear, x, targets, soft_cap=0.3)
        loss.backward()  # type: ignore[no-untyped-call]
    assert seen.numel == x.numel() < 200 * NUM_CLASSES
