"""A transformer's MLP by slices of its hidden width: the whole hidden activation never exists."""

from dataclasses import dataclass

import torch.nn.functional as F
from torch import Tensor, nn

from gyre_trainer.errors import RotationError
from gyre_trainer.layout import Cut
from gyre_trainer.rule import Rule


class MLP(nn.Module):
    """down(gelu(up(x))), over any leading dims."""

    def __init__(self, dim: int, hidden_dim: int, *, bias: bool = False) -> None:
        super().__init__()
        self.up = nn.Linear(dim, hidden_dim, bias=bias)
        self.down = nn.Linear(hidden_dim, dim, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        """The output, shaped as ``x``."""
        output: Tensor = self.down(F.gelu(self.up(x)))
        return output


class GatedMLP(nn.Module):
    """down(silu(gate(x)) · up(x)) (Shazeer, arXiv 2002.05202), over any leading dims."""

    def __init__(self, dim: int, hidden_dim: int, *, bias: bool = False) -> None:
        super().__init__()
        self.gate = nn.Linear(dim, hidden_dim, bias=bias)
        self.up = nn.Linear(dim, hidden_dim, bias=bias)
        self.down = nn.Linear(hidden_dim, dim, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        """The output, shaped as ``x``."""
        output: Tensor = self.down(F.silu(self.gate(x)) * self.up(x))
        return output


@dataclass(frozen=True)
class MLPRule(Rule):
    """For a module that applies ``ups`` to its input, something elementwise to their outputs, and ``down`` to the result.

    A slice holds the same range of the hidden width of all of them. The forward must be linear in ``down``'s weights: no
    residual, no dropout after it.

    Attributes:
        ups: names of the linear layers from the input to the hidden width (up, and gate where there is one).
        down: name of the linear layer from the hidden width to the output.
    """

    ups: tuple[str, ...] = ("up",)
    down: str = "down"

    @property
    def linear_in(self) -> tuple[str, ...]:
        """The last layer's."""
        return f"{self.down}.weight", f"{self.down}.bias"

    def cuts(self, module: nn.Module, num_slices: int) -> list[Cut]:
        """Rows of the ups, columns of the down, a segment of its bias."""
        return projections(module, self.ups, self.down)


def projections(module: nn.Module, inputs: tuple[str, ...], output: str) -> list[Cut]:
    """The cuts of linear layers that open a width together, and of the one that closes it.

    Raises:
        RotationError: one of them is missing or not linear, or dropout would draw another mask for each slice.
    """
    weights, biases = [], []
    for name in (*inputs, output):
        linear = dict(module.named_modules()).get(name)
        if not isinstance(linear, nn.Linear):
            raise RotationError(f"{type(module).__name__}.{name} is {type(linear).__name__}, but the rule wants a Linear there")
        closes = name == output
        weights.append(Cut(f"{name}.weight", tuple(linear.weight.shape), 1 if closes else 0))
        if linear.bias is not None:
            biases.append(Cut(f"{name}.bias", tuple(linear.bias.shape), 0, padded=closes))
    for name, child in module.named_modules():
        if isinstance(child, nn.Dropout) and child.p > 0:
            raise RotationError(
                f"{type(module).__name__}.{name} drops out with p={child.p}; each slice would draw its own mask: set p=0"
            )
    return weights + biases
