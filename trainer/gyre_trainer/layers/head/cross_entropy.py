# ruff: noqa: N803, N806  # names carry shape letters
"""The loss, log-probabilities and entropy of a linear head, by slices of the vocabulary.

The logits of all tokens and classes never exist. A loss needs two or three numbers of each token's
logits: the log of the sum of their exponentials, the target's logit, and for label smoothing their
sum, or for the entropy their mean by probability. Each slice gives those of its own classes; they
are reduced exactly, and the loss is computed from them. In backward a slice computes its logits
again, unless the head is frozen. See `gyre_trainer.layers.head.slice_statistics`.

Dims: T tokens, D features, V classes of the slice, S statistics.
"""

from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, NamedTuple

import torch
from torch import Tensor, nn

from gyre_trainer.errors import RotationError
from gyre_trainer.layers.encoded.quantized_linear import is_quantized
from gyre_trainer.layers.head.slice_statistics import (
    Asked,
    Classes,
    Extra,
    GradientAhead,
    LogitTransform,
    statistics_of,
)
from gyre_trainer.layers.linear import rows
from gyre_trainer.rotation.call import cast
from gyre_trainer.rotation.output_reduction import OutputReduction
from gyre_trainer.rotation.ring_pass import run
from gyre_trainer.rotation.rotated_module import RotatedModule, uncompiled
from gyre_trainer.rotation.rule import ModuleSlice, Rule, parameter_at
from gyre_trainer.shards.layout import Cut, Layout
from gyre_trainer.shards.local_shards import local_of
from gyre_trainer.whole.replicated import ReplicatedModule

Reduction = Literal["mean", "sum", "none"]


class TokenLogProbs(NamedTuple):
    """Numbers of each token, of the shape of the targets; float32, or float64 if ``x`` is.

    Attributes:
        log_probs: of the targets, in nats; 0 for ignored targets.
        log_sum_exp: of the logits. Its square is what a z-loss adds.
        entropy: of the distribution over all classes, in nats; None unless it was asked for.
    """

    log_probs: Tensor
    log_sum_exp: Tensor
    entropy: Tensor | None


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
    scale: float = 1.0,
    soft_cap: float | None = None,
) -> Tensor:
    """`F.cross_entropy(linear(x), targets, ...)`, in float32 or better, without the logits.

    Minus the result with `reduction="none"` is the targets' log-probabilities. Of a frozen head its
    slices travel once for them; those of `token_log_probs` travel twice.

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
        scale: multiplies the logits, as Cohere's `logit_scale`, or one by a temperature.
        soft_cap: caps the scaled logits z as Gemma 2 does: `soft_cap * tanh(z / soft_cap)`.

    Returns:
        A scalar, or with "none" a tensor shaped as ``targets``; float32, or float64 if ``x`` is.

    Raises:
        RotationError: the head is quantized, or sharded by another library than Gyre.
        RuntimeError: a target is neither a class nor `ignore_index`. On CUDA the error comes when
            the device is waited for.

    Example:
        x = model.norm(model.blocks(tokens))  # (B, T, D)
        loss = linear_cross_entropy(model.head, x, targets)  # instead of model.head(x)
        loss.backward()
    """
    counted = targets.flatten() != ignore_index
    inputs = x.flatten(0, -2), targets.flatten(), counted
    ahead = None if label_smoothing else _gradient_ahead(linear, inputs[0])
    transform = LogitTransform(scale, soft_cap)
    asked = Asked("sum" if label_smoothing else "none", transform, ahead)
    with torch.no_grad() if ahead else nullcontext():
        statistics = _statistics(linear, inputs, asked)
        losses = _losses(statistics, linear.out_features, label_smoothing, z_loss)
    if ahead:
        losses = ahead.attach(inputs[0], losses, 1 + 2 * z_loss * statistics[0] if z_loss else 1)
    losses = losses.masked_fill(~counted, 0)
    if reduction == "none":
        return losses.view(targets.shape)
    return losses.sum() if reduction == "sum" else losses.sum() / counted.sum()


