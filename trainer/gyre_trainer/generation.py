"""Texts from rotated models of `transformers`, with a cache of keys and values.

    tokens = model.generate(prompt, past_key_values=SlicedCache(model.config))

All ranks make the same call. Where a whole attention rotates, each slice of it computes some of the
heads, and has the keys and values of these in a cache of its own. So every rank keeps the whole
cache of its own rows.
"""

from collections.abc import Callable
from typing import Any

from transformers import DynamicCache

from gyre_trainer.rotation.call import PerSlice


def _in_all(name: str) -> Callable[..., None]:
    """The method of that name, of every slice's cache."""

    def change(cache: "SlicedCache", *args: Any) -> None:
        getattr(DynamicCache, name)(cache, *args)
        for each in cache._others.values():
            getattr(each, name)(*args)

    return change


class SlicedCache(DynamicCache, PerSlice):
    """A `DynamicCache` for models of which any part rotates.

    What the model asks it is answered by the first slice's cache, which it is itself: all have the
    same length.
    """

    def __init__(self, config: Any) -> None:
        """``config`` is the model's, which says what each layer keeps."""
        super().__init__(config=config)
        self._config = config
        self._others: dict[int, DynamicCache] = {}

    @property
    def begun(self) -> bool:
        """Whether it has keys and values."""
        return bool(self.get_seq_length())

    def of_slice(self, index: int) -> Any:
        """The slice's cache."""
        if index == 0:
            return self
        if index not in self._others:
            self._others[index] = DynamicCache(config=self._config)
        return self._others[index]

    reset = _in_all("reset")
    crop = _in_all("crop")
    reorder_cache = _in_all("reorder_cache")
    batch_repeat_interleave = _in_all("batch_repeat_interleave")
    batch_select_indices = _in_all("batch_select_indices")
