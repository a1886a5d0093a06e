"""A module whose forward goes round the ring."""

from dataclasses import replace
from typing import Any

from torch import nn

from gyre_trainer.rotation.dropout_masks import DRAW, Draw, fresh_key
from gyre_trainer.rotation.ring_pass import run
from gyre_trainer.rotation.rotation import Rotation
from gyre_trainer.rotation.rule import Rule

_MIXED = "_mixed_in"  # marks classes that `mix_in` made


class RotatedModule:
    """Mixed in before a module's class: its forward goes round the ring.

    Attributes:
        rotation: what is behind it.
    """

    rotation: Rotation
    training: bool
    _by_rule: dict[Rule, Rotation]

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """As without rotation, on this rank's part of the batch."""
        return self.around(*args, **kwargs)

    def around(self, *args: Any, **kwargs: Any) -> Any:
        """Once round the ring."""
        if self.training and self.rotation.rule.draws:
            equal = self.rotation.policy.dropout == "equal"
            kwargs[DRAW] = Draw(fresh_key(), self.rotation.home.ring, equal=equal)
        return run(self.rotation, args, kwargs)

    def rotation_by(self, rule: Rule) -> Rotation:
        """The same slices at the same home, run by another rule: the one of the first call with an equal rule."""
        if rule not in self._by_rule:
            self._by_rule[rule] = replace(self.rotation, rule=rule)
        return self._by_rule[rule]


def mix_in(module: nn.Module, behaviour: type, prefix: str) -> None:
    """The module's class becomes a subclass of itself with another forward; what it is an instance of stays true."""
    cls = type(module)
    module.__class__ = type(f"{prefix}{cls.__name__}", (behaviour, cls), {_MIXED: True})


def own_class(module: nn.Module) -> type:
    """The module's class as it was before anything was mixed in."""
    return next(cls for cls in type(module).__mro__ if issubclass(cls, nn.Module) and _MIXED not in vars(cls))
