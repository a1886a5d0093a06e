"""Parameters that a forward reads, instead of calling the module that has them.

Such are those of a `ParameterList`, or of a layer in `F.linear(x, self.layer.weight)`. While a
model runs, plain tensors stand in the place of all its replicated parameters, so that any forward
inside may read any of them. Stand-ins in the place of those that are cut refuse it by name.
"""

from collections.abc import Iterator
from copy import copy
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from gyre_trainer.rotation.call import cast
from gyre_trainer.rotation.rotated_module import RotatedModule, own_class, uncompiled
from gyre_trainer.shards.local_shards import local_of, place_of
from gyre_trainer.shards.stand_ins import StandIn


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
class _Cut:
    """Where a parameter is that is cut.

    Attributes:
        owner: the module that has it.
        last: its name there.
        name: its name in the model.
        path: of the module that rotates with it.
        stand_in: what refuses to be read in its place; made when it is needed first.
    """

    owner: nn.Module
    last: str
    name: str
    path: str
    stand_in: StandIn | None = None

    def instead(self, parameter: DTensor) -> Tensor:
        """Its stand-in."""
        stand_in = self.stand_in
        if stand_in is None or stand_in.parameter is not parameter:
            self.stand_in = stand_in = StandIn.of(parameter, self.name, self.path)
        elif stand_in.requires_grad != parameter.requires_grad:
            stand_in.requires_grad_(parameter.requires_grad)
        return stand_in


class ReadableParameters:
    """Hooks around a model's forward that put plain tensors in the place of its parameters.

    Those that are cut cannot be read; stand-ins take their place.
    """

    def __init__(self, model: nn.Module, dtype: torch.dtype | None) -> None:
        """Register the hooks; parameters of modules that are never called are read in ``dtype``."""
        self._dtype = dtype
        self._places: list[_Whole | _Cut] | None = list(_places(model, dtype))
        self._replaced: list[tuple[dict[str, Any], str, DTensor]] = []
        model.register_forward_pre_hook(self._before)
        model.register_forward_hook(self._after, always_call=True)
        model.register_state_dict_pre_hook(self._before_state)  # type: ignore[no-untyped-call]

    def __deepcopy__(self, memo: dict[int, Any]) -> "ReadableParameters":
        """The hooks of a copied model, which finds its own places when it first runs."""
        copied = copy(self)
        copied._places, copied._replaced = None, []
        return copied

    @uncompiled
    def _before(self, model: nn.Module, _args: Any) -> None:
        self._put_back()  # torch calls no hook after a forward that Ctrl-C has ended
        if self._places is None:
            self._places = list(_places(model, self._dtype))
        for place in self._places:
            parameters: dict[str, Any] = place.owner._parameters
            parameter = parameters.get(place.last)
            if isinstance(parameter, DTensor):  # a model around this one may have been here before
                self._replaced.append((parameters, place.last, parameter))
                parameters[place.last] = place.instead(parameter)

    @uncompiled
    def _after(self, _model: nn.Module, _args: Any, _output: Any) -> None:
        self._put_back()

    def _before_state(self, _model: nn.Module, _prefix: str, _keep_vars: bool) -> None:
        self._put_back()

    def _put_back(self) -> None:
        while self._replaced:
            parameters, last, parameter = self._replaced[-1]
            parameters[last] = parameter
            self._replaced.pop()


def _places(model: nn.Module, dtype: torch.dtype | None) -> Iterator[_Whole | _Cut]:
    """The places of parameters that are whole, and of those cut; tied ones have several."""
    for path, module in model.named_modules():
        # modules that are called cast their parameters themselves
        is_called = getattr(own_class(module), "forward", None) is not nn.Module.forward
        for name, parameter in module._parameters.items():
            if isinstance(parameter, DTensor) and place_of(parameter) is None:
                yield _Whole(module, name, None if is_called else dtype)
        if path and isinstance(module, RotatedModule):
            for cut in module.rotation.layout.cuts:
                inside, _, last = f"{path}.{cut.name}".rpartition(".")
                yield _Cut(model.get_submodule(inside), last, f"{inside}.{last}", path)


def read_layers_of(module: nn.Module) -> list[nn.Module]:
    """Layers whose weights a state-space mixer, such as Mamba's, reads when it takes one token.

    Its convolution along the sequence is then a product with the last inputs, and the kernels for
    CUDA take the weights of the step's projection. Both are small.
    """
    if not isinstance(getattr(module, "A_log", None), nn.Parameter):
        return []
    found = (getattr(module, name, None) for name in ("conv1d", "dt_proj"))
    return [each for each in found if isinstance(each, (nn.Conv1d, nn.Linear))]
