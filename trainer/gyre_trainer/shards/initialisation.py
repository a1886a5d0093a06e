"""Initial values shard by shard, the same for every number of ranks, and buffers on `meta`.

Transformers' models have a method `_init_weights(module)`, and many others: it is called for each
module, children first, and changes parameters of that module in place. Those that it leaves get
their values from `reset_parameters` of their modules. Each call is made twice. The first one runs
on `meta`, where nothing is computed, and shows which parameters change. The second one changes
whole parameters in memory that is given back after it, when each rank has taken its shard. So the
values are those of a single process, and a rank holds one module's parameters whole at a time.

Buffers of models that were built on `meta`, such as the frequencies of rotary positions, are in no
checkpoint; a module's constructor computes them. So the constructor runs again, for those modules
alone. Some modules keep such tensors without registering them (CodeGen).
"""

import inspect
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.modules.module import register_module_parameter_registration_hook

from gyre_trainer.comm.mesh import groups_of
from gyre_trainer.comm.ring import collective
from gyre_trainer.errors import RotationError
from gyre_trainer.shards.layout import place_of
from gyre_trainer.shards.sharded_parameters import note_replaced, note_rewritten
from gyre_trainer.torch_internals import TorchDispatchMode, is_fake, parameters_of, storage_number

_Init = Callable[[nn.Module], object]
_Fill = Callable[..., Tensor]


@dataclass(frozen=True, slots=True)
class _Target:
    """A parameter, and its stand-in meanwhile.

    Attributes:
        parameter: as the rank keeps it.
        twin: of its shape and dtype, on `meta`.
        places: the modules that have it, by their paths, and its name in each.
    """

    parameter: nn.Parameter
    twin: nn.Parameter
    places: list[tuple[str, nn.Module, str]]

    @property
    def name(self) -> str:
        path, _, name = self.places[0]
        return f"{path}.{name}".removeprefix(".")

    def put(self, parameter: nn.Parameter) -> None:
        for _, module, name in self.places:
            parameters_of(module)[name] = parameter


@torch.no_grad()
def _fill(model: nn.Module, seed: int) -> None:
    """Fill this rank's shards by `_init_weights`, and the rest by `reset_parameters`.

    A tied parameter has the values of its first place, as if it had been tied afterwards. Random
    numbers are drawn on the CPU, and later ones are as if none had been drawn here.

    Raises:
        RotationError: nothing gives values to a parameter, or one depends on its value before.
    """
    targets = _targets(model)
    left = dict(targets)
    with torch.random.fork_rng(devices=[]), _replaced(targets.values()):
        torch.default_generator.manual_seed(seed)
        has_marks = callable(getattr(model, "_initialize_weights", None))
        for path, module, init in _calls("", model, None, set() if has_marks else None):
            if init is not None:
                _take(init, path, module, list(targets.values()), left)
        given = targets.keys() - left.keys()
        for path, module, _ in _calls("", model, None, set()):
            if left.keys() & module.parameters(recurse=False):
                inside = [targets[each] for each in module.parameters() if each not in given]
                _take(_reset, path, module, inside, left)
        _begin_adapters(model, targets, left)
    for target in left.values():
        raise RotationError(
            f"parameter {target.name} has no initial values; give "
            f"{_own_class(target.places[0][1]).__name__} a method reset_parameters()"
        )


def adapters_of(module: nn.Module) -> list[nn.Module]:
    """The adapters of a layer of peft, which is around the layer that it adapts; else none."""
    names = getattr(module, "adapter_layer_names", None)
    if not (hasattr(module, "base_layer") and isinstance(names, tuple)):
        return []
    own = (getattr(module, name, None) for name in names)
    return [each for each in own if isinstance(each, nn.Module)]


@torch.no_grad()
def begin_adapters(model: nn.Module) -> None:
    """Give the adapters of peft in a model the values that they begin with.

    Torch's generator draws them on the CPU, so all ranks need the same seed.
    """
    targets = _targets(model)
    with _replaced(targets.values()):
        _begin_adapters(model, targets, dict(targets))
    note_rewritten(model.parameters())


def _begin_adapters(
    model: nn.Module,
    targets: Mapping[nn.Parameter, _Target],
    left: dict[nn.Parameter, _Target],
) -> None:
    """Take this rank's shards of what peft begins adapters with."""
    configs = (getattr(each, "peft_config", None) for each in model.modules())
    settings: Mapping[str, Any] = next(filter(None, configs), {})
    for path, module in model.named_modules():
        own = [targets[p] for each in adapters_of(module) for p in each.parameters()]
        if own:
            _take(partial(_begin, settings), path, module, own, left)


def _begin(settings: Mapping[str, Any], layer: Any) -> None:
    """Set the adapters of a layer as peft does when it makes them."""
    for adapter in adapters_of(layer):
        for each in adapter.modules():
            _reset(each)
    for name, each in settings.items():
        if hasattr(layer, "reset_lora_parameters"):
            layer.reset_lora_parameters(name, each.init_lora_weights)
        else:
            layer.reset_ia3_parameters(name)


