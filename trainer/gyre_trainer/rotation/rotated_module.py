"""A module whose forward runs slice by slice.

Also here:

* What a rule depends on and code may switch later; it is compared at each call of a module.
* What torch's methods for whole models do to modules with shards: `to`, `bfloat16`, `deepcopy`.
* Shards a module's parameters and replaces the forward that reads them by a rotation.
"""

import sys
from collections.abc import Callable, Iterator, Mapping, Set
from copy import deepcopy
from dataclasses import dataclass, replace
from functools import partial
from inspect import signature
from typing import Any, Self, cast
from weakref import WeakValueDictionary

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from gyre_trainer.comm.mesh import ring_group
from gyre_trainer.errors import RotationError
from gyre_trainer.rotation.ring_pass import run
from gyre_trainer.rotation.rule import Rotation, RotationPolicy, Rule
from gyre_trainer.shards.layout import Layout, with_local
from gyre_trainer.shards.sharded_parameters import (
    ShardedParameters,
    copy_sharded,
    note_replaced,
    shard_parameters,
    sharded_parameters_of,
)
from gyre_trainer.torch_internals import Dropout, hooks_of, parameters_of, shard_of, uncompiled

_KERNELS = {"attention kernel": "_attn_implementation", "experts kernel": "_experts_implementation"}
# The attribute of the experts of transformers by which their kernels take ids of experts elsewhere;
# nothing public sets it.
EXPERT_PARALLEL = "_is_expert_parallel"
MIXED = "_mixed_in"  # marks classes that `mix_in` made


def own_class(module: nn.Module) -> type:
    """The module's class before anything was mixed in."""
    return next(
        cls for cls in type(module).__mro__ if issubclass(cls, nn.Module) and MIXED not in vars(cls)
    )


def sets_forward(module: nn.Module) -> bool:
    """Whether an instance has another forward than its class.

    Libraries that wrap forwards for one call leave the class's own on the instance; it is removed.
    """
    forward: Any = vars(module).get("forward")
    if forward is None:
        return False
    own: Any = own_class(module)
    if getattr(forward, "__self__", None) is module and forward.__func__ is own.forward:
        del vars(module)["forward"]
        return False
    return True


def kernels_of(module: nn.Module) -> dict[str, Any]:
    """The kernels that a module's configuration chooses; those of a core are its own.

    With the function of an experts kernel, and whether the module is expert-parallel.
    """
    config = getattr(module, "config", None)
    kernels = {
        name: value
        for name, key in _KERNELS.items()
        if (value := getattr(config, key, None)) is not None
    }
    if function := experts_function(module):
        kernels["experts kernel's function"] = function
        kernels[EXPERT_PARALLEL] = getattr(module, EXPERT_PARALLEL, None)
    return kernels


def experts_function(module: nn.Module) -> Any:
    """The function that transformers computes stacked experts by; None where it is their forward.

    Nothing public says it: a forward that `use_experts_implementation` made has the table of such
    functions among the variables that it closes over, and looks the kernel's name up there.
    """
    forward: Any = own_class(module).forward  # type: ignore[attr-defined]
    names = getattr(getattr(forward, "__code__", None), "co_freevars", ())
    if "experts_interface" not in names:
        return None
    table = forward.__closure__[names.index("experts_interface")].cell_contents
    config = getattr(module, "config", None)
    return table.get(getattr(config, _KERNELS["experts kernel"], None))


def drop_rates(module: nn.Module) -> dict[str, float]:
    """The rates of dropout among a module's own attributes, as for functions of torch."""
    return {
        name: value
        for name, value in vars(module).items()
        if isinstance(value, float) and "drop" in name
    }


def _guarded(module: nn.Module) -> Iterator[tuple[str, Any]]:
    """What a rule depends on and code may switch later, by names for messages."""
    cls: Any = own_class(module)
    yield "the forward of its class", cls.forward
    for name, value in kernels_of(module).items():
        yield f"its {name}", value
    for name, value in vars(module).items():
        if callable(value) and name != "forward" and not name.startswith("_"):
            yield f"its {name}", value
    for name, each in module.named_modules():
        if not name:
            continue
        yield f"the class of {name}", own_class(each)
        if sets_forward(each):
            yield f"the forward of {name}", vars(each)["forward"]
        if isinstance(each, Dropout):
            yield f"the rate of {name}", each.p
    for name, rate in drop_rates(module).items():
        if rate > 0:
            yield f"its {name}", rate


