"""Finds columns of datasets, each once: stored values, and the lengths that transforms give.

Filters, packing, balance and buckets compare a column of all samples. Values of a stored field are
read, and lengths come from running a chain of transforms once on each sample. Both are found shard
by shard, by the same work for all that wait, and each shard's part is kept in a sidecar. This
belongs to the shard as it is, to the field or the chain, and to the samples that a filter left. So
the next daemon looks only at shards that are new or have changed.
"""

import asyncio
import contextlib
import hashlib
import logging
import time
from collections import deque
from collections.abc import (
    AsyncGenerator,
    AsyncIterator,
    Callable,
    Coroutine,
    Mapping,
    Sequence,
)
from contextvars import ContextVar
from dataclasses import replace
from functools import partial
from itertools import pairwise
from typing import Any, TypeVar

import numpy as np
from msgspec import Struct, field

from gyre_daemon.config import DatasetConfig
from gyre_daemon.datasets.checks import CorruptRecord, CorruptReports, check_limit
from gyre_daemon.datasets.dataset import Dataset, shard_bounds
from gyre_daemon.datasets.filters import TEXT, Column, Values
from gyre_daemon.datasets.formats import Extents, FieldSpec, stored_fields
from gyre_daemon.datasets.formats.base import Arrays, array_of
from gyre_daemon.datasets.formats.chunk_index import chunks_of
from gyre_daemon.datasets.shard_worker import Damage, from_arrays, to_arrays
from gyre_daemon.datasets.sidecars import SidecarKey, SidecarStore
from gyre_daemon.errors import ConfigError, CorruptSample, Overloaded, first_error
from gyre_daemon.fetching.fetch import Fetch, Fetcher
from gyre_daemon.fetching.layout import LayoutMaker
from gyre_daemon.fetching.portions import PortionPlan, PortionReader, Staging
from gyre_daemon.order.permutation import Int64Array
from gyre_daemon.order.steps import GroupPlan
from gyre_daemon.runtime.events import log_event
from gyre_daemon.runtime.threads import Claims, FairExecutor, Flow, compute
from gyre_daemon.storage.reads import Draws
from gyre_daemon.transforms.declared import Lengths, TransformedDataset

_MAX_READ_BYTES = 16 << 20  # of a stored field at once
# Different texts of a column. A filter compares it with a few of them; a column of documents, where
# all differ, is a mistake that would take the memory of the whole dataset.
_MAX_TEXTS, _MAX_TEXT_BYTES = 1 << 16, 256
# Portions that are under way at once: enough for all processes while others are read, and few
# enough that the portions of jobs have their turns soon.
_MAX_PORTIONS = 32
# Results in memory: of lengths 4, of columns up to 8 bytes for each sample. Others are read again,
# from their sidecars.
_MAX_KEPT = 8
# Work without a waiting caller that goes on, because a client whose call took too long will ask
# again. With no limit, a client that asks for one after the other and hangs up leaves hundreds.
_MAX_UNWANTED = 8
_CODES, _TEXTS, _ENDS, _LENGTHS = "values", "texts", "ends", "lengths"
_Bytes = np.ndarray[tuple[int], np.dtype[np.uint8]]
_Key = tuple[object, ...]


