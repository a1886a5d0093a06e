"""Caches of keys and values of `transformers`, in calls of modules that rotate.

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
from collections.abc import Sequence
from copy import copy
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

from gyre_trainer.rotation.caches.cached_layers import SharedLayers, refused


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
