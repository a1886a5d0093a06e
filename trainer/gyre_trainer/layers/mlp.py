"""A transformer's MLP by slices of its hidden width: the whole hidden activation never exists."""

from dataclasses import dataclass

import torch.nn.functional as F
from torch import Tensor, nn

from gyre_trainer.errors import RotationError
from gyre_trainer.layers.linear import projections
from gyre_trainer.rotation.rule import Rule
from gyre_trainer.shards.layout import Cut
from gyre_trainer.torch_internals import Dropout


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
    """For a module that applies ``ups`` to its input, an elementwise function, then ``down``.

    A slice holds the same range of the hidden width of all these layers. The forward must be linear
    in the weights of ``down``: no residual after it, and no dropout.

    Attributes:
        ups: names of the linear layers from the input to the hidden width (up, and gate where there
            is one).
        down: name of the linear layer from the hidden width to the output.
    """

    ups: tuple[str, ...] = ("up",)
    down: str = "down"

    @property
    def linear_in(self) -> tuple[str, ...]:
        """Weight and bias of the last layer."""
        return f"{self.down}.weight", f"{self.down}.bias"

    def cuts(self, module: nn.Module, num_slices: int) -> list[Cut]:
        """Rows of the ups, columns of the down, and a segment of its bias."""
        refuse_dropout(module)
        return projections(module, self.ups, self.down)


def refuse_dropout(module: nn.Module) -> None:
    """Refuse dropout inside: each slice would draw its own mask.

    Raises:
        RotationError: names the dropout.
    """
    for name, child in module.named_modules():
        if isinstance(child, Dropout) and child.p > 0:
            raise RotationError(
                f"{type(module).__name__}.{name} drops out with p={child.p}, and each slice would "
                "draw its own mask. Set p=0 before the model is rotated, or give no rule: its "
                "layers rotate one by one"
            )
