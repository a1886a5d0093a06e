"""The order of a mixture: quotas say which source a position reads, its order which sample. Pure.

Each source has its own shuffle and epochs: the n-th position that reads it reads the same sample as
the n-th position of a job on that source alone, with a seed that follows from the job's seed
and the source's name. A source may be a mixture itself.

A state keeps the sources with their fingerprints, the block, and every phase of the job: those of
the definition and those that it was given where it began or resumed.

[Note: Quotas are exact in every block of positions]

A *phase* is a run of steps with the same weights. From its first position on, positions are counted
in blocks of B. After b blocks, source k has had `apportioned(b * B)[k]` positions of the phase:
the whole part of its due `w_k * b * B`, and one more for those with the largest remainders. So at
the end of each block every source is less than one position from its due, and a block's quota
differs by less than two from `w_k * B`. Nothing is drawn: only the order inside a block is
shuffled, by the seed. A position's place in its source is the number of earlier positions that read
the same source.
"""

import hashlib
import struct
from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import lru_cache
from itertools import pairwise
from math import gcd, lcm
from typing import Any, NamedTuple

import msgspec
import numpy as np
from msgspec import Struct

from gyre_daemon.errors import CursorRejected, InvalidRequest
from gyre_daemon.order.balance import Balance, LengthsOf
from gyre_daemon.order.permutation import BlockIndex, BlockTable, Int64Array
from gyre_daemon.order.planner import NO_SAMPLES, BatchPlanner, Order
from gyre_daemon.order.steps import Phase, Placed, Stage

# Each takes 16 bytes a position; a plan of many steps needs some eight of 1,024 positions.
_MAX_KEPT = 32
# Decimals of a weight. More would make whole numbers that a cursor has no room for.
_DECIMALS = 9
MAX_PHASES = 64


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


class _Begun(Struct, frozen=True):
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
        self._pattern = lru_cache(_MAX_KEPT)(self._make)  # any thread may ask
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

    def _make(self, begun: _Begun, block: int) -> Reading:
        """The reading of the positions of one block."""
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


Shares = Callable[[Sequence[int]], tuple[tuple[Phase, ...], int]]


@dataclass(frozen=True, slots=True, eq=False)
class MixedSource:
    """One source of a mixture.

    Attributes:
        name: of its dataset.
        fingerprint: of its data.
        ordered: the samples, the sequences or the mixture that its order goes through.
        corrupt: int64 [C], ids of its samples that others replace, in rising order.
        first_id: the mixture's id of its first sample.
    """

    name: str
    fingerprint: str
    ordered: BlockIndex
    corrupt: Int64Array
    first_id: int


class Mixture(Struct, frozen=True, eq=False):
    """The sources and the shares of a mixture, through which its order goes.

    Attributes:
        sources: K of them.
        phases: by the operator's definition; a job may have other ones.
        block: B, the positions in which each source has its quota.
        num_samples: L, the number of samples that counts as an epoch of the mixture.
        shares: takes how many samples each source has, and returns the phases by the definition
            and L.
    """

    sources: tuple[MixedSource, ...]
    phases: tuple[Phase, ...]
    block: int
    num_samples: int
    shares: Shares

    def of(self, sources: Sequence[MixedSource]) -> "Mixture":
        """The same mixture, where an order goes through something else of its sources."""
        phases, num_samples = self.shares([each.ordered.num_samples for each in sources])
        return Mixture(tuple(sources), phases, self.block, num_samples, self.shares)

    def blocks(self, io_block_bytes: int) -> BlockTable:
        """See `BlockIndex.blocks`: adjacent samples of several sources are stored apart."""
        raise InvalidRequest("a mixture has no blocks; use the order `full` or `sequential`")

    @property
    def names(self) -> list[str]:
        """Of the sources."""
        return [source.name for source in self.sources]


