"""Calls of rotated modules in compiled graphs: what a graph does not carry of them.

See [Note: Ring passes in one graph] in `pass_operator`.
"""

import weakref
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import TreeSpec, register_pytree_node, tree_flatten, tree_unflatten

from gyre_trainer.rotation.caches.shared_cache import is_cache
from gyre_trainer.rotation.form import Missing, Passed
from gyre_trainer.rotation.rotated_module import RotatedModule

NOTHING = "gyre: None"  # stands for None in traced arguments

numbers = count()  # of modules, and of ring passes that wait for backward
_MODULES: "weakref.WeakValueDictionary[int, Sites]" = weakref.WeakValueDictionary()


class _Absent:
    """Stands for None in a traced output: a container of nothing, which becomes None."""


def _no_leaves(_absent: _Absent) -> tuple[list[Any], None]:
    return [], None


def _none(_leaves: Iterable[Any], _context: None) -> None:
    return None


register_pytree_node(_Absent, _no_leaves, _none)


@dataclass(slots=True)
class FlatForm:
    """Flattened values, with `Missing` in the places of tensors, and `Passed` in arguments'."""

    leaves: list[Any]
    spec: TreeSpec

    @classmethod
    def of(cls, values: Any, given: Sequence[Tensor] = ()) -> "tuple[FlatForm, list[Tensor]]":
        """The form of ``values``, and their tensors that are not among those ``given``."""
        leaves, spec = tree_flatten(values, is_leaf=is_cache)
        places = {id(tensor): place for place, tensor in enumerate(given)}
        leaves = [Passed(places[id(leaf)]) if id(leaf) in places else leaf for leaf in leaves]
        tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        return cls([_kept(leaf) for leaf in leaves], spec), tensors

    def filled(self, tensors: Iterable[Any]) -> Any:
        """The values, with ``tensors`` in the places of theirs."""
        arriving = iter(tensors)
        leaves = [next(arriving) if leaf is Missing else leaf for leaf in self.leaves]
        return tree_unflatten(leaves, self.spec)

    def filled_in_graph(self, tensors: Iterable[Any], given: Sequence[Tensor]) -> Any:
        """The same for a function that is traced, which may not return None as a leaf."""
        leaves = [_Absent() if leaf is None else leaf for leaf in self.leaves]
        leaves = [given[leaf.place] if isinstance(leaf, Passed) else leaf for leaf in leaves]
        return FlatForm(leaves, self.spec).filled(tensors)


def _kept(leaf: Any) -> Any:
    if isinstance(leaf, Tensor):
        return Missing
    return None if isinstance(leaf, str) and leaf == NOTHING else leaf


# None is a size that depends on values, such as the number of an expert's tokens.
Shapes = list[tuple[tuple[int | None, ...], torch.dtype]]


def shapes_of(tensors: Iterable[Tensor]) -> Shapes:
    """Shape and dtype of each tensor, as far as they are known when a graph is traced."""
    return [
        (tuple(size if type(size) is int else None for size in tensor.shape), tensor.dtype)
        for tensor in tensors
    ]


def fits(found: Shapes, noted: Shapes) -> bool:
    """Whether tensors have the shapes that were noted."""
    return len(found) == len(noted) and all(
        dtype == noted_dtype
        and len(shape) == len(noted_shape)
        and all(size in (own, None) for own, size in zip(shape, noted_shape, strict=True))
        for (shape, dtype), (noted_shape, noted_dtype) in zip(found, noted, strict=True)
    )


@dataclass(slots=True)
class Site:
    """One call of a rotated module in a graph.

    Attributes:
        num_parameters: the number of tensors before those of the arguments.
        arguments: the form of the arguments.
        shapes: shape and dtype of each tensor.
        takes_grad: for each tensor, whether backward returns its gradient.
        autocast: whether autocast is on, and its dtype.
        output: the form of the output, and shape and dtype of each tensor in it.
    """

    num_parameters: int
    arguments: FlatForm
    shapes: Shapes
    takes_grad: list[bool]
    autocast: tuple[bool, torch.dtype]
    output: tuple[FlatForm, Shapes] | None = field(default=None, compare=False)

    @property
    def recorded(self) -> bool:
        """Whether a backward may follow."""
        return any(self.takes_grad)

    def unknown_sizes(self, tensors: Iterable[Tensor]) -> list[int]:
        """The sizes of those tensors that take gradients, where `shapes` does not have them."""
        return [
            size
            for tensor, (shape, _), takes in zip(tensors, self.shapes, self.takes_grad, strict=True)
            for size, known in zip(tensor.shape, shape, strict=True)
            if takes and known is None
        ]

    def known_shapes(self, sizes: Iterable[int]) -> list[tuple[tuple[int, ...], torch.dtype]]:
        """Shape and dtype of each gradient, with ``sizes`` as `unknown_sizes` gives them."""
        rest = iter(sizes)
        return [
            (tuple(next(rest) if size is None else size for size in shape), dtype)
            for (shape, dtype), takes in zip(self.shapes, self.takes_grad, strict=True)
            if takes
        ]


class Sites:
    """The calls of one rotated module in graphs.

    Attributes:
        number: by which they name it, as long as it lives.
    """

    def __init__(self, module: RotatedModule) -> None:
        self._module = weakref.ref(module)
        self._sites: list[Site] = []
        self.number = next(numbers)
        _MODULES[self.number] = self

    @property
    def module(self) -> RotatedModule:
        """The module; what calls its graphs keeps it alive."""
        module = self._module()
        assert module is not None
        return module

    def __getitem__(self, index: int) -> Site:
        return self._sites[index]

    def add(self, site: Site) -> int:
        """The index of a site like this one, which is added where none is.

        A compiler traces one call several times.
        """
        if site not in self._sites:
            self._sites.append(site)
        return self._sites.index(site)


def sites_at(number: int) -> Sites:
    """The sites of the module with this number."""
    return _MODULES[number]
