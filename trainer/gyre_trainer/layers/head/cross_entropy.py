# ruff: noqa: N803, N806  # names carry shape letters
"""A linear head fused with cross-entropy, by slices of the vocabulary.

The logits of all tokens and classes never exist. Cross-entropy needs three numbers of each token's
logits: the log of the sum of their exponentials, the target's logit, and (for label smoothing)
their sum. Each slice gives those of its own classes; they are reduced exactly, and the loss is
computed from them. In backward a slice computes its logits again, unless the head is frozen
(`gradient_ahead`). Within a slice, tokens are taken in chunks, which bounds even the slice's
logits.

Dims: T tokens, D features, V classes of the slice, S statistics.
"""

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from gyre_trainer.errors import RotationError
from gyre_trainer.layers.encoded.quantized_linear import is_quantized
from gyre_trainer.layers.head.gradient_ahead import (
    ClassesOfSlice,
    GradientAhead,
    shares_of_targets,
)
from gyre_trainer.layers.head.logit_functions import LogitChain, LogitFunction
from gyre_trainer.layers.linear import rows
from gyre_trainer.layers.whole.replicated import ReplicatedModule
from gyre_trainer.rotation.backward.deferred_grads import DeferredGrads
from gyre_trainer.rotation.call import cast
from gyre_trainer.rotation.output_reduction import OutputReduction, RunningSum
from gyre_trainer.rotation.ring_pass import run
from gyre_trainer.rotation.rotated_module import RotatedModule, uncompiled
from gyre_trainer.rotation.rule import ModuleSlice, Rule, parameter_at
from gyre_trainer.shards.layout import Cut, Layout
from gyre_trainer.shards.local_shards import local_of

# Logits alive at once: 32 MiB of float32. More raises the peak of a step and was not faster; much
# less makes the matrix products small.
_MAX_LOGITS = 2**23

Reduction = Literal["mean", "sum", "none"]


@uncompiled
def linear_cross_entropy(
    linear: nn.Linear,
    x: Tensor,
    targets: Tensor,
    *,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    reduction: Reduction = "mean",
    functions: Sequence[LogitFunction] = (),
) -> Tensor:
    """`F.cross_entropy(linear(x), targets, ...)`, in float32 or better, without the logits.

    Args:
        linear: from features to classes; rotated or not. It may be tied to an embedding.
        x: features of shape (..., D), of the layer's dtype.
        targets: integers of shape (...): classes, or `ignore_index` for tokens without a loss.
        ignore_index: the target of tokens that have no loss.
        label_smoothing: in [0, 1]; this share of the target's probability is spread evenly over all
            classes.
        z_loss: the factor of the square of the log-sum-exp that is added to each loss (arXiv
            2204.02311).
        reduction: "mean" over the tokens that are not ignored (NaN where all are), "sum", or
            "none": each token's own loss, 0 where it is ignored.
        functions: what is done to the logits before, in this order, such as
            `(Divided(30.0), Tanh(), Multiplied(30.0))` of
            `gyre_trainer.layers.head.logit_functions` to cap them.

    Returns:
        A scalar, or with "none" a tensor shaped as ``targets``; float32, or float64 if ``x`` is.

    Raises:
        RuntimeError: a target is neither a class nor `ignore_index`. On CUDA the error comes when
            the device is waited for.

    Example:
        x = model.norm(model.blocks(tokens))  # (B, T, D)
        loss = linear_cross_entropy(model.head, x, targets)  # instead of model.head(x)
        loss.backward()
    """
    if is_quantized(linear):
        raise RotationError(
            "the head has quantized weights, which a loss by slices of the vocabulary cannot read; "
            "name it in the `keep` of quantize_frozen"
        )
    flat = targets.flatten()
    counted = flat != ignore_index
    rule = StatisticsRule(linear.out_features, with_sum=label_smoothing > 0)
    inputs = x.flatten(0, -2), flat, counted
    chain = LogitChain(tuple(functions))
    ahead = None if label_smoothing else _gradient_ahead(linear, inputs[0])
    with torch.no_grad() if ahead else nullcontext():
        statistics = _statistics(linear, rule, inputs, _Asked(rule.with_sum, chain, ahead))
        losses = _losses(statistics, linear.out_features, label_smoothing, z_loss)
    if ahead:
        losses = ahead.attach(inputs[0], losses, 1 + 2 * z_loss * statistics[0] if z_loss else 1)
    losses = losses.masked_fill(~counted, 0)
    if reduction == "none":
        return losses.view(targets.shape)
    return losses.sum() if reduction == "sum" else losses.sum() / counted.sum()