class MixturePlanner(BatchPlanner):
    """Plans the batches of one order over one mixture."""

    def __init__(
        self,
        order: Order,
        mixture: Mixture,
        planners: Sequence[BatchPlanner],
        phases: tuple[Phase, ...],
        balance: Balance | None,
    ) -> None:
        """Check that the order fits the mixture.

        Args:
            order: how the job goes through it.
            mixture: of K sources.
            planners: K, of `source_order`, for the sources.
            phases: the job's.
            balance: see `BatchPlanner`.

        Raises:
            InvalidRequest: the tail is `pad`, or as `BatchPlanner` and `Quotas`.
        """
        if order.tail == "pad":
            raise InvalidRequest(
                "a mixture has no end that could be padded: its sources begin again each by "
                "itself; use the tail `wrap` or `drop`"
            )
        super().__init__(order, mixture.num_samples, balance=balance)
        self.phases = phases
        self._planners = planners
        self._first_ids = [source.first_id for source in mixture.sources]
        size = order.global_batch_size
        self.quotas = Quotas(phases, mixture.names, mixture.block, order.seed, size)

    def samples_at(self, position: int, ahead: Int64Array) -> Placed:
        """See `BatchPlanner.samples_at`."""
        reading = self.quotas.read_at(position, ahead)
        sample_ids = np.empty(len(ahead), np.int64)
        replaced = np.zeros(len(ahead), np.bool_)
        has_substitutes = False
        for number, which, begin, its in self._by_source(reading):
            found = self._planners[number].samples_at(begin, its)
            sample_ids[which] = found.sample_ids + self._first_ids[number]
            if found.is_substitute is not None:
                replaced[which], has_substitutes = found.is_substitute, True
        return Placed(sample_ids, None, replaced if has_substitutes else None)

    def epochs_at(self, position: int, ahead: Int64Array) -> Int64Array:
        """See `BatchPlanner.epochs_at`: the epochs of each sample's own source."""
        epochs = np.empty(len(ahead), np.int64)
        for number, which, begin, its in self._by_source(self.quotas.read_at(position, ahead)):
            epochs[which] = self._planners[number].epochs_at(begin, its)
        return epochs

    def num_substitutes(self, position: int) -> int:
        """See `BatchPlanner.num_substitutes`."""
        counts = self.quotas.counts(position)
        return sum(
            planner.num_substitutes(count)
            for planner, count in zip(self._planners, counts, strict=True)
        )

    def cost_of(self, num_steps: int, world_size: int) -> int:
        """See `BatchPlanner.cost_of`: blocks are shuffled for all ranks, and sources are planned.

        A small source may begin many epochs.
        """
        num_positions = num_steps * self.order.global_batch_size
        its = sum(each.cost_of(num_positions, world_size) for each in self._planners)
        return 2 * num_positions + its

    def sample_ids_at(self, places: Int64Array) -> Int64Array:
        """See `BatchPlanner.sample_ids_at`; places may be in any order."""
        in_order = np.argsort(places, kind="stable")
        found = np.empty(len(places), np.int64)
        found[in_order] = self.samples_at(0, places[in_order]).sample_ids
        return found

    def _by_source(self, reading: Reading) -> "list[tuple[int, Int64Array, int, Int64Array]]":
        """For each source with reads: its number, by which positions, and where in the source.

        The places in the source are a first position and int64 [m] ahead of it, ascending.
        """
        parts = []
        for number in range(len(self._planners)):
            which = np.flatnonzero(reading.source == number)
            if len(which):
                places = reading.place[which]
                parts.append((number, which, int(places[0]), places - places[0]))
        return parts


def source_seed(seed: int, name: str) -> int:
    """The seed of a source, from that of the job and the source's name in the mixture."""
    text = struct.pack("<Q", seed) + name.encode()
    digest = hashlib.blake2b(text, digest_size=8, person=b"gyre.source").digest()
    return int.from_bytes(digest, "little")


def source_order(order: Order, name: str) -> Order:
    """The order of a job on one source of a mixture: one sample a step, with its own seed."""
    seed = source_seed(order.seed, name)
    return replace(order, tail="wrap", seed=seed, global_batch_size=1, skipped=())