def _reset(module: nn.Module) -> None:
    """Initialise a module's parameters as its class does it; torch's attention has its own name."""
    for name in ("reset_parameters", "_reset_parameters"):
        if callable(reset := getattr(module, name, None)):
            reset()
            return


def _take(
    init: _Init,
    path: str,
    module: nn.Module,
    targets: Sequence[_Target],
    left: dict[nn.Parameter, _Target],
) -> None:
    """Take this rank's shards of parameters that a call changes and whose first place is inside."""
    changed = _changed_by(init, module, targets)
    wholes = [
        nn.Parameter(torch.full(each.parameter.shape, torch.nan, dtype=each.parameter.dtype))
        for each in changed
    ]
    for target, whole in zip(changed, wholes, strict=True):
        target.put(whole)
    init(module)
    for target, whole in zip(changed, wholes, strict=True):
        target.put(target.twin)
        if path in _outwards(target.places[0][0]):  # its first place is inside
            _take_shard(target, whole.data, init)
            left.pop(target.twin, None)


def _targets(model: nn.Module) -> dict[nn.Parameter, _Target]:
    """All parameters, by their stand-ins."""
    found: dict[nn.Parameter, _Target] = {}
    for path, module in model.named_modules():
        for name, parameter in parameters_of(module).items():
            if parameter is None:
                continue
            if parameter not in found:
                meta = torch.empty(parameter.shape, dtype=parameter.dtype, device="meta")
                found[parameter] = _Target(parameter, nn.Parameter(meta), [])
            found[parameter].places.append((path, module, name))
    return {target.twin: target for target in found.values()}


@contextmanager
def _replaced(targets: Collection[_Target]) -> Iterator[None]:
    """A context in which the twins are the model's parameters."""
    for target in targets:
        target.put(target.twin)
    try:
        yield
    finally:
        for target in targets:
            target.put(target.parameter)


def _calls(
    path: str, module: nn.Module, init: _Init | None, seen: set[nn.Module] | None
) -> Iterator[tuple[str, nn.Module, _Init | None]]:
    """The calls of `_init_weights`, in their order; a module that has its own uses that.

    A module in several places is initialised once where there is a set for those ``seen``, as the
    library does it if it marks them, and else at each place, as `Module.apply` does.
    """
    init = getattr(module, "_init_weights", init)
    for name, child in module.named_children():
        if child not in adapters_of(module):
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

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        is_in_place = func.name().partition(".")[0].endswith("_")  # by torch's convention
        written = args[0] if is_in_place else kwargs.get("out")
        if isinstance(written, Tensor):
            self.storages.add(storage_number(written))
        return func(*args, **kwargs)


# Of `torch.nn.init`: they return a tensor on `meta` as it is, so nothing shows that it changes.
_IDLE_ON_META = ("_no_grad_trunc_normal_", "dirac_", "orthogonal_", "sparse_")


