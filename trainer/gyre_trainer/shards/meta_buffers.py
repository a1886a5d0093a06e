"""Buffers of models that were built on `meta`, such as the frequencies of rotary positions.

Their values are in no checkpoint; a module's constructor computes them. So the constructor runs
again, for those modules alone.
"""

import inspect
from typing import Any

import torch
from torch import Tensor, nn

from gyre_trainer.errors import RotationError

# What a constructor may require: the values are then those that the module itself was made with.
# An attribute of another name might mean something else than the argument does.
_KNOWN_ARGUMENTS = ("config", "layer_idx")


def make_buffers(model: nn.Module, device: torch.device) -> None:
    """Compute the buffers that are on `meta`, as the constructors of their modules do.

    That takes modules whose constructors require a `config` alone, as transformers' do, and that
    keep it. Tensors that such a module keeps beside its buffers are computed with them.

    Raises:
        RotationError: a module is made in another way; the message names the buffer.
    """
    for path, module in list(model.named_modules()):
        names = [name for name, buffer in module._buffers.items() if _is_on_meta(buffer)]
        if names:
            made = _made_again(module, f"{path}.{names[0]}".removeprefix("."))
            _take_tensors(module, made, device)


def _is_on_meta(value: Any) -> bool:
    return isinstance(value, Tensor) and value.is_meta


def _made_again(module: nn.Module, name: str) -> nn.Module:
    """Another module of the same class and configuration, on the CPU.

    Random numbers that it draws are drawn again later.
    """
    # classes that this package mixes in are made in it
    classes = [each for each in type(module).__mro__ if "gyre_trainer." not in each.__module__]
    accepted = inspect.signature(classes[0]).parameters
    required = {
        parameter.name
        for parameter in accepted.values()
        if parameter.default is parameter.empty
        and parameter.kind in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY)
    }
    arguments = {each: getattr(module, each, None) for each in _KNOWN_ARGUMENTS if each in accepted}
    if not required <= set(_KNOWN_ARGUMENTS) or arguments.get("config") is None:
        raise RotationError(
            f"buffer {name} is on meta, and {classes[0].__name__} cannot be made again from a "
            "config that it keeps; create it on a real device"
        )
    with torch.device("cpu"), torch.random.fork_rng(devices=[]):
        made: nn.Module = classes[0](**arguments)
    return made


def _take_tensors(module: nn.Module, made: nn.Module, device: torch.device) -> None:
    """Replace the tensors on `meta` that are no parameters; one object stays one object."""
    moved: dict[int, Tensor] = {}

    def taken(value: Tensor) -> Tensor:
        return moved.setdefault(id(value), value.to(device))

    for name, buffer in module._buffers.items():
        if _is_on_meta(buffer):
            found = made._buffers.get(name)
            assert buffer is not None
            if found is None or (found.shape, found.dtype) != (buffer.shape, buffer.dtype):
                raise RotationError(
                    f"buffer {name} of {type(module).__name__} is on meta, and its constructor "
                    f"now makes another one of that name; create it on a real device"
                )
            module._buffers[name] = taken(found)
    for name, value in vars(module).items():
        if _is_on_meta(value) and isinstance(vars(made).get(name), Tensor):
            vars(module)[name] = taken(vars(made)[name])