@uncompiled
def token_log_probs(
    linear: nn.Linear,
    x: Tensor,
    targets: Tensor,
    *,
    entropy: bool = False,
    ignore_index: int = -100,
    scale: float = 1.0,
    soft_cap: float | None = None,
) -> TokenLogProbs:
    """The targets' log-probabilities, log-sum-exps and entropies by token, without the logits.

    All of them have gradients, as losses such as DPO's, GRPO's and a z-loss need them.

    Args:
        linear: as in `linear_cross_entropy`, and so are all below but ``entropy``.
        x: features.
        targets: classes.
        entropy: whether to compute it, too.
        ignore_index: the target of tokens without a log-probability.
        scale: multiplies the logits.
        soft_cap: caps the scaled logits.

    Raises:
        RotationError, RuntimeError: as in `linear_cross_entropy`.

    Example:
        hidden = model.model(input_ids=tokens).last_hidden_state[:, :-1]
        found = token_log_probs(model.lm_head, hidden, tokens[:, 1:], entropy=True)
        ratios = (found.log_probs - old_log_probs).exp()
    """
    counted = targets.flatten() != ignore_index
    inputs = x.flatten(0, -2), targets.flatten(), counted
    asked = Asked("mean" if entropy else "none", LogitTransform(scale, soft_cap))
    log_sum_exp, target, *mean = _statistics(linear, inputs, asked).unbind()
    log_probs = (target - log_sum_exp).masked_fill(~counted, 0)
    entropies = (log_sum_exp - mean[0]).view(targets.shape) if entropy else None
    return TokenLogProbs(log_probs.view(targets.shape), log_sum_exp.view(targets.shape), entropies)


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

    See [Note: One pass for a frozen head] in `slice_statistics`.
    """
    if not isinstance(linear, RotatedModule) or not torch.is_grad_enabled():
        return None
    own = (parameter_at(linear.rotation.module, name) for name in ("weight", "bias"))
    if not x_TD.requires_grad or any(each is not None and each.requires_grad for each in own):
        return None
    return GradientAhead.of(x_TD.detach())


def _statistics(linear: nn.Linear, inputs: tuple[Tensor, Tensor, Tensor], asked: Asked) -> Tensor:
    if is_quantized(linear):
        raise RotationError(
            "the head has quantized weights, which a loss by slices of the vocabulary cannot read. "
            "Name it in the `keep` of quantize_frozen."
        )
    if isinstance(linear, RotatedModule):
        whole_bias = _whole_bias(linear)
        # not a field of the rule: a number that differs in each step would make another rule of it
        arguments = (*inputs, *([] if whole_bias is None else [whole_bias])), {"asked": asked}
        rule = StatisticsRule(linear.out_features, asked.extra)
        statistics: Tensor = run(linear.rotation_by(rule), *arguments)
        return statistics
    x_TD, targets_T, counted_T = inputs
    dtype = linear.outer_dtype if isinstance(linear, ReplicatedModule) else None
    x_TD, weight_VD = cast(x_TD, dtype), cast(local_of(linear.weight), dtype)
    if len(weight_VD) != linear.out_features:
        raise RotationError(
            f"the head has {len(weight_VD)} of its {linear.out_features} rows on this rank, and is "
            "not rotated. Compute the loss inside of the module that gathers them."
        )
    bias = None if linear.bias is None else cast(local_of(linear.bias), dtype)
    classes = Classes(0, linear.out_features, linear.out_features)
    return statistics_of((x_TD, targets_T, counted_T), weight_VD, bias, classes, asked)


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
        extra: the third statistic.
    """

    num_classes: int
    extra: Extra

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
        """Log-sum-exps and means are reduced to one; the other statistics add up."""
        return _StatisticsReduction(with_mean=self.extra == "mean")


class _StatisticsReduction:
    """Reduces statistics [S, T] over the classes of all slices."""

    def __init__(self, *, with_mean: bool) -> None:
        self._with_mean = with_mean
        self._of_slices: dict[int, Tensor] = {}
        self._total: Tensor | None = None
        self._reduced = torch.empty(0)

    def add(self, index: int, output: Tensor) -> None:
        """Add the statistics of slice ``index``."""
        self._of_slices[index] = output[0::2] if self._with_mean else output[:1]
        if self._total is None:
            self._total = output.clone()
            return
        before_T, sums = (
            self._total[0].clone(),
            self._total[1:2] if self._with_mean else self._total[1:],
        )
        torch.logaddexp(before_T, output[0], out=self._total[0])
        sums += output[1 : 1 + len(sums)]
        if self._with_mean:
            share_T = (output[0] - self._total[0]).exp()
            self._total[2] += share_T * (output[2] - self._total[2])

    def result(self) -> Tensor:
        """The statistics over all classes."""
        total, self._total = self._total, None
        assert total is not None
        self._reduced = total[0::2].clone() if self._with_mean else total[:1].clone()
        return total

    def grad_of_slice(self, index: int, grad: Tensor) -> Tensor:
        """The slice's share of the gradient of the log-sum-exp and of the mean; all of the rest."""
        own, current = self._of_slices[index], grad.clone()
        share_T = (own[0] - self._reduced[0]).exp()
        current[0] *= share_T
        if self._with_mean:
            current[2] *= share_T
            current[0] += current[2] * (own[1] - self._reduced[1])
        return current
