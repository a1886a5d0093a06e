# ruff: noqa: N803, N806, N815  # names carry shape letters
"""Compute a slice's share of what a loss needs of the logits, and of the gradients.

A loss needs two or three numbers of each token's logits; see
`gyre_trainer.layers.head.cross_entropy`. They are computed in chunks of tokens, so that not even
the logits of a slice exist as a whole.

[Note: One pass for a frozen head]

A slice's share of the gradient needs the log-sum-exp over all classes, which is known when the last
slice has been here. So a head that is trained sends its slices twice. A frozen one has no gradient
of its own, and that of its input is the mean of its rows by the probability of their classes, less
the target's row. Means of slices are put together as the output of attention is from blocks of keys
(FlashAttention, arXiv 2205.14135): each is weighted by its slice's share of the sum of
exponentials. So one pass is enough, in forward, and backward multiplies by the loss's gradient.

Dims: T tokens, D features, V classes of the slice, S statistics.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from gyre_trainer.layers.head.alike_chunks import computed_of
from gyre_trainer.rotation.backward.deferred_grads import DeferredGrads
from gyre_trainer.rotation.output_reduction import RunningSum

# Logits alive at once: 32 MiB of float32. More raises the peak of a step and was not faster; much
# less makes the matrix products small.
_MAX_LOGITS = 2**23

Extra = Literal["none", "sum", "mean"]
"""A third statistic: the sum of the logits, or their mean by the probability of their classes."""


@dataclass(frozen=True, slots=True)
class Classes:
    """The half-open range of classes that a slice has, of ``total``."""

    start: int
    stop: int
    total: int

    def places(self, targets_T: Tensor, counted_T: Tensor) -> tuple[Tensor, Tensor]:
        """The targets' places in the slice, and whether they are elsewhere or not counted.

        Targets outside of all slices are left to the first and the last slice, where torch refuses
        them.
        """
        elsewhere_T = ~counted_T
        if self.start > 0:
            elsewhere_T = elsewhere_T | (targets_T < self.start)
        if self.stop < self.total:
            elsewhere_T = elsewhere_T | (targets_T >= self.stop)
        return torch.where(elsewhere_T, 0, targets_T - self.start), elsewhere_T


@dataclass(frozen=True, slots=True)
class LogitTransform:
    """What a model does to its logits: ``z = scale * logits``, then ``cap * tanh(z / cap)``.

    Attributes:
        scale: a factor.
        soft_cap: the cap, a positive number; None for none.
    """

    scale: float = 1.0
    soft_cap: float | None = None

    def apply_(self, logits: Tensor) -> Tensor:
        """Transform in the memory of ``logits``."""
        if self.scale != 1:
            logits.mul_(self.scale)
        if self.soft_cap is not None:
            logits.div_(self.soft_cap).tanh_().mul_(self.soft_cap)
        return logits

    def differentiate_(self, grad: Tensor, transformed: Tensor) -> Tensor:
        """The gradient before the transform, in the memory of ``grad``, which is that after it.

        ``transformed`` is read, and overwritten, only where there is a cap.
        """
        if self.soft_cap is not None:
            grad.mul_(transformed.div_(self.soft_cap).square_().neg_().add_(1))
        return grad.mul_(self.scale) if self.scale != 1 else grad


@dataclass(frozen=True, slots=True)
class GradientAhead:
    """What the slices that were here say about the gradient of a frozen head's input.

    See [Note: One pass for a frozen head].

    Attributes:
        log_sum_exp_T: over their classes.
        mean_TD: the mean of their rows by the probability of their classes.
        target_TD: the target's row; zero for tokens whose target's slice was not here.
    """

    log_sum_exp_T: Tensor
    mean_TD: Tensor
    target_TD: Tensor

    @classmethod
    def of(cls, x_TD: Tensor) -> "GradientAhead":
        """Nothing yet, for a head that is called with ``x_TD``."""
        nothing = x_TD.new_full((len(x_TD),), -torch.inf, dtype=wide(x_TD.dtype))
        return cls(nothing, torch.zeros_like(x_TD), torch.zeros_like(x_TD))

    def add_mean(
        self,
        chunk: slice,
        own_T: Tensor,
        logits_TV: Tensor,
        transform: LogitTransform,
        weight_VD: Tensor,
    ) -> None:
        """Add a slice's rows for a chunk of tokens, each slice once.

        Args:
            chunk: the tokens.
            own_T: the log-sum-exp over the slice's classes.
            logits_TV: of these tokens and the slice's classes, transformed; overwritten.
            transform: what was done to them.
            weight_VD: the slice's rows.
        """
        before_T, mean_TD = self.log_sum_exp_T[chunk], self.mean_TD[chunk]
        both_T = torch.logaddexp(before_T, own_T)
        capped = transform.soft_cap is not None
        shifted_TV = logits_TV - both_T[:, None] if capped else logits_TV.sub_(both_T[:, None])
        grads_TV = transform.differentiate_(shifted_TV.exp_(), logits_TV).to(weight_VD.dtype)
        mean_TD *= (before_T - both_T).exp()[:, None].to(mean_TD.dtype)
        add_product(mean_TD, grads_TV, weight_VD)
        before_T.copy_(both_T)

    def add_targets(
        self, chunk: slice, shares_T1: Tensor, rows_TD: Tensor, elsewhere_T: Tensor
    ) -> None:
        """Add the targets' rows that a slice has, times the derivatives of the targets' logits."""
        shares_T1 = shares_T1.masked_fill(elsewhere_T[:, None], 0)
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
        found_TD = torch.empty_like(gradient_TD)  # no product in a wider dtype next to it
        return torch.mul(gradient_TD, grad_T[:, None], out=found_TD), None, None


@dataclass(frozen=True, slots=True)
class Asked:
    """What is asked of each slice.

    Attributes:
        extra: the third statistic.
        transform: what is done to the logits before.
        ahead: takes the slice's share of the input's gradient; None where backward computes that.
    """

    extra: Extra = "none"
    transform: LogitTransform = LogitTransform()
    ahead: GradientAhead | None = None

    @property
    def num_statistics(self) -> int:
        """How many numbers each token has."""
        return 2 + (self.extra != "none")


def statistics_of(
    inputs: tuple[Tensor, Tensor, Tensor],
    weight_VD: Tensor,
    bias_V: Tensor | None,
    classes: Classes,
    asked: Asked,
    deferred: DeferredGrads | None = None,
) -> Tensor:
    """Statistics [S, T] of a slice: its log-sum-exp, the target's logit or 0, the third one."""
    x_TD, targets_T, counted_T = inputs
    if classes.start == classes.stop:
        nothing = x_TD.new_zeros(asked.num_statistics, len(x_TD), dtype=wide(x_TD.dtype))
        nothing[0] = torch.finfo(nothing.dtype).min  # of no weight, and no NaN in differences
        return nothing
    places_T, elsewhere = classes.places(targets_T, counted_T)
    tensors = x_TD, weight_VD, bias_V, places_T, elsewhere
    statistics: Tensor = _Statistics.apply(*tensors, asked, deferred or DeferredGrads({}))  # type: ignore[no-untyped-call]
    return statistics


