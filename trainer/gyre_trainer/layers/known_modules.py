"""The kinds of modules whose way to rotate is known."""

from torch import nn
from torch.nn.utils.parametrize import is_parametrized

from gyre_trainer.layers.attention import Attention
from gyre_trainer.layers.conv import ConvRule
from gyre_trainer.layers.embedding import EmbeddingRule
from gyre_trainer.layers.encoded.foreign_codes import rotate_foreign
from gyre_trainer.layers.experts.moe import Experts, ExpertsRule, MoE
from gyre_trainer.layers.linear import TransposedLinearRule, rotate_linear
from gyre_trainer.layers.mlp import MLP, GatedMLP, MLPRule
from gyre_trainer.layers.multihead import rotate_multihead
from gyre_trainer.layers.projections import is_transposed_linear
from gyre_trainer.layers.query_heads import rotate_attention
from gyre_trainer.layers.transformer import rotate_transformer_layer
from gyre_trainer.rotation.rule import Rule
from gyre_trainer.rotation.wrap import RotationTarget, wrap

_LAYERS = (nn.Linear, nn.Embedding, nn.Conv1d, nn.Conv2d, nn.Conv3d)
_TORCHS = (nn.MultiheadAttention, nn.TransformerEncoderLayer, nn.TransformerDecoderLayer)
_OURS = (Attention, MLP, GatedMLP, Experts, MoE)


def rotate_known(module: nn.Module, target: RotationTarget) -> bool:
    """Rotate the module in the way of its kind, and return whether its kind is known.

    A module of an unknown kind is left as it is. A subclass with another forward is not of its
    parent's kind, and neither is a layer whose weight is computed from others.
    """
    if rotate_foreign(module, target):
        return True
    if is_transposed_linear(module):
        wrap(module, TransposedLinearRule(), target)
        return True
    kind = next((kind for kind in (*_LAYERS, *_TORCHS, *_OURS) if isinstance(module, kind)), None)
    if kind is None or type(module).forward is not kind.forward or computes_weights(module):
        return False
    match module:
        case nn.Linear():
            rotate_linear(module, target)
        case Attention():
            rotate_attention(module, target)
        case nn.MultiheadAttention():
            rotate_multihead(module, target)
        case nn.TransformerEncoderLayer() | nn.TransformerDecoderLayer():
            rotate_transformer_layer(module, target)
        case MoE():
            wrap(module.experts, ExpertsRule(), target)  # the router stays whole
        case _:
            wrap(module, _rule_of(module), target)
    return True


def computes_weights(module: nn.Module) -> bool:
    """Whether the weight of a layer is computed from others: by a parametrization, or by a hook.

    Such a hook is that of `nn.utils.weight_norm` or `nn.utils.spectral_norm`.
    """
    return is_parametrized(module) or (
        isinstance(module, _LAYERS) and "weight" not in module._parameters
    )


def is_of_known_class(module: nn.Module) -> bool:
    """Whether the module's class, or one that it derives from, is among the known kinds."""
    return isinstance(module, (*_LAYERS, *_TORCHS, *_OURS))


def _rule_of(module: nn.Module) -> Rule:
    match module:
        case nn.Embedding():
            return EmbeddingRule(module.num_embeddings, module.padding_idx)
        case nn.Conv1d() | nn.Conv2d() | nn.Conv3d():
            return ConvRule(module)
        case GatedMLP():
            return MLPRule(ups=("gate", "up"))
        case MLP():
            return MLPRule()
        case _:
            return ExpertsRule()
