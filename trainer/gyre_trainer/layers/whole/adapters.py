"""Adapters that peft adds to a model's layers: whole on every rank, beside layers that rotate.

An adapted layer has the layer itself as `base_layer`, and names the modules with the parameters
beside it in `adapter_layer_names`. Adapters are small: a hop for each would cost more time than
their memory is worth. Where nothing else is trained they stay plain tensors, as peft saves them.
"""

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from gyre_trainer.errors import RotationError
from gyre_trainer.rotation.guard import own_class
from gyre_trainer.rotation.rotated_module import mix_in
from gyre_trainer.rotation.rule import parameter_at
from gyre_trainer.shards.local_shards import as_dtensor, local_of, place_of

BASE_LAYER = "base_layer"


def adapters_of(module: nn.Module) -> list[nn.Module]:
    """The adapters of an adapted layer; none for any other module.

    Raises:
        RotationError: its adapters read the weight of something else than a linear layer (DoRA).
    """
    if not is_adapted_layer(module):
        return []
    base: Any = module.base_layer
    if own_class(module).__name__ == "ParamWrapper":
        raise RotationError(
            f"peft adapts the parameter {module.parameter_name!r} of a {_inmost(base)} "
            "by itself (target_parameters), and puts another one in its place while the model "
            "runs, which rotation does not see. Adapt layers (target_modules)."
        )
    for found in _magnitudes(module):
        if own_class(found).__name__ != "DoraLinearLayer" or not isinstance(base, nn.Linear):
            raise RotationError(
                f"{type(module).__name__} has an adapter with a magnitude vector (DoRA), which "
                f"reads the whole weight of {type(base).__name__}; of a layer that is "
                "not linear use LoRA (use_dora=False)"
            )
    layer: Any = module
    own = (getattr(layer, name, None) for name in layer.adapter_layer_names)
    others = (getattr(layer, name, None) for name in getattr(layer, "other_param_names", ()))
    adapters = [each for each in own if isinstance(each, nn.Module)]
    return adapters + [each for each in others if isinstance(each, nn.ParameterDict)]


def is_adapted_layer(module: nn.Module) -> bool:
    """Whether it is a layer of peft, around the layer that it adapts."""
    return hasattr(module, BASE_LAYER) and isinstance(
        getattr(module, "adapter_layer_names", None), tuple
    )


def _inmost(layer: Any) -> str:
    """The class of the layer that all adapters are around."""
    while hasattr(layer, BASE_LAYER):
        layer = layer.base_layer
    return own_class(layer).__name__


def use_norms_of_shards(module: nn.Module) -> None:
    """Let DoRA's magnitudes of an adapted layer be those of a weight that is cut by rows."""
    for each in _magnitudes(module):
        if not isinstance(each, NormsOfShards):
            mix_in(each, NormsOfShards, "Sharded")


def _magnitudes(module: nn.Module) -> list[nn.Module]:
    found = getattr(module, "lora_magnitude_vector", None)
    return list(found.values()) if isinstance(found, nn.ModuleDict) else []


class NormsOfShards:
    """Mixed in before peft's DoRA of a linear layer: each rank computes the norms of its own rows.

    In each forward the ranks gather these norms, and the layer's bias: two numbers for each output
    feature.
    """

    def forward(self, x: Tensor, *, base_layer: nn.Module, **others: Any) -> Tensor:
        """As peft's, beside a layer that rotates."""
        weight, bias = parameter_at(base_layer, "weight"), parameter_at(base_layer, "bias")
        if not weight.is_floating_point():
            raise RotationError(
                "an adapter with a magnitude vector (DoRA) reads the weights of a layer that are "
                "quantized. Use LoRA (use_dora=False), or name the layer in `keep`."
            )
        if isinstance(bias, DTensor):
            bias = bias.full_tensor()
        layer = SimpleNamespace(weight=weight, bias=bias)
        output: Tensor = super().forward(x, base_layer=layer, **others)  # type: ignore[misc]
        return output

    @torch.no_grad()
    def get_weight_norm(
        self, weight: Tensor, lora_weight: Tensor, scaling: float, **others: Any
    ) -> Tensor:
        """The norm of each row of ``weight + scaling * lora_weight``, [rows]; peft detaches it."""
        place = place_of(weight) if isinstance(weight, DTensor) else None
        if place is not None and place.dim != 0:
            raise RotationError("DoRA does not go with a rule that cuts columns; use LoRA")
        here = slice(place.start, place.stop) if place else slice(None)
        rows = local_of(weight) + scaling * lora_weight[here]
        norms: Tensor = torch.linalg.norm(rows, dim=1)
        if not isinstance(weight, DTensor) or place is None:
            return norms
        sharded = as_dtensor(norms, weight.device_mesh, weight.placements, weight.shape[:1])
        return sharded.full_tensor()


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
            if isinstance(adapter, nn.Linear) and adapter.out_features != base.out_features:
                raise RotationError(
                    f"the adapter of {path} has {adapter.out_features} output features, but the "
                    f"layer has {base.out_features}: peft took this rank's shard for the layer. "
                    "Call get_peft_model first, then rotate."
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
