"""The kinds of modules whose way to rotate is known."""

from torch import nn
from torch.nn.utils.parametrize import is_parametrized

from gyre_trainer.layers.attention import Attention
from gyre_trainer.layers.conv import ConvRule
from gyre_trainer.layers.embedding import EmbeddingRule
from gyre_trainer.layers.experts.moe import Experts, ExpertsRule, MoE
from gyre_trainer.layers.linear import TransposedLinearRule, rotate_linear
from gyre_trainer.layers.mlp import MLP, GatedMLP, MLPRule
from gyre_trainer.layers.multihead import rotate_multihead
from gyre_trainer.layers.projections import is_transposed_linear
from gyre_trainer.layers.query_heads import rotate_attention
from gyre_trainer.layers.transformer import rotate_transformer_layer
from gyre_trainer.rotation.guard import own_class, sets_forward
from gyre_trainer.rotation.rotated_module import num_hooks_of
from gyre_trainer.rotation.rule import Rule
from gyre_trainer.rotation.wrap import RotationTarget, wrap

_LAYERS = (nn.Linear, nn.Embedding, nn.Conv1d, nn.Conv2d, nn.Conv3d)
_TORCHS = (nn.MultiheadAttention, nn.TransformerEncoderLayer, nn.TransformerDecoderLayer)
# What a forward does not call.
_NOT_CALLED = {"__init__", "__repr__", "__setstate__", "extra_repr", "reset_parameters", "inits"}
_OURS = (Attention, MLP, GatedMLP, Experts, MoE)


def rotate_known(module: nn.Module, target: RotationTarget) -> bool:
    """Rotate the module in the way of its kind, and return whether its kind is known.

    A module of an unknown kind is left as it is. A subclass with another forward is not of its
    parent's kind, and neither is a layer whose weight is computed from others.
    """
    if is_transposed_linear(module):
        wrap(module, TransposedLinearRule(), target)
        return True
    kind = next((kind for kind in (*_LAYERS, *_TORCHS, *_OURS) if isinstance(module, kind)), None)
    if kind is None or not has_code_of(module, kind) or computes_weights(module):
        return False
    if kind not in (*_LAYERS, nn.MultiheadAttention) and _has_hooks(module):
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


def has_code_of(module: nn.Module, kind: type[nn.Module]) -> bool:
    """Whether a module runs the code of a class: no subclass, nor the instance, overrides it."""
    cls = own_class(module)
    if sets_forward(module) or cls.forward is not kind.forward:  # type: ignore[attr-defined]
        return False
    named = {
        name
        for each in kind.__mro__[: kind.__mro__.index(nn.Module)]
        for name, value in vars(each).items()
        if callable(value) or isinstance(value, property)
    } - _NOT_CALLED
    subclasses = cls.__mro__[: cls.__mro__.index(kind)]
    return not any(name in vars(each) for each in subclasses for name in named)


def _has_hooks(module: nn.Module) -> bool:
    """Whether other code would see what slices compute: by a hook or a forward on a layer inside.

    The attention of torch's layers rotates by itself.
    """
    parts = [
        each
        for name, each in module.named_children()
        if not isinstance(each, nn.MultiheadAttention)
    ]
    inside = [each for part in parts for each in part.modules()]
    return any(sets_forward(each) or num_hooks_of(each) for each in inside)


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
