"""The layers of a cache of `transformers` during one call of a rotated module.

See [Note: Slices and caches] in `shared_cache`.
"""

import sys
from collections.abc import Iterable, Sequence
from copy import copy
from inspect import signature
from typing import Any

import torch
from torch import Tensor

from gyre_trainer.errors import RotationError
from gyre_trainer.rotation.caches.unusable_tensors import UnusableTensor

# The library's classes of layers that make new keys and values at each update, and of those that
# write into what they have. What others keep is not known.
_GROWING = ("DynamicLayer", "DynamicSlidingWindowLayer")
_IN_PLACE = ("StaticLayer", "StaticSlidingWindowLayer", "SlidingWindowLayer", "ChunkedSlidingLayer")
_HEADS = 1  # the dim of keys and values


def refused(cache: Any, name: str, why: str) -> RotationError:
    """The error for a cache that the slices of the module ``name`` cannot share."""
    return RotationError(
        f"{name} is called with a {type(cache).__name__}, of which its slices cannot share the "
        f"keys and values: {why}; pass a DynamicCache or a StaticCache of transformers or none "
        "(use_cache=False), or let the layers inside rotate one by one (find_blocks=False, and no "
        "rule for the module)"
    )


class SharedLayers:
    """The layers of a cache during one call, as they were before it."""

    def __init__(
        self, cache: Any, heads: Sequence[Sequence[int]], name: str, *, recorded: bool
    ) -> None:
        self._cache = cache
        self._heads_of = heads
        self._num_parts = 1 + max(max(parts) for parts in heads)
        self._name = name
        self._recorded = recorded
        self._takes_grads = torch.is_grad_enabled()
        self._length = len(cache.layers)
        self._before: dict[int, Any] = {}

    def of_slice(self, index: int) -> "LayersOfSlice":
        """The layers with the heads of one slice."""
        return LayersOfSlice(self, index, self._length)

    def layer(self, place: int, index: int) -> Any:
        """A copy of a layer with the heads of one slice."""
        if place not in self._before:
            before = copy(self._cache.layers[place])
            self.require_known(before)
            self._before[place] = before
        of_slice = copy(self._before[place])
        if of_slice.keys is not None and of_slice.keys.numel():
            of_slice.keys = self._heads(of_slice.keys, index)
            of_slice.values = self._heads(of_slice.values, index)
            if self._would_lose_grads(self._before[place]):
                self._close(of_slice)
        if _is_in_place(of_slice):
            for name, tensor in _tensors(of_slice).items():  # also a count of tokens
                setattr(of_slice, name, tensor.clone())
        return of_slice

    def _would_lose_grads(self, layer: Any) -> bool:
        """Whether gradients would have to flow into what the layer has, which they cannot."""
        return self._takes_grads and (layer.keys.requires_grad or layer.values.requires_grad)

    def _close(self, layer: Any) -> None:
        """Let a layer tell the length of its keys and values, and refuse any use of them."""
        refusal = (
            f"{self._name} is called with gradients and with a {type(self._cache).__name__} "
            "that was filled with gradients, which cannot flow back into it; call the model "
            "once for all tokens, or fill the cache under torch.no_grad(), or let the layers "
            "inside rotate one by one (find_blocks=False, and no rule for the module)"
        )
        layer.keys = UnusableTensor.of(layer.keys, refusal)
        layer.values = UnusableTensor.of(layer.values, refusal)

    def _heads(self, tensor: Tensor, index: int) -> Tensor:
        num_heads, rest = divmod(tensor.shape[_HEADS], self._num_parts)
        if rest:
            raise RotationError(
                f"{self._name} is called with a cache of {tensor.shape[_HEADS]} heads, which "
                f"are not {self._num_parts} equal parts, as its slices need them; it is from "
                "another module or model"
            )
        first, *others = (
            tensor.detach().narrow(_HEADS, part * num_heads, num_heads)
            for part in self._heads_of[index]
        )
        return torch.cat([first, *others], _HEADS) if others else first

    def require_known(self, layer: Any) -> None:
        """Refuse a layer that keeps something else, or is overwritten in a call with gradients."""
        kind = type(layer).__name__
        library = sys.modules["transformers.cache_utils"]
        known = type(layer) is getattr(library, kind, None)
        if not known or kind not in (*_GROWING, *_IN_PLACE):
            raise refused(self._cache, self._name, f"it has a {kind}")
        if self._recorded and _is_in_place(layer):
            why = f"a {kind} is overwritten, and the call has gradients (torch.no_grad() has none)"
            raise refused(self._cache, self._name, why)

    def merge(self, by_slice: Sequence["LayersOfSlice"]) -> None:
        """Give the caller's layers what those of all slices have, in the order of the slices."""
        first, layers = by_slice[0], self._cache.layers
        for place in range(len(layers), len(first)):
            layers.append(copy(first[place]))
        for place in first.changed():
            of_slices = [each[place] for each in by_slice]
            if _is_in_place(of_slices[0]):
                self._write(layers[place], of_slices)
            else:
                self._join(layers[place], of_slices)

    def _join(self, layer: Any, of_slices: Sequence[Any]) -> None:
        """Let a layer have what its copies have."""
        vars(layer).update(vars(of_slices[0]))
        for name in ("keys", "values"):
            parts = [part.detach() for part in self._in_order(of_slices, name)]
            whole = torch.cat(parts, _HEADS) if len(parts) > 1 else parts[0]
            setattr(layer, name, _closed(whole) if self._recorded else whole)

    def _write(self, layer: Any, of_slices: Sequence[Any]) -> None:
        """Write what its copies have into the memory of a layer."""
        if layer.keys is None:
            likes = [self._no_tokens(of_slices, name) for name in ("keys", "values")]
            # transformers 4 asks for keys alone
            layer.lazy_initialization(
                *likes[: len(signature(layer.lazy_initialization).parameters)]
            )
        own = _tensors(layer)
        vars(layer).update(vars(of_slices[0]) | own | {"num_heads": layer.num_heads})
        for name in own.keys() - {"keys", "values"}:
            own[name].copy_(getattr(of_slices[0], name))
        for name in ("keys", "values"):
            targets = own[name].chunk(self._num_parts, _HEADS)
            for target, part in zip(targets, self._in_order(of_slices, name), strict=True):
                target.copy_(part)

    def _no_tokens(self, of_slices: Sequence[Any], name: str) -> Tensor:
        """Keys or values of all heads, of no token."""
        batch, heads, _, channels = self._in_order(of_slices, name)[0].shape
        like: Tensor = getattr(of_slices[0], name)
        return like.new_empty(batch, heads * self._num_parts, 0, channels)

    def _in_order(self, of_slices: Sequence[Any], name: str) -> list[Tensor]:
        """The keys or values of all parts of the heads, each from the first slice that has it."""
        found: dict[int, Tensor] = {}
        for parts, layer in zip(self._heads_of, of_slices, strict=True):
            chunks = getattr(layer, name).chunk(len(parts), _HEADS)
            for part, chunk in zip(parts, chunks, strict=True):
                found.setdefault(part, chunk)
        return [found[part] for part in range(self._num_parts)]