@contextmanager
def _writing_on_meta() -> Iterator[None]:
    """A context in which all of `torch.nn.init` writes to tensors on `meta`, too."""

    def written(function: _Fill, tensor: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        return tensor.zero_() if tensor.is_meta else function(tensor, *args, **kwargs)

    of_torch: dict[str, _Fill] = {name: getattr(nn.init, name) for name in _IDLE_ON_META}
    for name, function in of_torch.items():
        setattr(nn.init, name, partial(written, function))
    try:
        yield
    finally:
        for name, function in of_torch.items():
            setattr(nn.init, name, function)


def _changed_by(init: _Init, module: nn.Module, targets: Sequence[_Target]) -> list[_Target]:
    """The parameters that a call changes; found on `meta`, without random numbers."""
    state = torch.get_rng_state()
    before = [storage_number(target.twin) for target in targets]
    with _Written() as written, _writing_on_meta():
        try:
            init(module)
        except RuntimeError:  # `parameter.data = values` takes values of its own device alone
            with torch.device("meta"):
                init(module)
    torch.set_rng_state(state)
    replaced = [
        t for t in targets for _, owner, n in t.places if parameters_of(owner)[n] is not t.twin
    ]
    if replaced:
        raise RotationError(
            f"{_name_of(init)} puts another parameter in the place of {replaced[0].name}; "
            "let it change the values in place"
        )
    return [  # `parameter.data = values` gives it another storage
        target
        for target, old in zip(targets, before, strict=True)
        if storage_number(target.twin) != old or old in written.storages
    ]


def _take_shard(target: _Target, whole: Tensor, init: _Init) -> None:
    parameter = target.parameter
    local, own = parameter.data, whole
    if isinstance(parameter, DTensor):
        local = parameter.to_local()
        if (place := place_of(parameter)) is not None:
            own = whole.narrow(place.dim, place.start, place.stop - place.start)
    if not is_fake(own) and bool(own.sum().isnan()):  # without a mask as large as the parameter
        raise RotationError(
            f"{_name_of(init)} changes {target.name}, but not all of it, or by what it was before; "
            "let it set all values"
        )
    local.copy_(own)


def _name_of(init: _Init) -> str:
    return "reset_parameters" if init is _reset else "_init_weights"


def _is_on_meta(value: Any) -> bool:
    return isinstance(value, Tensor) and value.is_meta


def _outwards(path: str) -> list[str]:
    """The paths of a module and of those around it, the model's "" last."""
    names = path.split(".") if path else []
    return [".".join(names[:depth]) for depth in range(len(names), -1, -1)]


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
            and (_buffers_of(module).keys() <= _buffers_of(found).keys() or not around)
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
    module = model.get_submodule(path)
    configs = (getattr(model.get_submodule(each), "config", None) for each in _outwards(path))
    config = next((config for config in configs if config is not None), None)
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


def _buffers_of(module: nn.Module) -> dict[str, Tensor]:
    """A module's own buffers by name."""
    return dict(module.named_buffers(recurse=False, remove_duplicate=False))


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

    for name, buffer in _buffers_of(module).items():
        if _is_on_meta(buffer):
            found = _buffers_of(made).get(name)
            if found is None or (found.shape, found.dtype) != (buffer.shape, buffer.dtype):
                raise RotationError(
                    f"buffer {name} of {type(module).__name__} is on meta, and its constructor "
                    f"now makes another one of that name. Create it on a real device."
                )
            setattr(module, name, taken(found))
    for name, value in vars(module).items():
        if _is_on_meta(value) and isinstance(vars(made).get(name), Tensor):
            vars(module)[name] = taken(vars(made)[name])


def materialize(model: nn.Module, *, seed: int, device: torch.device | str = "cpu") -> None:
    """Give every parameter its initial value in place, and memory first where it is on `meta`.

    The values are those of one process: the same for every number of ranks, and for a parameter
    that is not rotated. A model with a method `_init_weights`, as transformers' are, gets the very
    values of that method after `torch.manual_seed(seed)` on the CPU; parameters that it leaves, and
    those of other models, get theirs from `reset_parameters` of their modules. Each rank draws all
    values, and holds one module's parameters whole at a time. Buffers on `meta` are made by the
    constructors of their modules, where these take a `config` alone: their own, or that of the
    nearest module around them.

    Args:
        model: rotated or not.
        seed: in [0, 2^64).
        device: where parameters on `meta` that are not rotated go, and buffers; rotated ones stay
            on the mesh's device.

    Raises:
        RotationError: nothing gives values to a parameter, or a buffer on `meta` cannot be made;
            the message names it. Or the ranks of a rotated model have different seeds.

    Example:
        with torch.device("meta"):
            model = MyModel()
        rotate_all(model, mesh=make_mesh("cuda"))
        materialize(model, seed=0, device="cuda")
    """
    _require_one_seed(model, seed)
    allocate(model, torch.device(device))
    _fill(model, seed)
    note_rewritten(model.parameters())


def _require_one_seed(model: nn.Module, seed: int) -> None:
    """Refuse different seeds on the ranks of a rotated model, whose shards would not fit together.

    Collective.
    """
    meshes = (each.device_mesh for each in model.parameters() if isinstance(each, DTensor))
    mesh = next(meshes, None)
    halves = divmod(seed, 2**32)
    if mesh is None:
        return
    extremes = torch.tensor([halves, [-each for each in halves]], device=mesh.device_type)
    with collective("comparing the seeds of materialize"):
        for group in groups_of(mesh):
            dist.all_reduce(extremes, dist.ReduceOp.MAX, group=group)
    if is_fake(extremes) or not extremes.sum(0).any():
        return  # a dry run has no other ranks
    raise RotationError(
        f"materialize got the seed {seed} on rank {dist.get_rank()} and another one on another "
        "rank, so the shards would be of different models. Pass the same seed on all ranks."
    )


def allocate(model: nn.Module, device: torch.device) -> None:
    """Give parameters on `meta` memory; tied parameters stay tied.

    Other tensors on `meta` that modules keep, such as buffers, are computed by the constructors of
    their modules. That takes a module whose constructor requires a `config` alone, as transformers'
    do: the one with the tensor, or the nearest one around it. The configuration is the one that it
    keeps, or else that of the nearest module around it.

    Raises:
        RotationError: a module is made in another way, or with another configuration; the message
            names the buffer.
    """
    constructed: dict[str, nn.Module | Exception] = {}
    for path, module in list(model.named_modules()):
        kept = {**_buffers_of(module), **vars(module)}
        names = [name for name, tensor in kept.items() if _is_on_meta(tensor)]
        if names:
            name = f"{path}.{names[0]}".removeprefix(".")
            _take_tensors(module, _made_again(model, path, name, constructed), device)
    real: dict[nn.Parameter, nn.Parameter] = {}
    for path, child in model.named_modules():
        for name, parameter in list(parameters_of(child).items()):
            if parameter is not None and parameter.is_meta:
                if parameter not in real:
                    note_replaced(parameter, f"{path}.{name}".removeprefix("."))
                    real[parameter] = nn.Parameter(
                        torch.empty_like(parameter, device=device), parameter.requires_grad
                    )
                setattr(child, name, real[parameter])