class Measuring(Struct):
    """The finding of one column of a dataset, or of the lengths that a chain gives its samples.

    A caller that no longer waits does not stop it.

    Attributes:
        num_shards: of the dataset.
        name: of the stored field; empty for lengths.
        dataset: its name.
        num_total: all samples.
        num_waiting: callers that wait for it.
        began_s: a time of the monotonic clock.
        num_done: shards that are done.
        num_reused: those of them whose part was kept before.
        shard: the name of the one done last.
        num_samples: of the shards that are done.
        num_in_shard: that are measured of the shard in hand.
        num_known: of the shards whose part was kept before.
        task: does it; None before `begin`.
        moved: is set with each shard that is done, and at the end.
    """

    num_shards: int
    name: str = ""
    dataset: str = ""
    num_total: int = 0
    num_waiting: int = 0
    began_s: float = field(default_factory=time.monotonic)
    num_done: int = 0
    num_reused: int = 0
    shard: str = ""
    num_samples: int = 0
    num_in_shard: int = 0
    num_known: int = 0
    task: "asyncio.Task[Any] | None" = None
    moved: asyncio.Event = field(default_factory=asyncio.Event)

    def begin(self, work: Coroutine[Any, Any, object], ended: Callable[[], None]) -> None:
        """Begin; `ended` is called as soon as it is over."""

        def over(_: asyncio.Task[object]) -> None:
            self.moved.set()
            ended()

        self.task = asyncio.create_task(work)
        self.task.add_done_callback(over)

    @property
    def is_over(self) -> bool:
        """Whether it has a result, has failed or was cancelled."""
        return bool(self.task and self.task.done())

    @property
    def has_failed(self) -> bool:
        """Whether it is over without a result."""
        task = self.task
        return bool(task and self.is_over and (task.cancelled() or task.exception()))

    def advance(self, num: int) -> None:
        """Some samples of the shard in hand are measured."""
        self.num_in_shard += num

    def after(self, shard: str, *, was_kept: bool) -> None:
        """One more shard is done, whose part may have been kept before."""
        self.num_done += 1
        self.num_reused += was_kept
        self.shard = shard
        self.moved.set()

    async def states(self) -> AsyncIterator["Measuring"]:
        """This, whenever it has moved; at last it is over. At most one more than shards are left.

        Raises:
            GyreError: as the work.
        """
        assert self.task
        over = False
        self.num_waiting += 1
        try:
            while not over:
                if not self.task.done():
                    self.moved.clear()
                    await self.moved.wait()
                over = self.task.done()
                if over:
                    self.task.result()
                yield self
        finally:
            self.num_waiting -= 1

    async def result(self) -> Any:
        """Wait for the result.

        Raises:
            GyreError: as the work.
        """
        async for _ in self.states():
            pass
        assert self.task
        return self.task.result()


class Measurings:
    """Those under way, and the last few that are over, by their subjects.

    If no one waits, the latest request goes on alone; shards that are done stay so.
    """

    def __init__(self) -> None:
        self._found: dict[_Key, Measuring] = {}

    def begun(self, key: _Key, begin: Callable[[], Measuring]) -> Measuring:
        """The measuring for a key, which begins if there is none."""
        work = self._found.pop(key, None)
        if work is None:
            work = begin()
            over = [each for each, its in self._found.items() if its.is_over]
            for each in over[: max(0, len(over) + 1 - _MAX_KEPT)]:
                del self._found[each]
            self._stop_unwanted()
        self._found[key] = work
        return work

    def _stop_unwanted(self) -> None:
        found = self._found.items()
        unwanted = [each for each, its in found if not its.is_over and not its.num_waiting]
        for each in unwanted[: max(0, len(unwanted) - _MAX_UNWANTED)]:
            if task := self._found.pop(each).task:
                task.cancel()

    @property
    def all(self) -> list[Measuring]:
        """All of them, under way or over."""
        return [*self._found.values()]

    def forget(self, key: _Key, work: Measuring) -> None:
        """Keep this one no longer; whoever waits for it gets its result."""
        if self._found.get(key) is work:
            del self._found[key]

    def close(self) -> None:
        """Stop all of them; shards that are done stay so."""
        for work in self._found.values():
            if work.task:
                work.task.cancel()
        self._found.clear()


class _ShardSamples(Struct, frozen=True):
    """Samples of one shard, by their ids."""

    shard: int
    ids: Int64Array


_ShardArrays = Sequence[tuple[_ShardSamples, Arrays]]


# Gets each `Measuring` that calls of a context begin or wait for.
BEGUN: ContextVar[asyncio.Queue[Measuring | None] | None] = ContextVar("BEGUN", default=None)


