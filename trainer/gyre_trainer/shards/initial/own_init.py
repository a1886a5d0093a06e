"""Initial values as a model's own `_init_weights(module)` gives them, shard by shard.

Transformers' models have such a method, and many others: it is called for each module, children
first, and changes parameters of that module in place. Each call is made twice. The first one runs
on `meta`, where nothing is computed, and shows which parameters change. The second one changes
whole parameters in memory that is given back after it, when each rank has taken its shard. So the
values are those of a single process, and a rank holds one module's parameters whole at a time.
"""

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

from gyre_trainer.errors import RotationError
from gyre_trainer.shards.local_shards import place_of

_Init = Callable[[nn.Module], object]


@dataclass(frozen=True, slots=True)
class _Target:
    """A parameter, and what stands in its place meanwhile.

    Attributes:
        parameter: as the rank keeps it.
        twin: of its shape and dtype, on `meta`.
        places: the modules that have it, by their paths, and its name in each.
        first: the names of the first place, and of those that the model's constructor ties to it.
    """

    parameter: nn.Parameter
    twin: nn.Parameter
    places: list[tuple[str, nn.Module, str]]
    first: set[str] = field(default_factory=set)

    @property
    def name(self) -> str:
        path, _, name = self.places[0]
        return _joined(path, name)

    def put(self, parameter: nn.Parameter) -> None:
        for _, module, name in self.places:
            module._parameters[name] = parameter

    def is_first_in(self, path: str) -> bool:
        """Whether its first place, or one tied to it since, is in the module of this path."""
        return not path or any(name.startswith(f"{path}.") for name in self.first)


def _joined(path: str, name: str) -> str:
    return f"{path}.{name}".removeprefix(".")


def has_own_init(model: nn.Module) -> bool:
    """Whether a model has a method `_init_weights`."""
    return callable(getattr(model, "_init_weights", None))


@torch.no_grad()
def fill_by_own_init(model: nn.Module, *, seed: int) -> set[str]:
    """Fill this rank's shards with the values of `_init_weights`, after `torch.manual_seed(seed)`.

    A tied parameter has the values of its first place, as if it had been tied afterwards. Of places
    that the model's constructor ties, as BART's does, the last one's values stay, as they do where
    the library draws them. Random numbers are drawn on the CPU, and later ones are as if none had
    been drawn here.

    Returns:
        The names of the parameters that it has filled.

    Raises:
        RotationError: a value depends on one that the parameter had before.
    """
    targets = _targets(model)
    filled: set[str] = set()
    with torch.random.fork_rng(devices=[]), _replaced(targets):
        torch.default_generator.manual_seed(seed)
        for path, module, init in _calls("", model, model._init_weights, _seen(model)):  # type: ignore[arg-type]
            changed = _changed_by(init, module, targets)
            wholes = [_whole(target) for target in changed]
            init(module)
            for target, whole in zip(changed, wholes, strict=True):
                target.put(target.twin)
                if target.is_first_in(path):
                    _take_shard(target, whole.data)
                    filled.add(target.name)
    return filled


def _targets(model: nn.Module) -> list[_Target]:
    found: dict[nn.Parameter, _Target] = {}
    for path, module in model.named_modules():
        for name, parameter in module._parameters.items():
            if parameter is None:
                continue
            if parameter not in found:
                meta = torch.empty(parameter.shape, dtype=parameter.dtype, device="meta")
                found[parameter] = _Target(parameter, nn.Parameter(meta), [])
            found[parameter].places.append((path, module, name))
    _find_first(model, list(found.values()))
    return list(found.values())


def _find_first(model: nn.Module, targets: Sequence[_Target]) -> None:
    """Note for each target which of its places are tied to the first one from the beginning."""
    is_tied = any(len(target.places) > 1 for target in targets)
    beginnings = _parameters_of_constructor(model) if is_tied else {}
    for target in targets:
        target.first.add(target.name)
        first = beginnings.get(target.name)
        names = [_joined(path, name) for path, _, name in target.places]
        target.first.update(n for n in names if first is not None and beginnings.get(n) is first)


def _parameters_of_constructor(model: nn.Module) -> dict[str, nn.Parameter]:
    """The parameters, on `meta`, of another model of the same configuration, before its ties.

    Most models are tied after they were initialised, by a method `tie_weights`; the constructor of
    some does it. None are returned where a configuration alone does not make the model.
    """
    cls: Any = next(c for c in type(model).__mro__ if "gyre_trainer." not in c.__module__)
    without_init = next(
        (
            context
            for each in cls.__mro__
            if (context := getattr(sys.modules.get(each.__module__), "no_init_weights", None))
        ),
        nullcontext,
    )
    try:
        with torch.device("meta"), torch.random.fork_rng(devices=[]), without_init():
            made: nn.Module = cls(model.config)
    except Exception:  # foreign code, that may take other arguments
        return {}
    return dict(made.named_parameters(remove_duplicate=False))


