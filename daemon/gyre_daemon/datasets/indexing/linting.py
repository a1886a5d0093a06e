"""Reads every shard of a dataset and checks every sample, and reports corrupt and odd ones.

Two passes: the shards are scanned again, whatever indexes there are, and then the samples of those
shards that can be read are checked. All formats go through the same two seams, `Format` and
`codecs`. A damaged shard does not end the work.
"""

import contextlib
from collections.abc import AsyncGenerator, AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

import numpy as np

from gyre_daemon.config import DatasetConfig
from gyre_daemon.datasets.checks import CheckedShard, DecodedShards
from gyre_daemon.datasets.codecs import chosen_fields
from gyre_daemon.datasets.formats import SampleIndex
from gyre_daemon.datasets.formats.base import DamagedSample
from gyre_daemon.datasets.formats.chunk_index import chunks_of
from gyre_daemon.datasets.formats.concat import with_fields
from gyre_daemon.datasets.indexing.indexer import Indexer
from gyre_daemon.datasets.indexing.shards import OpeningDataset
from gyre_daemon.datasets.indexing.unpacked import unpacked_name
from gyre_daemon.datasets.shard_worker import CheckMedia
from gyre_daemon.errors import CorruptSample
from gyre_daemon.runtime.threads import compute
from gyre_daemon.storage.beneath import LocalFile
from gyre_daemon.storage.listing import stat_shard
from gyre_daemon.storage.open_shards import ShardChecksums
from gyre_daemon.storage.reads import BlockCache, ReadPlan
from gyre_daemon.storage.shard import Shard

FindingKind = Literal["corrupt", "odd"]
# Named findings of one shard; the rest are counted. One message holds all of a shard's.
_MAX_FINDINGS = 1000
# Named findings of a dataset: a client keeps all of them.
_MAX_NAMED = 100_000


@dataclass(frozen=True, slots=True)
class Finding:
    """A fault of a shard or a sample.

    Attributes:
        kind: `corrupt`, or `odd`: it can be served, and is probably a mistake.
        shard: the name of the shard.
        offset: the byte at which it begins.
        sample_id: of a sample; None where it is about the shard, or where a shard before cannot be
            read, so that ids are not known.
        reason: the problem.
    """

    kind: FindingKind
    shard: str
    offset: int
    sample_id: int | None
    reason: str


@dataclass(frozen=True, slots=True)
class LintProgress:
    """One more shard was scanned or checked.

    Attributes:
        num_scanned: shards whose structure was read so far.
        num_checked: shards whose samples were checked so far, or cannot be.
        num_shards: of the dataset.
        num_samples: that were checked so far.
        num_bytes: of the samples that were checked so far.
        findings: the new ones.
        num_left_out: new findings without a name.
        media: how many images and sounds were decoded so far, under an empty text, and how many
            not, by the reason.
        num_damaged: shards so far that cannot be read.
    """

    num_scanned: int
    num_checked: int
    num_shards: int
    num_samples: int = 0
    num_bytes: int = 0
    findings: Sequence[Finding] = ()
    num_left_out: int = 0
    media: Mapping[str, int] = field(default_factory=dict)
    num_damaged: int = 0


