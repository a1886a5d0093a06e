"""Between the messages of the contract and the daemon's own values. Requests are checked here, once."""

import dataclasses
import functools
import tomllib
from weakref import WeakKeyDictionary

import numpy as np
from gyre_protos.v1 import loader_pb2 as pb

from gyre_daemon.config import DatasetConfig
from gyre_daemon.datasets.catalog import IndexProgress
from gyre_daemon.datasets.changes import Change
from gyre_daemon.datasets.cost import Prices, Question, Report
from gyre_daemon.datasets.dataset import Dataset
from gyre_daemon.datasets.formats import FieldSpec
from gyre_daemon.errors import InvalidRequest
from gyre_daemon.fetching.fetch import Strip
from gyre_daemon.fetching.layout import BatchLayout
from gyre_daemon.monitoring.lately import Lately
from gyre_daemon.monitoring.metrics import CacheCounts
from gyre_daemon.order.block_order import default_io_block_bytes, default_window_blocks
from gyre_daemon.order.cursor import NUM_BEFORE
from gyre_daemon.order.plan import MAX_START_POSITION, Order, OrderMode, Tail
from gyre_daemon.order.quality import ShuffleQuality
from gyre_daemon.sessions.news import Sent
from gyre_daemon.sessions.request import Reader
from gyre_daemon.sessions.session import Session
from gyre_daemon.storage.cache.cached import shared_block_bytes

_TAILS: dict[int, Tail] = {pb.TAIL_UNSPECIFIED: "wrap", pb.TAIL_WRAP: "wrap", pb.TAIL_DROP: "drop", pb.TAIL_PAD: "pad"}
_MODES: dict[int, OrderMode] = {
    pb.ORDER_MODE_UNSPECIFIED: "full",
    pb.ORDER_MODE_FULL: "full",
    pb.ORDER_MODE_BLOCK: "block",
    pb.ORDER_MODE_SEQUENTIAL: "sequential",
}
_CHANGES: dict[Change, "pb.ShardChange.ValueType"] = {
    "indexed": pb.SHARD_CHANGE_INDEXED,
    "kept": pb.SHARD_CHANGE_KEPT,
    "restored": pb.SHARD_CHANGE_RESTORED,
    "changed": pb.SHARD_CHANGE_CHANGED,
}
_MIN_IO_BLOCK_BYTES, _MAX_IO_BLOCK_BYTES = 512, 1 << 30
_MAX_WINDOW_BLOCKS = 1 << 16
_MAX_JOB_CHARS = 200


def to_order(message: pb.OrderSpec) -> Order:
    """The order that a client asks for; what it leaves open of blocks follows from G alone, so that all daemons agree.

    Raises:
        InvalidRequest: an unknown mode or tail, or a number beyond its range.
    """
    if message.mode not in _MODES:
        raise InvalidRequest(f"order mode {message.mode} is not known to this daemon; it knows full, block and sequential")
    if message.tail not in _TAILS:
        raise InvalidRequest(f"tail {message.tail} is not known to this daemon; it knows wrap, drop and pad")
    if message.start_position > MAX_START_POSITION:
        raise InvalidRequest(f"start position {message.start_position} lies beyond any training; positions end at 2**62")
    mode, blocks = _MODES[message.mode], (0, 0)
    if mode == "block":
        blocks = _to_blocks(message)
    elif message.io_block_bytes or message.window_blocks:
        raise InvalidRequest(f"the order `{mode}` has neither blocks nor a window of them; ask for the order `block`")
    return Order(mode, _TAILS[message.tail], message.seed, message.global_batch_size, *blocks, message.start_position)


def _to_blocks(message: pb.OrderSpec) -> tuple[int, int]:
    """Size of a block, and how many make a window."""
    window_blocks = message.window_blocks or default_window_blocks(message.global_batch_size)
    io_block_bytes = message.io_block_bytes or default_io_block_bytes(window_blocks)
    if not _MIN_IO_BLOCK_BYTES <= io_block_bytes <= _MAX_IO_BLOCK_BYTES:
        raise InvalidRequest(
            f"io_block is {io_block_bytes} bytes; it must be {_MIN_IO_BLOCK_BYTES} to {_MAX_IO_BLOCK_BYTES}: a block is one "
            "request"
        )
    if window_blocks > _MAX_WINDOW_BLOCKS:
        raise InvalidRequest(f"a window of {window_blocks} blocks is too wide; at most {_MAX_WINDOW_BLOCKS} can be mixed")
    return io_block_bytes, window_blocks


