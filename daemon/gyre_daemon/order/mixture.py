"""The order of a mixture: quotas say which source a position reads, its order which sample. Pure.

Each source has its own shuffle and epochs: the n-th position that reads it reads the same sample as
the n-th position of a job on that source alone, with a seed that follows from the job's seed
and the source's name. A source may be a mixture itself.
"""

import hashlib
import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from gyre_daemon.errors import InvalidRequest
from gyre_daemon.order.balance import Balance
from gyre_daemon.order.planner import BatchPlanner, Order
from gyre_daemon.order.quotas import Phase, Quotas, Reading
from gyre_daemon.order.shuffle.blocks import BlockIndex, BlockTable
from gyre_daemon.order.shuffle.permutation import Int64Array
from gyre_daemon.order.steps import Placed

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