def _losses(
    statistics_ST: Tensor, num_classes: int, label_smoothing: float, z_loss: float
) -> Tensor:
    """The loss of each token."""
    log_sum_exp, target, *rest = statistics_ST.unbind()
    losses = log_sum_exp - (1 - label_smoothing) * target
    if label_smoothing:
        losses = losses - label_smoothing / num_classes * rest[0]
    return losses + z_loss * log_sum_exp.square() if z_loss else losses


def _gradient_ahead(linear: nn.Linear, x_TD: Tensor) -> GradientAhead | None:
    """Where the gradient of a frozen head's input is collected, if backward will ask for it.

    See [Note: One pass for a frozen head] in `gradient_ahead`.
    """
    if not isinstance(linear, RotatedModule) or not torch.is_grad_enabled():
        return None
    own = (parameter_at(linear.rotation.module, name) for name in ("weight", "bias"))
    if not x_TD.requires_grad or any(each is not None and each.requires_grad for each in own):
        return None
    return GradientAhead.of(x_TD.detach(), _wide(x_TD.dtype))


def _statistics(
    linear: nn.Linear,
    rule: "StatisticsRule",
    inputs: tuple[Tensor, Tensor, Tensor],
    asked: "_Asked",
) -> Tensor:
    if isinstance(linear, RotatedModule):
        linear.leave_bundle()  # its weights would be gathered for nothing
        # not a field of the rule: a number that differs in each step would make another rule of it
        arguments = (*inputs, *_whole_bias(linear)), {"asked": asked}
        statistics: Tensor = run(linear.rotation_by(rule), *arguments)
        return statistics
    x_TD, targets_T, counted_T = inputs
    dtype = linear.outer_dtype if isinstance(linear, ReplicatedModule) else None
    x_TD, weight_VD = cast(x_TD, dtype), cast(local_of(linear.weight), dtype)
    bias = None if linear.bias is None else cast(local_of(linear.bias), dtype)
    classes = _Classes(0, linear.out_features, linear.out_features)
    inputs = x_TD, targets_T, counted_T
    return _of_slice(inputs, weight_VD, bias, classes, asked)


def _whole_bias(linear: RotatedModule) -> list[Tensor]:
    """The bias, if there is one that every rank has whole: that of a layer tied to an embedding."""
    module, names = linear.rotation.module, {cut.name for cut in linear.rotation.layout.cuts}
    bias = parameter_at(module, "bias")
    return [] if bias is None or "bias" in names else [local_of(bias)]


@dataclass(frozen=True)
class StatisticsRule(Rule):
    """For `nn.Linear`: it returns the statistics of its outputs over all classes, not the outputs.

    Attributes:
        num_classes: output features of the whole layer.
        with_sum: whether the statistics contain the sum of the logits.
    """

    num_classes: int
    with_sum: bool

    recompute_pays: ClassVar[bool] = False  # backward computes the logits again anyway
    divisible: ClassVar[bool] = True

    def cuts(self, module: nn.Module, num_slices: int) -> list[Cut]:
        """Weight and bias, along the classes."""
        return rows(module)

    def run(self, current: ModuleSlice, /, *args: Tensor, **kwargs: Any) -> Tensor:
        """Statistics [S, T] of the slice's own classes; ``asked`` says which."""
        x_TD, targets_T, counted_T, *whole_bias = args
        classes = _Classes(*current.bounds["weight"], self.num_classes)
        weight_VD, bias_V = current.weights["weight"], current.weights.get("bias")
        if whole_bias:
            bias_V = whole_bias[0][classes.start : classes.stop]
        inputs = x_TD, targets_T, counted_T
        return _of_slice(inputs, weight_VD, bias_V, classes, kwargs["asked"], current.deferred)

    def output_reduction(
        self, position: int, layout: Layout, dtype: torch.dtype
    ) -> OutputReduction:
        """Log-sum-exps are reduced to one; the other statistics add up."""
        return _StatisticsReduction()


class _StatisticsReduction:
    """Reduces statistics [S, T] over the classes of all slices."""

    def __init__(self) -> None:
        self._log_sum_exps: dict[int, Tensor] = {}
        self._total: Tensor | None = None
        self._log_sum_exp = torch.empty(0)

    def add(self, index: int, output: Tensor) -> None:
        """Add the statistics of slice ``index``."""
        self._log_sum_exps[index] = output[0]
        if self._total is None:
            self._total = output.clone()
        else:
            torch.logaddexp(self._total[0], output[0], out=self._total[0])
            self._total[1:] += output[1:]

    def result(self) -> Tensor:
        """The statistics over all classes."""
        total, self._total = self._total, None
        assert total is not None
        self._log_sum_exp = total[0].clone()
        return total

    def grad_of_slice(self, index: int, grad: Tensor) -> Tensor:
        """The slice's share of the log-sum-exp's gradient, and all of the others."""
        current = grad.clone()
        current[0] *= (self._log_sum_exps[index] - self._log_sum_exp).exp()
        return current


