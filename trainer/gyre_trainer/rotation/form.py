"""The form of a call's arguments, or of an output: everything in it but its tensors.

A module is called once for each slice, so its arguments are put together as often. Of an argument
that is no container nothing has to be found out; torch's functions for nested ones take longer than
an operator does.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from types import NoneType
from typing import Any

from torch import Tensor
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten

from gyre_trainer.rotation.caches.shared_cache import is_cache

_PLAIN = (Tensor, NoneType, bool, int, float, str)


class Missing:
    """Marks the position of a tensor."""


@dataclass(frozen=True, slots=True)
class Passed:
    """Marks the position of a tensor that the module was called with.

    Attributes:
        place: the tensor's index among those of the arguments.
    """

    place: int


class Form:
    """The form of some values, each of them nested or not.

    Attributes:
        leaves: of all values, in their order, with `Missing` in place of each tensor.
    """

    def __init__(self, values: Iterable[Any]) -> None:
        self.leaves: list[Any] = []
        self._tensors: list[Tensor] = []
        self._specs: list[TreeSpec | None] = []  # None for a leaf
        for value in values:
            leaves, spec = ([value], None) if isinstance(value, _PLAIN) else _flat(value)
            self._specs.append(spec)
            for leaf in leaves:
                if isinstance(leaf, Tensor):
                    self._tensors.append(leaf)
                    leaf = Missing  # noqa: PLW2901
                self.leaves.append(leaf)

    def take_tensors(self) -> list[Tensor]:
        """The tensors among the leaves. The form keeps them no longer."""
        tensors, self._tensors = self._tensors, []
        return tensors

    def note_passed(self, places: Mapping[int, int]) -> None:
        """Mark tensors that are arguments; the form keeps them no longer.

        Args:
            places: the indices of the arguments' tensors, by their ids.
        """
        if not any(id(tensor) in places for tensor in self._tensors):
            return
        others, arriving = [], iter(self._tensors)
        for index, leaf in enumerate(self.leaves):
            if leaf is Missing:
                tensor = next(arriving)
                if id(tensor) in places:
                    self.leaves[index] = Passed(places[id(tensor)])
                else:
                    others.append(tensor)
        self._tensors = others

    def filled(self, leaves: Iterable[Any], tensors: Iterable[Tensor]) -> list[Any]:
        """The values, with other ``leaves``, and with ``tensors`` in the places of `Missing`."""
        arrived = iter(tensors)
        found = (next(arrived) if leaf is Missing else leaf for leaf in leaves)
        return [next(found) if spec is None else _nested(found, spec) for spec in self._specs]


def _flat(value: Any) -> tuple[list[Any], TreeSpec]:
    return tree_flatten(value, is_leaf=is_cache)  # `transformers` registers some as containers


def _nested(leaves: Iterator[Any], spec: TreeSpec) -> Any:
    return tree_unflatten(islice(leaves, spec.num_leaves), spec)


def _can_be_written_to(spec: TreeSpec) -> bool:
    """Whether a list, a dict or another container that can change is in a nested value."""
    if spec.is_leaf():
        return False
    is_tuple = spec.type is tuple or issubclass(spec.type, tuple)
    return not is_tuple or any(map(_can_be_written_to, spec.children()))


class Arguments(Form):
    """The form of the arguments of a call."""

    def __init__(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        super().__init__((*args, *kwargs.values()))
        self._num_args, self._names = len(args), tuple(kwargs)
        self._mutable = [
            place
            for place, spec in enumerate(self._specs)
            if spec is not None and _can_be_written_to(spec)
        ]
        self._given: dict[int, list[int]] = {}  # identities: the leaves themselves are not kept

    def of_one_tensor(self) -> Iterator[tuple[int | str, int]]:
        """Of each argument that is a tensor: its position or name, and its index among tensors."""
        place = index = 0
        for key, spec in zip((*range(self._num_args), *self._names), self._specs, strict=True):
            stop = place + (1 if spec is None else spec.num_leaves)
            found = sum(leaf is Missing for leaf in self.leaves[place:stop])
            if spec is None and found:
                yield key, index
            place, index = stop, index + found

    def call(
        self, leaves: Iterable[Any], tensors: Iterable[Tensor]
    ) -> tuple[list[Any], dict[str, Any]]:
        """Positional and keyword arguments; see `filled`."""
        values = self.filled(leaves, tensors)
        self._given = {place: list(map(id, _flat(values[place])[0])) for place in self._mutable}
        named = zip(self._names, values[self._num_args :], strict=True)
        return values[: self._num_args], dict(named)

    def written_to(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """One of the lists and dicts of `call` that the module has changed since; None without one.

        They are others than the caller's, which would stay as it was.

        Args:
            args: the positional arguments as `call` gave them.
            kwargs: the keyword arguments.
        """
        if not self._mutable:
            return None
        values = [*args, *(kwargs[name] for name in self._names)]
        return next(
            (values[place] for place in self._mutable if self._differs(place, values)), None
        )

    def _differs(self, place: int, values: Sequence[Any]) -> bool:
        found, spec = _flat(values[place])
        before = self._specs[place]
        assert before is not None
        return spec != before or list(map(id, found)) != self._given[place]
