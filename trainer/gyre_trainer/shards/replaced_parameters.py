"""Parameters that others have replaced: an optimizer that holds one of them would not train it.

Rotation replaces the parameters of a model, and `materialize` those that are on `meta`. Nothing
else fails where an optimizer was made before: old parameters get no gradients, and a step skips
them.
"""

from typing import Any
from weakref import WeakKeyDictionary

from gyre_common.counts import counted
from torch import nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.weak import WeakIdKeyDictionary

from gyre_trainer.errors import RotationError


def ids_held_by(optimizer: Optimizer) -> list[int]:
    """The `id` of each parameter that an optimizer has now.

    Their number alone does not show that others were put into the places of some.
    """
    return [id(each) for group in optimizer.param_groups for each in group["params"]]


class _Replaced:
    """The parameters that were replaced and that something still holds, with their names."""

    def __init__(self) -> None:
        self._names = WeakIdKeyDictionary()
        self._num_noted = 0
        self._seen: WeakKeyDictionary[Optimizer, tuple[int, list[int]]] = WeakKeyDictionary()
        self._is_watching = False

    def note(self, parameter: nn.Parameter, name: str) -> None:
        self._names[parameter] = name
        self._num_noted += 1
        if not self._is_watching:
            self._is_watching = True
            register_optimizer_step_pre_hook(self._before_step)

    def _before_step(self, optimizer: Optimizer, _args: Any, _kwargs: Any) -> None:
        """Look at an optimizer's parameters once, and again after either side has changed."""
        seen = self._num_noted, ids_held_by(optimizer)
        if self._seen.get(optimizer) != seen:
            self._require_none(optimizer)
            self._seen[optimizer] = seen

    def _require_none(self, optimizer: Optimizer) -> None:
        held = (each for group in optimizer.param_groups for each in group["params"])
        names = [self._names[each] for each in held if each in self._names]
        if names:
            raise RotationError(
                f"{type(optimizer).__name__} holds {counted(len(names), 'parameter')}, first "
                f"{names[0]}, that the model has no more: rotate_all, rotate, materialize "
                "or a conversion, such as bfloat16(), has replaced them, so a step would not "
                "train it. Make the optimizer after these."
            )


_REPLACED = _Replaced()


def note_replaced(parameter: nn.Parameter, name: str) -> None:
    """Refuse the step of every optimizer that holds this parameter from now on.

    Args:
        parameter: no module has it any more. It is referred to weakly.
        name: its name, for the message.
    """
    _REPLACED.note(parameter, name)
