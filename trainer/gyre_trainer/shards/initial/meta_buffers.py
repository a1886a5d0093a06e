"""Buffers of models that were built on `meta`, such as the frequencies of rotary positions.

Some modules keep such tensors without registering them (CodeGen); they are made likewise.

Their values are in no checkpoint; a module's constructor computes them. So the constructor runs
again, for those modules alone.
"""

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_parameter_registration_hook

from gyre_trainer.errors import RotationError


def make_buffers(model: nn.Module, device: torch.device) -> None:
    """Compute the buffers that are on `meta`, as the constructors of their modules do.

    So are other tensors that modules keep, but for parameters.

    That takes a module whose constructor requires a `config` alone, as transformers' do: the one
    with the buffer, or the nearest one around it. The configuration is the one that it keeps, or
    else that of the nearest module around it.

    Raises:
        RotationError: a module is made in another way, or with another configuration; the message
            names the buffer.
    """
    constructed: dict[str, nn.Module | Exception] = {}
    for path, module in list(model.named_modules()):
        kept = {**module._buffers, **vars(module)}
        names = [name for name, tensor in kept.items() if _is_on_meta(tensor)]
        if names:
            name = f"{path}.{names[0]}".removeprefix(".")
            _take_tensors(module, _made_again(model, path, name, constructed), device)


def _is_on_meta(value: Any) -> bool:
    return isinstance(value, Tensor) and value.is_meta


def _outwards(path: str) -> list[str]:
    """The paths of a module and of those around it, the model's "" last."""
    names = path.split(".") if path else []
    return [".".join(names[:depth]) for depth in range(len(names), -1, -1)]


def _nearest_config(model: nn.Module, path: str) -> Any:
    """The `config` of the module at ``path``, or of the nearest one around it; None without one."""
    configs = (getattr(model.get_submodule(each), "config", None) for each in _outwards(path))
    return next((config for config in configs if config is not None), None)


def _made_again(
    model: nn.Module, path: str, name: str, constructed: dict[str, nn.Module | Exception]
) -> nn.Module:
    """Another module like the one at ``path``, with buffers on the CPU.

    Args:
        model: the model.
        path: of the module.
        name: of its buffer, for messages.
        constructed: by path, the modules that were made before, or why they cannot be.
    """
    module, failed = model.get_submodule(path), None
    for around in _outwards(path):
        if around not in constructed:
            constructed[around] = _constructed(model, around)
        made = constructed[around]
        if isinstance(made, Exception):
            failed = failed or made
            continue
        inside = path.removeprefix(around).removeprefix(".")
        found: nn.Module | None = dict(made.named_modules(remove_duplicate=False)).get(inside)
        # a module around it may have given it a buffer, as Falcon-H1's model does to its mixers
        if (
            found is not None
            and _is_like(module, found)
            and (_has_all(module, found) or not around)
        ):
            return found
    reason = "" if failed is None else f" ({type(failed).__name__}: {failed})"
    raise RotationError(
        f"buffer {name} is on meta, and {_own_class(module).__name__} cannot be made again from "
        f"the config that it, or a module around it, keeps. Create it on a real device{reason}"
    )


def _own_class(module: nn.Module) -> Any:
    """The class without those that this package mixes in, which are made in it."""
    return next(each for each in type(module).__mro__ if "gyre_trainer." not in each.__module__)


def _constructed(model: nn.Module, path: str) -> nn.Module | Exception:
    """Another module of the class and configuration of the one at ``path``, or why there is none.

    It is on the CPU; its parameters are on `meta`. Random numbers that it draws are drawn again
    later.
    """
    module, config = model.get_submodule(path), _nearest_config(model, path)
    accepted = inspect.signature(_own_class(module)).parameters
    required = {
        parameter.name
        for parameter in accepted.values()
        if parameter.default is parameter.empty
        and parameter.kind in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY)
    }
    known = {"config": config, "layer_idx": getattr(module, "layer_idx", None)}
    if not required <= known.keys() or "config" not in accepted or config is None:
        return TypeError(f"{_own_class(module).__name__} takes {', '.join(accepted) or 'nothing'}")
    arguments = {each: value for each, value in known.items() if each in accepted}
    with torch.device("cpu"), torch.random.fork_rng(devices=[]), _parameters_on_meta():
        try:
            made: nn.Module = _own_class(module)(**arguments)
        except Exception as error:  # foreign code, with a config that may not be its own
            return error
    return made


def _is_like(module: nn.Module, made: nn.Module) -> bool:
    """Whether both have one class, one shape of each parameter, and equal numbers and texts."""
    shapes = {each: parameter.shape for each, parameter in module.named_parameters()}
    own = _plain_values(module)
    return (
        type(made) is _own_class(module)
        and all(shapes.get(each, p.shape) == p.shape for each, p in made.named_parameters())
        and all(own.get(each, value) == value for each, value in _plain_values(made).items())
    )


def _has_all(module: nn.Module, made: nn.Module) -> bool:
    """Whether the second module has all buffers of the first one."""
    return module._buffers.keys() <= made._buffers.keys()


def _plain_values(module: nn.Module) -> dict[str, Any]:
    """Numbers and texts that a module keeps: another one was made with another configuration."""
    return {
        name: value
        for name, value in vars(module).items()
        if isinstance(value, (int, float, str)) and name != "training"
    }


@contextmanager
def _parameters_on_meta() -> Iterator[None]:
    """A context in which new modules have their parameters on `meta`, so that these cost nothing.

    Memory that a constructor asks for is given back before anything is written to it.
    """

    def on_meta(_module: nn.Module, _name: str, parameter: nn.Parameter) -> nn.Parameter:
        return nn.Parameter(parameter.to("meta"), parameter.requires_grad)

    handle = register_module_parameter_registration_hook(on_meta)  # type: ignore[arg-type]
    try:
        yield
    finally:
        handle.remove()


def _take_tensors(module: nn.Module, made: nn.Module, device: torch.device) -> None:
    """Replace the tensors on `meta` that are no parameters; one object stays one object."""
    moved: dict[int, Tensor] = {}

    def taken(value: Tensor) -> Tensor:
        if value.is_meta:
            raise RotationError(
                f"a buffer of {type(module).__name__} is on meta, and its constructor computes it "
                "from parameters; create it on a real device"
            )
        return moved.setdefault(id(value), value.to(device))

    for name, buffer in module._buffers.items():
        if _is_on_meta(buffer):
            found = made._buffers.get(name)
            assert buffer is not None
            if found is None or (found.shape, found.dtype) != (buffer.shape, buffer.dtype):
                raise RotationError(
                    f"buffer {name} of {type(module).__name__} is on meta, and its constructor "
                    f"now makes another one of that name. Create it on a real device."
                )
            module._buffers[name] = taken(found)
    for name, value in vars(module).items():
        if _is_on_meta(value) and isinstance(vars(made).get(name), Tensor):
            vars(module)[name] = taken(vars(made)[name])