async def lint_dataset(
    indexer: Indexer,
    name: str | None,
    config: DatasetConfig,
    check_media: CheckMedia,
    chosen: range | None = None,
) -> AsyncGenerator[LintProgress, None]:
    """Check a dataset, and report each shard once it is scanned and once it is checked.

    Args:
        indexer: opens datasets.
        name: for messages; None for an ad-hoc dataset.
        config: its definition.
        check_media: decodes images and sounds; it is called in other processes.
        chosen: check these shards alone, whose samples count from 0; None for all.

    Raises:
        ConfigError, InvalidRequest: the definition makes no sense.
        ShardMissing, NotAllowed, StorageUnavailable: a shard cannot be read.
    """
    opening = await indexer.begin(name, config)
    opening.damaged = {}
    tally = _Tally(LintProgress(0, 0, len(opening.source.shards)))
    numbers = _chosen_of(opening, chosen)
    if not numbers:
        yield tally.progress
        return
    async with contextlib.aclosing(indexer.shards.run(opening, None, numbers)) as scanning:
        async for scanned in scanning:
            failure = opening.damaged.get(scanned.number)
            yield tally.scanned(opening, scanned.number, failure)
    if tally.progress.num_scanned == 0:  # nothing is scanned in this format
        tally.progress = replace(tally.progress, num_scanned=tally.progress.num_shards)
    shards = _SoundShards(opening, [each for each in numbers if each not in opening.damaged])
    try:
        index, damaged = await indexer.assembled(
            opening, shards, shards.numbers, refresh=True, is_tolerant=True
        )
    except CorruptSample as failure:
        yield tally.unfit(failure)
        return
    if not index.num_samples:
        for number in range(len(shards.shards)):
            yield tally.checked(shards, CheckedShard(number, 0, 0, 0, ()))
        return
    by_shard: dict[int, list[DamagedSample]] = {}
    for each in damaged:
        by_shard.setdefault(each.shard, []).append(each)
    fields = chosen_fields(index.fields, opening.config.rename, opening.config.cast)
    index = with_fields(index, fields)
    chunks = chunks_of(index)
    decoded = DecodedShards(shards, chunks, index, indexer.decoding) if chunks else None
    checking = indexer.checker.run(
        opening.location,
        decoded or shards,
        index,
        np.array([each.sample for each in damaged], np.int64),
        fields,
        refresh=True,
        check_media=check_media,
    )
    async with contextlib.aclosing(checking) as checked:
        async for shard in checked:
            number = shard.number
            if not decoded:
                empty = await compute(_first_empty, index, shard)
                yield tally.checked(shards, shard, by_shard.get(number, ()), empty)
                continue
            failed = {each.sample for each in decoded.failed_samples(number, shard.first_sample)}
            left = [each for each in shard.damages if each.sample not in failed]
            its = replace(shard, damages=left)
            yield tally.checked(shards, its, failures=decoded.failures_of(number))


def _chosen_of(opening: OpeningDataset, chosen: range | None) -> range:
    """The numbers of the shards to check."""
    numbers = range(len(opening.source.shards))
    if chosen is None:
        return numbers
    if opening.scan is None:  # a probe reads all of them together
        return numbers if chosen and not chosen.start else range(0)
    return numbers[chosen.start : chosen.stop]


class _SoundShards:
    """The shards that can be read, uncompressed: a `Storage` of them without checksums."""

    checksums: ShardChecksums | None = None
    block_cache: BlockCache | None = None

    def __init__(self, opening: OpeningDataset, numbers: Sequence[int]) -> None:
        self.opening, self.numbers = opening, numbers
        self.shards: Sequence[Shard] = [
            stat_shard(opening.paths[number], unpacked_name(opening.source.shards[number].name))
            if number in opening.paths
            else opening.source.shards[number]
            for number in numbers
        ]

    @property
    def are_all(self) -> bool:
        """Whether every shard can be read, so that ids are those of the dataset."""
        return not self.opening.damaged

    @property
    def is_node_local(self) -> bool:
        return self.opening.source.is_node_local or bool(self.opening.paths)

    async def read(self, plan: ReadPlan) -> None:
        reads = plan.part(slice(None))
        numbers = np.array(self.numbers, np.int64)
        await self.opening.source.read(replace(reads, shard=numbers[reads.shard]))

    def path(self, shard: int) -> str:
        return self.opening.source.path(self.numbers[shard])

    def stream(self, shard: int) -> AsyncIterator[bytes]:
        return self.opening.source.stream(self.numbers[shard])

    def local_file(self, shard: int) -> LocalFile | None:
        number = self.numbers[shard]
        return self.opening.paths.get(number) or self.opening.source.local_file(number)