def _told(value: Any) -> str:
    if value is None:
        return "not set"
    return getattr(value, "__qualname__", None) or repr(value)


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
        """Apply ``fn`` to all tensors inside but the shards, which must stay as they are.

        `Module.to`, `bfloat16` and the like call this.

        Raises:
            RotationError: it would move or convert shards.
        """
        places = [
            (f"{type(self).__name__}.{path}.{name}".replace("..", "."), child, name, parameter)
            for path, child in cast("nn.Module", self).named_modules()
            for name, parameter in parameters_of(child).items()
            if isinstance(parameter, DTensor)
        ]
        for where, *_, parameter in places:
            _require_same(where, parameter, fn)
        for _, child, name, _ in places:
            parameters_of(child)[name] = None
        try:
            super()._apply(fn, recurse)  # type: ignore[misc]
        finally:
            for _, child, name, parameter in places:
                parameters_of(child)[name] = parameter
        return self

    def state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """The state of the module, which `torch.distributed.checkpoint` saves.

        `torch.save` of it is refused: each rank would write its own shards alone.
        """
        state: dict[str, Any] = super().state_dict(*args, **kwargs)  # type: ignore[misc]
        refusal = partial(
            refuse,
            "model.state_dict() has the shards of this rank alone, and torch.save would lose the "
            f"others. {SAVE_ADVICE}",
        )
        for value in state.values():
            if isinstance(value, DTensor) and not isinstance(value, nn.Parameter):
                value.__reduce_ex__ = refusal  # type: ignore[method-assign]
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


def refuse(text: str, *_args: object, **_kwargs: object) -> Any:
    """Stand, with a given text, in the place of a method that cannot work with shards.

    Raises:
        RotationError: always.
    """
    raise RotationError(text)


def adapt_library_models(model: nn.Module) -> None:
    """Let the models of transformers inside keep their vocabulary, and make no cache by default.

    `save_pretrained` names the function to use. Unasked, models make a cache of keys and values
    in each call, which blocks that rotate as one refuse: each slice would add its own heads.
    """
    library: Any = sys.modules.get("transformers.modeling_utils")
    rotated = (each for each in model.modules() if isinstance(each, RotatedModule))
    has_blocks = any(each.rotation.rule.linear_in for each in rotated)
    for module in model.modules() if library else ():
        if isinstance(module, library.PreTrainedModel):
            cast("Any", module).save_pretrained = partial(
                refuse,
                "model.save_pretrained() would write the shards of this rank alone, because the "
                f"model is rotated. {SAVE_ADVICE}",
            )
            cast("Any", module).resize_token_embeddings = partial(_keep_vocabulary, module)
            if has_blocks:
                module.register_forward_pre_hook(_without_cache, with_kwargs=True)