def planner_for(
    order: Order,
    index: BlockIndex,
    corrupt: Int64Array = NO_SAMPLES,
    stages: Sequence[Stage] = (),
    balance: Balance | None = None,
    phases: tuple[Phase, ...] = (),
    lengths_of: LengthsOf | None = None,
) -> BatchPlanner:
    """The planner of an order over a dataset, whose corrupt samples are replaced by others.

    With the order `block`, it may look at every sample to make the table of blocks.

    Args:
        order: how the job goes through the dataset.
        index: the dataset that the order goes through.
        corrupt: int64 [C], ids that others replace; a mixture's sources have their own.
        stages: see `BatchPlanner`.
        balance: see `BatchPlanner`.
        phases: of a job on a mixture; empty for those of the mixture's definition.
        lengths_of: see `BatchPlanner`.

    Raises:
        InvalidRequest: a mixture is to be sorted by length; or see `BatchPlanner` and
            `MixturePlanner`.
    """
    has_blocks = order.mode == "block" and index.num_samples > 0
    blocks = index.blocks(order.io_block_bytes) if has_blocks else None
    if not isinstance(index, Mixture):
        return BatchPlanner(order, index.num_samples, blocks, corrupt, stages, balance, lengths_of)
    if order.bucket:
        raise InvalidRequest(
            "`bucket` does not go with a mixture, whose sources begin again each by itself. Read "
            "its sources with a loader each, or leave `bucket` out."
        )
    planners = [
        planner_for(source_order(order, source.name), source.ordered, source.corrupt)
        for source in index.sources
    ]
    return MixturePlanner(order, index, planners, phases or index.phases, balance)


def check_ranks(order: Order, rank: int, world_size: int) -> None:
    """Refuse ranks that do not divide the global batch.

    Raises:
        InvalidRequest: the rank does not exist, or the parts would differ.
    """
    if world_size < 1 or not 0 <= rank < world_size:
        raise InvalidRequest(f"rank {rank} of world size {world_size} does not exist")
    if order.global_batch_size % world_size:
        raise InvalidRequest(
            f"the global batch size {order.global_batch_size} is not divisible by the world size "
            f"{world_size}; every rank reads an equal part"
        )


_Encoded = tuple[  # the type of `MixtureState.encoded`
    tuple[tuple[str, str], ...], int, int, list[list[int]], tuple[int, ...]
]


@dataclass(frozen=True, slots=True)
class MixtureState:
    """The mixture of one job.

    Attributes:
        sources: name and fingerprint of each.
        block: B.
        num_samples: L.
        phases: of the job.
        given: the first steps of the phases whose weights the job was given, that of the latest
            weights last; the other phases come from the mixture's definition.
    """

    sources: tuple[tuple[str, str], ...]
    block: int
    num_samples: int
    phases: tuple[Phase, ...]
    given: tuple[int, ...] = ()

    @classmethod
    def of(cls, mixture: Mixture) -> "MixtureState":
        """Of a job that begins now."""
        sources = tuple((each.name, each.fingerprint) for each in mixture.sources)
        return cls(sources, mixture.block, mixture.num_samples, mixture.phases)

    def with_weights(self, weights: Mapping[str, float], step: int) -> "MixtureState":
        """The state of a job that is given weights at a step.

        The weights that it was given last change nothing: a script passes them at each resume, also
        after an entry of the schedule. Weights that it has at this step begin no phase.

        Args:
            weights: of sources by name; one that is absent is not read.
            step: the first one with them. Phases that begin later stay.

        Raises:
            InvalidRequest: there is no such source, they are no weights, or a state has no room.
        """
        names = [name for name, _ in self.sources]
        if unknown := sorted(weights.keys() - set(names)):
            raise InvalidRequest(
                f"weights: the mixture has no source {unknown[0]!r:.100}. Its sources are "
                f"{', '.join(names)}."
            )
        wanted = whole_weights([weights.get(name, 0.0) for name in names])
        weights_at = {each.first_step: each.weights for each in self.phases}
        if self.given and weights_at.get(self.given[-1]) == wanted:
            return self
        first_step = max(each for each in weights_at if each <= step)
        if weights_at[first_step] != wanted:
            first_step = step
        # A phase of the definition counts as given if the job asks for its weights: the next resume
        # compares with them.
        phases = tuple(Phase(*each) for each in sorted({**weights_at, first_step: wanted}.items()))
        if not are_phases(phases, len(names)):
            raise InvalidRequest(
                f"weights: the job has had {len(self.phases)} of them, and a state holds no more. "
                "Begin a new run."
            )
        given = (*(each for each in self.given if each != first_step), first_step)
        return replace(self, phases=phases, given=given)

    @property
    def defined(self) -> tuple[Phase, ...]:
        """The phases that come from the mixture's definition."""
        return tuple(phase for phase in self.phases if phase.first_step not in self.given)

    def encoded(self) -> list[Any]:
        """As a value of JSON."""
        phases = [[phase.first_step, *phase.weights] for phase in self.phases]
        return [self.sources, self.block, self.num_samples, phases, self.given]


