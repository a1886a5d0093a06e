# ruff: noqa: N803, N806  # names carry shape letters
"""`nn.MultiheadAttention`, layer by layer: its projections rotate by output features.

Each rank attends with all heads. The packed projection holds the rows of all queries before those
of all keys and all values, so equal slices of it are not groups of heads. To save activations, use
a module with separate projections, and `AttentionRule`.

Dims: B batch, T targets, S sources, E features, H heads, C channels of one head.

Also here:

* Torch's transformer layers: their attentions rotate, and their feed-forward by hidden slices.
"""

from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gyre_trainer.errors import RotationError
from gyre_trainer.layers.linear import LinearRule, projections
from gyre_trainer.layers.mlp import MLPRule
from gyre_trainer.rotation.output_reduction import ConcatenatedOutputs, OutputReduction
from gyre_trainer.rotation.ring_pass import run
from gyre_trainer.rotation.rotated_module import (
    PartialRotation,
    RotatedModule,
    RotationTarget,
    uncompiled,
    wrap,
)
from gyre_trainer.rotation.rule import ModuleSlice, Rule
from gyre_trainer.shards.layout import Cut, Layout, local_of

_SEPARATE = ("q_proj_weight", "k_proj_weight", "v_proj_weight")


@dataclass(frozen=True)
class InputProjectionsRule(Rule):
    """For the projections to queries, keys and values: one packed weight, or three.

    Attributes:
        dim: output features of each projection.
        packed: whether there is one packed weight.
    """

    dim: int
    packed: bool

    def cuts(self, module: nn.Module, num_slices: int) -> list[Cut]:
        """Weights, and a packed weight's bias, along the output features."""
        names = ("in_proj_weight", "in_proj_bias") if self.packed else _SEPARATE
        parameters = {name: getattr(module, name) for name in names}
        return [Cut(name, tuple(p.shape), 0) for name, p in parameters.items() if p is not None]

    def run(self, current: ModuleSlice, /, *args: Tensor, **kwargs: Any) -> list[Tensor]:
        """The slice's features of queries, keys and values."""
        if not self.packed:
            weights = [current.weights[name] for name in _SEPARATE]
            return [
                F.linear(x.to(weight.dtype), weight)
                for x, weight in zip(args, weights, strict=True)
            ]
        weight, bias = current.weights["in_proj_weight"], current.weights.get("in_proj_bias")
        packed = current.bounds["in_proj_weight"]
        outputs = []
        for position, x in enumerate(args):
            start, stop = (
                bound + position * self.dim - packed[0] for bound in self._bounds(position, packed)
            )
            own_bias = None if bias is None else bias[start:stop]
            outputs.append(F.linear(x.to(weight.dtype), weight[start:stop], own_bias))
        return outputs

    def output_reduction(
        self, position: int, layout: Layout, dtype: torch.dtype
    ) -> OutputReduction:
        """Side by side, along the features."""
        cut = layout.cuts[0 if self.packed else position]
        bounds = layout.all_bounds(cut)
        return ConcatenatedOutputs(
            -1,
            [self._bounds(position, each) for each in bounds] if self.packed else bounds,
            cut.name,
            dtype,
        )

    def _bounds(self, position: int, packed: tuple[int, int]) -> tuple[int, int]:
        """The part of a packed range that belongs to queries (0), keys (1) or values (2)."""
        start, stop = (min(max(bound - position * self.dim, 0), self.dim) for bound in packed)
        return start, stop


class RotatedMultiheadAttention(RotatedModule):
    """Mixed in before `nn.MultiheadAttention`: the same arguments and the same results."""

    def add_dropout_masks(self, kwargs: dict[str, Any]) -> None:
        """None: what goes round the ring, the projections, drops nothing."""

    def ring_forward(self, *args: Any, **kwargs: Any) -> Any:
        """Queries, keys and values, without a bias that is not packed."""
        return run(self.rotation, args, kwargs)

    @uncompiled
    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_padding_mask: Tensor | None = None,
        need_weights: bool = True,
        attn_mask: Tensor | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        """The module's output for this rank's part of the batch, as without rotation."""
        assert isinstance(self, nn.MultiheadAttention)
        if is_causal and attn_mask is None:
            raise RuntimeError("is_causal is a hint about attn_mask, which is missing")
        batched = query.dim() == 3
        swapped = batched and not self.batch_first
        q, k, v = (x if batched else x.unsqueeze(0) for x in (query, key, value))
        q, k, v = (x.transpose(0, 1) if swapped else x for x in (q, k, v))
        q, k, v = (
            x.view(*x.shape[:2], self.num_heads, -1).transpose(1, 2)
            for x in _projected(self, q, k, v)
        )
        mask = _merged_mask(attn_mask, key_padding_mask, q, k)
        y_BHTC, weights = _attended(self, q, k, v, mask, need_weights=need_weights)
        y_BTE = self.out_proj(y_BHTC.transpose(1, 2).flatten(2))
        output = y_BTE.transpose(0, 1) if swapped else y_BTE
        if weights is not None and average_attn_weights:
            weights = weights.mean(1)
        if batched:
            return output, weights
        return output.squeeze(0), None if weights is None else weights.squeeze(0)


def _projected(module: nn.MultiheadAttention, *inputs: Tensor) -> list[Tensor]:
    """Queries, keys and values."""
    assert isinstance(module, RotatedModule)
    projected: list[Tensor] = module.ring_forward(*inputs)
    if module.in_proj_bias is None or module._qkv_same_embed_dim:
        return projected
    biases = local_of(module.in_proj_bias).chunk(3)
    return [x + bias.to(x.dtype) for x, bias in zip(projected, biases, strict=True)]


