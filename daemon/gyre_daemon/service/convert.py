"""Between the messages of the contract and the daemon's own values. Requests are checked here, once."""

import tomllib

from gyre_protos.v1 import loader_pb2 as pb

from gyre_daemon.batch import BatchLayout
from gyre_daemon.config import DatasetConfig
from gyre_daemon.dataset import Dataset
from gyre_daemon.errors import InvalidRequest
from gyre_daemon.fetch import Batch
from gyre_daemon.formats import FieldSpec
from gyre_daemon.plan import Order, Tail
from gyre_daemon.session import Reader, Session

_TAILS: dict[int, Tail] = {pb.TAIL_UNSPECIFIED: "wrap", pb.TAIL_WRAP: "wrap", pb.TAIL_DROP: "drop", pb.TAIL_PAD: "pad"}
_MAX_JOB_CHARS = 200


def to_order(message: pb.OrderSpec) -> Order:
    """The order that a client asks for.

    Raises:
        InvalidRequest: an unknown mode or tail.
    """
    if message.mode not in (pb.ORDER_MODE_UNSPECIFIED, pb.ORDER_MODE_FULL):
        raise InvalidRequest(f"order mode {message.mode} is not known to this daemon; it knows `full`")
    if message.tail not in _TAILS:
        raise InvalidRequest(f"tail {message.tail} is not known to this daemon; it knows wrap, drop and pad")
    return Order("full", _TAILS[message.tail], message.seed, message.global_batch_size)


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
    return [pb.Field(name=spec.name, dtype=spec.dtype.name, shape=spec.shape, ragged=spec.ragged) for spec in fields]


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


def from_batches(batches: list[Batch], session: Session) -> pb.StreamResponse:
    """One message for several batches; a layout that all of them have is written once."""
    first = batches[0].layout
    shared = all(batch.layout is first for batch in batches)
    message = pb.Batches(tensors=_from_layout(first) if shared else [])
    for batch in batches:
        step, num_bytes = batch.plan.step, batch.layout.num_bytes
        entry = message.batches.add(step=step, epoch=batch.plan.epoch, cursor=session.cursor_at(step + 1))
        if not shared:
            entry.tensors.extend(_from_layout(batch.layout))
        if session.shares_arena:
            entry.arena.arena = session.arena_number(batch)
            entry.arena.offset_bytes = batch.slot.offset_bytes
            entry.arena.num_bytes = num_bytes
        else:
            entry.inline.num_bytes = num_bytes
    return pb.StreamResponse(batches=message)


def _from_layout(layout: BatchLayout) -> list[pb.Tensor]:
    return [
        pb.Tensor(name=spec.name, dtype=spec.dtype.name, shape=spec.shape, offset_bytes=spec.offset_bytes)
        for spec in layout.tensors
    ]


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
        memory_limit_bytes=session.share.num_bytes,
        credits=session.credits,
        wait_storage_s=totals.times.wait_storage_s,
        wait_trainer_s=totals.times.wait_trainer_s,
        window_ready_batch_s=totals.times.ready_batch_s,
        window_size_batch_s=totals.times.size_batch_s,
        trainer_waited_s=totals.trainer_waited_s,
        attached=session.attached,
        num_sharing=session.num_sharing,
        transport=pb.TRANSPORT_ARENA if session.shares_arena else pb.TRANSPORT_INLINE,
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