def decoded(value: Any) -> MixtureState:
    """The state that `encoded` wrote.

    Raises:
        ValueError: no job can have it.
    """
    try:
        sources, block, num_samples, steps, given = msgspec.convert(value, _Encoded)
    except msgspec.ValidationError as error:
        raise ValueError(str(error)) from error
    phases = tuple(Phase(step, tuple(weights)) for step, *weights in steps)
    if block < 1 or num_samples < 1 or not are_phases(phases, len(sources)):
        raise ValueError("no mixture has these phases")
    return MixtureState(sources, block, num_samples, phases, given)


def check_mixture(
    theirs: MixtureState | None,
    mixture: Mixture | None,
    name: str,
    what_changed: Callable[[str, str], str] = lambda source, fingerprint: "",
) -> None:
    """Check that a cursor's mixture is the served one.

    Args:
        theirs: of the cursor; None if it is of a plain dataset.
        mixture: the served one; None for a plain dataset.
        name: of the dataset, for the error.
        what_changed: takes the name of a source and its earlier fingerprint, and says how its data
            differ now.

    Raises:
        CursorRejected: it is another; says how they differ.
    """
    if theirs is None or mixture is None:
        if (theirs is None) != (mixture is None):
            there, here = ("a plain dataset", "a mixture") if mixture else ("a mixture", "none")
            raise _differs(f"it is of {there}, and `{name}` is {here}", "the mixture")
        return
    ours = MixtureState.of(mixture)
    then, now = dict(theirs.sources), dict(ours.sources)
    if [each for each, _ in theirs.sources] != [each for each, _ in ours.sources]:
        raise _differs(
            f"its sources are {', '.join(then)}, and those of `{name}` are {', '.join(now)}",
            "the sources",
        )
    for source, fingerprint in theirs.sources:
        if now[source] != fingerprint:
            changed = what_changed(source, fingerprint)
            raise _differs(
                f"the data of the source `{source}` have the fingerprint {fingerprint} there and "
                f"{now[source]} here" + (f"; {changed}" if changed else ""),
                "fingerprint",
            )
    pairs: list[tuple[str, object, object]] = [
        ("the block", theirs.block, ours.block),
        ("the samples of an epoch", theirs.num_samples, ours.num_samples),
        (
            "the weights",
            in_words(theirs.defined, then),
            in_words([each for each in ours.phases if each.first_step not in theirs.given], now),
        ),
    ]
    for what, there_is, here_is in pairs:
        if there_is != here_is:
            raise _differs(f"{what} of `{name}`: {there_is} there and {here_is} here", what)


def in_words(phases: Sequence[Phase], names: Sequence[str] | dict[str, str]) -> str:
    """Phases for people, as parts of one."""
    return "; ".join(
        f"from step {phase.first_step} "
        + ", ".join(
            f"{name}={weight / sum(phase.weights):.6g}"
            for name, weight in zip(names, phase.weights, strict=True)
        )
        for phase in phases
    )


def _differs(what: str, fact: str) -> CursorRejected:
    fix = "restore the mixture, or start from the beginning"
    if fact == "the weights":
        fix = "restore them, and pass other ones as weights= of the Loader"
    return CursorRejected(f"the cursor does not fit the mixture: {what}; {fix}", {"differs": fact})
