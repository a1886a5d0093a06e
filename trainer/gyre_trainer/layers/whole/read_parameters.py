"""Parameters that a forward reads, instead of calling the module that has them.

Such are those of a `ParameterList`, or of a layer in `F.linear(x, self.layer.weight)`. While a
model runs, plain tensors stand in the place of all its replicated parameters, and stand-ins in the
place of those that are cut, so that any forward inside may read any of them. See [Note: Parameters
that are read] in `gyre_trainer.shards.gathered`.
"""

from collections.abc import Iterator
from copy import copy, deepcopy
from dataclasses import dataclass, field
from typing import Any, Self
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from gyre_trainer.rotation.call import cast
from gyre_trainer.rotation.guard import own_class
from gyre_trainer.rotation.rotated_module import RotatedModule, uncompiled
from gyre_trainer.rotation.rotation import RotationPolicy
from gyre_trainer.shards.gathered import Gathered, release_after
from gyre_trainer.shards.local_shards import local_of, place_of
from gyre_trainer.shards.sharded_parameters import ShardedParameters
from gyre_trainer.shards.stand_ins import StandIn

READABLE = "readable_parameters"  # an attribute of models: their `ReadableParameters`
IS_GRAPH = "is_graph"  # an attribute of models: whether the next forward is a compiled graph


@dataclass(slots=True)
class _Whole:
    """Where a parameter is that every rank has whole.

    Attributes:
        owner: the module that has it.
        last: its name there.
        dtype: what it is read in; None for its own.
    """

    owner: nn.Module
    last: str
    dtype: torch.dtype | None

    def instead(self, parameter: DTensor) -> Tensor:
        """A plain tensor of its values, with its gradient."""
        return cast(local_of(parameter), self.dtype)


@dataclass(slots=True)
class CutPlace:
    """Where a parameter is that is cut.

    Attributes:
        owner: the module that has it.
        last: its name there.
        reader: the module whose forward may read it.
        policy: of its rotation.
        sharded: the sharded parameters that it is one of.
        stand_in: what is read in its place; made when it is needed first.
        number: its number in `Ring.modules`, the same on every rank.
    """

    owner: nn.Module
    last: str
    reader: nn.Module
    policy: RotationPolicy
    sharded: ShardedParameters
    stand_in: StandIn | None = None
    number: int = field(init=False)

    def __post_init__(self) -> None:
        self.number = self.sharded.ring.modules.add(self.owner)

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        """The place of a copied parameter, with another stand-in."""
        return type(self)(
            deepcopy(self.owner, memo),
            self.last,
            deepcopy(self.reader, memo),
            self.policy,
            deepcopy(self.sharded, memo),
        )

    @property
    def is_read(self) -> bool:
        """Whether a forward has read it."""
        return self.stand_in is not None and self.stand_in.gathered.is_read

    def instead(self, parameter: DTensor) -> Tensor:
        """Its stand-in."""
        stand_in = self.stand_in
        if stand_in is None or stand_in.gathered.parameter is not parameter:
            policy = self.policy
            gathered = Gathered(
                parameter,
                self.owner,
                self.last,
                self.reader,
                self.number,
                dtype=None if keeps_dtype(self.reader, parameter) else policy.outer_dtype,
                grad_dtype=policy.grad_dtype,
            )
            self.stand_in = stand_in = StandIn.of(gathered)
        elif stand_in.requires_grad != parameter.requires_grad or not stand_in.is_fresh:
            self.stand_in = stand_in = StandIn.of(stand_in.gathered)
        return stand_in


def keeps_dtype(module: nn.Module, parameter: Tensor) -> bool:
    """Whether a module reads its parameter in the dtype that it has, whatever it computes in.

    Torch takes activations of a BatchNorm in another dtype, but not weights in another one than
    statistics.
    """
    return isinstance(module, nn.modules.batchnorm._NormBase) or not parameter.is_floating_point()


def has_forward(module: nn.Module) -> bool:
    """Whether a module can be called; a container, such as a `ParameterList`, cannot."""
    return getattr(own_class(module), "forward", None) is not nn.Module.forward


def own_parameters(module: nn.Module) -> Iterator[tuple[str, nn.Module, str]]:
    """The parameters that a module's forward reads: its own, and those of containers inside.

    Yields:
        The name in the module, the module that has it, and its name there.
    """
    for name, parameter in module._parameters.items():
        if parameter is not None:
            yield name, module, name
    for path, child in module._modules.items():
        if child is not None and not has_forward(child):
            for name, owner, last in own_parameters(child):
                yield f"{path}.{name}", owner, last