@dataclass(frozen=True, slots=True)
class _Classes:
    """The half-open range of classes that a slice has, of ``total``."""

    start: int
    stop: int
    total: int


@dataclass(frozen=True, slots=True)
class _Asked:
    """What is asked of each slice.

    Attributes:
        with_sum: whether the statistics contain the sum of the logits.
        chain: what is done to the logits before.
        ahead: takes the slice's share of the input's gradient; None where backward computes that.
    """

    with_sum: bool
    chain: LogitChain
    ahead: GradientAhead | None = None


def _of_slice(
    inputs: tuple[Tensor, Tensor, Tensor],
    weight_VD: Tensor,
    bias_V: Tensor | None,
    classes: _Classes,
    asked: _Asked,
    deferred: DeferredGrads | None = None,
) -> Tensor:
    """Statistics [S, T] of a slice: its log-sum-exp, the target's logit or 0, the sum."""
    x_TD, targets_T, counted_T = inputs
    if classes.start == classes.stop:
        shape = 2 + asked.with_sum, len(x_TD)
        nothing = torch.zeros(shape, dtype=_wide(x_TD.dtype), device=x_TD.device)
        nothing[0] = -torch.inf
        return nothing
    elsewhere = ~counted_T
    # Targets outside of all slices are left to the first and the last slice, where torch refuses
    # them.
    if classes.start > 0:
        elsewhere = elsewhere | (targets_T < classes.start)
    if classes.stop < classes.total:
        elsewhere = elsewhere | (targets_T >= classes.stop)
    places_T = torch.where(elsewhere, 0, targets_T - classes.start)
    tensors = x_TD, weight_VD, bias_V, places_T, elsewhere
    statistics: Tensor = _Statistics.apply(*tensors, asked, deferred or DeferredGrads({}))  # type: ignore[no-untyped-call]
    return statistics


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)


def _chunks(num_tokens: int, num_elements: int) -> list[slice]:
    """Ranges of tokens of at most `_MAX_LOGITS` elements, at so many for each token."""
    size = max(1, _MAX_LOGITS // num_elements)
    return [slice(start, start + size) for start in range(0, num_tokens, size)]


def _logits(x_TD: Tensor, weight_VD: Tensor, bias_V: Tensor | None) -> Tensor:
    return F.linear(x_TD, weight_VD, bias_V).to(_wide(x_TD.dtype))


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
        asked: _Asked,
        deferred: DeferredGrads,
    ) -> Tensor:
        statistics = torch.empty(
            2 + asked.with_sum, len(x_TD), dtype=_wide(x_TD.dtype), device=x_TD.device
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
            del logits_TV, outputs  # the next ones must not exist beside them
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
        grad_target_T = grad_ST[1].masked_fill(elsewhere_T, 0)

        def add(chunk: slice) -> None:
            logits_TV, outputs = ctx.chain.record_(_logits(x_TD[chunk], weight_VD, bias_V))
            grads_TV = logits_TV.sub_(log_sum_exp_T[chunk, None])
            grads_TV.exp_().mul_(grad_ST[0, chunk, None])
            grads_TV.scatter_add_(1, places_T[chunk, None], grad_target_T[chunk, None])
            if len(grad_ST) > 2:
                grads_TV += grad_ST[2, chunk, None]
            grads_TV = ctx.chain.differentiate_(grads_TV, outputs).to(x_TD.dtype)
            if grad_x_TD is not None:
                _add_product(grad_x_TD[chunk], grads_TV, weight_VD)
            if grad_weight_VD is not None:
                _add_product(grad_weight_VD, grads_TV.T, x_TD[chunk])
            elif needs_weight:
                ctx.deferred.add_product(ctx.position, grads_TV.T, x_TD[chunk])
            if grad_bias_V is not None:
                grad_bias_V.add_(grads_TV.sum(0))

        for chunk in _chunks(len(x_TD), len(weight_VD) * (1 + ctx.chain.num_outputs)):
            add(chunk)
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


def _add_product(total: Tensor, left: Tensor, right: Tensor) -> None:
    if total.dtype == left.dtype:
        total.addmm_(left, right)
    else:
        total += left @ right