class LayersOfSlice(Sequence[Any]):
    """The layers of a cache with the heads of one slice; each is copied when it is asked for."""

    def __init__(self, shared: SharedLayers, index: int, length: int) -> None:
        self._shared = shared
        self._index = index
        self._length = length
        self._copied: dict[int, tuple[Any, Tensor | None]] = {}

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, place: Any) -> Any:
        place = range(self._length)[place]
        if place not in self._copied:
            layer = self._shared.layer(place, self._index)
            self._copied[place] = layer, layer.keys
        return self._copied[place][0]

    def append(self, layer: Any) -> None:
        """As the library does where a cache begins without layers."""
        self._shared.require_known(layer)
        self._copied[self._length] = layer, layer.keys
        self._length += 1

    def used(self) -> list[Any]:
        """The layers that were asked for, or were added, in the order of the cache."""
        return [layer for _, (layer, _) in sorted(self._copied.items(), key=lambda each: each[0])]

    def changed(self) -> Iterable[int]:
        """The places of the layers that have been updated."""
        for place, (layer, before) in self._copied.items():
            if layer.keys is not before or (_is_in_place(layer) and before is not None):
                yield place


def _is_in_place(layer: Any) -> bool:
    """Whether the layer writes into the memory that it has, at addresses that must stay."""
    return type(layer).__name__ in _IN_PLACE


def _tensors(layer: Any) -> dict[str, Tensor]:
    """The tensors of a layer, by attribute."""
    return {name: value for name, value in vars(layer).items() if isinstance(value, Tensor)}


class _Closed(torch.autograd.Function):
    """A tensor that requires a gradient and refuses it."""

    @staticmethod
    def forward(_: Any, tensor: Tensor, _requires_grad: Tensor) -> Tensor:
        return tensor.view_as(tensor)

    @staticmethod
    def backward(_: Any, *_grads: Any) -> Any:
        raise RotationError(
            "a gradient would have to flow through keys and values of a cache into a module that "
            "rotates as a whole. Compute the loss of the model's other outputs, or let the layers "
            "inside rotate one by one (find_blocks=False, and no rule for the module)."
        )


def _closed(tensor: Tensor) -> Tensor:
    closed: Tensor = _Closed.apply(tensor, torch.empty(0, requires_grad=True))  # type: ignore[no-untyped-call]
    return closed
