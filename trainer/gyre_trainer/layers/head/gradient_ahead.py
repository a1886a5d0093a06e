# ruff: noqa: N803, N806, N815  # names carry shape letters
"""The gradient of a frozen head's input, found while the loss is computed.

[Note: One pass for a frozen head]

A slice's share of the gradient needs the log-sum-exp over all classes, which is known when the last
slice has been here. So a head that is trained sends its slices twice. A frozen one has no gradient
of its own, and that of its input is the mean of its rows by the probability of their classes, less
the target's row. Means of slices are put together as the output of attention is from blocks of keys
(FlashAttention, arXiv 2205.14135): each is weighted by its slice's share of the sum of
exponentials. So one pass is enough, in forward, and backward multiplies by the loss's gradient.

Dims: T tokens, D features, V classes of the slice.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from gyre_trainer.layers.head.logit_functions import LogitChain


@dataclass(frozen=True, slots=True)
class ClassesOfSlice:
    """Where the targets of some tokens are among a slice's classes.

    Attributes:
        weight_VD: the slice's rows.
        places_T: the targets' places in the slice; any where it has not the target.
        elsewhere_T: whether it has not.
    """

    weight_VD: Tensor
    places_T: Tensor
    elsewhere_T: Tensor


@dataclass(frozen=True, slots=True)
class GradientAhead:
    """What the slices that were here say about the gradient of the head's input.

    Attributes:
        log_sum_exp_T: over their classes.
        mean_TD: the mean of their rows by the probability of their classes.
        target_TD: the target's row; zero for tokens whose target's slice was not here.
    """

    log_sum_exp_T: Tensor
    mean_TD: Tensor
    target_TD: Tensor

    @classmethod
    def of(cls, x_TD: Tensor, dtype: torch.dtype) -> "GradientAhead":
        """Nothing yet, for a head that is called with ``x_TD`` and statistics of ``dtype``."""
        nothing = torch.full((len(x_TD),), -torch.inf, dtype=dtype, device=x_TD.device)
        return cls(nothing, torch.zeros_like(x_TD), torch.zeros_like(x_TD))

    def add_mean(
        self,
        chunk: slice,
        own_T: Tensor,
        logits_TV: Tensor,
        outputs: Sequence[Tensor | None],
        chain: LogitChain,
        weight_VD: Tensor,
    ) -> None:
        """Add a slice's rows for a chunk of tokens, each slice once.

        Args:
            chunk: the tokens.
            own_T: the log-sum-exp over the slice's classes.
            logits_TV: of these tokens and the slice's classes; overwritten.
            outputs: what ``chain`` recorded of them; overwritten.
            chain: what was done to the logits.
            weight_VD: the slice's rows.
        """
        before_T, mean_TD = self.log_sum_exp_T[chunk], self.mean_TD[chunk]
        both_T = torch.logaddexp(before_T, own_T)
        probabilities_TV = logits_TV.sub_(both_T[:, None]).exp_()
        gradient_TV = chain.differentiate_(probabilities_TV, list(outputs)).to(weight_VD.dtype)
        mean_TD *= (before_T - both_T).exp()[:, None].to(mean_TD.dtype)
        if mean_TD.dtype == weight_VD.dtype:
            mean_TD.addmm_(gradient_TV, weight_VD)
        else:
            mean_TD += gradient_TV @ weight_VD
        before_T.copy_(both_T)

    def add_targets(self, chunk: slice, shares_T1: Tensor, classes: ClassesOfSlice) -> None:
        """Add the targets' rows that a slice has, times ``shares_T1`` of `shares_of_targets`."""
        shares_T1 = shares_T1.masked_fill(classes.elsewhere_T[:, None], 0)
        rows_TD = classes.weight_VD.index_select(0, classes.places_T)
        self.target_TD[chunk] += rows_TD.mul_(shares_T1.to(rows_TD.dtype))

    def attach(self, x_TD: Tensor, losses_T: Tensor, of_log_sum_exp_T: Tensor | float) -> Tensor:
        """The losses, in a graph in which each one's gradient reaches its token's ``x_TD``.

        Args:
            x_TD: the head's input.
            losses_T: the derivative by the target's logit is -1.
            of_log_sum_exp_T: their derivatives by the log-sum-exp.
        """
        gradient_TD = self.mean_TD
        if isinstance(of_log_sum_exp_T, Tensor):
            gradient_TD *= of_log_sum_exp_T[:, None].to(gradient_TD.dtype)
        gradient_TD -= self.target_TD
        losses: Tensor = _Known.apply(x_TD, losses_T, gradient_TD)  # type: ignore[no-untyped-call]
        return losses


def shares_of_targets(
    logits_TV: Tensor, outputs: Sequence[Tensor | None], chain: LogitChain, places_T: Tensor
) -> Tensor:
    """The derivative of the targets' logits, after ``chain``, by those before: of shape (T, 1)."""
    places_T1 = places_T[:, None]
    of_targets = [None if each is None else each.gather(1, places_T1) for each in outputs]
    return chain.differentiate_(torch.ones_like(logits_TV[:, :1]), of_targets)


class _Known(torch.autograd.Function):
    """Losses whose gradients are known."""

    @staticmethod
    def forward(ctx: Any, x_TD: Tensor, losses_T: Tensor, gradient_TD: Tensor) -> Tensor:
        ctx.save_for_backward(gradient_TD)
        return losses_T.clone()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_T: Tensor) -> tuple[Tensor, None, None]:
        (gradient_TD,) = ctx.saved_tensors
        found_TD = torch.empty_like(gradient_TD)  # no product in a wider dtype beside it
        return torch.mul(gradient_TD, grad_T[:, None], out=found_TD), None, None
