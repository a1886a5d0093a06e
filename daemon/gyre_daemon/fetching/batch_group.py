"""Batch groups: laid out, and read. Plain values."""

from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np

from gyre_daemon.datasets.formats import Extents
from gyre_daemon.datasets.packing import Packed
from gyre_daemon.fetching.layout import GroupLayout
from gyre_daemon.fetching.packed import PackedRows, lay_out_packed
from gyre_daemon.memory.arena import Slot
from gyre_daemon.order.shuffle.permutation import Int64Array
from gyre_daemon.order.steps import GroupPlan
from gyre_daemon.storage.base import Draws, NextUse, WritableArena


class Place(Protocol):
    """Memory that a batch group is read into, such as a slot."""

    @property
    def memory(self) -> memoryview:
        """All of it, writable."""

    @property
    def address(self) -> int:
        """The address of its first byte."""

    @property
    def arena(self) -> WritableArena:
        """The owner of the memory."""


@dataclass(frozen=True, slots=True)
class Fetch:
    """A batch group that is laid out and not yet read.

    Attributes:
        plan: the sample ids of its batches.
        extents: where the samples lie in storage, batch after batch; where sequences are packed,
            their documents.
        layout: where the samples go in the slot.
        rows: the parts of each sequence, where the dataset is packed.
        draws: of all that is read, where that depends on chance; None for those of seed 0.
    """

    plan: GroupPlan
    extents: Extents
    layout: GroupLayout
    rows: PackedRows | None = None
    draws: Draws | None = None

    @property
    def ids(self) -> Int64Array:
        """Int64 [n], the samples that are read, or the documents of packed sequences."""
        return self.plan.sample_ids.reshape(-1) if self.rows is None else self.rows.documents

    def part(self, begin: int, end: int) -> "Fetch":
        """The batches `[begin, end)` of the group; they keep their places in the slot."""
        size = self.plan.sample_ids.shape[1]
        which, rows = slice(begin * size, end * size), None
        if self.rows is not None:
            which = self.rows.which(begin * size, end * size)
            rows = self.rows.part(begin * size, end * size)
        plan, layout = self.plan[begin:end], self.layout.part(begin, end)
        draws = self.draws and self.draws.part(which)
        return Fetch(plan, self.extents.part(which), layout, rows, draws)

    def drawn(self, seed: int, epochs: Int64Array) -> "Fetch":
        """The same, with the job's seed and the epoch of each sample, int64 [K, B]."""
        epochs = epochs.reshape(-1)
        if self.rows is not None:
            epochs = np.repeat(epochs, np.diff(self.rows.bounds))
        return replace(self, draws=Draws(seed, epochs))


def packed_fetches(
    packed: Packed, plan: GroupPlan, num_together: int, rows: PackedRows, extents: Extents
) -> list[Fetch]:
    """Lay out batches of packed sequences in groups of `num_together`.

    Args:
        packed: how the sequences are packed.
        plan: the sample ids of the batches.
        num_together: the batches of a group.
        rows: the parts of all samples of the plan.
        extents: where the parts of their documents lie in storage.
    """
    size, fetches = plan.sample_ids.shape[1], []
    for begin in range(0, len(plan), num_together):
        some = plan[begin : begin + num_together]
        first, end = begin * size, (begin + len(some)) * size
        its, located = rows.part(first, end), extents.part(rows.which(first, end))
        fetches.append(Fetch(some, located, lay_out_packed(packed, its, some), its))
    return fetches


@dataclass(frozen=True, slots=True, eq=False, weakref_slot=True)
class BatchGroup:
    """The batches of successive steps, complete and never changed again.

    Attributes:
        plan: the sample ids of the batches.
        layout: where the batches and their tensors lie in the slot.
        slot: the memory that the group owns.
    """

    plan: GroupPlan
    layout: GroupLayout
    slot: Slot

    def part(self, steps: range) -> "BatchGroup":
        """The batches of some of its steps; their bytes stay where they are."""
        if len(steps) == len(self.plan):
            return self
        begin, end = steps.start - self.plan.first_step, steps.stop - self.plan.first_step
        return BatchGroup(self.plan[begin:end], self.layout.part(begin, end), self.slot)

    @property
    def num_bytes(self) -> int:
        """The bytes of all batches, without the padding between them."""
        return sum(batch.num_bytes for batch in self.layout.batches)

    @property
    def payloads(self) -> list[memoryview]:
        """The bytes of each batch, as views of the slot."""
        pairs = zip(self.layout.batches, self.layout.offsets.tolist(), strict=True)
        return [self.slot.memory[offset : offset + batch.num_bytes] for batch, offset in pairs]


@dataclass(frozen=True, slots=True)
class Ahead:
    """Tells a cache about the later reads of a job; see `Reads`.

    Attributes:
        block_bytes: the approximate size of the blocks of the order; 0 lets the cache choose.
        next_use: says in how many samples the job reads each of some blocks; None if unknown.
    """

    block_bytes: int = 0
    next_use: NextUse | None = None


NOTHING_AHEAD = Ahead()
