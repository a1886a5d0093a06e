"""Adapters that peft adds to a model's layers: LoRA and (IA)3, whole on every rank.

An adapted layer has the layer itself as `base_layer`, which rotates, and names the modules with its
own parameters in `adapter_layer_names`. Adapters are small: a hop for each would cost more time
than their memory is worth. Where nothing else is trained they stay plain tensors, as peft saves
them. Other methods of peft compute with weights of the layer, which no rank has whole.
"""

from functools import partial
from typing import Any

from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn.modules.module import register_module_module_registration_hook

from gyre_trainer.errors import RotationError
from gyre_trainer.rotation.rotated_module import own_class
from gyre_trainer.torch_internals import child_of

BASE_LAYER = "base_layer"
# Modules of peft hold the module that they wrap under one of these names.
_AROUND = frozenset((BASE_LAYER, "original_module", "base_model", "model"))
_KNOWN = ("peft.tuners.lora.", "peft.tuners.ia3.")  # their forwards call the layer below
_BEGIN_WITHOUT_WEIGHTS = frozenset(("gaussian", "eva", "orthogonal"))
_is_noticing = False


def adapters_of(module: nn.Module) -> list[nn.Module]:
    """The adapters of an adapted layer; none for any other module.

    Raises:
        RotationError: its adapters read the layer's weights.
    """
    if not is_adapted_layer(module):
        return []
    layer: Any = module
    kind = own_class(module)
    if not _calls_layer(kind) or getattr(layer, "lora_magnitude_vector", None):
        raise RotationError(
            f"peft's {kind.__name__} reads the weights of its layer, and each rank has a shard. "
            "Use LoRA of layers (use_dora=False, no target_parameters), or (IA)3"
        )
    for name in ("merge", "unmerge"):
        vars(module)[name] = partial(_refuse_to_merge, module)
    own = (getattr(layer, name, None) for name in layer.adapter_layer_names)
    return [each for each in own if isinstance(each, nn.Module)]


def _calls_layer(kind: type) -> bool:
    """Whether the forward of a class of peft calls the layer below, and reads nothing of it."""
    return f"{kind.__module__}.".startswith(_KNOWN) and kind.__name__ != "ParamWrapper"


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
        RotationError: its adapter would read or copy sharded weights.
    """
    kind = own_class(module)
    if name not in _AROUND or child is None or child_of(module, name) is not None:
        return
    if not kind.__module__.startswith("peft.") or not any(
        isinstance(each, DTensor) for each in child.parameters()
    ):
        return
    inside = own_class(child) if name == "base_model" else kind
    if not _calls_layer(inside):
        raise RotationError(
            f"peft's {kind.__name__} cannot be put around {own_class(child).__name__}, which is "
            "rotated already. Use LoRA of layers, or (IA)3; prompts need get_peft_model first"
        )
    if name == BASE_LAYER:
        vars(module)["update_layer"] = partial(_update_layer, module)


def _update_layer(module: Any, *args: Any, **kwargs: Any) -> None:
    """As peft's: add an adapter to a layer that rotates.

    Raises:
        RotationError: it begins with the layer's weights, or computes with them.
    """
    for each in (*args, *kwargs.values()):
        begins = getattr(each, "init_lora_weights", False)
        if reads_weights(begins) or getattr(each, "use_dora", False):
            raise RotationError(
                f"{own_class(module).__name__}: the adapter reads weights (got init_lora_weights="
                f"{begins!r}, use_dora={each.use_dora}), but the layer is rotated already. Set "
                "use_dora=False, and call get_peft_model before rotate_all"
            )
    type(module).update_layer(module, *args, **kwargs)


def reads_weights(begins: object) -> bool:
    """Whether LoRA with that `init_lora_weights` reads the weights below, which some change."""
    return isinstance(begins, str) and begins not in _BEGIN_WITHOUT_WEIGHTS


def is_adapted_layer(module: nn.Module) -> bool:
    """Whether it is a layer of peft, around the layer that it adapts."""
    return hasattr(module, BASE_LAYER) and isinstance(
        getattr(module, "adapter_layer_names", None), tuple
    )


def plain_adapters(model: nn.Module) -> list[nn.Parameter]:
    """The adapters' parameters, where they are plain tensors with values and all that is trained.

    An optimizer does not take plain tensors and DTensors together.
    """
    modules = [adapter for module in model.modules() for adapter in adapters_of(module)]
    adapters = list(dict.fromkeys(each for module in modules for each in module.parameters()))
    others = {p for p in model.parameters() if p.requires_grad} - set(adapters)
    if others or any(isinstance(each, DTensor) or each.is_meta for each in adapters):
        return []
    return adapters
