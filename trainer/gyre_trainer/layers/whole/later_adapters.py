"""Adapters that peft adds to layers that rotate already, and what peft does to their weights later.

Peft reads the weights of a layer when it adds some adapters (DoRA, PiSSA), and writes them when it
merges adapters. Each rank has a shard alone. So meanwhile a plain copy of the layer, with the whole
weights, stands in its place; what peft has written to it then goes into each rank's own shard. All
ranks add, merge and unmerge alike, as they call modules alike.

Torch tells of each module that is put into another one, so peft needs no change.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from copy import copy
from itertools import chain
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn.modules.module import register_module_module_registration_hook

from gyre_trainer.errors import RotationError
from gyre_trainer.layers.whole.adapters import (
    BASE_LAYER,
    adapters_of,
    is_adapted_layer,
    use_norms_of_shards,
)
from gyre_trainer.rotation.guard import own_class
from gyre_trainer.rotation.rotated_module import mix_in, uncompiled
from gyre_trainer.shards.local_shards import local_of, place_of

# Ways to begin LoRA that do not read the layer's weights, and folders of other methods that do not.
_BEGIN_WITHOUT = frozenset(("gaussian", "eva", "orthogonal"))
_ADDED_WITHOUT = frozenset(
    ("adalora", "boft", "c3a", "fourierft", "hra", "ia3", "loha", "lokr", "miss", "oft", "randlora")
) | {"road", "vblora", "vera", "waveft"}
_REFUSED = {
    "AdaptionPromptModel": (
        "it never calls the rotated model, so gradients of the adapter would not be averaged; add "
        "the adapter before rotating"
    ),
    "LNTuningLayer": (
        "it trains a copy of the norm, which is rotated already; add the adapter before rotating"
    ),
    "ModulesToSaveWrapper": (
        "modules_to_save trains a copy of the module, which is rotated already; add the adapter "
        "before rotating"
    ),
    "ParamWrapper": (
        "target_parameters puts another parameter into it while the model runs, which rotation "
        "does not see; adapt layers (target_modules)"
    ),
}
# Under these names modules of peft have what they are put around.
_NAMES = frozenset((BASE_LAYER, "original_module", "base_model", "model"))
_is_noticing = False


def notice_later_adapters() -> None:
    """From now on see to what peft adds to rotated modules of this process."""
    global _is_noticing  # noqa: PLW0603  # torch has one list of these hooks for the process
    if not _is_noticing:
        _is_noticing = True
        register_module_module_registration_hook(_notice)


def reads_whole_weights(layer: nn.Module) -> None:
    """Let an adapted layer be merged where the layer below it rotates."""
    if is_adapted_layer(layer) and own_class(layer).__name__ not in _REFUSED:
        _read_whole(layer)


def _read_whole(layer: nn.Module) -> None:
    if not isinstance(layer, ReadsWholeWeights):
        mix_in(layer, ReadsWholeWeights, "Whole")


def _notice(module: nn.Module, name: str, child: nn.Module | None) -> None:
    """See to a child that a module of peft is given first, under one of the names."""
    if name not in _NAMES or child is None or name in module._modules:
        return
    if not own_class(module).__module__.startswith("peft."):
        return
    if not any(isinstance(each, DTensor) for each in child.parameters()):
        return
    kind = own_class(module).__name__
    if kind in _REFUSED:
        raise RotationError(
            f"peft's {kind} cannot be put around {own_class(child).__name__}, which is rotated "
            f"already: {_REFUSED[kind]}"
        )
    if name == "base_model":
        module.register_forward_pre_hook(_average_outside)
    elif name == BASE_LAYER:
        _read_whole(module)


class ReadsWholeWeights:
    """Mixed in before peft's class of an adapted layer, above a layer that rotates."""

    def update_layer(self, *args: Any, **kwargs: Any) -> None:
        """As peft's: add an adapter."""
        layer: Any = self
        with _whole(layer, "the adapter reads") if _reads(layer, args, kwargs) else nullcontext():
            super().update_layer(*args, **kwargs)  # type: ignore[misc]
        adapters_of(layer)
        use_norms_of_shards(layer)

    def merge(self, *args: Any, **kwargs: Any) -> None:
        """As peft's; each rank's shard has the merged values."""
        layer: Any = self
        with _whole(layer, "merging changes"):
            super().merge(*args, **kwargs)  # type: ignore[misc]

    def unmerge(self, *args: Any, **kwargs: Any) -> None:
        """As peft's; each rank's shard has the values of before."""
        layer: Any = self
        with _whole(layer, "merging changes"):
            super().unmerge(*args, **kwargs)  # type: ignore[misc]


def _reads(layer: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Whether an adapter that these arguments add may read the layer's weights."""
    method = own_class(layer).__module__.removeprefix("peft.tuners.").partition(".")[0]
    if method != "lora":
        return method not in _ADDED_WITHOUT
    for each in (*args, *kwargs.values()):
        begins = getattr(each, "init_lora_weights", False)
        if getattr(each, "use_dora", False):
            return True
        if isinstance(begins, str) and begins not in _BEGIN_WITHOUT:
            return True
    return False


@contextmanager
def _whole(adapted: Any, what: str) -> Iterator[None]:
    """Let a plain layer with whole weights stand below whole adapters; write back what changes.

    Collective, but where one stands there already.
    """
    inside = chain.from_iterable(each.modules() for each in adapters_of(adapted))
    adapters = [(each, name) for each in inside for name in _sharded(each)]
    while hasattr(adapted.base_layer, BASE_LAYER):
        adapted = adapted.base_layer
    rotated = adapted.base_layer
    names = _sharded(rotated)
    if not all(rotated._parameters[name].is_floating_point() for name in names):
        raise RotationError(
            f"{what} the weights of {own_class(rotated).__name__}, which are quantized. Use an "
            "adapter that does not read them and do not merge it, or name the layer in `keep`."
        )
    plain = rotated
    if names:
        plain = copy(rotated)
        plain.__class__ = own_class(rotated)
        plain._parameters = dict(rotated._parameters)
    places = [(plain, name) for name in names]
    adapted._modules[BASE_LAYER] = plain
    with ExitStack() as stack:
        for owner, name in (*places, *adapters):
            stack.enter_context(_whole_parameter(owner, name))
        try:
            yield
        finally:
            adapted._modules[BASE_LAYER] = rotated


def _sharded(module: nn.Module) -> list[str]:
    """The names of a module's own parameters that are DTensors."""
    return [name for name, each in module._parameters.items() if isinstance(each, DTensor)]


@contextmanager
def _whole_parameter(owner: nn.Module, name: str) -> Iterator[None]:
    """Let the whole parameter stand in the place of this rank's shard; write back what changes."""
    sharded: Any = owner._parameters[name]
    whole = sharded.detach().full_tensor()
    before = whole.clone()
    plain = owner._parameters[name] = nn.Parameter(whole, sharded.requires_grad)
    try:
        yield
    finally:
        owner._parameters[name] = sharded
    if not torch.equal(plain.detach(), before):
        _write(sharded, plain.detach())


@torch.no_grad()
def _write(parameter: DTensor, values: torch.Tensor) -> None:
    """Write this rank's part of whole values."""
    place = place_of(parameter)
    if place is not None:
        values = values.narrow(place.dim, place.start, place.stop - place.start)
    local_of(parameter).copy_(values)


@uncompiled
def _average_outside(peft_model: nn.Module, _args: Any) -> None:
    """Average the gradients of what trains in a peft model beside the model inside that rotates.

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
