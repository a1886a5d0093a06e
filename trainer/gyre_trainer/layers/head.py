# ruff: noqa: N803, N806, N815  # names carry shape letters
"""The loss, log-probabilities and entropy of a linear head, by slices of the vocabulary.

The logits of all tokens and classes never exist. A loss needs two or three numbers of each token's
logits: the log of the sum of their exponentials, the target's logit, and for the entropy their mean
by probability. Each slice gives those of its own classes, in chunks of tokens; they are reduced
exactly, and the loss is computed from them. In backward a slice computes its logits again, unless
the head is frozen.

[Note: One pass for a frozen head]

A slice's share of the gradient needs the log-sum-exp over all classes, which is known when the last
slice has been here. So a trained head sends its slices twice. A frozen one has no gradient
of its own, and that of its input is the mean of its rows by the probability of their classes, less
the target's row. Means of slices are put together as the output of attention is from blocks of keys
(FlashAttention, arXiv 2205.14135): each is weighted by its slice's share of the sum of
exponentials. So one pass is enough, in forward, and backward multiplies by the loss's gradient.

Dims: T tokens, D features, V classes of the slice, S statistics.
"""

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from gyre_trainer.errors import RotationError
from gyre_trainer.layers.linear import LinearRule, id_error, places_in, require_ids
from gyre_trainer.layers.quantized import is_quantized
from gyre_trainer.rotation.call import cast
from gyre_trainer.rotation.ring_pass import run
from gyre_trainer.rotation.rotated_module import RotatedModule
from gyre_trainer.rotation.rule import DeferredGrads, ModuleSlice, OutputReduction, parameter_at
from gyre_trainer.shards.layout import Layout, add_product, local_of
from gyre_trainer.torch_internals import is_fake, uncompiled
from gyre_trainer.whole.replicated import ReplicatedModule

