"""From the daemon's own values to the messages of the protocol.

A `Checkup` finds the problems of a daemon and its node for `gyre status --check`. Each is one
sentence: the object, the figure, what to change. Its limits are those of the alerts in
`docker/prometheus`.
"""

import functools
import os
import time
from collections.abc import Iterable, Iterator
from dataclasses import asdict
from typing import TYPE_CHECKING, Any, TypeVar
from weakref import WeakKeyDictionary

import numpy as np
from google.protobuf.message import Message
from gyre_protos.v1 import loader_pb2 as pb
from msgspec import Struct

from gyre_daemon.config import DaemonConfig
from gyre_daemon.config.schema import memory_limit_bytes
from gyre_daemon.datasets.codecs import LengthHistogram
from gyre_daemon.datasets.cost import CostQuery, CostReport
from gyre_daemon.datasets.dataset import Dataset
from gyre_daemon.datasets.formats import FieldSpec
from gyre_daemon.fetching.columns import Measuring
from gyre_daemon.fetching.fetch import BatchGroup, BatchTiming
from gyre_daemon.fetching.layout import BatchLayout
from gyre_daemon.monitoring.metrics import Census, series_of
from gyre_daemon.order.cursor import NUM_BEFORE
from gyre_daemon.order.planner import Order
from gyre_daemon.order.steps import SkippedSteps
from gyre_daemon.runtime.limits import descriptor_shares, own_bytes
from gyre_daemon.sessions.session import Sent, Session
from gyre_daemon.sessions.table import SessionTable
from gyre_daemon.storage.engine.endpoint import Endpoint
from gyre_daemon.storage.mounts import MOUNTS, Mount

if TYPE_CHECKING:
    from gyre_daemon.datasets.indexing.linting import LintProgress

Kind = TypeVar("Kind", bound=Message)

# Sessions of one shared stream are sent the same batch groups, and each message is built once.
_MESSAGES: WeakKeyDictionary[BatchGroup, pb.BatchGroup] = WeakKeyDictionary()


def like(kind: type[Kind], /, *values: object, **others: Any) -> Kind:
    """A message with the attributes of values that have the names of its fields, and others."""
    names = kind.DESCRIPTOR.fields_by_name.keys() - others.keys()
    same = {
        name: getattr(value, name) for value in values for name in names if hasattr(value, name)
    }
    return kind(**same, **others)


def from_fields(fields: Iterable[FieldSpec]) -> list[pb.Field]:
    """The tensors of a sample."""
    return [
        like(
            pb.Field,
            spec,
            dtype=spec.dtype.name,
            text=spec.codec in ("text", "quoted", "json"),
        )
        for spec in fields
    ]


def from_stages(session: Session) -> list[pb.Stage]:
    """The stages of a session's job; none where its dataset does not grow."""
    stages = session.request.cursor.stages
    return [like(pb.Stage, each) for each in stages]


def from_dataset(
    dataset: Dataset, lengths: Iterable[LengthHistogram] = ()
) -> pb.DatasetDescription:
    """The description of an open dataset."""
    shard_bytes = [shard.size_bytes for shard in dataset.storage.shards]
    return like(
        pb.DatasetDescription,
        dataset,
        num_shards=len(dataset.storage.shards),
        fields=from_fields(dataset.served),
        least_shard_bytes=min(shard_bytes, default=0),
        greatest_shard_bytes=max(shard_bytes, default=0),
        lengths=[pb.LengthHistogram(**asdict(each)) for each in lengths],
        transforms=dataset.transform_names,
        packing=_from_packed(dataset) if dataset.packed else None,
        dropped_categories=_dropped_categories(dataset),
    )


def _dropped_categories(dataset: Dataset) -> list[pb.Categories]:
    """The names of classes that the dataset has, and its fields after transforms do not."""
    left = {spec.name for spec in dataset.fields if spec.categories}
    return [
        pb.Categories(field=spec.name, names=spec.categories)
        for spec in dataset.stored.fields
        if spec.categories and spec.name not in left
    ]


def _from_packed(dataset: Dataset) -> pb.Packing:
    assert dataset.packed
    packed = dataset.packed
    return like(
        pb.Packing,
        packed.sequences,
        field=packed.stored.name,
        length=packed.config.length,
        num_documents=dataset.index.num_samples,
        efficiency=packed.efficiency,
        overlong=packed.config.overlong,
    )