def _projections(module: nn.MultiheadAttention, *inputs: Tensor) -> list[Tensor]:
    """What the projections that rotate give, on whole weights."""
    if not module._qkv_same_embed_dim:
        weights = [getattr(module, name) for name in _SEPARATE]
        return [F.linear(x, weight) for x, weight in zip(inputs, weights, strict=True)]
    packed, bias = module.in_proj_weight.chunk(3), module.in_proj_bias
    biases = [None] * 3 if bias is None else bias.chunk(3)
    return [F.linear(*each) for each in zip(inputs, packed, biases, strict=True)]


def _merged_mask(
    attn_mask: Tensor | None, padding: Tensor | None, q_BHTC: Tensor, k_BHSC: Tensor
) -> Tensor | None:
    """The mask to add to the scores, of a shape that broadcasts to [B, H, T, S], or None."""
    dtype = q_BHTC.dtype
    padding = F._canonical_mask(
        padding, "key_padding_mask", F._none_or_dtype(attn_mask), "attn_mask", dtype
    )
    attn_mask = F._canonical_mask(attn_mask, "attn_mask", None, "", dtype, check_other=False)
    if attn_mask is not None:
        attn_mask = attn_mask.to(dtype).view(
            -1, q_BHTC.shape[1] if attn_mask.dim() == 3 else 1, *attn_mask.shape[-2:]
        )
    if padding is not None:
        padding = padding.to(dtype).view(-1, 1, 1, k_BHSC.shape[2])
    if attn_mask is None or padding is None:
        return padding if attn_mask is None else attn_mask
    return attn_mask + padding


def _attended(
    module: nn.MultiheadAttention,
    q_BHTC: Tensor,
    k_BHSC: Tensor,
    v_BHSC: Tensor,
    mask: Tensor | None,
    *,
    need_weights: bool,
) -> tuple[Tensor, Tensor | None]:
    """The heads' outputs, and the attention weights if they are needed."""
    p = module.dropout if module.training else 0.0
    if not need_weights:
        return F.scaled_dot_product_attention(
            q_BHTC, k_BHSC, v_BHSC, attn_mask=mask, dropout_p=p
        ), None
    scores = q_BHTC @ k_BHSC.transpose(-2, -1) * q_BHTC.shape[-1] ** -0.5
    weights = (scores if mask is None else scores + mask).softmax(-1)
    if p:
        weights = F.dropout(weights, p)
    return weights @ v_BHSC, weights if need_weights else None


def rotate_multihead(module: nn.MultiheadAttention, target: RotationTarget) -> None:
    """Rotate the input projections together, and the output projection by itself.

    Raises:
        RotationError: it has an option that is not supported.
    """
    for option in ("bias_k", "bias_v", "add_zero_attn"):
        if getattr(module, option) is not None and getattr(module, option) is not False:
            raise RotationError(
                f"{type(module).__name__}: attention with {option} cannot be rotated"
            )
    rule = InputProjectionsRule(module.embed_dim, module._qkv_same_embed_dim)
    reads = ("in_proj_weight", "in_proj_bias") if rule.packed else _SEPARATE
    forward = partial(_projections, module)
    wrap(module, rule, target, PartialRotation(forward, reads, RotatedMultiheadAttention))
    wrap(module.out_proj, LinearRule(), target)


_Layer = nn.TransformerEncoderLayer | nn.TransformerDecoderLayer


@dataclass(frozen=True)
class FeedForwardRule(MLPRule):
    """For the feed-forward inside of such a layer."""

    ups: tuple[str, ...] = ("linear1",)
    down: str = "linear2"
    drops_out: bool = True

    def cuts(self, module: nn.Module, num_slices: int) -> list[Cut]:
        """As `MLPRule`; the layer's other dropouts are outside of the feed-forward."""
        return projections(module, self.ups, self.down)

    def require_known_dropout(self, module: nn.Module) -> None:
        """Any: that of the layer is outside of the feed-forward, but for the one of its width."""


class RotatedFeedForward(RotatedModule):
    """Mixed in before the layer's class: its feed-forward rotates, everything else is as it was."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The layer's output for this rank's part of the batch, as without rotation."""
        return super(RotatedModule, self).forward(*args, **kwargs)  # type: ignore[misc]  # that of the layer's class

    def _ff_block(self, x: Tensor) -> Tensor:
        is_encoder = isinstance(self, nn.TransformerEncoderLayer)
        last: nn.Module = self.dropout2 if is_encoder else self.dropout3  # type: ignore[attr-defined]
        output: Tensor = last(self.ring_forward(x))
        return output


def rotate_transformer_layer(layer: _Layer, target: RotationTarget) -> None:
    """Rotate its attentions and its feed-forward; its norms are left as they are.

    Raises:
        RotationError: it has an option that is not supported.
    """
    rotate_multihead(layer.self_attn, target)
    if isinstance(layer, nn.TransformerDecoderLayer):
        rotate_multihead(layer.multihead_attn, target)
    else:
        layer.activation_relu_or_gelu = 0  # torch's fused inference would read the whole parameters

    reads = ("linear1", "linear2", "dropout", "activation")
    wrap(
        layer,
        FeedForwardRule(),
        target,
        PartialRotation(partial(_feed_forward, layer), reads, RotatedFeedForward),
    )


def _feed_forward(layer: Any, x: Tensor) -> Tensor:
    output: Tensor = layer.linear2(layer.dropout(layer.activation(layer.linear1(x))))
    return output
