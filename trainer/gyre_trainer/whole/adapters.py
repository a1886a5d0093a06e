"""Adapters that peft adds to a model's layers: LoRA and (IA)3, whole on every rank.

They come before rotating. An adapted layer has the layer itself as `base_layer`, which rotates.
Adapters are small: a hop for each would cost more time than their memory is worth. Where nothing
else is trained they stay plain tensors, as peft saves them. Other methods of peft compute with
weights of the layer, which no rank has whole.
"""

from functools import cache, partial

from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn.modules.module import register_module_module_registration_hook

from gyre_trainer.errors import RotationError
from gyre_trainer.rotation.rotated_module import ShardedModule, own_class, refuse
from gyre_trainer.shards.initialisation import adapters_of

_KNOWN = ("peft.tuners.lora.", "peft.tuners.ia3.")  # their forwards call the layer below
_BEGIN_WITHOUT_WEIGHTS = frozenset(("gaussian", "eva", "orthogonal"))


def plain_adapters(model: nn.Module) -> set[nn.Parameter]:
    """The adapters' parameters, where they are plain tensors and all that is trained.

    An optimizer does not take plain tensors and DTensors together. From now on adapters are not
    merged into their layers.

    Raises:
        RotationError: adapters read the weights of a layer.
    """
    adapters = set[nn.Parameter]()
    for module in model.modules():
        own = adapters_of(module)
        if own:
            _require_whole(module)
        adapters.update(parameter for each in own for parameter in each.parameters())
    others = {p for p in model.parameters() if p.requires_grad} - adapters
    if others or any(isinstance(each, DTensor) for each in adapters):
        return set()
    return adapters


def _require_whole(module: nn.Module) -> None:
    """Refuse an adapted layer that would read shards, now or when it is merged."""
    kind = own_class(module)
    calls_layer = f"{kind.__module__}.".startswith(_KNOWN) and kind.__name__ != "ParamWrapper"
    if not calls_layer or getattr(module, "lora_magnitude_vector", None):
        raise RotationError(
            f"peft's {kind.__name__} reads the weights of its layer, and each rank has a shard. "
            "Use LoRA of layers (use_dora=False, no target_parameters), or (IA)3"
        )
    refusal = partial(
        refuse,
        f"{kind.__name__}: adapters cannot be merged into a layer that rotates. Save them by "
        "pretrained.save_pretrained(model, folder), and merge them in one process",
    )
    vars(module).update(merge=refusal, unmerge=refusal)


@cache
def refuse_later_adapters() -> None:
    """From now on refuse models of peft around rotated ones in this process.

    They would read or copy shards, or train prompts whose gradients nothing averages.
    """
    register_module_module_registration_hook(_refuse_around)


def _refuse_around(module: nn.Module, name: str, child: nn.Module | None) -> None:
    kind = own_class(module)
    if name not in ("base_model", "model") or not kind.__module__.startswith("peft."):
        return
    if child is not None and any(isinstance(each, ShardedModule) for each in child.modules()):
        raise RotationError(
            f"peft's {kind.__name__} cannot be put around {own_class(child).__name__}, which is "
            "rotated already. Call get_peft_model before rotate_all"
        )


def reads_weights(begins: object) -> bool:
    """Whether LoRA with that `init_lora_weights` reads the weights below, which some change."""
    return isinstance(begins, str) and begins not in _BEGIN_WITHOUT_WEIGHTS