def to_reader(message: pb.Reader) -> Reader:
    """Who reads.

    Raises:
        InvalidRequest: the job has no name, or a very long one.
    """
    if not 1 <= len(message.job) <= _MAX_JOB_CHARS:
        raise InvalidRequest(f"a job's name must have 1 to {_MAX_JOB_CHARS} characters, but has {len(message.job)}")
    return Reader(message.job, message.rank, message.world_size or 1, message.generation)


def to_ad_hoc(message: pb.AdHocDataset) -> DatasetConfig:
    """A dataset that the client defines.

    Raises:
        InvalidRequest: an option is no TOML value.
    """
    options = {}
    for key, text in message.options.items():
        try:
            options[key] = tomllib.loads(f"value = {text}")["value"]
        except (ValueError, RecursionError) as error:
            raise InvalidRequest(f"option `{key[:100]}` of the dataset is no TOML value: {text[:100]!r}") from error
    storage = options.pop("storage", {})
    if not isinstance(storage, dict):
        raise InvalidRequest("option `storage` of the dataset must be a TOML table")
    return DatasetConfig(message.uri, message.format, options, storage)


def from_fields(fields: tuple[FieldSpec, ...] | list[FieldSpec]) -> list[pb.Field]:
    """The tensors of a sample."""
    return [
        pb.Field(name=spec.name, dtype=spec.dtype.name, shape=spec.shape, ragged=spec.ragged, token_ids=spec.token_ids)
        for spec in fields
    ]


def from_dataset(dataset: Dataset) -> pb.DatasetDescription:
    """What there is to know of an open dataset."""
    return pb.DatasetDescription(
        name=dataset.name,
        format=dataset.format,
        uri=dataset.uri,
        num_samples=dataset.num_samples,
        num_shards=len(dataset.storage.shards),
        num_bytes=dataset.num_bytes,
        fingerprint=dataset.fingerprint,
        fields=from_fields(list(dataset.fields)),
    )


def from_progress(progress: IndexProgress) -> pb.IndexProgress:
    """One more shard is indexed."""
    return pb.IndexProgress(
        shards_done=progress.num_done,
        num_shards=progress.num_shards,
        num_samples=progress.num_samples,
        shard=progress.shard,
        reused=progress.reused,
        change=_CHANGES[progress.change],
        fingerprint=progress.fingerprint,
        fingerprint_before=progress.fingerprint_before,
        removed=progress.removed,
    )


def to_cost_question(message: pb.PlanCostRequest, dataset: Dataset) -> Question:
    """What is to be estimated.

    Raises:
        InvalidRequest: see `to_order`; or a price that is none.
    """
    spec = pb.OrderSpec()
    spec.CopyFrom(message.order)
    spec.mode = pb.ORDER_MODE_BLOCK
    prices = Prices(
        _to_price(message.price_per_1000_requests) if message.HasField("price_per_1000_requests") else None,
        _to_price(message.price_per_gb) if message.HasField("price_per_gb") else None,
    )
    is_local = dataset.storage.local_path(0) is not None and prices == Prices()
    cache_block_bytes = shared_block_bytes(dataset.storage.shards)
    return Question(to_order(spec), message.num_epochs or 1, message.cache_bytes, cache_block_bytes, prices, is_local)


def _to_price(price: float) -> float:
    if not 0 <= price < float("inf"):
        raise InvalidRequest(f"a price must be a number of at least 0, but is {price}")
    return price


def from_cost_report(report: Report, question: Question, dataset: Dataset) -> pb.PlanCostResponse:
    """What each order costs."""
    block_bytes = {"full": 0, "block": question.order.io_block_bytes, "full with the cache": question.cache_block_bytes}
    return pb.PlanCostResponse(
        estimates=[
            pb.CostEstimate(
                order=each.order,
                num_requests=each.num_requests,
                num_bytes=each.num_bytes,
                amplification=each.amplification,
                memory_bytes=each.memory_bytes,
                quality=from_quality(each.quality),
                io_block_bytes=block_bytes[each.order],
                window_blocks=question.order.window_blocks if each.order == "block" else 0,
                money=each.money,
            )
            for each in report.estimates
        ],
        recommendation=report.recommendation,
        num_samples=dataset.num_samples,
        num_bytes_served=report.num_bytes_served,
    )


def from_quality(quality: ShuffleQuality) -> pb.ShuffleQuality:
    """How well an order shuffles."""
    return pb.ShuffleQuality(displacement=quality.displacement, spread=quality.spread, mixing=quality.mixing)


def from_cache(counts: CacheCounts) -> pb.CacheCount:
    """What the node cache did."""
    return pb.CacheCount(**dataclasses.asdict(counts))


