"""Arguments of which each slice of a rotated module has its own."""

from abc import ABC, abstractmethod
from typing import Any

from torch.utils._pytree import tree_flatten, tree_map


class PerSlice(ABC):
    """An object that a rotated module may be called with although it changes: one for each slice.

    Only calls without gradients take it: a backward would have to know what it was before.
    """

    @abstractmethod
    def of_slice(self, index: int) -> Any:
        """What the slice is called with; the same object at every call."""

    @property
    @abstractmethod
    def begun(self) -> bool:
        """Whether a slice has changed what is its own."""


def begun_in(arguments: Any) -> bool:
    """Whether an object in the arguments of a call has begun."""
    return any(isinstance(leaf, PerSlice) and leaf.begun for leaf in tree_flatten(arguments)[0])


def without(arguments: Any) -> Any:
    """The arguments with None in place of such objects."""
    return tree_map(lambda leaf: None if isinstance(leaf, PerSlice) else leaf, arguments)