def _without_cache(
    module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    """Call a model without a cache of keys and values where the caller says nothing of one."""
    given = kwargs.get("use_cache"), kwargs.get("past_key_values")
    # `register_forward_method` puts its method there
    forward: Any = vars(module).get("forward", own_class(module).forward)  # type: ignore[attr-defined]
    if given != (None, None) or "use_cache" not in signature(forward).parameters:
        return None
    return args, kwargs | {"use_cache": False}


def _keep_vocabulary(
    model: Any, new_num_tokens: int | None = None, pad_to_multiple_of: int | None = None, **_: Any
) -> nn.Module:
    """The method of a rotated model of transformers that resizes its embedding: the embedding.

    Raises:
        RotationError: it has another size.
    """
    embedding: nn.Module = model.get_input_embeddings()
    size = embedding.get_parameter("weight").shape[0]
    if new_num_tokens in (None, size) and not pad_to_multiple_of:
        return embedding
    raise RotationError(
        f"{own_class(model).__name__} was rotated with an embedding of {size} tokens, and each "
        f"rank has a shard, so resize_token_embeddings({new_num_tokens}) cannot change it. "
        "Resize the model first, then rotate it."
    )


def copy_shards(parameters: list[nn.Parameter], memo: dict[int, Any]) -> None:
    """Copy this rank's shards of all DTensors in ``parameters`` into ``memo``, each once."""
    for parameter in parameters:
        if not isinstance(parameter, DTensor) or id(parameter) in memo:
            continue
        sharded = sharded_parameters_of(parameter)
        if sharded is None:
            memo[id(parameter)] = with_local(parameter, shard_of(parameter).clone())
        else:
            copied = memo[id(sharded)] = copy_sharded(sharded)
            for one, other in zip(sharded.parameters, copied.parameters, strict=True):
                memo[id(one)] = other


def _require_same(where: str, parameter: DTensor, fn: Callable[[Tensor], Tensor]) -> None:
    shard = shard_of(parameter).detach()
    result = fn(shard.view(-1)[:0])
    if (result.dtype, result.device) == (shard.dtype, shard.device):
        return
    raise RotationError(
        f"{where} is rotated as {shard.dtype} on {shard.device} and cannot become "
        f"{result.dtype} on {result.device}. Move or convert a model before it is rotated."
    )


_MIXED_CLASSES: WeakValueDictionary[tuple[type, type], type] = WeakValueDictionary()


class RotatedModule(ShardedModule):
    """Mixed in before a module's class: the module's forward goes round the ring.

    Attributes:
        rotation: how the module is cut, and where its parameters are.
        unchecked_modes: the values of `training` with which the module is still to be checked, at
            its first call.
        is_unverified: whether it is too large to be compared with the whole module by default.
        guard: the state that its rule depends on, as it was when the module was rotated.
        was_called: whether its forward has run.
    """

    rotation: Rotation
    unchecked_modes: Set[bool] = frozenset()
    is_unverified: bool = False
    guard: Mapping[str, Any]
    was_called: bool = False
    training: bool

    @uncompiled
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The module's output for this rank's part of the batch, as without rotation."""
        if not self.was_called:  # torch checks each attribute when it is set
            self.was_called = True
        self._compare_guard()
        return run(self.rotation, args, kwargs)

    def _compare_guard(self) -> None:
        """Return if nothing was switched that the rule depends on.

        Raises:
            RotationError: names the value then and now; or there is a hook inside.
        """
        rotation = self.rotation
        guard = dict(_guarded(rotation.module))
        for name in {**self.guard, **guard}:
            before, after = self.guard.get(name), guard.get(name)
            if before != after:
                raise RotationError(
                    f"{rotation.name}: {name} was {_told(before)} when it was rotated as one, and "
                    f"is {_told(after)} now. Set it before rotate_all, or let its layers rotate "
                    "one by one (find_blocks=False, and no rule for the module)"
                )
        if rotation.rule.linear_in and num_hooks_inside(rotation.module):
            raise RotationError(
                f"a hook was registered inside of {own_class(rotation.module).__name__} after it "
                "was rotated as a whole: it would be called for each slice, with a part of "
                "the output. Register it on the module itself, or let the layers inside "
                "rotate one by one (find_blocks=False, and no rule for the module)."
            )

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        """A module with a copy of this rank's slice, which rotates by itself on the same ring."""
        rotation = self.rotation
        copy_shards(list(rotation.module.parameters()), memo)
        copied: Any = self._copy(memo, "rotation", "guard")
        copied.guard = dict(_guarded(copied))
        copied.rotation = replace(
            rotation,
            module=copied,
            forward=deepcopy(rotation.forward, memo),
            sharded=memo[id(rotation.sharded)],
            number=rotation.sharded.ring.modules.add(copied),
        )
        return cast("Self", copied)


def num_hooks_of(module: nn.Module) -> int:
    """How many hooks of other code a module has."""
    return sum(
        not getattr(hook, "__module__", "").startswith("gyre_trainer.") for hook in hooks_of(module)
    )


def num_hooks_inside(module: nn.Module) -> int:
    """How many hooks of others modules inside have, which would get what slices compute."""
    return sum(num_hooks_of(each) for each in module.modules() if each is not module)


def mix_in(module: nn.Module, behaviour: type, prefix: str) -> None:
    """Replace the module's class by a subclass of it with ``behaviour`` before it.

    The module stays an instance of its own class. Modules of one class share the subclass, so that
    they share compiled graphs, too. One that has the behaviour is left as it is.
    """
    cls = type(module)
    if issubclass(cls, behaviour):
        return
    mixed = _MIXED_CLASSES.get((behaviour, cls))
    if mixed is None:
        mixed = type(f"{prefix}{cls.__name__}", (behaviour, cls), {MIXED: True})
        _MIXED_CLASSES[behaviour, cls] = mixed
    module.__class__ = mixed


def behaviours_of(module: nn.Module) -> list[type]:
    """The classes mixed in before the module's class, the last one first."""
    return [cls.__bases__[0] for cls in type(module).__mro__ if MIXED in vars(cls)]


@dataclass(frozen=True, slots=True)
class RotationTarget:
    """The ring that modules rotate on, and the policy."""

    mesh: DeviceMesh
    policy: RotationPolicy

    @property
    def num_slices(self) -> int:
        """The number of slices of each module: the number of ranks."""
        return ring_group(self.mesh).size()


def wrap(module: nn.Module, rule: Rule, target: RotationTarget) -> None:
    """Shard the parameters that ``rule`` cuts, and let the module's forward go round the ring.

    Raises:
        RotationError: the module cannot be cut like this; the message names module and parameter.
    """
    require_own_forward(module)
    for name, child in module.named_modules():
        if isinstance(child, RotatedModule):
            raise RotationError(
                f"{type(module).__name__}.{name} is rotated already; "
                f"rotate either it or {type(module).__name__}"
            )
    layout = Layout(tuple(rule.cuts(module, target.num_slices)), target.num_slices)
    sharded = _sharded_parameters(module, layout, target.mesh)
    for cut, parameter in zip(layout.cuts, sharded.parameters, strict=True):
        path, _, name = cut.name.rpartition(".")
        source = module.get_parameter(cut.name)
        if source is not parameter:
            note_replaced(source, f"{cut.name} of {type(module).__name__}")
        setattr(module.get_submodule(path), name, parameter)
    cut_names = {cut.name for cut in layout.cuts}
    replicated = tuple(name for name, _ in module.named_parameters() if name not in cut_names)
    rotation = Rotation(
        module,
        module.forward,
        rule,
        layout,
        sharded,
        target.policy,
        replicated,
        sharded.ring.modules.add(module),
    )
    if not rule.divisible or len(layout.cuts) > 1:
        sharded.ring.pool.largest_whole_numel = max(
            sharded.ring.pool.largest_whole_numel, layout.numel(0)
        )
    mix_in(module, RotatedModule, "Rotated")
    module.rotation = rotation  # type: ignore[assignment]
    module.guard = dict(_guarded(module))  # type: ignore[assignment]


def require_own_forward(module: nn.Module) -> None:
    """Refuse a forward set on an instance: the module that rotates would not call it.

    Raises:
        RotationError: names the module.
    """
    for name, each in module.named_modules():
        if sets_forward(each):
            raise RotationError(
                f"{own_class(module).__name__}{'.' if name else ''}{name} has a forward "
                "set on the instance, so no rule can be true of it. Remove it before rotating, or "
                "give no rule for the module"
            )


def _sharded_parameters(module: nn.Module, layout: Layout, mesh: DeviceMesh) -> ShardedParameters:
    """The module's sharded parameters: new ones, or those of the module that they are tied with."""
    sources = [module.get_parameter(cut.name) for cut in layout.cuts]
    if len({id(source) for source in sources}) < len(sources):
        names = ", ".join(cut.name for cut in layout.cuts)
        raise RotationError(
            f"{type(module).__name__} uses one parameter in several places among {names}; "
            "it cannot be cut"
        )
    tied = [sharded_parameters_of(source) for source in sources]
    if all(sharded is None for sharded in tied):
        _require_uniform(module, layout, sources, mesh)
        return shard_parameters(sources, layout, mesh)
    sharded = tied[0]
    if (
        sharded is None
        or any(other is not sharded for other in tied)
        or sharded.layout.shapes != layout.shapes
    ):
        names = ", ".join(
            cut.name for cut, other in zip(layout.cuts, tied, strict=True) if other is not None
        )
        raise RotationError(
            f"{type(module).__name__} shares {names} with a module that is rotated already "
            "and cut in another way; "
            "tied modules must have the same parameters, all cut alike"
        )
    return sharded


def _require_uniform(
    module: nn.Module, layout: Layout, sources: list[nn.Parameter], mesh: DeviceMesh
) -> None:
    """Refuse parameters that do not fit in one buffer on the mesh's device."""
    for cut, source in zip(layout.cuts, sources, strict=True):
        where = f"{type(module).__name__}.{cut.name}"
        if not source.is_floating_point():
            raise RotationError(
                f"{where} is {source.dtype}, but only real floating-point parameters rotate"
            )
        if source.dtype != sources[0].dtype:
            raise RotationError(
                f"{where} is {source.dtype}, but {layout.cuts[0].name} is {sources[0].dtype}"
            )
        if source.device.type not in ("meta", mesh.device_type):
            raise RotationError(
                f"{where} is on {source.device}, but the mesh is of {mesh.device_type}"
            )
