"""The documents of the scenario, and the expected result of a run."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

NAMES, FIRST, SIZES = ("a", "b"), (0, 420), (420, 180)
WEIGHTS, LATER = (0.7, 0.3), (0.4, 0.6)
G, NUM_STEPS, CHANGE_AT = 12, 60, 40
NUM_SHARDS = 4  # of each source, where a loader has shards
LEAST, LENGTH = 8, 40  # tokens of a document that the filter leaves, and of a packed sequence
SEED = 5

# The documents of one sample; a packed sequence has several.
Sample = tuple[int, ...]
Steps = list[list[Sample]]


@dataclass(frozen=True)
class Variant:
    """The settings of a mixture.

    Attributes:
        is_filtered: documents of fewer than `LEAST` tokens are left out.
        is_packed: samples are sequences of at most `LENGTH` tokens.
        is_changed: the weights are `LATER` from step `CHANGE_AT` on.
    """

    is_filtered: bool = False
    is_packed: bool = False
    is_changed: bool = False

    def weights(self, first_step: int) -> tuple[float, float]:
        """Those of a stage that begins there."""
        return LATER if self.is_changed and first_step >= CHANGE_AT else WEIGHTS

    def ids(self, source: int) -> list[int]:
        """The documents to read from a source."""
        ids = range(FIRST[source], FIRST[source] + SIZES[source])
        return [each for each in ids if self.passes(each)]

    def passes(self, document: int) -> bool:
        """Whether the filter leaves a document."""
        return not self.is_filtered or length_of(document) >= LEAST


def length_of(document: int) -> int:
    """How many tokens it has: 3 to 31."""
    return 3 + document * 7 % 29


def tokens_of(document: int) -> list[int]:
    """Each of its tokens tells which document it is; 0 is left for padding."""
    return [document + 1] * length_of(document)


def documents_in(tokens: Sequence[int]) -> Sample:
    """The documents of a sequence of tokens, in their order."""
    values = np.asarray(tokens)
    values = values[values > 0]
    return tuple((values[np.flatnonzero(np.diff(values, prepend=0))] - 1).tolist())


def pack(documents: Sequence[int]) -> list[list[int]]:
    """Documents in sequences, each in the first that has room: for loaders that let users pack."""
    packed: list[list[int]] = []
    room: list[int] = []
    for document in documents:
        length = length_of(document)
        place = next((at for at, left in enumerate(room) if left >= length), len(packed))
        if place == len(packed):
            packed.append([])
            room.append(LENGTH)
        packed[place].append(document)
        room[place] -= length
    return packed


def shuffled(ids: Sequence[int]) -> list[int]:
    """A global shuffle, for loaders that take their samples from a list."""
    return list(map(int, np.random.default_rng(SEED).permutation(np.array(ids))))


def shards(source: int) -> Iterator[tuple[int, range]]:
    """The number of each shard of a source, and its documents."""
    size = SIZES[source] // NUM_SHARDS
    for shard in range(NUM_SHARDS):
        begin = FIRST[source] + shard * size
        yield shard, range(begin, begin + size)
