"""Measures how long the results of a shard's samples are, once: they are kept in a sidecar.

A sidecar belongs to the shard as it is, to the chain of transforms and to the samples that a filter
left.
"""

import asyncio
import hashlib
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from gyre_daemon.datasets.checks.damage import Damage, from_arrays, to_arrays
from gyre_daemon.datasets.formats.base import Arrays, array_of
from gyre_daemon.datasets.sidecars.store import SidecarKey, SidecarStore
from gyre_daemon.errors import CorruptSample, first_error
from gyre_daemon.fetching.fetch import NOTHING_AHEAD
from gyre_daemon.fetching.measuring.held import HeldRecords
from gyre_daemon.fetching.portions import PortionPlan, PortionReader
from gyre_daemon.order.shuffle.permutation import Int64Array
from gyre_daemon.runtime.threads import Claims, Flow, compute
from gyre_daemon.storage.base import Draws
from gyre_daemon.storage.delays import Delays
from gyre_daemon.transforms.declared import TransformedDataset
from gyre_daemon.transforms.measured import Lengths

_SUFFIX = ".gyre-lengths"
# Samples whose places are looked up together.
AT_ONCE = 1 << 16
_LENGTHS, _VERSION, _VERSION_WITH_FAILURES = "lengths", "lengths/1", "lengths and failures/1"
# Portions that are under way at once: enough for all processes while others are read, and few
# enough that the portions of jobs have their turns soon.
_MAX_PORTIONS = 32


@dataclass(frozen=True, slots=True)
class ShardPart:
    """The samples of one shard.

    Attributes:
        dataset: as it is transformed.
        reader: of the dataset.
        shard: its number.
        ids: int64 [n], of its samples.
        goes_on, held: see `Measuring`.
        advance: is told how many samples were measured, with each portion.
    """

    dataset: TransformedDataset
    reader: PortionReader
    shard: int
    ids: Int64Array
    goes_on: bool
    held: HeldRecords | None
    advance: Callable[[int], None]


class ShardMeasurer:
    """Finds the lengths of the results of a shard's samples, or takes those that are kept."""

    def __init__(self, sidecars: SidecarStore) -> None:
        """Measure nothing yet.

        Args:
            sidecars: keep the lengths.
        """
        self._sidecars = sidecars
        self._flow = Flow("measuring")

    async def measured(self, part: ShardPart) -> tuple[Lengths, list[Damage], bool]:
        """The lengths of a shard's samples, its failures, and whether both were known before.

        The numbers of failures are places in the part.

        Raises:
            CorruptSample: a sample cannot be transformed, and none replaces it.
            GyreError: the shard cannot be read, or no process can be started.
        """
        dataset, num = part.dataset, len(part.ids)
        listed, shape = dataset.shards[part.shard], (num, len(dataset.made_ragged))
        chain, kind = await compute(_identities, part)
        sidecars = self._sidecars.sibling(f".{chain}{_SUFFIX}")
        key = SidecarKey(dataset.uri, listed.name, listed.size_bytes, listed.version, kind)

        def check(arrays: Arrays) -> None:
            found = array_of(arrays, _LENGTHS, np.int32, 2)
            if found.shape != shape or (found < 0).any():
                raise ValueError("its lengths are not those of the shard's samples")
            if part.goes_on:
                from_arrays(arrays, num)

        arrays = await sidecars.load(key, None, check)
        if arrays is not None:
            return arrays[_LENGTHS], from_arrays(arrays, num) if part.goes_on else [], True
        try:
            lengths, failures = await self._lengths_of(part)
        except ExceptionGroup as errors:
            raise first_error(errors) from errors
        arrays = {_LENGTHS: lengths, **(to_arrays(failures) if part.goes_on else {})}
        await sidecars.try_to_save(key, None, arrays)
        return lengths, failures, False

    async def _lengths_of(self, part: ShardPart) -> tuple[Lengths, list[Damage]]:
        dataset, ids = part.dataset, part.ids
        lengths = np.zeros((len(ids), len(dataset.made_ragged)), np.int32)
        failures: list[Damage] = []
        room = asyncio.Semaphore(_MAX_PORTIONS)
        async with asyncio.TaskGroup() as tasks:
            for begin in range(0, len(ids), AT_ONCE):
                some = ids[begin : begin + AT_ONCE]
                extents = dataset.index.locate(some)
                for its in part.reader.cut(extents, None):
                    draws = Draws.first(its.stop - its.start)
                    into = _Into(lengths, failures, begin + its.start)
                    await room.acquire()
                    keeps = bool(part.held and part.held.has_room)
                    plan = PortionPlan(some[its], draws, extents.part(its), begin, None, keeps)
                    tasks.create_task(self._portion(part, plan, into, room))
        return lengths, sorted(failures, key=lambda each: each.sample)

    async def _portion(
        self, part: ShardPart, plan: PortionPlan, into: "_Into", room: asyncio.Semaphore
    ) -> None:
        try:
            left = [(0, plan)]
            while left:
                begin, some = left.pop()
                try:
                    await self._measure_portion(part, some, into.lengths_at(begin, some))
                except CorruptSample as error:
                    if not part.goes_on:
                        raise
                    number = _number(some, error)
                    into.failures.append(_failure(into.first + begin + number, part, error))
                    left += [
                        (begin + each.start, some.part(each))
                        for each in (slice(0, number), slice(number + 1, len(some)))
                        if each.start < each.stop
                    ]
            part.advance(len(plan))
        finally:
            room.release()

    async def _measure_portion(self, part: ShardPart, plan: PortionPlan, into: Lengths) -> None:
        reader, claims = part.reader, Claims(self._flow, plan.urgency)
        try:
            async with reader.read(plan, claims, NOTHING_AHEAD, Delays()) as portion:
                lengths, num_kept = await reader.measure(portion, claims)
                into[:] = lengths
                if part.held:
                    part.held.hold(portion, lengths, num_kept)
        except ExceptionGroup as errors:  # of records that are made before they are kept
            raise first_error(errors) from errors