class Measurer:
    """Finds columns and lengths; all jobs that want one wait for the same work.

    Attributes:
        threads: the daemon's.
    """

    def __init__(
        self, sidecars: SidecarStore, threads: FairExecutor, reports: CorruptReports
    ) -> None:
        """Find nothing yet.

        Args:
            sidecars: keep the parts.
            threads: the daemon's.
            reports: of samples that cannot be transformed and that others replace.
        """
        self._sidecars, self.threads, self._reports = sidecars, threads, reports
        self._works = Measurings()

    async def read(self, dataset: Dataset, name: str) -> Column:
        """The values of a stored field of all samples; they are not kept in memory any longer.

        Raises:
            ConfigError: it is neither one number for each sample nor a text, or has too many
                different texts.
            GyreError: a shard cannot be read.
        """
        key = id(dataset.storage), dataset.fingerprint, name
        reading = self._begun(key, partial(_StoredField, dataset, name, self.threads), name=name)
        column: Column = await reading.result()
        self._works.forget(key, reading)
        return column

    async def measured(
        self, dataset: TransformedDataset, config: DatasetConfig
    ) -> TransformedDataset:
        """The dataset with the lengths of its samples; waits until all are measured.

        A caller that no longer waits does not stop the measuring, unless there are many such ones
        (`Measurings`). Where others replace corrupt samples, they replace those that cannot be
        transformed, too.

        Raises:
            CorruptSample: a sample cannot be transformed, and none replaces it, or more cannot than
                `max_corrupt` allows; names the first.
            GyreError: a shard cannot be read, or no process can be started.
        """
        if not must_be_measured(dataset, config):
            return dataset
        return with_measured(
            dataset, config, *await self._measuring(dataset, config, None).result()
        )

    def progress(
        self, dataset: TransformedDataset, config: DatasetConfig, shards: range
    ) -> AsyncIterator[Measuring]:
        """The state of the measuring of some shards, whenever it has moved; at last it is over.

        Args:
            dataset: to be measured.
            config: of the dataset.
            shards: measure these alone.

        Raises:
            GyreError: as `measured`.
        """
        return self._measuring(dataset, config, shards).states()

    @property
    def under_way(self) -> list[Measuring]:
        """The measurements of lengths under way."""
        return [each for each in self._works.all if not each.is_over and not each.name]

    def close(self) -> None:
        """Stop all work; shards that are done stay so."""
        self._works.close()

    def _measuring(
        self, dataset: TransformedDataset, config: DatasetConfig, shards: range | None
    ) -> Measuring:
        goes_on = config.on_corrupt == "replace"
        key = id(dataset.storage), dataset.fingerprint, dataset.transforms, goes_on, shards
        reports = self._reports if goes_on else None
        return self._begun(key, partial(_MadeLengths, dataset, self.threads, reports), shards)

    def _begun(
        self,
        key: _Key,
        source_of: "Callable[[], _Source]",
        shards: range | None = None,
        name: str = "",
    ) -> Measuring:
        def begin() -> Measuring:
            source = source_of()
            dataset = source.dataset
            num_total = dataset.stored.index.num_samples
            work = Measuring(
                len(dataset.shards), name=name, dataset=dataset.name, num_total=num_total
            )
            work.begin(self._find(source, work, shards), partial(self._ended, key, work))
            return work

        work = self._works.begun(key, begin)
        if found := BEGUN.get():
            found.put_nowait(work)
        return work

    def _ended(self, key: _Key, work: Measuring) -> None:
        """One that failed is tried again by the next that asks."""
        if work.has_failed:
            self._works.forget(key, work)

    async def _find(self, source: "_Source", work: Measuring, shards: range | None) -> object:
        """The column of all shards, or of some."""
        dataset, parts, num_shards = source.dataset, [], len(source.dataset.shards)
        bounds = await compute(shard_bounds, dataset.stored.index, num_shards)
        for shard, (first, stop) in enumerate(pairwise(bounds.tolist())):
            if shards is None or shard in shards:
                part = _ShardSamples(shard, source.ids(first, stop))
                arrays, was_kept = await self._part(source, part, work.advance)
                parts.append((part, arrays))
                work.num_known += (stop - first) * was_kept
                work.after(dataset.shards[shard].name, was_kept=was_kept)
                if not was_kept:
                    facts = {"shard": work.shard, "done": f"{shard + 1}/{num_shards}"}
                    log_event(source.event, {"dataset": dataset.name, **source.facts, **facts})
            work.num_samples, work.num_in_shard = stop, 0
        return await source.joined(parts, are_all=shards is None)

    async def _part(
        self, source: "_Source", part: _ShardSamples, advance: Callable[[int], None]
    ) -> tuple[Arrays, bool]:
        """The part of one shard, and whether it was kept before."""
        suffix, kind = await compute(_identities, source, part)
        listed = source.dataset.shards[part.shard]
        key = SidecarKey(source.dataset.uri, listed.name, listed.size_bytes, listed.version, kind)
        sidecars = self._sidecars.sibling(suffix)
        arrays = await sidecars.load(key, None, partial(source.check, part))
        if arrays is not None:
            return arrays, True
        try:
            arrays = await source.find(part, advance)
        except ExceptionGroup as errors:
            raise first_error(errors) from errors
        await sidecars.try_to_save(key, None, arrays)
        return arrays, False


