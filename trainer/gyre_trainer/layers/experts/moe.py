# ruff: noqa: N806  # names carry shape letters
"""A mixture of experts by groups of experts: experts travel, and each rank keeps its own tokens.

No token is sent, so none is dropped for lack of capacity, and no rank waits for an expert that more
tokens chose. The price is that all experts travel to every rank, chosen or not.

Dims: T tokens, D model, H hidden, E experts, K choices of a token, R rows: one for each choice of
an expert that is here.
"""

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gyre_trainer.errors import RotationError
from gyre_trainer.layers.mlp import refuse_dropout
from gyre_trainer.layers.projections import changed_counts
from gyre_trainer.rotation.rule import ModuleSlice, Rule
from gyre_trainer.shards.initial.sharded_init import Uniform
from gyre_trainer.shards.layout import Cut


class Experts(nn.Module):
    """Gated MLPs, of which each token chooses some; their weights are stacked along the first dim.

    The forward reads the number of experts from the weights, so it runs with all experts or a
    slice.
    """

    def __init__(self, num_experts: int, dim: int, hidden_dim: int) -> None:
        super().__init__()
        self.gate = nn.Parameter(torch.empty(num_experts, hidden_dim, dim))
        self.up = nn.Parameter(torch.empty(num_experts, hidden_dim, dim))
        self.down = nn.Parameter(torch.empty(num_experts, dim, hidden_dim))
        self.reset_parameters()

    def inits(self) -> dict[str, Uniform]:
        """Each expert is initialised as a linear layer is."""
        return {name: Uniform(weight.shape[-1] ** -0.5) for name, weight in self.named_parameters()}

    def reset_parameters(self) -> None:
        """Initialise the parameters in place, with torch's generator."""
        for name, init in self.inits().items():
            nn.init.uniform_(self.get_parameter(name), -init.bound, init.bound)

    def forward(self, x: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        """The weighted sum of the outputs of each token's experts.

        Args:
            x: (..., D).
            chosen: numbers of experts, (..., K). Numbers outside [0, E) add nothing.
            weights: the weights of the chosen experts, (..., K).
        """
        x_TD, chosen_TK, weights_TK = (
            x.flatten(0, -2),
            chosen.flatten(0, -2),
            weights.flatten(0, -2),
        )
        num_experts = self.down.shape[0]
        if num_experts == 0:
            return torch.zeros_like(x)
        token_R, place_R = ((chosen_TK >= 0) & (chosen_TK < num_experts)).nonzero(as_tuple=True)
        expert_R, order_R = chosen_TK[token_R, place_R].sort(stable=True)
        token_R, place_R = token_R[order_R], place_R[order_R]
        rows = torch.split(x_TD[token_R], expert_R.bincount(minlength=num_experts).tolist())
        stacks = zip(rows, self.gate.unbind(), self.up.unbind(), self.down.unbind(), strict=True)
        y_RD = torch.cat(
            [
                F.linear(F.silu(F.linear(row, gate)) * F.linear(row, up), down)
                for row, gate, up, down in stacks
            ]
        )
        weights_R1 = weights_TK[token_R, place_R].unsqueeze(-1)
        return (
            torch.zeros_like(x_TD)
            .index_add_(0, token_R, (y_RD * weights_R1).type_as(x_TD))
            .view_as(x)
        )


class MoE(nn.Module):
    """A router and its experts.

    Each token goes to the experts with its largest softmax scores, weighted by these scores over
    their sum.
    """

    def __init__(self, dim: int, hidden_dim: int, *, num_experts: int, num_chosen: int) -> None:
        super().__init__()
        self.num_chosen = num_chosen
        self.router = nn.Linear(dim, num_experts, bias=False)
        self.experts = Experts(num_experts, dim, hidden_dim)

    def forward(self, x: Tensor) -> Tensor:
        """The output, shaped as ``x``: (..., D)."""
        scores = self.router(x).softmax(-1, dtype=torch.promote_types(x.dtype, torch.float32))
        weights, chosen = scores.topk(self.num_chosen, dim=-1)
        output: Tensor = self.experts(x, chosen, weights / weights.sum(-1, keepdim=True))
        return output


@dataclass(frozen=True)
class ExpertsRule(Rule):
    """For a module that adds up the outputs of the experts that each token chose.

    A slice holds the same range of experts of all ``weights``. The forward must read the number of
    experts from them, or from the attribute ``count``; add nothing for a choice of that very
    number, which stands for experts elsewhere; and be linear in the last of the weights. Where it
    unbinds them with `unbind()`, an expert's gradient is formed in the ring's buffer; where it
    indexes them, the gradients of all the slice's experts exist beside it.

    Attributes:
        weights: names of the parameters, each with the experts along its first dim.
        chosen: the argument with the experts' numbers, by its position or its name.
        scores: the argument with a weight for every expert in its last dim, of which a slice takes
            its own; None where the weights are of the chosen experts.
        last: names of the parameters that the output is linear in; () for the last of ``weights``.
        arguments: names of the forward's arguments in their order, so that ``chosen`` and
            ``scores`` may be names of arguments that are passed by position; () without that.
        count: the module's attribute with the number of experts, a slice's own while it computes.
    """

    weights: tuple[str, ...] = ("gate", "up", "down")
    chosen: int | str = 1
    scores: int | str | None = None
    last: tuple[str, ...] = ()
    arguments: tuple[str, ...] = ()
    count: str = ""

    @property
    def linear_in(self) -> tuple[str, ...]:
        """The parameters of the last layer."""
        return self.last or self.weights[-1:]

    def cuts(self, module: nn.Module, num_slices: int) -> list[Cut]:
        """All weights, along the experts."""
        refuse_dropout(module)
        parameters = dict(module.named_parameters())
        missing = [name for name in self.weights if name not in parameters]
        if missing:
            raise RotationError(
                f"{type(module).__name__} has no parameter {missing[0]}, which the rule cuts"
            )
        shapes = {name: tuple(parameters[name].shape) for name in self.weights}
        sizes = {shape[0] if shape else 0 for shape in shapes.values()}
        if len(sizes) > 1:
            raise RotationError(
                f"{type(module).__name__} has different numbers of experts in {shapes}"
            )
        return [Cut(name, shape, 0) for name, shape in shapes.items()]

    def run(self, current: ModuleSlice, /, *args: Any, **kwargs: Any) -> Any:
        """The outputs of the slice's experts for the tokens that chose them."""
        start, stop = current.bounds[self.weights[0]]
        own, named = self.arguments_of(start, stop, args, kwargs)
        with changed_counts(current.module, {self.count: stop - start} if self.count else {}):
            return current.forward(*own, **named)

    def arguments_of(
        self, start: int, stop: int, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[list[Any], dict[str, Any]]:
        """The arguments for the experts of [start, stop), by position and by name.

        Raises:
            RotationError: the module is called without an argument that the rule names.
        """
        if self.arguments:
            args, kwargs = (), dict(zip(self.arguments, args, strict=False)) | kwargs
        arguments: dict[int | str, Any] = dict(enumerate(args)) | kwargs
        for name, argument in (("chosen", self.chosen), ("scores", self.scores)):
            if argument is not None and argument not in arguments:
                raise RotationError(
                    f"ExpertsRule({name}={argument!r}): the module is called without that argument"
                )
        chosen = arguments[self.chosen]
        is_here = (chosen >= start) & (chosen < stop)
        if self.scores is not None:
            arguments[self.scores] = arguments[self.scores].narrow(-1, start, stop - start)
        arguments[self.chosen] = torch.where(is_here, chosen - start, stop - start)
        own = [arguments.pop(position) for position in range(len(args))]
        return own, {str(name): value for name, value in arguments.items()}