def from_strips(sent: list[Sent], session: Session) -> pb.StreamResponse:
    """One message for several strips."""
    response = pb.StreamResponse()
    response.batches.SetInParent()
    if session.shares_arena and (grant := session.new_grant()):
        response.batches.prefetch_batches = grant.num_queued
        response.batches.max_kept_batches = grant.num_kept
    for each in sent:
        message = response.batches.strips.add()
        message.CopyFrom(_as_told(each.strip, session))
        if session.shares_arena:
            message.arena.arena = each.arena
        else:
            message.inline.SetInParent()
    return response


_TOLD: WeakKeyDictionary[Strip, pb.Strip] = WeakKeyDictionary()


def _as_told(strip: Strip, session: Session) -> pb.Strip:
    """What all sessions that read along are told: one order has one cursor at each step, and only arenas' numbers differ."""
    message = _TOLD.get(strip)
    if message is None:
        message = _TOLD[strip] = _from_strip(strip, session)
    return message


def _from_strip(strip: Strip, session: Session) -> pb.Strip:
    """A layout that all batches have is written once."""
    plan, layout = strip.plan, strip.layout
    return pb.Strip(
        first_step=plan.first_step,
        cursors=_from_cursors(session, range(plan.first_step, plan.stop_step)),
        layouts=[_from_layout(layout.shared)] if layout.shared else [_from_layout(batch) for batch in layout.batches],
        arena=pb.ArenaSlot(offsets_bytes=(layout.offsets + strip.slot.offset_bytes).tolist()),
    )


def _from_cursors(session: Session, steps: range) -> pb.Cursors:
    """Of clients that have consumed each of these steps."""
    size, encoder = session.request.order.global_batch_size, session.cursors
    positions = range((steps.start + 1) * size, (steps.stop + 1) * size, size)
    return pb.Cursors(common=encoder.common, num_before=NUM_BEFORE, own=encoder.own(positions))


def _from_layout(layout: BatchLayout) -> pb.Layout:
    return pb.Layout(
        tensors=[
            pb.Tensor(name=spec.name, dtype=_name_of(spec.dtype), shape=spec.shape, offset_bytes=spec.offset_bytes)
            for spec in layout.tensors
        ],
        num_bytes=layout.num_bytes,
    )


@functools.cache
def _name_of(dtype: np.dtype[np.generic]) -> str:
    """Numpy puts the name together each time it is asked for."""
    return dtype.name


def from_session(session: Session) -> pb.SessionState:
    """Where a session stands."""
    reader, view, totals = session.request.reader, session.view, session.totals
    num_ready = view.num_ready
    return pb.SessionState(
        session_id=session.session_id,
        dataset=session.request.dataset.name,
        reader=pb.Reader(job=reader.job, rank=reader.rank, world_size=reader.world_size, generation=reader.generation),
        next_step=view.next_to_send,
        num_batches_sent=totals.num_batches,
        num_bytes_sent=totals.num_bytes,
        num_ready=num_ready,
        num_in_flight=view.num_begun - num_ready,
        num_held=session.num_held,
        prefetch_batches=session.window_size,
        memory_bytes=session.memory_bytes,
        memory_limit_bytes=session.share.reserved_bytes,
        credits=session.credits,
        wait_storage_s=totals.times.wait_storage_s,
        wait_trainer_s=totals.times.wait_trainer_s,
        wait_processor_s=totals.times.wait_processor_s,
        window_ready_batch_s=totals.times.ready_batch_s,
        window_size_batch_s=totals.times.size_batch_s,
        trainer_waited_s=totals.trainer_waited_s,
        attached=session.attached,
        num_sharing=session.num_sharing,
        quality=from_quality(quality) if (quality := session.shuffle.quality) else None,
        transport=pb.TRANSPORT_ARENA if session.shares_arena else pb.TRANSPORT_INLINE,
        lately=_from_lately(session.lately),
    )


def _from_lately(lately: Lately) -> pb.Lately:
    times = lately.times
    return pb.Lately(
        elapsed_s=lately.elapsed_s,
        batches_per_s=lately.batches_per_s,
        bytes_per_s=lately.bytes_per_s,
        window_ready_batch_s=times.ready_batch_s,
        window_size_batch_s=times.size_batch_s,
        wait_storage_s=times.wait_storage_s,
        wait_processor_s=times.wait_processor_s,
        wait_trainer_s=times.wait_trainer_s,
        trainer_waited_s=lately.trainer_waited_s,
    )


def frame_chunk(data: memoryview) -> bytes:
    """The bytes of PayloadChunk(data=data), written by hand: one copy, which gRPC needs anyway, and no codec."""
    return b"".join((b"\x0a", _varint(len(data)), data))


def _varint(value: int) -> bytes:
    encoded = bytearray()
    while value > 0x7F:
        encoded.append(value & 0x7F | 0x80)
        value >>= 7
    encoded.append(value)
    return bytes(encoded)
