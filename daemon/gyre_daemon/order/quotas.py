"""Which source of a mixture each position reads: exact quotas in every block of positions. Pure.

A *phase* is a run of steps with the same weights. From its first position on, positions are counted
in blocks of B. After b blocks, source k has had `apportioned(b * B)[k]` positions of the phase:
the whole part of its due `w_k * b * B`, and one more for those with the largest remainders. So at
the end of each block every source is less than one position from its due, and a block's quota
differs by less than two from `w_k * B`. Nothing is drawn: only the order inside a block is
shuffled, by the seed.

A position's place in its source is the number of earlier positions that read the same source.
"""

import hashlib
import struct
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from itertools import pairwise
from math import gcd, lcm
from typing import NamedTuple

import numpy as np

from gyre_daemon.errors import InvalidRequest
from gyre_daemon.order.shuffle.permutation import Int64Array

# Each takes 16 bytes a position; a plan of many steps needs some eight of 1,024 positions.
_MAX_KEPT = 32
# Decimals of a weight. More would make whole numbers that a cursor has no room for.
_DECIMALS = 9
MAX_PHASES = 64


@dataclass(frozen=True, slots=True)
class Phase:
    """Steps of a job on a mixture in which the sources have the same weights.

    Attributes:
        first_step: global; the phase ends where the next one begins.
        weights: of each source, a whole number of at least 0; only their ratios count.
    """

    first_step: int
    weights: tuple[int, ...]


