"""What a forward writes to its modules: attributes such as a state that the next call reads.

A module whose forward runs more than once for one call, in backward or for every rank's slice, must
find what it found the first time, and leave what it left.
"""

from collections import OrderedDict, defaultdict, deque
from collections.abc import Iterator
from contextlib import contextmanager
from copy import copy
from dataclasses import dataclass
from typing import Any, Protocol

from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from gyre_trainer.rotation.rotated_module import behaviours_of

# Those of every module: parameters, buffers and modules inside, hooks, and `training`.
_OF_EVERY_MODULE = frozenset(vars(nn.Module()))
_ABSENT = object()
# Containers whose contents are put back; what others do when they are changed is not known.
_CONTAINERS = (list, dict, OrderedDict, defaultdict, set, deque)


class Place(Protocol):
    """Where a module keeps a value."""

    @property
    def name(self) -> str:
        """That of the attribute."""
        ...

    @property
    def value(self) -> Any:
        """What is there now."""
        ...

    def put(self, value: Any) -> None:
        """Let ``value`` be there."""
        ...


@dataclass(frozen=True, slots=True)
class _Attribute:
    """An attribute of a module; `_ABSENT` is the value of one that it has not."""

    attributes: dict[str, Any]
    name: str

    @property
    def value(self) -> Any:
        return self.attributes.get(self.name, _ABSENT)

    def put(self, value: Any) -> None:
        if value is _ABSENT:
            self.attributes.pop(self.name, None)
        else:
            self.attributes[self.name] = value


@dataclass(frozen=True, slots=True)
class _Contents:
    """What is in a container that an attribute of a module has; its value is a copy of it."""

    container: Any
    name: str

    @property
    def value(self) -> Any:
        return copy(self.container)

    def put(self, value: Any) -> None:
        self.container.clear()
        put_all = "update" if isinstance(self.container, dict | set) else "extend"
        getattr(self.container, put_all)(value)


class BeforeCall:
    """What the attributes of a module, and of those inside, are before a call.

    Lists, dicts, sets and deques are looked into. Of a tensor is known whether it was written to,
    and not what it had.
    """

    def __init__(self, module: nn.Module) -> None:
        self._attributes = [
            (vars(each), {name: x for name, x in vars(each).items() if name not in kept}, kept)
            for each in module.modules()
            for kept in [_OF_EVERY_MODULE | _kept_by(each)]
        ]
        self._contents: dict[int, tuple[_Contents, Any]] = {}
        self._versions: list[tuple[str, Tensor, int]] = []
        for _, was, _ in self._attributes:
            for name, value in was.items():
                self._note(name, value)

    def _note(self, name: str, value: Any) -> None:
        if isinstance(value, Tensor) and not value.is_inference():
            self._versions.append((name, value, value._version))
        elif type(value) in _CONTAINERS and id(value) not in self._contents:
            place = _Contents(value, name)
            self._contents[id(value)] = place, place.value
            for each in value.values() if isinstance(value, dict) else value:
                self._note(name, each)

    def changes(self) -> list[tuple[Place, Any]]:
        """The places that have other values now, with the values before."""
        found: list[tuple[Place, Any]] = [
            (_Attribute(attributes, name), was.get(name, _ABSENT))
            for attributes, was, kept in self._attributes
            for name in dict.fromkeys((*was, *attributes))
            if name not in kept and attributes.get(name, _ABSENT) is not was.get(name, _ABSENT)
        ]
        return found + [
            (place, was)
            for place, was in self._contents.values()
            if not _are_same(place.container, was)
        ]

    def counts(self) -> bool:
        """Whether a number has another value now, or a container other contents."""
        return any(
            isinstance(place, _Contents) or (isinstance(was, int | float) and place.value != was)
            for place, was in self.changes()
        )

    def overwritten(self) -> str | None:
        """The name of an attribute with a tensor that was written to; None without one."""
        return next(
            (name for name, tensor, version in self._versions if tensor._version != version), None
        )


def _are_same(one: Any, other: Any) -> bool:
    """Whether two containers have the same objects."""
    if isinstance(one, set):
        return bool(one == other)
    if isinstance(one, dict):
        return _are_same(list(one.keys()), list(other.keys())) and _are_same(
            list(one.values()), list(other.values())
        )
    return len(one) == len(other) and all(a is b for a, b in zip(one, other, strict=True))


def _kept_by(module: nn.Module) -> set[str]:
    """The names of attributes that rotation itself keeps with a module."""
    classes = (cls for behaviour in behaviours_of(module) for cls in behaviour.__mro__)
    return {name for cls in classes for name in (*vars(cls), *vars(cls).get("__annotations__", ()))}


def has_tensor(value: Any) -> bool:
    """Whether a value is a tensor, or has one inside."""
    return any(isinstance(leaf, Tensor) for leaf in tree_leaves(value))


@contextmanager
def as_before(written: list[tuple[Place, Any]]) -> Iterator[None]:
    """A context in which attributes have the values of before a call; they get the present back."""
    now = [(place, place.value) for place, _ in written]
    for place, value in written:
        place.put(value)
    try:
        yield
    finally:
        for place, value in now:
            place.put(value)