def _identities(source: "_Source", part: _ShardSamples) -> tuple[str, str]:
    """The suffix of a column's sidecars, and the kind of that of these samples."""
    column = hashlib.blake2b(source.identity, digest_size=8).hexdigest()
    samples = hashlib.blake2b(source.identity, digest_size=16)
    for begin in range(0, len(part.ids), source.at_once):
        extents = source.places(part.ids[begin : begin + source.at_once])
        samples.update(extents.start.astype("<i8").tobytes())
        samples.update(extents.size.astype("<i8").tobytes())
    return f".{column}{source.suffix}", f"{source.version} {samples.hexdigest()}"


class _StoredField:
    """The values of a stored field: numbers as they are, texts as numbers of the different ones.

    Attributes:
        dataset: whose shards are gone through.
        identity: tells the column from others of the dataset.
        version: of the sidecars.
        suffix: of the sidecars.
        at_once: samples whose places are looked up together; the sidecars depend on it.
        event: the line of the log for each shard.
        facts: of that line.
    """

    version, suffix, event = "column/1", ".gyre-columns", "column read"
    at_once = 1 << 14

    def __init__(self, dataset: Dataset, name: str, threads: FairExecutor) -> None:
        """Read nothing yet.

        Raises:
            ConfigError: it is neither one number for each sample nor a text.
        """
        stored = stored_fields(dataset.fields)
        self._column = [spec.name for spec in stored].index(name)
        spec = stored[self._column]
        is_text = spec.ragged and spec.dtype == np.uint8 and not spec.shape
        if not is_text and (spec.ragged or spec.shape or spec.dtype.kind not in "biuf"):
            raise ConfigError(
                f"a filter compares {name!r:.100}, which is neither a number nor a text of each "
                "sample; it can only compare its length"
            )
        self.dataset = replace(dataset, chosen=[spec])
        self.identity = f"{spec.name} {spec.dtype.str} {spec.codec}".encode()
        if chunks := chunks_of(dataset.index):
            self.identity += chunks.identity
        self.facts: Mapping[str, str] = {"column": name}
        self._spec, self._is_text = spec, is_text
        self._fetcher, self._flow = Fetcher(self.dataset, threads), Flow("columns")
        self._layouts = LayoutMaker([spec])

    def places(self, sample_ids: Int64Array) -> Extents:
        """Where this field of samples is stored, which the sidecars belong to."""
        found, which = self.dataset.index.locate(sample_ids), slice(self._column, self._column + 1)
        return replace(
            found,
            start=found.start[:, which],
            size=found.size[:, which],
            lengths=None if found.lengths is None else found.lengths[:, which],
            absent=None if found.absent is None else found.absent[:, which],
            indexed=(),
        )

    def ids(self, first: int, stop: int) -> Int64Array:
        """Those of the samples `[first, stop)` that the column has."""
        return np.arange(first, stop)

    def check(self, part: _ShardSamples, arrays: Arrays) -> None:
        """Refuse stored arrays that cannot be this part's, with a ValueError."""
        num = len(part.ids)
        if not self._is_text:
            num_bytes = num * self._spec.dtype.itemsize
            if array_of(arrays, _CODES, np.uint8, 1).shape != (num_bytes,):
                raise ValueError("its values are not those of the shard's samples")
            return
        texts = array_of(arrays, _TEXTS, np.uint8, 1)
        codes, ends = array_of(arrays, _CODES, np.int32, 1), array_of(arrays, _ENDS, np.int64, 1)
        is_whole = len(codes) == num and (not num or 0 <= codes.min() <= codes.max() < len(ends))
        if not is_whole or (np.diff(ends, prepend=0) < 0).any() or ends[-1:].sum() != len(texts):
            raise ValueError("its texts are not those of the shard's samples")

    async def find(self, part: _ShardSamples, advance: Callable[[int], None]) -> Arrays:
        """The part, to be stored; `advance` is told of samples as they are done."""
        found: list[_Bytes] = []
        for first in range(0, len(part.ids), self.at_once):
            ids = part.ids[first : first + self.at_once]
            places = self.places(ids)
            cuts = np.flatnonzero(np.diff(np.cumsum(places.tensor_bytes) // _MAX_READ_BYTES)) + 1
            for begin, end in pairwise([0, *cuts.tolist(), len(ids)]):
                its = places.part(slice(begin, end))
                plan = GroupPlan(0, ids[None, begin:end], None, np.zeros(1, np.int64))
                layout = self._layouts.make(plan, its.tensor_bytes)
                memory = np.empty(layout.num_bytes, np.uint8)
                fetch = Fetch(plan, its, layout)
                try:
                    await self._fetcher.fill(fetch, Staging.of(memory), Claims(self._flow, 0))
                except* CorruptSample as errors:
                    raise self._unsound(first_error(errors)) from errors
                found += [memory[at:end] for at, end in layout.destinations[:, 0].tolist()]
                advance(end - begin)
        if not self._is_text:  # sidecars have no floating-point numbers
            return {_CODES: np.concatenate([np.empty(0, np.uint8), *found])}
        samples = [each.tobytes() for each in found]
        different = sorted(set(samples))
        if len(different) > _MAX_TEXTS or max(map(len, different), default=0) > _MAX_TEXT_BYTES:
            raise self._too_many()
        numbers = {text: number for number, text in enumerate(different)}
        return {
            _CODES: np.array([numbers[text] for text in samples], np.int32),
            _TEXTS: np.frombuffer(b"".join(different), np.uint8),
            _ENDS: np.cumsum([len(text) for text in different], dtype=np.int64),
        }

    async def joined(self, parts: _ShardArrays, *, are_all: bool) -> Column:
        """The column of all parts, or of those of some shards."""
        name = self._spec.name
        if not self._is_text:
            dtype = self._spec.dtype
            numbers = [arrays[_CODES].view(dtype) for _, arrays in parts]
            spec = FieldSpec(name, dtype, (), ragged=False, codec="indexed")
            return Column(spec, np.concatenate([np.empty(0, dtype), *numbers]))
        texts = [np.empty(0, object), *(_texts(arrays) for _, arrays in parts)]
        different, codes = np.unique(np.concatenate(texts), return_inverse=True)
        if len(different) > _MAX_TEXTS:
            raise self._too_many()
        categories = tuple(each.decode(errors="replace") for each in different.tolist())
        int64 = np.dtype(np.int64)
        spec = FieldSpec(name, int64, (), ragged=False, codec="indexed", categories=categories)
        return Column(replace(spec, media_type=TEXT), codes.astype(int64))

    def _unsound(self, error: BaseException) -> CorruptSample:
        """The error with its remedy: without its value, no sample is known to be left or not."""
        remedy = (
            f"A filter compares {self._spec.name!r:.100}, so all its values must be sound, also "
            'with on_corrupt = "replace". Repair those that `gyre lint` names, or filter by lengths'
        )
        return CorruptSample(f"{error}. {remedy}", getattr(error, "facts", {}))

    def _too_many(self) -> ConfigError:
        return ConfigError(
            f"a filter compares {self._spec.name!r:.100}, which has more than {_MAX_TEXTS} "
            f"different texts, or some of more than {_MAX_TEXT_BYTES} bytes; it can only compare "
            "its length"
        )


def _texts(arrays: Arrays) -> Values:
    """The text of each sample."""
    ends, whole = arrays[_ENDS].tolist(), arrays[_TEXTS].tobytes()
    texts = [whole[begin:end] for begin, end in pairwise([0, *ends])]
    words: Values = np.array([*texts, b""], object)[:-1]
    return words[arrays[_CODES]]


class _MadeLengths:
    """The lengths that a chain gives to samples, and the failures; found as `_StoredField` is."""

    suffix, event, at_once = ".gyre-lengths", "shard measured", 1 << 16

    def __init__(
        self, dataset: TransformedDataset, threads: FairExecutor, reports: CorruptReports | None
    ) -> None:
        """Measure nothing yet.

        Args:
            dataset: as it is transformed.
            threads: the daemon's.
            reports: gets the samples that cannot be transformed; None where the first is an error.
        """
        self.dataset: Dataset = dataset
        self.facts: Mapping[str, str] = {}
        self._reports = reports
        self.version = "lengths and failures/1" if reports else "lengths/1"
        # the recipe begins behind `cache`
        self.identity = dataset.recipe + dataset.transforms.encode() + self.version.encode()
        self._reader, self._flow = PortionReader(dataset, threads), Flow("measuring")
        self._num_lengths = len(dataset.made_ragged)

    def places(self, sample_ids: Int64Array) -> Extents:
        return self.dataset.stored.index.locate(sample_ids)

    def ids(self, first: int, stop: int) -> Int64Array:
        """Corrupt samples have no length."""
        ids = np.arange(first, stop)
        return ids[~np.isin(ids, self.dataset.corrupt)]

    def check(self, part: _ShardSamples, arrays: Arrays) -> None:
        found = array_of(arrays, _LENGTHS, np.int32, 2)
        if found.shape != (len(part.ids), self._num_lengths) or (found < 0).any():
            raise ValueError("its lengths are not those of the shard's samples")
        if self._reports:
            from_arrays(arrays, len(part.ids))

    async def find(self, part: _ShardSamples, advance: Callable[[int], None]) -> Arrays:
        ids = part.ids
        lengths = np.zeros((len(ids), self._num_lengths), np.int32)
        failures: list[Damage] = []
        room = asyncio.Semaphore(_MAX_PORTIONS)

        async def measure(begin: int, plan: PortionPlan) -> None:
            try:
                found = await self._measured(begin, plan, lengths[begin : begin + len(plan)])
                failures.extend(found)
                advance(len(plan))
            finally:
                room.release()

        async with asyncio.TaskGroup() as tasks:
            for begin in range(0, len(ids), self.at_once):
                some = ids[begin : begin + self.at_once]
                extents = self.dataset.index.locate(some)
                for its in self._reader.cut(extents, None):
                    draws = Draws.first(its.stop - its.start)
                    await room.acquire()
                    plan = PortionPlan(some[its], draws, extents.part(its), begin, None)
                    tasks.create_task(measure(begin + its.start, plan))
        if not self._reports:
            return {_LENGTHS: lengths}
        return {_LENGTHS: lengths, **to_arrays(sorted(failures, key=lambda each: each.sample))}

    async def _measured(self, first: int, plan: PortionPlan, into: Lengths) -> list[Damage]:
        """Measure a portion; where failures are reported, the others go on without those samples.

        Args:
            first: the place of its first sample in the part.
            plan: the portion.
            into: int32 [n, R], gets the lengths.

        Returns:
            The failures, by their places in the part.
        """
        left, failures = [(0, len(plan))], list[Damage]()
        while left:
            begin, end = left.pop()
            try:
                into[begin:end] = await self._lengths_of(plan.part(slice(begin, end)))
            except CorruptSample as error:
                if not self._reports:
                    raise
                (found,) = np.nonzero(plan.sample_ids == int(error.facts["sample_id"]))
                number = int(found[0])
                failures.append(self._failure(first + number, error))
                rest = (begin, number), (number + 1, end)
                left += [(begin, end) for begin, end in rest if begin < end]
        return failures

    async def _lengths_of(self, plan: PortionPlan) -> Int64Array:
        """Int64 [n, R], the lengths of the samples of a portion."""
        claims = Claims(self._flow, plan.urgency)
        try:
            async with self._reader.transformed(plan, claims) as portion:
                return self._reader.told(portion)
        except ExceptionGroup as errors:  # of records that are made before they are kept
            raise first_error(errors) from errors

    def _failure(self, place: int, error: CorruptSample) -> Damage:
        """An error as damage of the shard, where it may name a file and a byte of that."""
        extents = self.places(np.array([int(error.facts["sample_id"])]))
        start, shard = int(extents.start[0, 0]), self.dataset.shards[int(extents.shard[0])]
        offset = start - shard.place_of(start)[1] + int(error.facts["offset"])
        by, reason = error.facts.get("transform"), str(error.facts["reason"])
        return Damage(place, offset, f"{by}: {reason}" if by else reason)

    async def joined(
        self, parts: _ShardArrays, *, are_all: bool
    ) -> tuple[Lengths, list[CorruptRecord]]:
        """Report the failures of all shards, too."""
        dataset = self.dataset
        shape = dataset.stored.index.num_samples, self._num_lengths
        lengths = np.zeros(shape, np.int32)
        failures: list[CorruptRecord] = []
        for part, arrays in parts:
            lengths[part.ids] = arrays[_LENGTHS]
            listed = dataset.shards[part.shard]
            failures += [
                CorruptRecord(
                    *listed.place_of(each.offset), int(part.ids[each.sample]), each.reason
                )
                for each in (from_arrays(arrays, len(part.ids)) if self._reports else ())
            ]
        if self._reports and are_all:
            identity = f"{dataset.uri} {dataset.transforms}"
            path = await self._reports.write(dataset.name, identity, failures)
            if failures:
                about = {"dataset": dataset.name, "samples": len(failures), "report": path}
                log_event("samples cannot be transformed", about, logging.WARNING)
        return lengths, failures


_Source = _StoredField | _MadeLengths


def must_be_measured(dataset: TransformedDataset, config: DatasetConfig) -> bool:
    """Whether each sample of a dataset is transformed once before it is served."""
    return bool(dataset.made_ragged) or config.on_corrupt == "replace"


def with_measured(
    dataset: TransformedDataset,
    config: DatasetConfig,
    lengths: Lengths,
    failures: Sequence[CorruptRecord] = (),
) -> TransformedDataset:
    """A dataset with its measured lengths.

    Args:
        dataset: without them.
        config: of the dataset.
        lengths: of all samples; 0 for those that are corrupt.
        failures: the samples that cannot be transformed, in the order of their ids.

    Raises:
        CorruptSample: too many samples cannot be transformed.
    """
    before = dataset.source.failed
    if failures or len(before):
        num_before, num_samples = len(dataset.corrupt), dataset.index.num_samples
        if failures:
            check_limit(dataset.name, failures, num_samples, config.max_corrupt, num_before)
        failed = np.array([each.sample_id for each in failures], np.int64)
        failed = np.union1d(before, failed)
        # the replaced samples are part of the transforms: the data are the same
        digest = hashlib.blake2b(dataset.transforms.encode(), digest_size=8)
        digest.update(failed.astype("<i8").tobytes())
        corrupt = np.union1d(dataset.corrupt, failed)
        dataset = replace(dataset, corrupt=corrupt, transforms=digest.hexdigest())
    return dataset.with_lengths(lengths) if dataset.made_ragged else dataset


# How long a client may take messages after the work is done: this many seconds, and one more for
# each 10,000 messages. A client that reads needs a tenth of it. With no end, a client that stopped
# would keep the progress of each of its calls in memory.
_TAKEN_WITHIN_S, _MESSAGES_PER_S = 60.0, 10_000

_Progress = TypeVar("_Progress")


async def unheld(
    source: AsyncGenerator[_Progress, None], taken_within_s: float = _TAKEN_WITHIN_S
) -> AsyncGenerator[_Progress, None]:
    """Yield a source's items. The source goes on at its own pace, and is ended with this.

    So a source that holds a lock gives it back when its work is done, also where the client stops
    reading: then the call waits, and nobody else does.

    Args:
        source: owned by this.
        taken_within_s: how long the rest may wait once the source has ended.

    Raises:
        Overloaded: the client did not take it within that time.
        Exception: the source's own, behind all that it yielded.
    """
    waiting: deque[_Progress] = deque()
    news, is_late = asyncio.Event(), False
    timers: list[asyncio.TimerHandle] = []

    async def run() -> None:
        async with contextlib.aclosing(source):
            async for progress in source:
                waiting.append(progress)
                news.set()

    def ended(_: asyncio.Task[None]) -> None:
        left_s = taken_within_s + len(waiting) / _MESSAGES_PER_S
        timers.append(asyncio.get_running_loop().call_later(left_s, drop))
        news.set()

    def drop() -> None:
        nonlocal is_late
        is_late = bool(waiting)
        waiting.clear()

    running = asyncio.create_task(run())
    running.add_done_callback(ended)
    try:
        while waiting or not running.done():
            if waiting:
                yield waiting.popleft()
            else:
                news.clear()
                await news.wait()
        if is_late:
            raise Overloaded(
                "the client did not read the progress of its call, which is over; call again"
            )
        await running
    finally:
        running.cancel()
        await asyncio.wait([running])
        for timer in timers:
            timer.cancel()
        if not running.cancelled():
            running.exception()  # who reads on got it
