"""Which heads each slice of an attention has where slices cannot have equal parts of all heads.

The ranks may be able to share the query heads evenly, but not the key/value heads: 8 query heads
and 2 key/value heads on 4 ranks. Then a slice has its query heads and the key/value heads that
serve these, and several slices have the same key/value head. Or they can share neither: of 25 heads
on 4 ranks, a slice has 7 or 6.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from math import gcd

Ranges = tuple[tuple[tuple[int, int], ...], ...]


@dataclass(frozen=True, slots=True)
class SharedHeads:
    """The heads of each slice.

    The first slices have a query head more where the slices cannot have equally many. Each
    key/value head of a slice serves equally many of its query heads, which follow one another. So a
    slice whose query heads lie unevenly on two key/value heads has one of these more than once.

    Attributes:
        num_kv_heads: key/value heads of the module.
        group: query heads of the module that each of them serves.
        num_slices: at most the number of query heads.
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
    def head_width(self) -> int:
        """Features of one head."""
        return self.kv_width // self.num_kv_heads

    @property
    def is_even(self) -> bool:
        """Whether all slices have equally many query heads."""
        return self.num_heads % self.num_slices == 0

    @property
    def is_cut(self) -> bool:
        """Whether each slice has a head, and none is larger than the first one."""
        sizes = [
            len(range(*self.heads(index))) + self.num_kv_heads_of(index)
            for index in range(min(self.num_slices, self.num_heads))
        ]
        return len(sizes) == self.num_slices and sizes[0] == max(sizes)

    def heads(self, index: int) -> tuple[int, int]:
        """The half-open range of the query heads of slice ``index``."""
        few, more = divmod(self.num_heads, self.num_slices)
        start = index * few + min(index, more)
        return start, start + few + (index < more)

    def slice_at(self, start: int) -> int:
        """The slice whose queries begin at a feature."""
        return [self.heads(index)[0] for index in range(self.num_slices)].index(
            start // self.head_width
        )

    def group_of(self, index: int) -> int:
        """Query heads of a slice that each of its key/value heads serves."""
        start, stop = self.heads(index)
        return gcd(stop - start, start, self.group)

    def num_kv_heads_of(self, index: int) -> int:
        """Key/value heads of a slice, each counted as often as the slice has it."""
        start, stop = self.heads(index)
        return (stop - start) // self.group_of(index)

    def kv_heads(self, index: int) -> tuple[int, ...]:
        """The module's key/value heads that slice ``index`` has, in their order."""
        return tuple(head // self.group for head in range(*self.heads(index), self.group_of(index)))

    def of_queries(self) -> Ranges:
        """For each slice, the half-open range of the features of its queries."""
        return self._of_slices(self._queries)

    def of_keys(self) -> Ranges:
        """For each slice, half-open ranges of the features of its keys, or of its values."""
        return self._of_slices(self._keys)

    def of_all(self) -> Ranges:
        """The same of one layer with all queries, keys and values, in this order."""
        queries = self.kv_width * self.group
        return self._of_slices(
            lambda index: (
                *self._queries(index),
                *self._keys(index, queries),
                *self._keys(index, queries + self.kv_width),
            )
        )

    def _of_slices(self, ranges: Callable[[int], Iterable[tuple[int, int]]]) -> Ranges:
        return tuple(tuple(ranges(index)) for index in range(self.num_slices))

    def _queries(self, index: int) -> Iterator[tuple[int, int]]:
        start, stop = self.heads(index)
        yield start * self.head_width, stop * self.head_width

    def _keys(self, index: int, offset: int = 0) -> Iterator[tuple[int, int]]:
        for head in self.kv_heads(index):
            yield offset + head * self.head_width, offset + (head + 1) * self.head_width
