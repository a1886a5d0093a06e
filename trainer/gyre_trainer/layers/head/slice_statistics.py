"""What a slice of the vocabulary gives of some tokens' logits, and its part of their gradient.

The three numbers of each token that cross-entropy needs, in chunks of tokens; see
`gyre_trainer.layers.head.cross_entropy`.

Dims: T tokens, D features, V classes of the slice, S statistics.
"""
# ruff: noqa: N803, N806  # names carry shape letters

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from gyre_trainer.layers.head.alike_chunks import computed_of
from gyre_trainer.layers.head.gradient_ahead import (
    ClassesOfSlice,
    GradientAhead,
    shares_of_targets,
)
from gyre_trainer.layers.head.logit_functions import LogitChain
from gyre_trainer.rotation.backward.deferred_grads import DeferredGrads
from gyre_trainer.rotation.output_reduction import RunningSum

# Logits alive at once: 32 MiB of float32. More raises the peak of a step and was not faster; much
# less makes the matrix products small.
_MAX_LOGITS = 2**23


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
class Asked:
    """What is asked of each slice.

    Attributes:
        with_sum: whether the statistics contain the sum of the logits.
        chain: what is done to the logits before.
        ahead: takes the slice's share of the input's gradient; None where backward computes that.
    """

    with_sum: bool
    chain: LogitChain
    ahead: GradientAhead | None = None


def statistics_of(
    inputs: tuple[Tensor, Tensor, Tensor],
    weight_VD: Tensor,
    bias_V: Tensor | None,
    classes: Classes,
    asked: Asked,
    deferred: DeferredGrads | None = None,
) -> Tensor:
    """Statistics [S, T] of a slice: its log-sum-exp, the target's logit or 0, the sum."""
    x_TD, targets_T, counted_T = inputs
    if classes.start == classes.stop:
        shape = 2 + asked.with_sum, len(x_TD)
        nothing = torch.zeros(shape, dtype=wide(x_TD.dtype), device=x_TD.device)
        nothing[0] = -torch.inf
        return nothing
    places_T, elsewhere = classes.places(targets_T, counted_T)
    tensors = x_TD, weight_VD, bias_V, places_T, elsewhere
    statistics: Tensor = _Statistics.apply(*tensors, asked, deferred or DeferredGrads({}))  # type: ignore[no-untyped-call]
    return statistics


def wide(dtype: torch.dtype) -> torch.dtype:
    """The dtype of statistics: float32 or better."""
    return torch.promote_types(dtype, torch.float32)


def _chunks(num_tokens: int, num_elements: int) -> Iterator[slice]:
    """Ranges of tokens of at most `_MAX_LOGITS` elements, at so many for each token."""
    size = max(1, _MAX_LOGITS // num_elements)
    return computed_of([slice(start, start + size) for start in range(0, num_tokens, size)])


def _logits(x_TD: Tensor, weight_VD: Tensor, bias_V: Tensor | None) -> Tensor:
    return F.linear(x_TD, weight_VD, bias_V).to(wide(x_TD.dtype))


def differentiate(
    x_TD: Tensor,
    slice_: tuple[Tensor, Tensor | None, Tensor, Tensor],
    log_sum_exp_T: Tensor,
    grad_ST: Tensor,
    chain: LogitChain,
    add: Callable[[slice, Tensor], None],
) -> None:
    """Give ``add`` the gradients of a slice's logits, chunk by chunk of tokens.

    Args:
        x_TD: the head's input.
        slice_: weight, bias, the targets' places in the slice, and whether they are elsewhere.
        log_sum_exp_T: of the classes that the gradient in ``grad_ST`` is for.
        grad_ST: of the statistics.
        chain: what is done to the logits.
        add: takes a chunk, and its gradients [T, V], which it may write to.
    """
    weight_VD, bias_V, places_T, elsewhere_T = slice_
    grad_target_T = grad_ST[1].masked_fill(elsewhere_T, 0)

    def of_chunk(chunk: slice) -> Tensor:
        logits_TV, outputs = chain.record_(_logits(x_TD[chunk], weight_VD, bias_V))
        grads_TV = logits_TV.sub_(log_sum_exp_T[chunk, None])
        grads_TV.exp_().mul_(grad_ST[0, chunk, None])
        grads_TV.scatter_add_(1, places_T[chunk, None], grad_target_T[chunk, None])
        if len(grad_ST) > 2:
            grads_TV += grad_ST[2, chunk, None]
        return chain.differentiate_(grads_TV, outputs).to(x_TD.dtype)

    for chunk in _chunks(len(x_TD), len(weight_VD) * (1 + chain.num_outputs)):
        add(chunk, of_chunk(chunk))  # no name keeps it while the next is computed


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
        statistics = torch.empty(
            2 + asked.with_sum, len(x_TD), dtype=wide(x_TD.dtype), device=x_TD.device
        )
        chain, ahead = asked.chain, asked.ahead
        for chunk in _chunks(len(x_TD), len(weight_VD) * (1 + bool(ahead) * chain.num_outputs)):
            logits_TV = _logits(x_TD[chunk], weight_VD, bias_V)
            outputs: list[Tensor | None] = []
            if ahead:
                logits_TV, outputs = chain.record_(logits_TV)
            else:
                logits_TV = chain.apply_(logits_TV)
            statistics[1, chunk] = logits_TV.gather(1, places_T[chunk, None]).squeeze(1)
            if asked.with_sum:
                statistics[2, chunk] = logits_TV.sum(1)
            statistics[0, chunk] = torch.logsumexp(logits_TV, 1)
            if ahead:
                shares_T1 = shares_of_targets(logits_TV, outputs, chain, places_T[chunk])
                own_T = statistics[0, chunk]
                ahead.add_mean(chunk, own_T, logits_TV, outputs, chain, weight_VD)
            del logits_TV, outputs  # the next ones must not exist next to them
            if ahead:
                here = ClassesOfSlice(weight_VD, places_T[chunk], elsewhere_T[chunk])
                ahead.add_targets(chunk, shares_T1, here)
        statistics[1].masked_fill_(elsewhere_T, 0)
        ctx.save_for_backward(x_TD, weight_VD, bias_V, places_T, elsewhere_T, statistics[0].clone())
        ctx.chain = asked.chain
        ctx.deferred, ctx.sum, ctx.position = (
            deferred,
            deferred.sums.get(id(x_TD)),
            deferred.positions.get(id(weight_VD)),
        )
        return statistics

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_ST: Tensor) -> tuple[Tensor | None, ...]:
        x_TD, weight_VD, bias_V, places_T, elsewhere_T, log_sum_exp_T = ctx.saved_tensors
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

        slice_ = weight_VD, bias_V, places_T, elsewhere_T
        differentiate(x_TD, slice_, log_sum_exp_T, grad_ST, ctx.chain, add)
        return (
            grad_x_TD if ctx.sum is None else None,
            grad_weight_VD,
            grad_bias_V,
            None,
            None,
            None,
            None,
        )


def _room(x_TD: Tensor, total: RunningSum | None) -> Tensor:
    return torch.zeros_like(x_TD) if total is None else total.writable(x_TD)


def add_product(total: Tensor, left: Tensor, right: Tensor) -> None:
    """Add the product of two matrices to ``total``, which may have another dtype."""
    if total.dtype == left.dtype:
        total.addmm_(left, right)
    else:
        total += left @ right