# Logits alive at once: 32 MiB of float32. More raises the peak of a step and was not faster on a
# CPU; much less makes the matrix products small. On CUDA fewer rows would leave most of a device
# idle, and its host behind.
_MAX_LOGITS = 2**23
_MIN_ROWS_ON_CUDA = 1_024


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
        """Nothing yet, for a head called with ``x_TD``."""
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
            transform: how they were transformed.
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

    def attach(self, x_TD: Tensor, losses_T: Tensor) -> Tensor:
        """The losses, in a graph in which each one's gradient reaches its token's ``x_TD``."""
        gradient_TD = self.mean_TD.sub_(self.target_TD)
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
        with_mean: whether for a third statistic, the mean of the logits by their probability.
        transform: what is done to the logits before.
        ahead: takes the slice's share of the input's gradient; None where backward computes that.
    """

    with_mean: bool = False
    transform: LogitTransform = LogitTransform()
    ahead: GradientAhead | None = None


def statistics_of(
    x_TD: Tensor,
    weight_VD: Tensor,
    bias_V: Tensor | None,
    targets: tuple[Tensor, Tensor],
    asked: Asked,
    deferred: DeferredGrads,
) -> Tensor:
    """Statistics [S, T] of a slice: its log-sum-exp, the target's logit or 0, the mean.

    ``targets`` are the places of the tokens' targets in the slice, and whether they are elsewhere
    or not counted.
    """
    if not len(weight_VD):
        nothing = x_TD.new_zeros(2 + asked.with_mean, len(x_TD), dtype=wide(x_TD.dtype))
        nothing[0] = torch.finfo(nothing.dtype).min  # of no weight, and no NaN in differences
        return nothing
    statistics: Tensor = _Statistics.apply(x_TD, weight_VD, bias_V, *targets, asked, deferred)  # type: ignore[no-untyped-call]
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
        statistics_ST = x_TD.new_empty(2 + asked.with_mean, len(x_TD), dtype=wide(x_TD.dtype))
        transform, ahead = asked.transform, asked.ahead
        num_copies = asked.with_mean or (ahead and transform.soft_cap is not None)
        for chunk in _chunks(x_TD, len(weight_VD) * (1 + bool(num_copies))):
            logits_TV = transform.apply_(_logits(x_TD[chunk], weight_VD, bias_V))
            own_T, targets_T1 = logits_TV.logsumexp(1), logits_TV.gather(1, places_T[chunk, None])
            statistics_ST[0, chunk], statistics_ST[1, chunk] = own_T, targets_T1.squeeze(1)
            if asked.with_mean:
                statistics_ST[2, chunk] = (logits_TV - own_T[:, None]).exp_().mul_(logits_TV).sum(1)
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
        grad_x_TD = None
        if needs_x:
            grad_x_TD = torch.zeros_like(x_TD) if ctx.sum is None else ctx.sum.writable(x_TD)
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
    capped, with_mean = transform.soft_cap is not None, asked.with_mean

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
        return transform.differentiate_(grads_TV, logits_TV).to(x_TD.dtype)

    for chunk in _chunks(x_TD, len(weight_VD) * (1 + capped + with_mean)):
        add(chunk, of_chunk(chunk))  # no name keeps it while the next is computed


def _chunks(x_TD: Tensor, num_elements: int) -> Iterator[slice]:
    """Ranges of tokens of at most `_MAX_LOGITS` elements, at this number for each token.

    On CUDA a range has at least `_MIN_ROWS_ON_CUDA` tokens.
    """
    size = max(_MIN_ROWS_ON_CUDA if x_TD.is_cuda else 1, _MAX_LOGITS // num_elements)
    return (slice(start, start + size) for start in range(0, len(x_TD), size))


def _logits(x_TD: Tensor, weight_VD: Tensor, bias_V: Tensor | None) -> Tensor:
    return F.linear(x_TD, weight_VD, bias_V).to(wide(x_TD.dtype))


Reduction = Literal["mean", "sum", "none"]


class TokenLogProbs(NamedTuple):
    """Numbers of each token, of the shape of the targets; float32, or float64 if ``x`` is.

    Attributes:
        log_probs: of the targets, in nats; 0 for ignored targets.
        log_sum_exp: of the logits. A z-loss adds its square.
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
        reduction: "mean" over the tokens not ignored (NaN where all are), "sum", or
            "none": each token's own loss, 0 where it is ignored.
        scale: multiplies the logits, as Cohere's `logit_scale`, or one by a temperature.
        soft_cap: caps the scaled logits z as Gemma 2 does: `soft_cap * tanh(z / soft_cap)`.

    Returns:
        A scalar, or with "none" a tensor shaped as ``targets``; float32, or float64 if ``x`` is.

    Raises:
        RotationError: the head is quantized, or sharded by another library than Gyre.
        IndexError: a target is neither a class nor `ignore_index`; the message names rank and
            target. On CPUs it is raised on every rank of the ring; on CUDA on this rank, before the
            optimizer's step, or where the head is whole, when the device is waited for.

    Example:
        x = model.norm(model.blocks(tokens))  # (B, T, D)
        loss = linear_cross_entropy(model.head, x, targets)  # instead of model.head(x)
        loss.backward()
    """
    counted = targets.flatten() != ignore_index
    inputs = x.flatten(0, -2), targets.flatten(), counted
    ahead = _gradient_ahead(linear, inputs[0])
    asked = Asked(transform=LogitTransform(scale, soft_cap), ahead=ahead)
    with torch.no_grad() if ahead else nullcontext():
        log_sum_exp, target = _statistics(linear, inputs, asked).unbind()
        losses = log_sum_exp - target
    if ahead:
        losses = ahead.attach(inputs[0], losses)
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
        RotationError, IndexError: as in `linear_cross_entropy`.

    Example:
        hidden = model.model(input_ids=tokens).last_hidden_state[:, :-1]
        found = token_log_probs(model.lm_head, hidden, tokens[:, 1:], entropy=True)
        ratios = (found.log_probs - old_log_probs).exp()
    """
    counted = targets.flatten() != ignore_index
    inputs = x.flatten(0, -2), targets.flatten(), counted
    asked = Asked(entropy, LogitTransform(scale, soft_cap))
    log_sum_exp, target, *mean = _statistics(linear, inputs, asked).unbind()
    log_probs = (target - log_sum_exp).masked_fill(~counted, 0)
    entropies = (log_sum_exp - mean[0]).view(targets.shape) if entropy else None
    return TokenLogProbs(log_probs.view(targets.shape), log_sum_exp.view(targets.shape), entropies)


