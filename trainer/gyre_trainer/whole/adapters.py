"""Adapters that peft adds to a model's layers: whole on every rank, next to layers that rotate.

An adapted layer has the layer itself as `base_layer`, and names the modules with the parameters
beside it in `adapter_layer_names`. Adapters are small: a hop for each would cost more time than
their memory is worth. Where nothing else is trained they stay plain tensors, as peft saves them.
"""

from collections.abc import Iterator
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.modules.module import register_module_module_registration_hook

from gyre_trainer.errors import RotationError
from gyre_trainer.rotation.rotated_module import mix_in, own_class, uncompiled
from gyre_trainer.rotation.rule import parameter_at
from gyre_trainer.shards.layout import as_dtensor, local_of, place_of

BASE_LAYER = "base_layer"
# Modules of peft hold the module that they wrap under one of these names.
_AROUND = frozenset((BASE_LAYER, "original_module", "base_model", "model"))
_LATER = ("peft.tuners.lora.", "peft.tuners.ia3.")  # their first values need no weights
# Their forwards call the layer below, and do not read its weights.
_CALLING = (*_LATER, *(f"peft.tuners.{name}." for name in ("adalora", "loha", "lokr", "vera")))
_BEGIN_WITHOUT_WEIGHTS = frozenset(("gaussian", "eva", "orthogonal"))
_is_noticing = False


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
    for name in ("merge", "unmerge"):
        vars(module)[name] = partial(_refuse_to_merge, module)
    adapters = [each for each in own if isinstance(each, nn.Module)]
    return adapters + [each for each in others if isinstance(each, nn.ParameterDict)]


def _refuse_to_merge(module: nn.Module, *_args: Any, **_kwargs: Any) -> None:
    """Stands in the place of peft's methods that merge adapters into a sharded layer.

    Raises:
        RotationError: always.
    """
    raise RotationError(
        f"{own_class(module).__name__}: adapters cannot be merged into a layer that rotates. Save "
        "them by pretrained.save_pretrained(model, folder), and merge them in one process"
    )


def notice_later_adapters() -> None:
    """From now on see to what peft puts around rotated modules of this process."""
    global _is_noticing  # noqa: PLW0603  # torch has one list of these hooks for the process
    if not _is_noticing:
        _is_noticing = True
        register_module_module_registration_hook(_notice)


def _notice(module: nn.Module, name: str, child: nn.Module | None) -> None:
    """See to a child that a module of peft is given first, under one of these names.

    Raises:
        RotationError: its adapter would read or copy weights that are sharded.
    """
    kind = own_class(module)
    if name not in _AROUND or child is None or name in module._modules:
        return
    if not kind.__module__.startswith("peft.") or not any(
        isinstance(each, DTensor) for each in child.parameters()
    ):
        return
    if name == "base_model":
        module.register_forward_pre_hook(_average_outside)
    elif not f"{kind.__module__}.".startswith(_LATER) or kind.__name__ == "ParamWrapper":
        raise RotationError(
            f"peft's {kind.__name__} cannot be put around {own_class(child).__name__}, which is "
            "rotated already: LoRA and (IA)3 alone can be. Call get_peft_model first, then rotate"
        )
    elif name == BASE_LAYER:
        vars(module)["update_layer"] = partial(_update_layer, module)


def _update_layer(module: Any, *args: Any, **kwargs: Any) -> None:
    """As peft's: add an adapter to a layer that rotates.

    Raises:
        RotationError: it begins with the layer's weights, or computes with them.
    """
    for each in (*args, *kwargs.values()):
        begins = getattr(each, "init_lora_weights", False)
        reads = isinstance(begins, str) and begins not in _BEGIN_WITHOUT_WEIGHTS
        if reads or getattr(each, "use_dora", False):
            raise RotationError(
                f"{own_class(module).__name__}: the adapter reads weights (got init_lora_weights="
                f"{begins!r}, use_dora={each.use_dora}), but the layer is rotated already. Call "
                "get_peft_model first, then rotate"
            )
    type(module).update_layer(module, *args, **kwargs)


@uncompiled
def _average_outside(peft_model: nn.Module, _args: Any) -> None:
    """Average the gradients of parameters of a peft model outside of the model that rotates.

    Such are prompts, and the classifier of X-LoRA.
    """
    rotated = next((m for m in peft_model.modules() if "grad_averaging" in vars(m)), None)
    if rotated is None or rotated is peft_model or not torch.is_grad_enabled():
        return
    averaging: Any = rotated.grad_averaging
    inside = {id(each) for each in rotated.parameters()}
    averaging.add(
        [
            each
            for each in peft_model.parameters()
            if each.requires_grad and id(each) not in inside and each not in averaging
        ]
    )


def names_of_read_base(module: nn.Module) -> list[str]:
    """The parameters of the layer below an adapted layer that its forward reads; others call it."""
    if not is_adapted_layer(module) or f"{own_class(module).__module__}.".startswith(_CALLING):
        return []
    inmost, path = module, ""
    while hasattr(inmost, BASE_LAYER):
        inmost, path = inmost.get_submodule(BASE_LAYER), f"{path}{BASE_LAYER}."
    return [f"{path}{name}" for name, each in inmost.named_parameters(recurse=False) if each.dim()]


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
        """As peft does, next to a layer that rotates."""
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
        adapters_of(module)
        if any(not isinstance(each, NormsOfShards) for each in _magnitudes(module)):
            raise RotationError(
                f"the adapter of {path} has a magnitude vector (DoRA), which reads the weights. "
                "Call get_peft_model first, then rotate."
            )
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