def from_lint_progress(progress: "LintProgress") -> pb.LintProgress:
    """The progress after one more shard was read or checked."""
    return like(
        pb.LintProgress,
        progress,
        findings=[
            like(pb.LintFinding, each, kind=pb.LintFinding.Kind.Value(f"KIND_{each.kind.upper()}"))
            for each in progress.findings
        ],
        num_decoded=progress.media.get("", 0),
        not_decoded={reason: num for reason, num in progress.media.items() if reason},
    )


def from_cost_report(
    report: CostReport, question: CostQuery, dataset: Dataset
) -> pb.PlanCostResponse:
    """The estimate for each order."""
    block_bytes = {
        "full": 0,
        "block": question.order.io_block_bytes,
        "full with the cache": question.cache_block_bytes,
    }
    return pb.PlanCostResponse(
        estimates=[
            like(
                pb.CostEstimate,
                each,
                quality=pb.ShuffleQuality(**asdict(each.quality)),
                io_block_bytes=block_bytes[each.order],
                window_blocks=question.order.window_blocks if each.order == "block" else 0,
            )
            for each in report.estimates
        ],
        recommendation=report.recommendation,
        num_samples=dataset.num_samples,
        num_bytes_served=report.num_bytes_served,
    )


def from_groups(sent: list[Sent], session: Session) -> pb.StreamResponse:
    """One message for several batch groups, with the session's credit if it has changed."""
    response = pb.StreamResponse()
    response.batches.SetInParent()
    if session.shares_arena and session.renew_grant():
        response.batches.max_queued_batches = session.max_queued
        response.batches.max_kept_batches = session.num_kept
    for each in sent:
        message = response.batches.groups.add()
        message.CopyFrom(_message(each.group, session))
        if session.shares_arena:
            message.arena.arena = each.arena
        else:
            message.inline.SetInParent()
    return response


def _message(group: BatchGroup, session: Session) -> pb.BatchGroup:
    """The message for a batch group; sessions add only how its payload reaches their client."""
    message = _MESSAGES.get(group)
    if message is not None:
        return message
    plan, layout = group.plan, group.layout
    layouts = [layout.shared] if layout.shared else layout.batches
    message = _MESSAGES[group] = pb.BatchGroup(
        first_step=plan.first_step,
        cursors=_from_cursors(session, range(plan.first_step, plan.stop_step)),
        layouts=[from_layout(each) for each in layouts],
        arena=pb.ArenaSlot(offsets_bytes=(layout.offsets + group.slot.offset_bytes).tolist()),
    )
    return message


def _from_cursors(session: Session, steps: range) -> pb.Cursors:
    """The cursor after each of these steps."""
    encoder, count = session.cursors, session.planner.num_substitutes
    positions = map(session.request.order.position_behind, steps)
    own = encoder.own((position, count(position)) for position in positions)
    return pb.Cursors(common=encoder.common, num_before=NUM_BEFORE, own=own)


def from_layout(layout: BatchLayout) -> pb.Layout:
    """The tensors of a batch."""
    return pb.Layout(
        tensors=[
            pb.Tensor(
                name=spec.name,
                dtype=_name_of(spec.dtype),
                shape=spec.shape,
                offset_bytes=spec.offset_bytes,
            )
            for spec in layout.tensors
        ],
        num_bytes=layout.num_bytes,
    )


@functools.cache
def _name_of(dtype: np.dtype[np.generic]) -> str:
    """NumPy builds the name each time, which costs more than this look-up."""
    return dtype.name


def from_session(session: Session) -> pb.SessionState:
    """The state of a session, without its spread, which `spreads_of` computes."""
    reader = session.request.reader
    gauges, totals, lately = session.gauges, session.totals, session.lately
    packed = session.request.dataset.packed
    return like(
        pb.SessionState,
        *(session, gauges, totals, totals.times),
        user=session.request.owner.name,
        dataset=session.request.dataset.name,
        transforms=session.request.dataset.transform_names,
        reader=pb.Reader(**asdict(reader)),
        next_step=session.request.order.step_of(session.next_step),
        resume_step=session.request.order.step_of(session.resume_step),
        cursor=session.cursor_at(session.resume_step),
        num_batches_sent=totals.num_batches,
        num_bytes_sent=totals.num_bytes,
        quality=pb.ShuffleQuality(**asdict(session.quality)),
        transport=pb.TRANSPORT_ARENA if session.shares_arena else pb.TRANSPORT_INLINE,
        stages=from_stages(session),
        lately=like(pb.Lately, lately, lately.times),
        filled=packed.efficiency if packed else None,
        metrics={each.name: each.value for each in series_of(totals, gauges)},
    )