class _Tally:
    """The progress so far; every method returns the next message."""

    def __init__(self, progress: LintProgress) -> None:
        self.progress = progress
        self._num_named = 0

    def scanned(
        self, opening: OpeningDataset, number: int, failure: CorruptSample | None
    ) -> LintProgress:
        name = opening.source.shards[number].name
        return self._next(
            [_of_shard(name, failure)] if failure else [],
            num_scanned=self.progress.num_scanned + 1,
            num_checked=self.progress.num_checked + bool(failure),  # no sample of it can be
            num_damaged=len(opening.damaged or {}),
        )

    def unfit(self, failure: CorruptSample) -> LintProgress:
        """The shards do not make one dataset, so no sample is checked."""
        findings = [_of_shard(str(failure.facts.get("shard", "")), failure)]
        return self._next(findings, num_checked=self.progress.num_shards)

    def checked(
        self,
        shards: _SoundShards,
        shard: CheckedShard,
        damaged: Sequence[DamagedSample] = (),
        empty: tuple[int, int, int] | None = None,
        failures: Sequence[CorruptSample] = (),
    ) -> LintProgress:
        files = shards.shards[shard.number]

        def of_sample(kind: FindingKind, sample: int, offset: int, reason: str) -> Finding:
            sample_id = sample if shards.are_all else None
            return Finding(kind, *files.place_of(offset), sample_id, reason)

        bad = [(each.offset, each.sample, each.reason) for each in damaged]
        first = shard.first_sample
        bad += [(each.offset, first + each.sample, each.reason) for each in shard.damages]
        findings = [
            of_sample("corrupt", sample, offset, reason) for offset, sample, reason in sorted(bad)
        ]
        findings += [_of_shard(files.name, each) for each in (*failures, shard.failure) if each]
        if not shard.num_samples:
            findings.append(Finding("odd", files.name, 0, None, "it has no sample"))
        if empty:
            sample, offset, num_empty = empty
            reason = f"{num_empty} samples have nothing in any field; this is the first"
            findings.append(of_sample("odd", sample, offset, reason))
        progress = self.progress
        return self._next(
            findings,
            num_checked=progress.num_checked + 1,
            num_samples=progress.num_samples + shard.num_samples,
            num_bytes=progress.num_bytes + shard.num_bytes,
            media={
                reason: progress.media.get(reason, 0) + shard.media.get(reason, 0)
                for reason in [*progress.media, *shard.media]
            },
        )

    def _next(self, findings: Sequence[Finding], **counts: int | Mapping[str, int]) -> LintProgress:
        self.progress = replace(self.progress, **counts)  # type: ignore[arg-type]
        num_kept = min(_MAX_FINDINGS, _MAX_NAMED - self._num_named)
        named, num_left_out = findings[:num_kept], max(0, len(findings) - num_kept)
        self._num_named += len(named)
        return replace(self.progress, findings=named, num_left_out=num_left_out)


def _of_shard(name: str, failure: CorruptSample) -> Finding:
    facts = failure.facts
    offset, shard = str(facts.get("offset", 0)), str(facts.get("shard", name)) or name
    place = int(offset) if offset.isdecimal() else 0
    return Finding("corrupt", shard, place, None, str(facts.get("reason", failure)))


def _first_empty(index: SampleIndex, shard: CheckedShard) -> tuple[int, int, int] | None:
    """Of the samples in which nothing is stored: the first one's id and offset, and their number.

    None if there are none, or if the format stores nothing in samples.
    """
    ids = np.arange(shard.first_sample, shard.first_sample + shard.num_samples)
    extents = index.locate(ids)
    empty = np.flatnonzero(~extents.size.any(axis=1))
    if not extents.size.shape[1] or not len(empty):
        return None
    first = int(empty[0])
    return int(ids[first]), int(extents.start[first, 0]), len(empty)
