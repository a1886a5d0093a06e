"""Torch's transformer layers: their attentions rotate, and their feed-forward by hidden slices."""

from dataclasses import dataclass
from functools import partial
from typing import Any

from torch import Tensor, nn

from gyre_trainer.layers.dropout import use_equal_mask
from gyre_trainer.layers.mlp import MLPRule, use_slice_mask
from gyre_trainer.layers.multihead import rotate_multihead
from gyre_trainer.layers.projections import projections
from gyre_trainer.rotation.rotated_module import RotatedModule
from gyre_trainer.rotation.wrap import PartialRotation, RotationTarget, wrap
from gyre_trainer.shards.layout import Cut

_Layer = nn.TransformerEncoderLayer | nn.TransformerDecoderLayer


@dataclass(frozen=True)
class FeedForwardRule(MLPRule):
    """For the feed-forward inside of such a layer."""

    ups: tuple[str, ...] = ("linear1",)
    down: str = "linear2"
    dropouts: tuple[str, ...] = ("dropout",)

    def cuts(self, module: nn.Module, num_slices: int) -> list[Cut]:
        """As `MLPRule`; the layer's other dropouts are outside of the feed-forward."""
        use_slice_mask(module, "dropout")
        return projections(module, self.ups, self.down)

    def require_known_dropout(self, module: nn.Module) -> None:
        """Any: that of the layer is outside of the feed-forward, but for the one that is named."""


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
    batch_dim = 0 if layer.self_attn.batch_first else 1
    rotate_multihead(layer.self_attn, target)
    if isinstance(layer, nn.TransformerDecoderLayer):
        rotate_multihead(layer.multihead_attn, target)
    else:
        layer.activation_relu_or_gelu = 0  # torch's fused inference would read the whole parameters

    reads = ("linear1", "linear2", "dropout", "activation")
    wrap(
        layer,
        FeedForwardRule(batch_dim=batch_dim),
        target,
        PartialRotation(partial(_feed_forward, layer), reads, RotatedFeedForward),
    )
    if target.policy.dropout == "equal":
        for name in ("dropout1", "dropout2", "dropout3"):
            if hasattr(layer, name):
                use_equal_mask(getattr(layer, name), target.mesh, batch_dim)


def _feed_forward(layer: Any, x: Tensor) -> Tensor:
    output: Tensor = layer.linear2(layer.dropout(layer.activation(layer.linear1(x))))
    return output