def _gradient_ahead(linear: nn.Linear, x_TD: Tensor) -> GradientAhead | None:
    """Where the gradient of a frozen head's input is collected, if backward will ask for it.

    See [Note: One pass for a frozen head].
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
    x_TD, targets_T, counted_T = inputs
    where = "the head (nor ignore_index)"
    if isinstance(linear, RotatedModule):
        ids_T = targets_T.where(counted_T, 0)
        require_ids(linear.rotation, ids_T, linear.out_features, "target", where)
        statistics: Tensor = run(linear.rotation.by(_STATISTICS), inputs, {"asked": asked})
        return statistics
    if targets_T.device.type == "cpu" and not is_fake(targets_T):
        odd_T = targets_T[counted_T & ((targets_T < 0) | (targets_T >= linear.out_features))]
        if len(odd_T):
            rank = f"rank {dist.get_rank()}: " if dist.is_initialized() else ""
            raise id_error(int(odd_T[0]), f"{rank}target", where, linear.out_features)
    dtype = linear.outer_dtype if isinstance(linear, ReplicatedModule) else None
    x_TD, weight_VD = cast(x_TD, dtype), cast(local_of(linear.weight), dtype)
    if len(weight_VD) != linear.out_features:
        raise RotationError(
            f"the head has {len(weight_VD)} of its {linear.out_features} rows on this rank, and is "
            "not rotated. Compute the loss inside of the module that gathers them."
        )
    bias = None if linear.bias is None else cast(local_of(linear.bias), dtype)
    targets = targets_T.where(counted_T, 0), ~counted_T
    return statistics_of(x_TD, weight_VD, bias, targets, asked, DeferredGrads({}))


class StatisticsRule(LinearRule):
    """For `nn.Linear`: it returns the statistics of its outputs over all classes."""

    recompute_pays: ClassVar[bool] = False  # backward computes the logits again anyway

    def run(self, current: ModuleSlice, /, *args: Tensor, **kwargs: Any) -> Tensor:
        """Statistics [S, T] of the slice's own classes; ``asked`` says which."""
        x_TD, targets_T, counted_T = args
        start, stop = current.bounds["weight"]
        weight_VD, bias_V = current.weights["weight"], parameter_at(current.module, "bias")
        if bias_V is not None and "bias" not in current.weights:  # whole, where the weight is tied
            bias_V = bias_V[start:stop]
        places_T, elsewhere_T = places_in(targets_T, start, stop)
        targets = places_T, elsewhere_T | ~counted_T
        return statistics_of(x_TD, weight_VD, bias_V, targets, kwargs["asked"], current.deferred)

    def output_reduction(
        self, position: int, layout: Layout, dtype: torch.dtype
    ) -> OutputReduction:
        """Log-sum-exps and means are reduced to one; the targets' logits add up."""
        return _StatisticsReduction()


_STATISTICS = StatisticsRule()


class _StatisticsReduction(OutputReduction):
    """Reduces statistics [S, T] over the classes of all slices."""

    def __init__(self) -> None:
        self._of_slices: dict[int, Tensor] = {}
        self._total: Tensor | None = None
        self._reduced = torch.empty(0)

    def add(self, index: int, output: Tensor) -> None:
        """Add the statistics of slice ``index``."""
        self._of_slices[index] = output[0::2]
        if self._total is None:
            self._total = output.clone()
            return
        before_T = self._total[0].clone()
        torch.logaddexp(before_T, output[0], out=self._total[0])
        self._total[1] += output[1]
        if len(output) > 2:
            share_T = (output[0] - self._total[0]).exp()
            self._total[2] += share_T * (output[2] - self._total[2])

    def result(self) -> Tensor:
        """The statistics over all classes."""
        total, self._total = self._total, None
        assert total is not None
        self._reduced = total[0::2].clone()
        return total

    def grad_of_slice(self, index: int, grad: Tensor) -> Tensor:
        """The slice's share of the gradient of the log-sum-exp and of the mean; all of the rest."""
        own, current = self._of_slices[index], grad.clone()
        share_T = (own[0] - self._reduced[0]).exp()
        current[0] *= share_T
        if len(current) > 2:
            current[2] *= share_T
            current[0] += current[2] * (own[1] - self._reduced[1])
        return current