def from_order(order: Order) -> pb.OrderSpec:
    """The order of a job, as its client asked for it."""
    return like(
        pb.OrderSpec,
        order,
        mode=pb.OrderMode.Value(f"ORDER_MODE_{order.mode.upper()}"),
        tail=pb.Tail.Value(f"TAIL_{order.tail.upper()}"),
        bucket=pb.Bucket(**asdict(order.bucket)) if order.bucket else None,
    )


def from_skipped(skipped: SkippedSteps) -> pb.SkippedSteps | None:
    """The steps that a job leaves out; None if there is none."""
    ranges = [pb.StepRange(first=first, stop=stop) for first, stop in skipped]
    return pb.SkippedSteps(ranges=ranges) if ranges else None


def from_census(census: Census, *, has_cache: bool) -> pb.DaemonStatus:
    """The state of a daemon, without its process, its sessions and its endpoints."""
    counts = census.counts
    return like(
        pb.DaemonStatus,
        census,
        draining=census.is_draining,
        storage=[
            pb.StorageCount(**labels._asdict(), **asdict(count))
            for labels, count in sorted(counts.storage.items())
        ],
        num_batches_sent=counts.num_batches_sent,
        num_bytes_sent=counts.num_bytes_sent,
        num_substitutes_sent=counts.num_substitutes_sent,
        num_samples_transformed=counts.transforms.num_samples,
        transform_cpu_s=counts.transforms.cpu_s,
        num_transform_workers_replaced=counts.transforms.num_replaced,
        cache=like(pb.CacheCount, counts.cache) if has_cache else None,
        metrics=[pb.Metric(**each._asdict()) for each in series_of(census)],
    )


def from_measuring(measuring: Measuring) -> pb.MeasuringState:
    """How far the measuring of a dataset is."""
    return pb.MeasuringState(
        dataset=measuring.dataset,
        num_done=measuring.num_samples + measuring.num_in_shard,
        num_samples=measuring.num_total,
        elapsed_s=time.monotonic() - measuring.began_s,
        num_reused=measuring.num_known,
    )


def hide_others(status: pb.DaemonStatus) -> None:
    """Remove from a status all that tells of sessions that are not in it, and of their datasets."""
    for field in (
        "storage",
        "endpoints",
        "mounts",
        "cache",
        "num_samples_transformed",
        "transform_cpu_s",
        "num_transform_workers_replaced",
        "metrics",
        "checkup",
    ):
        status.ClearField(field)
    status.num_batches_sent = sum(each.num_batches_sent for each in status.sessions)
    status.num_bytes_sent = sum(each.num_bytes_sent for each in status.sessions)
    status.num_substitutes_sent = sum(each.num_substitutes for each in status.sessions)


def from_endpoint(endpoint: Endpoint, now: float) -> pb.EndpointState:
    """The limits and queues of an object storage; `now` is a time of the loop's clock."""
    return like(
        pb.EndpointState,
        endpoint,
        limit=endpoint.limit.limit,
        num_in_flight=endpoint.queue.num_taken,
        num_waiting=endpoint.queue.num_waiting,
        num_retries_left=endpoint.budget.num_left(now),
    )


def from_mount(mount: Mount) -> pb.Mount:
    """A mount: whether it hangs, and whether its reads are slow."""
    return like(
        pb.Mount,
        mount,
        guessed_slow=mount.latency.guess == "slow",
        slow=mount.latency.is_slow,
        read_s=mount.latency.median_s,
    )


def from_timing(timing: BatchTiming, now: float, reader: str | None) -> pb.BatchTiming:
    """The timing of a batch as of `now`, of the same clock.

    The user `reader` sees the names of no other user's jobs; None sees all.
    """
    return like(
        pb.BatchTiming,
        timing,
        job=timing.job if reader in (None, timing.user) else "",
        ago_s=now - timing.begun_at - timing.total_s,
        awaited=timing.is_awaited,
        **asdict(timing.delays),
    )


