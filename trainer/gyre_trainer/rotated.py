"""A module whose forward goes round the ring."""

from dataclasses import replace
from typing import Any

from gyre_trainer.rotation import Rotation
from gyre_trainer.rule import Rule
from gyre_trainer.turn import run


class RotatedModule:
    """Mixed in before a module's class: its forward goes round the ring.

    Attributes:
        rotation: what is behind it.
    """

    rotation: Rotation
    _by_rule: dict[Rule, Rotation]

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """As without rotation, on this rank's part of the batch."""
        return run(self.rotation, args, kwargs)

    def rotation_by(self, rule: Rule) -> Rotation:
        """The same slices at the same home, run by another rule: the one of the first call with an equal rule."""
        if rule not in self._by_rule:
            self._by_rule[rule] = replace(self.rotation, rule=rule)
        return self._by_rule[rule]
