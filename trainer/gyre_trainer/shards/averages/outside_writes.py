"""Writes to parameters that no step of an optimizer made, such as those of weights that are loaded.

[Note: Values that change later]

Ranks that hold the same values compare them before the first backward, and take the same steps from
then on. Another write may be made on one rank alone. Torch counts the writes to a tensor, so a rank
knows, at no cost, that there was one outside of the optimizer's steps. Along with the gradients
that a backward averages, each rank sends whether it has seen one. Only where some rank has, all
ranks compare their values.
"""

from collections.abc import Iterator, Sequence
from typing import Any
from weakref import WeakKeyDictionary, WeakSet, ref

from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from gyre_trainer.shards.replaced_parameters import ids_held_by


class OutsideWrites:
    """Whether parameters were written to outside of a step since all ranks compared them.

    A step is one of an optimizer that derives from torch's.
    """

    def __init__(self, parameters: Sequence[Tensor] = ()) -> None:
        self._parameters = parameters
        self._num_counted: int | None = None
        self._found = False
        self._in_step = False
        _STEPS.watch(self)

    @property
    def found(self) -> bool:
        """Whether there was such a write; False before the first `settle`."""
        self.look()
        return self._found

    def track(self, parameters: Sequence[Tensor]) -> None:
        """Watch these from now on; what is known of others stays."""
        if [*map(id, parameters)] != [*map(id, self._parameters)]:
            self.look()
            self._parameters = list(parameters)
            self.skip()

    def look(self) -> None:
        """Take the writes since the last look for such that are outside of a step.

        But in one: a backward of its closure looks at what the step has written so far.
        """
        if self._in_step:
            self.skip()
        elif self._num_counted is not None and self._num_counted != self._count():
            self._found = True

    def begin_step(self, *, has_closure: bool) -> None:
        """Take the writes until `end_step` for those of a step.

        Only a closure looks before that. So after a step without one that fails, others are seen.
        """
        self._in_step = False
        self.look()
        self._in_step = has_closure

    def end_step(self) -> None:
        """Take the writes from now on for such that are outside of a step."""
        self.skip()
        self._in_step = False

    def skip(self) -> None:
        """Take the writes since the last look for those of a step."""
        if self._num_counted is not None:
            self._num_counted = self._count()

    def settle(self) -> None:
        """Note that all ranks have the same values now."""
        self._num_counted, self._found = self._count(), False

    def are_of(self, parameters: set[int]) -> bool:
        """Whether one of the parameters has one of these ids."""
        return any(id(each) in parameters for each in self._parameters)

    def _count(self) -> int:
        return sum(map(_num_writes, self._parameters))


def _num_writes(parameter: Tensor) -> int:
    """The writes to a parameter, or to its shard as a tensor of its own."""
    local = parameter._local_tensor._version if isinstance(parameter, DTensor) else 0
    return parameter._version + local


class _Steps:
    """Tells those who watch parameters which writes are those of a step."""

    def __init__(self) -> None:
        self._watching: WeakSet[OutsideWrites] = WeakSet()
        self._num_watched = 0
        self._seen: WeakKeyDictionary[Optimizer, tuple[int, list[int]]] = WeakKeyDictionary()
        self._stepped: WeakKeyDictionary[Optimizer, list[ref[OutsideWrites]]] = WeakKeyDictionary()

    def watch(self, writes: OutsideWrites) -> None:
        if not self._num_watched:
            register_optimizer_step_pre_hook(self._before)
            register_optimizer_step_post_hook(self._after)
        self._watching.add(writes)
        self._num_watched += 1

    def _before(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        has_closure = len(args) > 1 or bool(kwargs)  # the first one is the optimizer
        for each in self._of(optimizer):
            each.begin_step(has_closure=has_closure)

    def _after(self, optimizer: Optimizer, _args: Any, _kwargs: Any) -> None:
        for each in self._of(optimizer):
            each.end_step()

    def _of(self, optimizer: Optimizer) -> Iterator[OutsideWrites]:
        held = ids_held_by(optimizer)
        seen = self._num_watched, held
        if self._seen.get(optimizer) != seen:
            self._seen[optimizer] = seen
            ids = set(held)
            self._stepped[optimizer] = [ref(each) for each in self._watching if each.are_of(ids)]
        for reference in self._stepped[optimizer]:
            if (there := reference()) is not None:
                yield there


_STEPS = _Steps()
