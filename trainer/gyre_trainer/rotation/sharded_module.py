"""What torch's methods for whole models do to modules with shards: `to`, `bfloat16`, `deepcopy`."""

import sys
from collections.abc import Callable, Iterator, Mapping
from copy import deepcopy
from typing import Any, NamedTuple, Self, cast

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from gyre_trainer.errors import RotationError
from gyre_trainer.shards.local_shards import converted_to, local_of, with_local
from gyre_trainer.shards.replaced_parameters import note_replaced
from gyre_trainer.shards.sharded_parameters import (
    convert_sharded,
    copy_sharded,
    note_successors,
    sharded_parameters_of,
    successor_of,
)

SAVE_ADVICE = (
    "Call gyre_trainer.pretrained.save_pretrained(model, folder) on all ranks, or "
    "torch.distributed.checkpoint.save; for one file, "
    "get_model_state_dict(model, options=StateDictOptions(full_state_dict=True))"
)

LOAD_ADVICE = (
    "Call gyre_trainer.pretrained.load(model, folder), or "
    "torch.distributed.checkpoint.state_dict.set_model_state_dict(model, state, "
    "options=StateDictOptions(full_state_dict=True))"
)


class ShardedModule:
    """The base of what is mixed in before a module's class when it is rotated, or kept whole."""

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        """Apply ``fn`` to all tensors inside; shards may take another dtype.

        `Module.to`, `bfloat16` and the like call this. Where the dtype changes, parameters are
        others afterwards: an optimizer that holds the old ones is refused at its next step.

        Raises:
            RotationError: it would move shards to another device, or convert them to integers, or
                those of few bits.
        """
        places = list(_places(cast("nn.Module", self)))
        for place in places:
            _require_convertible(place, fn)
        for place in places:
            place.put(None)
        try:
            super()._apply(fn, recurse)  # type: ignore[misc]
        finally:
            for place in places:
                place.put(place.parameter)
        for place in places:
            converted = _converted(place.parameter, fn)
            if converted is not place.parameter:
                note_replaced(place.parameter, place.name)
                place.put(converted)
        return self

    def state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """The state of the module, which `torch.distributed.checkpoint` saves.

        `torch.save` of it is refused: each rank would write its own shards alone.
        """
        state: dict[str, Any] = super().state_dict(*args, **kwargs)  # type: ignore[misc]
        for value in state.values():
            if isinstance(value, DTensor) and not isinstance(value, nn.Parameter):
                value.__reduce_ex__ = _refuse_to_pickle  # type: ignore[method-assign]
        return state

    def load_state_dict(self, state_dict: Mapping[str, Any], *args: Any, **kwargs: Any) -> Any:
        """Load a state of shards, as `torch.distributed.checkpoint` gives it.

        Raises:
            RotationError: a parameter is whole there, and cut here.
        """
        for name, parameter in cast("nn.Module", self).named_parameters():
            value = state_dict.get(name)
            if isinstance(parameter, DTensor) and type(value) in (Tensor, nn.Parameter):
                raise RotationError(
                    f"load_state_dict: {name} is a plain tensor, but the model is rotated (a "
                    f"DTensor of {tuple(parameter.shape)}). {LOAD_ADVICE}"
                )
        return super().load_state_dict(state_dict, *args, **kwargs)  # type: ignore[misc]

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        """A module with a copy of this rank's shards, on the same ring."""
        copy_shards(list(cast("nn.Module", self).parameters()), memo)
        return self._copy(memo)

    def _copy(self, memo: dict[int, Any], *without: str) -> Self:
        """A copy of the attributes but ``without``, once shards in them are in ``memo``."""
        copied = type(self).__new__(type(self))
        memo[id(self)] = copied
        state = {name: value for name, value in vars(self).items() if name not in without}
        vars(copied).update(deepcopy(state, memo))
        return copied


def _refuse_to_pickle(_protocol: object) -> Any:
    """What pickle calls of a shard in a state.

    Raises:
        RotationError: always.
    """
    raise RotationError(
        "model.state_dict() has the shards of this rank alone, and torch.save would lose the "
        f"others. {SAVE_ADVICE}"
    )


def refuse_own_saving(model: nn.Module) -> None:
    """Let `save_pretrained` of the models of transformers inside name the function to use."""
    library: Any = sys.modules.get("transformers.modeling_utils")
    for module in model.modules() if library else ():
        if isinstance(module, library.PreTrainedModel):
            cast("Any", module).save_pretrained = _refuse_save_pretrained


def _refuse_save_pretrained(*_args: object, **_options: object) -> None:
    """What a rotated model of transformers has in place of its own method.

    Raises:
        RotationError: always.
    """
    raise RotationError(
        "model.save_pretrained() would write the shards of this rank alone, because the model is "
        f"rotated. {SAVE_ADVICE}"
    )


def copy_shards(parameters: list[nn.Parameter], memo: dict[int, Any]) -> None:
    """Copy this rank's shards of all DTensors in ``parameters`` into ``memo``, each once."""
    for parameter in parameters:
        if not isinstance(parameter, DTensor) or id(parameter) in memo:
            continue
        sharded = sharded_parameters_of(parameter)
        if sharded is None:
            memo[id(parameter)] = with_local(parameter, parameter._local_tensor.clone())
        else:
            copied = memo[id(sharded)] = copy_sharded(sharded)
            for one, other in zip(sharded.parameters, copied.parameters, strict=True):
                memo[id(one)] = other


class _Place(NamedTuple):
    """Where a DTensor parameter is.

    Attributes:
        owner: the module that has it.
        last: its name there.
        name: its name in the module that is converted, for messages.
        parameter: the parameter.
    """

    owner: nn.Module
    last: str
    name: str
    parameter: Any

    def put(self, parameter: nn.Parameter | None) -> None:
        """Put another parameter there."""
        self.owner._parameters[self.last] = parameter


def _places(module: nn.Module) -> Iterator[_Place]:
    for path, child in module.named_modules():
        for last, parameter in child._parameters.items():
            if isinstance(parameter, DTensor):
                name = f"{type(module).__name__}.{path}.{last}".replace("..", ".")
                yield _Place(child, last, name, parameter)


def _require_convertible(place: _Place, fn: Callable[[Tensor], Tensor]) -> None:
    shard = local_of(place.parameter.detach())
    result = fn(shard.view(-1)[:0])
    if (result.dtype, result.device) == (shard.dtype, shard.device):
        return
    sharded = sharded_parameters_of(place.parameter)
    encoded = sharded is not None and not sharded.flat.is_floating_point()
    if result.device == shard.device and result.is_floating_point() and not encoded:
        return
    raise RotationError(
        f"{place.name} is rotated as {shard.dtype} on {shard.device} and cannot become "
        f"{result.dtype} on {result.device}. Move or convert a model before it is rotated."
    )


@torch.no_grad()
def _converted(parameter: Any, fn: Callable[[Tensor], Tensor]) -> nn.Parameter:
    """The parameter after a conversion; the same one where nothing changes.

    The parameters that rest in one buffer are converted together.
    """
    shard = local_of(parameter.detach())
    if fn(shard.view(-1)[:0]).dtype == shard.dtype:
        same: nn.Parameter = parameter
        return same
    converted = successor_of(parameter)  # a tied one was converted at its other place
    if converted is None:
        sharded = sharded_parameters_of(parameter)
        if sharded is None:
            converted = converted_to(parameter, fn(shard))
            note_successors([parameter], [converted])
        else:
            convert_sharded(sharded, fn)
            converted = successor_of(parameter)
    assert converted is not None
    return converted
