"""Adapters that peft adds to a model's layers: whole on every rank, beside layers that rotate.

An adapted layer has the layer itself as `base_layer`, and names the modules with the parameters
beside it in `adapter_layer_names`. Adapters are small: a hop for each would cost more time than
their memory is worth. Where nothing else is trained they stay plain tensors, as peft saves them.
"""

from collections.abc import Iterator

from torch import nn
from torch.distributed.tensor import DTensor

from gyre_trainer.errors import RotationError

BASE_LAYER = "base_layer"


def adapters_of(module: nn.Module) -> list[nn.Module]:
    """The adapters of an adapted layer; none for any other module.

    Raises:
        RotationError: its adapters read the layer's weight, as DoRA's do.
    """
    names = getattr(module, "adapter_layer_names", ())
    if not hasattr(module, BASE_LAYER) or not isinstance(names, tuple):
        return []
    if len(getattr(module, "lora_magnitude_vector", None) or ()):
        raise RotationError(
            f"{type(module).__name__} has an adapter with a magnitude vector (DoRA), which reads "
            "the whole weight of the layer that rotates; use LoRA (use_dora=False)"
        )
    return [each for name in names if isinstance(each := getattr(module, name, None), nn.Module)]


def adapter_parameters(model: nn.Module) -> Iterator[nn.Parameter]:
    """The parameters of all adapters in a model."""
    for module in model.modules():
        for adapter in adapters_of(module):
            yield from adapter.parameters()


def require_whole(model: nn.Module) -> None:
    """Refuse adapters that were made for a shard of their layer instead of the whole.

    Raises:
        RotationError: names the first.
    """
    for path, module in model.named_modules():
        base = getattr(module, BASE_LAYER, None)
        if not isinstance(base, nn.Linear):
            continue
        for adapter in getattr(module, "lora_B", {}).values():
            if adapter.out_features != base.out_features:
                raise RotationError(
                    f"the adapter of {path} has {adapter.out_features} output features, but the "
                    f"layer has {base.out_features}: peft took this rank's shard for the layer; "
                    "call get_peft_model first, then rotate"
                )


def plain_adapters(model: nn.Module) -> list[nn.Parameter]:
    """The adapters' parameters, where they are plain tensors with values and all that is trained.

    An optimizer does not take plain tensors and DTensors together.
    """
    adapters = list(dict.fromkeys(adapter_parameters(model)))
    others = {p for p in model.parameters() if p.requires_grad} - set(adapters)
    if others or any(isinstance(each, DTensor) or each.is_meta for each in adapters):
        return []
    return adapters
