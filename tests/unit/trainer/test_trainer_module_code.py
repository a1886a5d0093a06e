"""The digest of a module's code: equal for equal code, another one for any other."""

from collections.abc import Callable
from functools import wraps
from typing import Any

import pytest
import torch.nn.functional as F
from gyre_trainer.layers.known_blocks import UnknownCode, digest_of
from torch import Tensor, nn


class Perceptron(nn.Module):
    def __init__(self, act: Any = None) -> None:
        super().__init__()
        self.up, self.down, self.act = nn.Linear(2, 3), nn.Linear(3, 2), act or nn.GELU()

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.down(self.hidden(x))
        return output

    def hidden(self, x: Tensor) -> Tensor:
        hidden: Tensor = self.act(self.up(x))
        return hidden


class Annotated(nn.Module):
    """The same code with other words around it."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down, self.act = nn.Linear(2, 3), nn.Linear(3, 2), nn.ReLU()

    def forward(self, x):  # type: ignore[no-untyped-def]
        """With a docstring."""
        output = self.down(self.hidden(x))  # and a comment
        return output  # noqa: RET504

    def hidden(self, x: "Tensor | None") -> "Any":
        hidden = self.act(self.up(x))
        return hidden  # noqa: RET504


class OtherHelper(Perceptron):
    def hidden(self, x: Tensor) -> Tensor:
        output: Tensor = self.act(self.up(x)) * 2
        return output


class OtherForward(Perceptron):
    def forward(self, x: Tensor) -> Tensor:
        return x + super().forward(x)


def _with_forward() -> nn.Module:
    module = Perceptron()
    module.forward = lambda x: x  # type: ignore[method-assign]
    return module


def _with_forward_inside() -> nn.Module:
    module = Perceptron()
    module.act.forward = lambda x: x  # type: ignore[method-assign]
    return module


def _doubled(forward: Callable[..., Tensor]) -> Callable[..., Tensor]:
    @wraps(forward)
    def other(self: Any, x: Tensor) -> Tensor:
        return forward(self, x) * 2

    return other


class Wrapped(Perceptron):
    forward = _doubled(Perceptron.forward)


def test_words_change_nothing() -> None:
    assert digest_of(Perceptron()) == digest_of(Annotated())
    assert digest_of(Perceptron(F.silu)) == digest_of(Perceptron(F.gelu))


@pytest.mark.parametrize(
    "other",
    [
        OtherHelper,
        OtherForward,
        lambda: Perceptron(nn.Softmax(-1)),
        lambda: Perceptron(F.softmax),
        lambda: nn.Sequential(nn.Linear(2, 3), nn.GELU(), nn.Linear(3, 2)),
    ],
)
def test_other_code_has_another_digest(other: Callable[[], nn.Module]) -> None:
    assert digest_of(other()) != digest_of(Perceptron())


@pytest.mark.parametrize("unknown", [_with_forward, _with_forward_inside, Wrapped])
def test_code_that_cannot_be_read_is_unknown(unknown: Callable[[], nn.Module]) -> None:
    with pytest.raises(UnknownCode):
        digest_of(unknown())
