"""The order of a mixture: quotas say which source a position reads, its order which sample. Pure.

Each source has its own shuffle and epochs: the n-th position that reads it reads the same sample as
the n-th position of a job on that source alone, with a seed that follows from the job's seed
and the source's name. A source may be a mixture itself.

A state keeps the sources with their fingerprints, the block, and every phase of the job: those of
the definition and those that it was given where it began or resumed.
"""

import hashlib
import struct
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from gyre_daemon.errors import CursorRejected, InvalidRequest
from gyre_daemon.order.balance import Balance
from gyre_daemon.order.buckets import LengthsOf
from gyre_daemon.order.planner import NO_SAMPLES, BatchPlanner, Order
from gyre_daemon.order.quotas import Phase, Quotas, Reading, are_phases, whole_weights
from gyre_daemon.order.shuffle.blocks import BlockIndex, BlockTable
from gyre_daemon.order.shuffle.permutation import Int64Array
from gyre_daemon.order.steps import Placed, Stage

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


@dataclass(frozen=True, slots=True, eq=False)
class Mixture:
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


@dataclass(frozen=True, slots=True)
class MixtureState:
    """The mixture of one job.

    Attributes:
        sources: name and fingerprint of each.
        block: B.
        num_samples: L.
        phases: of the job.
        given: the first steps of the phases that the job was given; the others come from the
            mixture's definition.
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
        """The state of a job with other weights from a step on; itself if it has them there.

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
        phase = Phase(step, whole_weights([weights.get(name, 0.0) for name in names]))
        if [each for each in self.phases if each.first_step <= step][-1].weights == phase.weights:
            return self
        others = [each for each in self.phases if each.first_step != step]
        phases = tuple(sorted((*others, phase), key=lambda each: each.first_step))
        if not are_phases(phases, len(names)):
            raise InvalidRequest(
                f"weights: the job has had {len(self.phases)} of them, and a state holds no more. "
                "Begin a new run."
            )
        return replace(self, phases=phases, given=tuple(sorted({*self.given, step})))

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
        TypeError, ValueError: no job can have it.
    """
    sources, block, num_samples, phases, given = value
    state = MixtureState(
        tuple((str(name), str(fingerprint)) for name, fingerprint in sources),
        _whole(block),
        _whole(num_samples),
        tuple(Phase(_whole(step), tuple(map(_whole, weights))) for step, *weights in phases),
        tuple(map(_whole, given)),
    )
    if block < 1 or num_samples < 1 or not are_phases(state.phases, len(state.sources)):
        raise ValueError("no mixture has these phases")
    return state


def _whole(value: Any) -> int:
    if type(value) is not int:
        raise TypeError(f"{value!r:.100} is no whole number")
    return value


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