@dataclass(frozen=True, slots=True)
class _Into:
    """Where the results of a portion go.

    Attributes:
        lengths: of all samples of the shard.
        failures: of the shard.
        first: the place of the portion in the shard.
    """

    lengths: Lengths
    failures: list[Damage]
    first: int

    def lengths_at(self, begin: int, plan: PortionPlan) -> Lengths:
        """Those of a part of the portion."""
        return self.lengths[self.first + begin :][: len(plan)]


def _number(plan: PortionPlan, error: CorruptSample) -> int:
    """Which sample of a portion an error is about."""
    (found,) = np.nonzero(plan.sample_ids == int(error.facts["sample_id"]))
    return int(found[0])


def _failure(place: int, part: ShardPart, error: CorruptSample) -> Damage:
    """An error as damage of the shard, where it may name a file and a byte of that."""
    extents = part.dataset.stored.index.locate(np.array([int(error.facts["sample_id"])]))
    start, shard = int(extents.start[0, 0]), part.dataset.shards[int(extents.shard[0])]
    offset = start - shard.place_of(start)[1] + int(error.facts["offset"])
    by, reason = error.facts.get("transform"), str(error.facts["reason"])
    return Damage(place, offset, f"{by}: {reason}" if by else reason)


def _identities(part: ShardPart) -> tuple[str, str]:
    """The keys of a chain, and of these samples under it."""
    dataset, ids = part.dataset, part.ids
    version = _VERSION_WITH_FAILURES if part.goes_on else _VERSION
    # the recipe begins behind `cache`
    all_of_it = dataset.recipe + dataset.transforms.encode() + version.encode()
    chain = hashlib.blake2b(all_of_it, digest_size=8)
    samples = hashlib.blake2b(all_of_it, digest_size=16)
    for begin in range(0, len(ids), AT_ONCE):
        extents = dataset.stored.index.locate(ids[begin : begin + AT_ONCE])
        samples.update(extents.start.astype("<i8").tobytes())
        samples.update(extents.size.astype("<i8").tobytes())
    return chain.hexdigest(), f"{version} {samples.hexdigest()}"
