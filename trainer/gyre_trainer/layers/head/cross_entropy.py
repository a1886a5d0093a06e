# ruff: noqa: N803, N806  # names carry shape letters
"""A linear head fused with cross-entropy, by slices of the vocabulary.

The logits of all tokens and classes never exist. Cross-entropy needs three numbers of each token's
logits: the log of the sum of their exponentials, the target's logit, and (for label smoothing)
their sum. Each slice gives those of its own classes; they are reduced exactly, and the loss is
computed from them. In backward a slice computes its logits again, unless the head is frozen
(`gradient_ahead`). Within a slice, tokens are taken in chunks, which bounds even the slice's
logits. Slices go round the ring, or all ranks' tokens do where that is fewer bytes (`by_tokens`).

Dims: T tokens, D features, V classes of the slice, S statistics.
"""

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor, nn

from gyre_trainer.errors import RotationError
from gyre_trainer.layers.encoded.quantized_linear import is_quantized
from gyre_trainer.layers.head.by_tokens import statistics_by_tokens
from gyre_trainer.layers.head.gradient_ahead import GradientAhead
from gyre_trainer.layers.head.logit_functions import LogitChain, LogitFunction
from gyre_trainer.layers.head.slice_statistics import Asked, Classes, statistics_of, wide
from gyre_trainer.layers.linear import rows
from gyre_trainer.layers.whole.replicated import ReplicatedModule
from gyre_trainer.rotation.call import cast
from gyre_trainer.rotation.output_reduction import OutputReduction
from gyre_trainer.rotation.ring_pass import run
from gyre_trainer.rotation.rotated_module import RotatedModule, uncompiled
from gyre_trainer.rotation.rule import ModuleSlice, Rule, parameter_at
from gyre_trainer.shards.layout import Cut, Layout
from gyre_trainer.shards.local_shards import local_of

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
            "the head has quantized weights, which a loss by slices of the vocabulary cannot read. "
            "Name it in the `keep` of quantize_frozen."
        )
    flat = targets.flatten()
    counted = flat != ignore_index
    rule = StatisticsRule(linear.out_features, with_sum=label_smoothing > 0)
    inputs = x.flatten(0, -2), flat, counted
    chain = LogitChain(tuple(functions))
    ahead = None if label_smoothing else _gradient_ahead(linear, inputs[0])
    with torch.no_grad() if ahead else nullcontext():
        statistics = _statistics(linear, rule, inputs, Asked(rule.with_sum, chain, ahead))
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
    return GradientAhead.of(x_TD.detach(), wide(x_TD.dtype))


def _statistics(
    linear: nn.Linear,
    rule: "StatisticsRule",
    inputs: tuple[Tensor, Tensor, Tensor],
    asked: "Asked",
) -> Tensor:
    if isinstance(linear, RotatedModule):
        whole_bias = _whole_bias(linear)
        by_tokens = statistics_by_tokens(linear, inputs, asked, whole_bias)
        if by_tokens is not None:
            return by_tokens
        # not a field of the rule: a number that differs in each step would make another rule of it
        arguments = (*inputs, *([] if whole_bias is None else [whole_bias])), {"asked": asked}
        statistics: Tensor = run(linear.rotation_by(rule), *arguments)
        return statistics
    x_TD, targets_T, counted_T = inputs
    dtype = linear.outer_dtype if isinstance(linear, ReplicatedModule) else None
    x_TD, weight_VD = cast(x_TD, dtype), cast(local_of(linear.weight), dtype)
    bias = None if linear.bias is None else cast(local_of(linear.bias), dtype)
    classes = Classes(0, linear.out_features, linear.out_features)
    inputs = x_TD, targets_T, counted_T
    return statistics_of(inputs, weight_VD, bias, classes, asked)


def _whole_bias(linear: RotatedModule) -> Tensor | None:
    """The bias, if there is one that every rank has whole: that of a layer tied to an embedding."""
    module, names = linear.rotation.module, {cut.name for cut in linear.rotation.layout.cuts}
    bias = parameter_at(module, "bias")
    return None if bias is None or "bias" in names else local_of(bias)


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
        classes = Classes(*current.bounds["weight"], self.num_classes)
        weight_VD, bias_V = current.weights["weight"], current.weights.get("bias")
        if whole_bias:
            bias_V = whole_bias[0][classes.start : classes.stop]
        inputs = x_TD, targets_T, counted_T
        return statistics_of(inputs, weight_VD, bias_V, classes, kwargs["asked"], current.deferred)

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
