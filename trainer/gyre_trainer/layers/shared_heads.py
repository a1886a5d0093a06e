"""Which heads each slice of an attention has where slices share key/value heads.

The ranks may be able to share the query heads evenly, but not the key/value heads: 8 query heads
and 2 key/value heads on 4 ranks. Then a slice has its query heads and the key/value heads that
serve these, and several slices have the same key/value head.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from math import gcd


@dataclass(frozen=True, slots=True)
class SharedHeads:
    """The heads of each slice.

    A slice has as many key/value heads as any other, and each of them serves equally many of its
    query heads, which follow one another. So a slice whose query heads lie unevenly on two
    key/value heads has one of these more than once.

    Attributes:
        num_kv_heads: key/value heads of the module.
        group: query heads of the module that each of them serves.
        num_slices: it divides the number of query heads.
        kv_width: features of all keys, and of all values.
    """

    num_kv_heads: int
    group: int
    num_slices: int
    kv_width: int

    @property
    def num_heads(self) -> int:
        """Query heads of the module."""
        return self.num_kv_heads * self.group

    @property
    def group_of_slice(self) -> int:
        """Query heads of a slice that each of its key/value heads serves."""
        return gcd(self.num_heads // self.num_slices, self.group)

    @property
    def num_kv_heads_of_slice(self) -> int:
        """Key/value heads of a slice, each counted as often as the slice has it."""
        return self.num_heads // self.num_slices // self.group_of_slice

    def kv_heads(self, index: int) -> tuple[int, ...]:
        """The module's key/value heads that slice ``index`` has, in their order."""
        count = self.num_kv_heads_of_slice
        return tuple(
            place * self.group_of_slice // self.group
            for place in range(index * count, (index + 1) * count)
        )

    def ranges(self, *, packed: bool) -> tuple[tuple[tuple[int, int], ...], ...]:
        """For each slice, half-open ranges of the features of its keys, or of its values.

        Where they are ``packed``, of one layer with those of all queries, keys and values, in this
        order: ranges of all three.
        """
        return tuple(tuple(self._ranges(index, packed=packed)) for index in range(self.num_slices))

    def _ranges(self, index: int, *, packed: bool) -> Iterator[tuple[int, int]]:
        queries, size = self.kv_width * self.group, self.kv_width // self.num_kv_heads
        if packed:
            share = queries // self.num_slices
            yield index * share, (index + 1) * share
        for offset in (queries, queries + self.kv_width) if packed else (0,):
            for head in self.kv_heads(index):
                yield offset + head * size, offset + (head + 1) * size