class ReadableParameters:
    """Hooks around a model's forward that put what can be read in the place of its parameters.

    Those are plain tensors for replicated parameters, and stand-ins for those that are cut. Modules
    around a parameter that was read once get hooks of their own: torch's checkpoint calls them
    again in backward, when the model's forward is over.
    """

    def __init__(self, model: nn.Module, dtype: torch.dtype | None) -> None:
        """Register the hooks; parameters of modules that are never called are read in ``dtype``."""
        self._dtype = dtype
        self._places: list[_Whole | CutPlace] | None = list(_places(model, dtype))
        self._replaced: list[tuple[dict[str, Any], str, DTensor]] = []
        self._inside: WeakKeyDictionary[nn.Module, list[CutPlace]] = WeakKeyDictionary()
        self._marks: list[int] = []
        self._followed: set[int] = set()
        self._is_graph = False
        vars(model)[READABLE] = self
        model.register_forward_pre_hook(self._before)
        model.register_forward_hook(self._after, always_call=True)
        model.register_state_dict_pre_hook(self._before_state)  # type: ignore[no-untyped-call]

    def __deepcopy__(self, memo: dict[int, Any]) -> "ReadableParameters":
        """The hooks of a copied model, which finds its own places when it first runs."""
        copied = memo[id(self)] = copy(self)
        copied._places, copied._replaced, copied._marks = None, [], []
        copied._inside, copied._followed = WeakKeyDictionary(), set()
        copied._is_graph = False
        return copied

    @uncompiled
    def _before(self, model: nn.Module, _args: Any) -> None:
        self._put_back()  # torch calls no hook after a forward that Ctrl-C has ended
        self._marks.clear()
        if self._places is None:
            self._places = list(_places(model, self._dtype))
        # a graph takes the shards as its inputs, and gathers what it reads itself
        self._is_graph = is_graph = getattr(model, IS_GRAPH, False)
        self._replace([p for p in self._places if not (is_graph and isinstance(p, CutPlace))])

    def read_places(self) -> list[CutPlace]:
        """The places of cut parameters that forwards have read."""
        places = self._places or ()
        return [each for each in places if isinstance(each, CutPlace) and each.is_read]

    @uncompiled
    def _after(self, model: nn.Module, _args: Any, _output: Any) -> None:
        self._put_back()
        release_after(model)
        self._is_graph = False
        for place in self.read_places():
            if id(place) not in self._followed:
                self._followed.add(id(place))
                self._follow(model, place)

    def _before_state(self, _model: nn.Module, _prefix: str, _keep_vars: bool) -> None:
        self._put_back()

    def _replace(self, places: list[Any]) -> None:
        for place in places:
            parameters: dict[str, Any] = place.owner._parameters
            parameter = parameters.get(place.last)
            if isinstance(parameter, DTensor):  # a model around this one may have been here before
                self._replaced.append((parameters, place.last, parameter))
                parameters[place.last] = place.instead(parameter)

    def _put_back(self, mark: int = 0) -> None:
        while len(self._replaced) > mark:
            parameters, last, parameter = self._replaced[-1]
            parameters[last] = parameter
            self._replaced.pop()

    def _follow(self, model: nn.Module, place: CutPlace) -> None:
        """Let the modules around a place that is read see to it themselves."""
        for module in _around(model, place.owner):
            followed = self._inside.setdefault(module, [])
            if not followed:
                module.register_forward_pre_hook(self._before_inside)
                module.register_forward_hook(self._after_inside, always_call=True)
            followed.append(place)

    def _before_inside(self, module: nn.Module, _args: Any) -> None:
        if not self._is_graph:
            self._enter(module)

    def _after_inside(self, module: nn.Module, _args: Any, _output: Any) -> None:
        if not self._is_graph:
            self._leave(module)

    @uncompiled
    def _enter(self, module: nn.Module) -> None:
        self._marks.append(len(self._replaced))
        self._replace(self._inside.get(module, []))

    @uncompiled
    def _leave(self, module: nn.Module) -> None:
        if self._marks:
            self._put_back(self._marks.pop())
        release_after(module)


def _around(model: nn.Module, owner: nn.Module) -> Iterator[nn.Module]:
    """The modules inside a model that can be called and that have ``owner`` inside."""
    for path, module in model.named_modules():
        is_around = module is not owner and any(each is owner for each in module.modules())
        if path and is_around and has_forward(module):
            yield module


def _places(model: nn.Module, dtype: torch.dtype | None) -> Iterator[_Whole | CutPlace]:
    """The places of parameters that are whole, and of those cut; tied ones have several."""
    modules = dict(model.named_modules())
    for path, module in modules.items():
        for name, parameter in module._parameters.items():
            if isinstance(parameter, DTensor) and place_of(parameter) is None:
                # modules that are called cast their parameters themselves
                yield _Whole(module, name, None if has_forward(module) else dtype)
        yield from getattr(module, "read_parameters", {}).values()
        if path and isinstance(module, RotatedModule):
            rotation = module.rotation
            for cut in rotation.layout.cuts:
                inside, _, last = f"{path}.{cut.name}".rpartition(".")
                reader = _reader(modules, path)
                yield CutPlace(modules[inside], last, reader, rotation.policy, rotation.sharded)


def _reader(modules: dict[str, nn.Module], path: str) -> nn.Module:
    """The module that can be called around the one at ``path``."""
    while path:
        path = path.rpartition(".")[0]
        if has_forward(modules[path]):
            return modules[path]
    return modules[""]


def read_layers_of(module: nn.Module) -> list[nn.Module]:
    """Layers whose weights a state-space mixer, such as Mamba's, reads when it takes one token.

    Its convolution along the sequence is then a product with the last inputs, and the kernels for
    CUDA take the weights of the step's projection. Both are small.
    """
    if not isinstance(getattr(module, "A_log", None), nn.Parameter):
        return []
    found = (getattr(module, name, None) for name in ("conv1d", "dt_proj"))
    return [each for each in found if isinstance(each, (nn.Conv1d, nn.Linear))]