def whole_weights(weights: Sequence[float]) -> tuple[int, ...]:
    """Weights as the smallest whole numbers in the same ratios, exact to nine decimals.

    Raises:
        InvalidRequest: one is negative or no number, or all are 0.
    """
    if not all(0 <= each < 1e9 for each in weights) or not any(weights):
        shown = ", ".join(f"{each:g}" for each in weights)
        raise InvalidRequest(
            f"the weights are {shown}; they must be numbers of at least 0, and one of them above"
        )
    exact = [Fraction(f"{each:.{_DECIMALS}f}") for each in weights]
    scale = lcm(*(each.denominator for each in exact))
    numbers = [int(each * scale) for each in exact]
    common = gcd(*numbers)
    if not common:
        raise InvalidRequest("the weights have nine decimals at most, and all of them are 0 there")
    return tuple(number // common for number in numbers)


def are_phases(phases: Sequence[Phase], num_sources: int) -> bool:
    """Whether a job on this many sources can have these phases."""
    return (
        0 < len(phases) <= MAX_PHASES
        and phases[0].first_step == 0
        and all(before.first_step < after.first_step for before, after in pairwise(phases))
        and all(
            len(each.weights) == num_sources and min(each.weights) >= 0 and any(each.weights)
            for each in phases
        )
    )


def apportioned(num_positions: int, weights: Sequence[int]) -> list[int]:
    """How many of the first positions of a phase each source has; they add up to all of them."""
    total = sum(weights)
    dues = [divmod(weight * num_positions, total) for weight in weights]
    counts = [whole for whole, _ in dues]
    by_remainder = sorted(range(len(weights)), key=lambda source: (-dues[source][1], source))
    for source in by_remainder[: num_positions - sum(counts)]:
        counts[source] += 1
    return counts


class Reading(NamedTuple):
    """The sources and places that n positions of a mixture read.

    Attributes:
        source: int64 [n], the number of the source.
        place: int64 [n], how many earlier positions read the same source.
    """

    source: Int64Array
    place: Int64Array


@dataclass(frozen=True, slots=True)
class _Begun:
    """Where a phase begins: its first position, and the positions that each source had before."""

    position: int
    counts: tuple[int, ...]
    phase: Phase


class Quotas:
    """Shares out the positions of one job among the sources of a mixture."""

    def __init__(
        self,
        phases: Sequence[Phase],
        names: Sequence[str],
        block: int,
        seed: int,
        global_batch_size: int,
    ) -> None:
        """Count the positions before each phase.

        Args:
            phases: at least one, for which `are_phases` holds.
            names: K, of the sources, for errors.
            block: B, in positions.
            seed: of the order inside blocks.
            global_batch_size: G, positions of a step.

        Raises:
            InvalidRequest: a block has no position for a source with a small weight.
        """
        self._block, self._seed, self._num_sources = block, seed, len(names)
        self._kept: dict[tuple[int, int], Reading] = {}
        self._begun: list[_Begun] = []
        self._positions: list[int] = []
        for phase in phases:
            _check_shares(phase, names, block)
            position = phase.first_step * global_batch_size
            counts = self.counts(position) if self._begun else [0] * len(names)
            self._begun.append(_Begun(position, tuple(counts), phase))
            self._positions.append(position)

    def counts(self, position: int) -> list[int]:
        """How many positions before this one read each source, K numbers."""
        begun = self._at(position)
        block, rest = divmod(position - begun.position, self._block)
        counts = self._before(begun, block)
        if rest:
            pattern = self._pattern(begun, block)
            read = np.bincount(pattern.source[:rest], minlength=self._num_sources)
            counts = [count + more for count, more in zip(counts, read.tolist(), strict=True)]
        return counts

    def read_at(self, position: int, ahead: Int64Array) -> Reading:
        """The reading of the positions `position + ahead`; `ahead` is int64 [n], ascending."""
        source, place = np.empty(len(ahead), np.int64), np.empty(len(ahead), np.int64)
        first = 0
        while first < len(ahead):
            at = position + int(ahead[first])
            begun = self._at(at)
            block = (at - begun.position) // self._block
            begin = begun.position + block * self._block
            stop = min(begin + self._block, self._end(begun))
            end = int(np.searchsorted(ahead, stop - position))
            pattern = self._pattern(begun, block)
            within = ahead[first:end] + (position - begin)
            source[first:end], place[first:end] = pattern.source[within], pattern.place[within]
            first = end
        return Reading(source, place)

    def _at(self, position: int) -> _Begun:
        return self._begun[bisect_right(self._positions, position) - 1]

    def _end(self, begun: _Begun) -> int:
        """The position behind a phase."""
        number = bisect_right(self._positions, begun.position)
        return self._positions[number] if number < len(self._positions) else 1 << 63

    def _before(self, begun: _Begun, block: int) -> list[int]:
        """The positions of each source before a block of a phase."""
        its = apportioned(block * self._block, begun.phase.weights)
        return [before + count for before, count in zip(begun.counts, its, strict=True)]

    def _pattern(self, begun: _Begun, block: int) -> Reading:
        """The reading of the positions of one block; any thread may ask."""
        key = begun.position, block
        pattern = self._kept.get(key)
        if pattern is None:
            pattern = self._make(begun, block)
            others = list(self._kept.items())[-(_MAX_KEPT - 1) :]
            self._kept = {**dict(others), key: pattern}  # one assignment: threads may do the same
        return pattern

    def _make(self, begun: _Begun, block: int) -> Reading:
        before = np.array(self._before(begun, block))
        quotas = np.array(self._before(begun, block + 1)) - before
        in_turn = np.repeat(np.arange(self._num_sources), quotas)
        key = struct.pack("<QQQ", self._seed, begun.position, block)
        words = hashlib.shake_128(b"gyre.mixture" + key).digest(8 * self._block)
        source = in_turn[np.argsort(np.frombuffer(words, "<u8"), kind="stable")]
        place = np.empty(self._block, np.int64)
        nth = np.arange(self._block) - np.repeat(np.cumsum(quotas) - quotas, quotas)
        place[np.argsort(source, kind="stable")] = nth + np.repeat(before, quotas)
        return Reading(source, place)


def _check_shares(phase: Phase, names: Sequence[str], block: int) -> None:
    total = sum(phase.weights)
    for name, weight in zip(names, phase.weights, strict=True):
        if 0 < weight * block < total:
            raise InvalidRequest(
                f"the source `{name}` has {weight / total:.3g} of all weights, which is less than "
                f"one position in a block of {block}. Raise `block`, its weight, or make it 0."
            )
