"""Tensors of which only the shape, the dtype and the device may be asked for.

Also here:

* The layers of a cache of `transformers` during one call of a rotated module.

Caches of keys and values of `transformers`, in calls of modules that rotate.

[Note: Slices and caches]

The caller's cache has the keys and values of all heads, in the order of the heads, as without
rotation. So all that the library asks of it or does to it holds: lengths, masks, beams, cropping.
Each slice is called with a copy of the cache whose layers have the heads of that slice alone, and
the library's own code adds to this copy. When all slices have run, what they have is put side by
side into the caller's cache; of a head that several slices have, what the first of them has. A call
that fails leaves the cache as it was, and a slice that backward computes again begins with what it
began with before.

A gradient cannot flow through the cache into the call that filled it, because a backward of that
call takes the gradients of its outputs alone. So keys and values of a call with gradients refuse a
backward, and no other call with gradients may use them. It may ask for their length, as each layer
of UMT5 asks for that of the first one.

Nothing here imports the library: where a cache is, it was imported.
"""

import sys
from collections.abc import Iterable, Mapping, Sequence
from copy import copy
from inspect import signature
from typing import Any

import torch
from torch import Tensor
from torch._C import DisableTorchFunctionSubclass

from gyre_trainer.errors import RotationError
from gyre_trainer.torch_internals import tree_leaves, tree_map

# What a cache reads of keys to tell how long they are. None of it takes part in a gradient.
_ALLOWED = frozenset(
    (
        *(Tensor.size, Tensor.dim, Tensor.ndimension, Tensor.numel, Tensor.nelement),
        *(Tensor.__len__, Tensor.is_floating_point, Tensor.get_device, torch.numel),
        *(getattr(Tensor, name).__get__ for name in ("shape", "ndim", "dtype", "device", "layout")),
    )
)


class UnusableTensor(Tensor):
    """A tensor that tells its shape, dtype and device; any other use raises an error."""

    refusal: str

    @classmethod
    def of(cls, tensor: Tensor, refusal: str) -> "UnusableTensor":
        """One of the form of ``tensor``; ``refusal`` is the text of the `RotationError`."""
        unusable = tensor.detach().as_subclass(cls)
        unusable.refusal = refusal
        return unusable

    @classmethod
    def __torch_function__(
        cls,
        func: Any,
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        if func in _ALLOWED:
            with DisableTorchFunctionSubclass():
                return func(*args, **(kwargs or {}))
        leaves = tree_leaves((args, kwargs))
        raise RotationError(next(leaf.refusal for leaf in leaves if isinstance(leaf, cls)))


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


def is_cache(value: Any) -> bool:
    """Whether it is a cache of keys and values of `transformers`."""
    library = sys.modules.get("transformers.cache_utils")
    return library is not None and isinstance(value, library.Cache)


def copies_of_caches(arguments: Any, name: str) -> Any:
    """The arguments with a copy in place of each cache, for a trial call of the module ``name``.

    Keys and values that were filled with gradients may be used in it: the call itself refuses that.
    """

    def copied(leaf: Any) -> Any:
        if not is_cache(leaf):
            return leaf
        with torch.no_grad():
            return SharedCache(leaf, [(0,)], name, recorded=False).of_slice(0)

    return tree_map(copied, arguments, is_leaf=is_cache)


def kept_in_copies(arguments: Any) -> list[Tensor]:
    """The keys and values in the layers that a trial call has used, detached."""
    caches = filter(is_cache, tree_leaves(arguments, is_leaf=is_cache))
    layers = (layer for each in caches for part in _parts(each) for layer in part.layers.used())
    kept = (tensor for layer in layers for tensor in (layer.keys, layer.values))
    return [tensor.detach() for tensor in kept if tensor is not None]


class SharedCache:
    """A cache during one call of a rotated module; see [Note: Slices and caches].

    Attributes:
        cache: the caller's.
    """

    def __init__(
        self, cache: Any, heads: Sequence[Sequence[int]], name: str, *, recorded: bool
    ) -> None:
        """Nothing is copied yet.

        Args:
            cache: the caller's.
            heads: of each slice of the module, as `Rule.cached_heads` has them.
            name: that of the module, for messages.
            recorded: whether a backward may follow.

        Raises:
            RotationError: this kind of cache cannot be shared.
        """
        for part in _parts(cache):
            _require_own_update(part, name)
        self.cache = cache
        self._shared = [
            SharedLayers(part, heads, name, recorded=recorded) for part in _parts(cache)
        ]
        self._updated = dict(getattr(cache, "is_updated", ()))
        self._copies: dict[int, Any] = {}
        self._merged = False

    def of_slice(self, index: int) -> Any:
        """A copy for one run of the slice, as the cache was before the call."""
        layers = [shared.of_slice(index) for shared in self._shared]
        copied = copy(self.cache)
        if len(layers) == 1:
            copied.layers = layers[0]
        else:
            copied.is_updated = dict(self._updated)
            copied.self_attention_cache = copy(self.cache.self_attention_cache)
            copied.cross_attention_cache = copy(self.cache.cross_attention_cache)
            for part, of_part in zip(_parts(copied), layers, strict=True):
                part.layers = of_part
        if not self._merged:
            self._copies[index] = copied
        return copied

    def is_copy(self, value: Any) -> bool:
        """Whether it is what a slice of this call was given."""
        return any(value is each for each in self._copies.values())

    def merge(self) -> None:
        """Give the caller's cache what the slices have added; each has run once."""
        by_slice = [self._copies[index] for index in sorted(self._copies)]
        for place, shared in enumerate(self._shared):
            shared.merge([_parts(each)[place].layers for each in by_slice])
        if self._updated or hasattr(self.cache, "is_updated"):
            self.cache.is_updated.update(by_slice[0].is_updated)
        self._copies.clear()
        self._merged = True


def _parts(cache: Any) -> list[Any]:
    """The caches with layers of their own: two where a decoder also attends to an encoder."""
    if hasattr(cache, "self_attention_cache"):
        return [cache.self_attention_cache, cache.cross_attention_cache]
    return [cache]


def _require_own_update(cache: Any, name: str) -> None:
    """Refuse a cache that is updated by other code than the library's layers."""
    library = sys.modules["transformers.cache_utils"]
    if type(cache).update is not library.Cache.update:
        raise refused(cache, name, "its class has its own `update`")
    if getattr(cache, "offloading", False):
        raise refused(cache, name, "it moves keys and values to the CPU (offloading=True)")