_SLOW_READ_S = 0.25
_FULL, _NEARLY_FULL = 0.8, 0.95  # of descriptors; of memory_budget
_EXPIRES_SOON_S = 14 * 86400.0
_GIB, _MIB = 1 << 30, 1 << 20


class Checkup(Struct, frozen=True):
    """Looks at a daemon when it is asked to."""

    _config: DaemonConfig
    _sessions: SessionTable

    def problems(self, census: Census) -> list[str]:
        """A sentence for each problem."""
        return [
            *self._mounts(),
            *self._cache(census),
            *self._descriptors(),
            *self._memory(census),
            *_files(census),
        ]

    def _mounts(self) -> Iterator[str]:
        for mount in MOUNTS:
            name = f"the mount {mount.path} ({mount.file_system})"
            if hangs_s := mount.hangs_since_s:
                yield f"{name} has not answered for {hangs_s:.0f} s: restore its server."
            elif (read_s := mount.latency.median_s or 0.0) > _SLOW_READ_S:
                yield (
                    f"{name} takes {read_s:.2f} s for a read: look at its server's load, or keep "
                    "its blocks on a local disk (cache_dir)."
                )

    def _cache(self, census: Census) -> Iterator[str]:
        config, counts = self._config, census.counts.cache
        if counts.is_disk_failing:
            yield (
                f"no block is written to cache_dir ({config.cache_dir}): make room, or look for "
                "the disk's errors in the log."
            )
        cached = {
            dataset.fingerprint: dataset.num_bytes
            for dataset in (session.request.dataset for session in self._sessions)
            if dataset.storage.block_cache
        }
        needed = sum(cached.values())
        has_disk = bool(config.cache_dir) and not counts.is_disk_failing
        size = config.cache_memory + (config.cache_disk if has_disk else 0)
        if counts.num_evicted and needed > size:
            key = "cache_disk" if has_disk else "cache_memory, or cache_dir with cache_disk,"
            yield (
                f"the node cache has {_size(size)} and jobs read {_size(needed)} through it, so "
                f"each epoch reads some again: raise {key} by {_size(needed - size)}."
            )

    def _descriptors(self) -> Iterator[str]:
        shares, num_open = descriptor_shares(), len(os.listdir("/proc/self/fd"))  # noqa: PTH208
        if num_open > _FULL * shares.limit:
            yield f"{num_open} of {shares.limit} descriptors are open: raise LimitNOFILE=."
        elif shares.connections < self._config.max_requests:
            yield (
                f"{shares.limit} descriptors allow {shares.connections} requests in flight, and "
                f"max_requests is {self._config.max_requests}: raise LimitNOFILE= to "
                f"{4 * self._config.max_requests}, or lower max_requests."
            )

    def _memory(self, census: Census) -> Iterator[str]:
        budget, abandoned = census.memory_budget_bytes, census.memory_abandoned_bytes
        # all but the blocks in memory: indexes, requests, the interpreter
        own = max(0, own_bytes() - census.counts.cache.memory_bytes)
        needed, limit = budget + self._config.cache_memory + own, memory_limit_bytes()
        if limit is not None and needed > limit:
            yield (
                f"memory_budget, cache_memory and the daemon's own {_size(own)} are "
                f"{_size(needed)}, and its control group allows {_size(limit)}: raise the limit "
                "(MemoryMax=, --memory), or lower memory_budget."
            )
        if census.memory_reserved_bytes + abandoned > _NEARLY_FULL * budget:
            yield (
                f"sessions hold {_size(census.memory_reserved_bytes + abandoned)} of "
                f"memory_budget ({_size(budget)}), and the next may be refused: raise it, or "
                "lower session_memory."
            )
        if abandoned > budget // 10:
            yield (f"clients keep {_size(abandoned)} of ended sessions: end those that are frozen.")


def _files(census: Census) -> Iterator[str]:
    counts = census.counts
    if not counts.is_reload_good:
        yield "the last reload was refused: correct the file (gyred check-config), and reload it."
    for (kind, name), at in counts.expires.items():
        left_s = at - time.time()
        if left_s < _EXPIRES_SOON_S:
            when = f"expires in {left_s / 86400:.1f} days" if left_s > 0 else "has expired"
            yield f"the {kind} {name} {when}: replace its file."


def _size(num_bytes: int) -> str:
    if num_bytes >= _GIB:
        return f"{num_bytes / _GIB:.1f} GiB"
    return f"{max(1, num_bytes // _MIB)} MiB"