def wide(dtype: torch.dtype) -> torch.dtype:
    """The dtype of statistics: float32 or better."""
    return torch.promote_types(dtype, torch.float32)


class _Statistics(torch.autograd.Function):
    """Statistics of x_TD @ weight_VD.T + bias_V, without keeping the logits.

    Backward adds the slice's gradients to the ring's buffer, chunk by chunk.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x_TD: Tensor,
        weight_VD: Tensor,
        bias_V: Tensor | None,
        places_T: Tensor,
        elsewhere_T: Tensor,
        asked: Asked,
        deferred: DeferredGrads,
    ) -> Tensor:
        statistics_ST = x_TD.new_empty(asked.num_statistics, len(x_TD), dtype=wide(x_TD.dtype))
        transform, ahead = asked.transform, asked.ahead
        num_copies = asked.extra == "mean" or (ahead and transform.soft_cap is not None)
        for chunk in _chunks(len(x_TD), len(weight_VD) * (1 + bool(num_copies))):
            logits_TV = transform.apply_(_logits(x_TD[chunk], weight_VD, bias_V))
            own_T, targets_T1 = logits_TV.logsumexp(1), logits_TV.gather(1, places_T[chunk, None])
            statistics_ST[0, chunk], statistics_ST[1, chunk] = own_T, targets_T1.squeeze(1)
            if asked.extra == "sum":
                statistics_ST[2, chunk] = logits_TV.sum(1)
            elif asked.extra == "mean":
                statistics_ST[2, chunk] = _mean_by_probability(logits_TV, own_T)
            if ahead:
                shares_T1 = transform.differentiate_(torch.ones_like(targets_T1), targets_T1)
                ahead.add_mean(chunk, own_T, logits_TV, transform, weight_VD)
            del logits_TV  # the next ones must not exist next to them
            if ahead:
                rows_TD = weight_VD.index_select(0, places_T[chunk])
                ahead.add_targets(chunk, shares_T1, rows_TD, elsewhere_T[chunk])
        statistics_ST[1].masked_fill_(elsewhere_T, 0)
        ctx.save_for_backward(
            x_TD, weight_VD, bias_V, places_T, elsewhere_T, statistics_ST[0::2].clone()
        )
        ctx.asked, ctx.deferred = asked, deferred
        ctx.sum = deferred.sums.get(id(x_TD))
        ctx.position = deferred.positions.get(id(weight_VD))
        return statistics_ST

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_ST: Tensor) -> tuple[Tensor | None, ...]:
        x_TD, weight_VD, bias_V, *_ = ctx.saved_tensors
        needs_x, needs_weight, needs_bias, *_ = ctx.needs_input_grad
        grad_x_TD = _room(x_TD, ctx.sum) if needs_x else None
        grad_weight_VD = (
            torch.zeros_like(weight_VD) if needs_weight and ctx.position is None else None
        )
        grad_bias_V = torch.zeros_like(bias_V) if needs_bias else None

        def add(chunk: slice, grads_TV: Tensor) -> None:
            if grad_x_TD is not None:
                add_product(grad_x_TD[chunk], grads_TV, weight_VD)
            if grad_weight_VD is not None:
                add_product(grad_weight_VD, grads_TV.T, x_TD[chunk])
            elif needs_weight:
                ctx.deferred.add_product(ctx.position, grads_TV.T, x_TD[chunk])
            if grad_bias_V is not None:
                grad_bias_V.add_(grads_TV.sum(0))

        _differentiate(ctx.saved_tensors, grad_ST, ctx.asked, add)
        grad_x_TD = grad_x_TD if ctx.sum is None else None
        return grad_x_TD, grad_weight_VD, grad_bias_V, None, None, None, None


def _differentiate(
    saved: tuple[Tensor, ...], grad_ST: Tensor, asked: Asked, add: Callable[[slice, Tensor], None]
) -> None:
    """Give ``add`` each chunk of tokens and the gradients [T, V] of its logits, to write to."""
    x_TD, weight_VD, bias_V, places_T, elsewhere_T, own = saved
    log_sum_exp_T1, transform = own[0, :, None], asked.transform
    grad_target_T1 = grad_ST[1].masked_fill(elsewhere_T, 0)[:, None]
    capped, with_mean = transform.soft_cap is not None, asked.extra == "mean"

    def of_chunk(chunk: slice) -> Tensor:
        logits_TV = transform.apply_(_logits(x_TD[chunk], weight_VD, bias_V))
        shift = torch.Tensor.sub if capped or with_mean else torch.Tensor.sub_
        grads_TV = shift(logits_TV, log_sum_exp_T1[chunk]).exp_()
        of_log_sum_exp_T1 = grad_ST[0, chunk, None]
        if with_mean:
            # d mean / d logit = p (1 + logit - mean)
            factors_TV = logits_TV.clone() if capped else logits_TV
            factors_TV.sub_(own[1, chunk, None] - 1).mul_(grad_ST[2, chunk, None])
            grads_TV.mul_(factors_TV.add_(of_log_sum_exp_T1))
        else:
            grads_TV.mul_(of_log_sum_exp_T1)
        grads_TV.scatter_add_(1, places_T[chunk, None], grad_target_T1[chunk])
        if asked.extra == "sum":
            grads_TV += grad_ST[2, chunk, None]
        return transform.differentiate_(grads_TV, logits_TV).to(x_TD.dtype)

    for chunk in _chunks(len(x_TD), len(weight_VD) * (1 + capped + with_mean)):
        add(chunk, of_chunk(chunk))  # no name keeps it while the next is computed


def _chunks(num_tokens: int, num_elements: int) -> Iterator[slice]:
    """Ranges of tokens of at most `_MAX_LOGITS` elements, at so many for each token."""
    size = max(1, _MAX_LOGITS // num_elements)
    return computed_of([slice(start, start + size) for start in range(0, num_tokens, size)])


def _logits(x_TD: Tensor, weight_VD: Tensor, bias_V: Tensor | None) -> Tensor:
    return F.linear(x_TD, weight_VD, bias_V).to(wide(x_TD.dtype))


def _mean_by_probability(logits_TV: Tensor, log_sum_exp_T: Tensor) -> Tensor:
    return (logits_TV - log_sum_exp_T[:, None]).exp_().mul_(logits_TV).sum(1)


def _room(x_TD: Tensor, total: RunningSum | None) -> Tensor:
    return torch.zeros_like(x_TD) if total is None else total.writable(x_TD)


def add_product(total: Tensor, left: Tensor, right: Tensor) -> None:
    """Add the product of two matrices to ``total``, which may have another dtype."""
    if total.dtype == left.dtype:
        total.addmm_(left, right)
    else:
        total += left @ right
