"""What a forward writes to its modules: attributes such as a state that the next call reads.

A module whose forward runs more than once for one call, in backward or for every rank's slice, must
find what it found the first time, and leave what it left.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from gyre_trainer.rotation.rotated_module import behaviours_of

# Those of every module: parameters, buffers and modules inside, hooks, and `training`.
_OF_EVERY_MODULE = frozenset(vars(nn.Module()))
_ABSENT = object()


@dataclass(frozen=True, slots=True)
class _Place:
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


def written_by(module: nn.Module) -> Callable[[], list[tuple[_Place, Any]]]:
    """A function that, after a call of the module, gives what it wrote, with the values before."""
    before = [(vars(each), dict(vars(each)), _kept_by(each)) for each in module.modules()]

    def written() -> list[tuple[_Place, Any]]:
        return [
            (_Place(attributes, name), was.get(name, _ABSENT))
            for attributes, was, kept in before
            for name in dict.fromkeys((*was, *attributes))
            if name not in _OF_EVERY_MODULE
            and name not in kept
            and attributes.get(name, _ABSENT) is not was.get(name, _ABSENT)
        ]

    return written


def _kept_by(module: nn.Module) -> set[str]:
    """The names of attributes that rotation itself keeps with a module."""
    classes = (cls for behaviour in behaviours_of(module) for cls in behaviour.__mro__)
    return {name for cls in classes for name in (*vars(cls), *vars(cls).get("__annotations__", ()))}


def tensor_among(written: list[tuple[_Place, Any]]) -> str | None:
    """The name of an attribute that has a tensor now; None where none of these has."""
    return next(
        (
            place.name
            for place, _ in written
            if any(isinstance(leaf, Tensor) for leaf in tree_leaves(place.value))
        ),
        None,
    )


@contextmanager
def as_before(written: list[tuple[_Place, Any]]) -> Iterator[None]:
    """A context in which attributes have the values of before a call; they get the present back."""
    now = [(place, place.value) for place, _ in written]
    for place, value in written:
        place.put(value)
    try:
        yield
    finally:
        for place, value in now:
            place.put(value)