@contextmanager
def _replaced(targets: Sequence[_Target]) -> Iterator[None]:
    """A context in which the twins are the model's parameters."""
    for target in targets:
        target.put(target.twin)
    try:
        yield
    finally:
        for target in targets:
            target.put(target.parameter)


def _seen(model: nn.Module) -> set[nn.Module] | None:
    """Takes the modules that had their turn, where the library marks them; None without marks."""
    return set() if callable(getattr(model, "_initialize_weights", None)) else None


def _calls(
    path: str, module: nn.Module, init: _Init, seen: set[nn.Module] | None
) -> Iterator[tuple[str, nn.Module, _Init]]:
    """The calls of `_init_weights`, in their order; a module that has its own uses that.

    A module in several places is initialised once where there is a set for those ``seen``, as the
    library does it, and else at each place, as `Module.apply` does.
    """
    init = getattr(module, "_init_weights", init)
    for name, child in module.named_children():
        yield from _calls(f"{path}.{name}".removeprefix("."), child, init, seen)
    if seen is None or module not in seen:
        if seen is not None:
            seen.add(module)
        yield path, module, init


class _Written(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Notes the storages of the tensors that operators write to."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.storages: set[int] = set()

    def __torch_dispatch__(
        self,
        func: Any,
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        for place, argument in enumerate(func._schema.arguments):
            value = args[place] if place < len(args) else (kwargs or {}).get(argument.name)
            if argument.is_write and isinstance(value, Tensor):
                self.storages.add(value.untyped_storage()._cdata)
        return func(*args, **kwargs or {})


# Of `torch.nn.init`: they return a tensor on `meta` as it is, so nothing shows that it changes.
_IDLE_ON_META = ("_no_grad_trunc_normal_", "dirac_", "orthogonal_", "sparse_")


@contextmanager
def _writing_on_meta() -> Iterator[None]:
    """A context in which all of `torch.nn.init` writes to tensors on `meta`, too."""
    of_torch = {name: getattr(nn.init, name) for name in _IDLE_ON_META}
    for name, function in of_torch.items():
        setattr(nn.init, name, partial(_written_on_meta, function))
    try:
        yield
    finally:
        for name, function in of_torch.items():
            setattr(nn.init, name, function)


def _written_on_meta(
    function: Callable[..., Tensor], tensor: Tensor, *args: Any, **kwargs: Any
) -> Tensor:
    return tensor.zero_() if tensor.is_meta else function(tensor, *args, **kwargs)


def _changed_by(init: _Init, module: nn.Module, targets: Sequence[_Target]) -> list[_Target]:
    """The parameters that a call changes; found on `meta`, without random numbers."""
    state = torch.get_rng_state()
    before = [_storage(target) for target in targets]
    with _Written() as written, _writing_on_meta():
        try:
            init(module)
        except RuntimeError:  # `parameter.data = values` takes values of its own device alone
            with torch.device("meta"):
                init(module)
    torch.set_rng_state(state)
    replaced = [
        t for t in targets for _, owner, n in t.places if owner._parameters[n] is not t.twin
    ]
    if replaced:
        raise RotationError(
            f"_init_weights puts another parameter in the place of {replaced[0].name}; "
            "let it change the values in place"
        )
    return [  # `parameter.data = values` gives it another storage
        target
        for target, old in zip(targets, before, strict=True)
        if _storage(target) != old or old in written.storages
    ]


def _storage(target: _Target) -> int:
    return int(target.twin.untyped_storage()._cdata)


def _whole(target: _Target) -> nn.Parameter:
    """Memory for the whole parameter, in its place; NaN."""
    whole = torch.full(target.parameter.shape, torch.nan, dtype=target.parameter.dtype)
    parameter = nn.Parameter(whole)
    target.put(parameter)
    return parameter


def _take_shard(target: _Target, whole: Tensor) -> None:
    parameter = target.parameter
    if not isinstance(parameter, DTensor):
        local, own = parameter.data, whole
    else:
        local, own, place = parameter.to_local(), whole, place_of(parameter)
        if place is not None:
            own = whole.narrow(place.dim, place.start, place.stop - place.start)
    if bool(own.isnan().any()):
        raise RotationError(
            f"_init_weights changes {target.name}, but not all of it, or by what it was before; "
            "give the model a method inits()"
        )
    local.copy_(own)
