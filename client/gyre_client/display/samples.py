"""Single samples of a dataset, for commands that show them.

They come in one batch over gRPC, which needs no torch.
"""

import itertools
import math
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from math import prod
from typing import TYPE_CHECKING, Any, NamedTuple

import grpc
from gyre_protos.text import printable
from gyre_protos.v1 import loader_pb2 as pb

from gyre_client.display.formatting import media_type, size
from gyre_client.errors import DaemonFault, InvalidRequest, NotInstalled
from gyre_client.transport.answers import (
    BFLOAT16,
    OFFSETS_SUFFIX,
    SAMPLE_ID,
    BatchTensors,
    check_group,
    check_same_dataset,
)
from gyre_client.transport.arguments import order, reader
from gyre_client.transport.channel import chunk_data
from gyre_client.transport.connection import OPEN_TIMEOUT_S, Connection, error_from

if TYPE_CHECKING:
    import numpy.typing as npt

_HEARTBEATS_PER_LEASE = 4


class Value(NamedTuple):
    """One field of one sample.

    Attributes:
        dtype: The dtype of its tensor.
        shape: The shape of its tensor.
        data: The bytes of a ragged field of uint8; else the number, or (nested) lists of numbers.
    """

    dtype: str
    shape: Sequence[int]
    data: Any


class Sample(NamedTuple):
    """One sample; its values by the names of its fields."""

    sample_id: int
    values: dict[str, Value]


def first_samples(
    connection: Connection,
    dataset: pb.DatasetRef,
    description: pb.DatasetDescription,
    num_samples: int,
    seed: int,
    transforms: pb.TransformList | None = None,
) -> list[Sample]:
    """Returns the first samples of the shuffle by a seed, at most as many as the dataset has.

    Args:
        connection: To the daemon.
        dataset: To read.
        description: The dataset's description, with these transforms.
        num_samples: How many.
        seed: The seed of the shuffle.
        transforms: Applied to samples; None for those of the dataset's definition.

    Raises:
        DaemonFault: The daemon sends no such batch.
    """
    num_samples = min(num_samples, description.num_samples)
    request = pb.OpenSessionRequest(
        dataset=dataset,
        order=order(num_samples, 1, seed, "drop"),
        reader=reader(None, 0, 1),
        prefetch_batches=1,
        transforms=transforms,
    )
    opened = connection.open_session(request)
    check_same_dataset(opened, description)
    return _samples_of(connection, opened, num_samples, has_mask=False)


def rows_of_step(
    connection: Connection,
    located: pb.LocateStepResponse,
    request: pb.LocateStepRequest,
    first: int,
    num_rows: int,
    *,
    job: str | None = None,
    is_as_served: bool = False,
) -> list[Sample]:
    """Returns rows of a global batch of a job.

    Their fields are as they are stored. Where documents are packed or batches have buckets, lengths
    after transforms decide which samples a row has, and the fields are as served.

    Args:
        connection: To the daemon.
        located: The step.
        request: The request for `located`.
        first: The first row, a multiple of `num_rows`.
        num_rows: How many; they divide the global batch.
        job: The name of the session that reads them; None for any.
        is_as_served: Whether all fields are as the job gets them.

    Raises:
        DaemonFault: The daemon sends no such batch.
    """
    is_packed = any(sample.num_tokens for each in located.rows for sample in each.samples)
    is_as_served = is_as_served or is_packed or located.order.HasField("bucket")
    given = request.transforms if request.HasField("transforms") else None
    asked = pb.OpenSessionRequest(
        dataset=request.dataset,
        order=located.order,
        cursor=request.cursor,
        step=located.batch,
        reader=reader(job, first // num_rows, located.order.global_batch_size // num_rows),
        prefetch_batches=1,
        transforms=given if is_as_served else pb.TransformList(),
        changed_transforms=not is_as_served,
    )
    opened = connection.open_session(asked)
    has_mask = located.order.tail == pb.TAIL_PAD
    return _samples_of(connection, opened, num_rows, has_mask=has_mask)


def _samples_of(
    connection: Connection, opened: pb.SessionOpened, num_samples: int, *, has_mask: bool
) -> list[Sample]:
    """Returns the samples of a session's first batch."""
    tensors = BatchTensors(opened.fields, num_samples, has_mask=has_mask)
    layout, payload = _first_batch(connection, opened, tensors)
    arrays = arrays_of(layout, payload, tensors.ragged)
    ids, fields = arrays[SAMPLE_ID].tolist(), opened.fields
    return [
        Sample(ids[row], {each.name: _value(arrays, each, row) for each in fields})
        for row in range(num_samples)
    ]


def arrays_of(
    layout: pb.Layout, payload: bytes | bytearray, ragged: Iterable[str]
) -> dict[str, "npt.NDArray[Any]"]:
    """Returns the tensors of a batch as numpy arrays that share its bytes; bfloat16 as uint16.

    Raises:
        DaemonFault: The samples of a ragged field do not follow each other, or do not fill it.
    """
    import numpy as np  # noqa: PLC0415  # most commands do without it

    found = {}
    for tensor in layout.tensors:
        dtype = np.dtype("uint16" if tensor.dtype == BFLOAT16 else tensor.dtype).newbyteorder("<")
        shape = tuple(tensor.shape)
        array = np.frombuffer(payload, dtype, prod(shape), tensor.offset_bytes)
        found[tensor.name] = array.reshape(shape)
    for name in ragged:
        ends = found[name + OFFSETS_SUFFIX]
        bounds = ends[0], ends[-1]
        if (np.diff(ends, prepend=0) < 0).any() or bounds != (0, len(found[name])):
            raise DaemonFault(f"the offsets of {name!r} do not rise from 0 to its end")
    return found


def _first_batch(
    connection: Connection, opened: pb.SessionOpened, tensors: BatchTensors
) -> tuple[pb.Layout, bytes]:
    is_over = threading.Event()
    stream = connection.stream(_requests(opened, is_over), OPEN_TIMEOUT_S)
    try:
        for response in stream:
            if response.batches.groups:
                group = response.batches.groups[0]
                check_group(group, opened.first_step, 1)
                if len(group.layouts) != 1:
                    raise DaemonFault(f"one batch came with {len(group.layouts)} layouts")
                tensors.check(group.layouts[0])
                num_bytes = group.layouts[0].num_bytes
                return group.layouts[0], _payload(connection, opened.session_id, num_bytes)
        raise DaemonFault(f"the daemon at {connection.address.text} sent no batch")
    except grpc.RpcError as failure:
        raise error_from(failure, connection.address) from None
    finally:
        is_over.set()
        stream.cancel()  # type: ignore[no-untyped-call]


def _requests(opened: pb.SessionOpened, is_over: threading.Event) -> Iterator[pb.StreamRequest]:
    yield pb.StreamRequest(attach=pb.Attach(session_id=opened.session_id))
    yield pb.StreamRequest(credit=pb.Credit(num_batches=1))
    while not is_over.wait(opened.lease_s / _HEARTBEATS_PER_LEASE):
        yield pb.StreamRequest(heartbeat=pb.Heartbeat())


def _payload(connection: Connection, session_id: str, num_bytes: int) -> bytes:
    data = bytearray()
    frames = connection.read_payload(session_id, OPEN_TIMEOUT_S)
    while len(data) < num_bytes and (frame := next(iter(frames), None)) is not None:
        data += chunk_data(frame)
    frames.cancel()  # type: ignore[no-untyped-call]
    if len(data) != num_bytes:
        raise DaemonFault(f"the daemon sent {len(data)} bytes of a batch of {num_bytes}")
    return bytes(data)


def _value(arrays: Mapping[str, "npt.NDArray[Any]"], field: pb.Field, row: int) -> Value:
    """Returns a field of one of the samples of a batch."""
    array, offsets = arrays[field.name], arrays.get(f"{field.name}{OFFSETS_SUFFIX}")
    value = array[row] if offsets is None else array[offsets[row] : offsets[row + 1]]
    shape = list(value.shape)
    if field.ragged and field.dtype == "uint8":
        return Value(field.dtype, shape, value.tobytes())
    return Value(field.dtype, shape, _listed(value, field.dtype))


def _listed(value: "npt.NDArray[Any]", dtype: str) -> Any:
    """Returns an array as (nested) lists of numbers; a complex number is two."""
    if dtype == BFLOAT16:  # the upper half of a float32
        value = (value.astype("uint32") << 16).view("float32")
    if dtype.startswith("complex"):
        value = value[..., None].view(value.real.dtype)
    return value.tolist()


LOSS_MASK = "loss_mask"
# fields of whole numbers, but not of token ids
_NO_IDS = frozenset((LOSS_MASK, "position", "cu_seqlens", "document_id"))
_MAX_TOKENS = 8192
_BYTES = "bytes"  # the tokenizer whose tokens are the bytes of the text

Decode = Callable[[Sequence[int]], str]


def decoder(name: str | None) -> Decode | None:
    """Returns a function that turns token ids into text: `bytes`, or that of a file of tokenizers.

    Raises:
        InvalidRequest: It is no such file.
        NotInstalled: tokenizers is missing.
    """
    if name is None:
        return None
    if name == _BYTES:
        return lambda ids: bytes(each for each in ids if 0 <= each < 256).decode(errors="replace")
    try:
        from tokenizers import Tokenizer  # noqa: PLC0415  # only where it is asked for
    except ImportError as error:
        raise NotInstalled.needs("--tokenizer", "tokenizers", "text") from error
    try:
        tokenizer = Tokenizer.from_file(name)
    except Exception as error:  # the library raises nothing narrower
        raise InvalidRequest(f"{name} is no file of a tokenizer: {error}") from error

    def decode(ids: Sequence[int]) -> str:
        try:
            known = [each for each in ids if each >= 0]
            return str(tokenizer.decode(known, skip_special_tokens=False))
        except (OverflowError, TypeError):  # they are no ids of its
            return ""

    return decode


def token_ids(name: str, value: Value) -> list[int] | None:
    """Returns the numbers of a field that may be token ids: whole ones in one dim."""
    if name in _NO_IDS or "int" not in value.dtype or len(value.shape) != 1:
        return None
    return list(value.data[:_MAX_TOKENS]) if len(value.data) > 1 else None


def contributions(located: pb.LocateStepResponse) -> Counter[str]:
    """Returns how many samples each source contributed, or each shard where there is one source."""
    samples = [sample for row in located.rows for sample in row.samples]
    if located.sources:
        return Counter(located.sources[each.source] for each in samples)
    return Counter(located.shards[each.shard] for each in samples)


_MAX_CHARS, _MAX_NUMBERS = 300, 8
_SHOWN_BYTES = 16


def text_of(value: Value) -> str | None:
    """Returns the text in a value; None if it is not text."""
    if not isinstance(value.data, bytes) or media_type(value.data):
        return None
    try:
        return value.data.decode()
    except UnicodeDecodeError:
        return None


def words_of(value: Value) -> str:
    """Returns one line about a value, without any control character."""
    text = text_of(value)
    if text is not None:
        more = " ..." if len(text) > _MAX_CHARS else ""
        return printable(text[:_MAX_CHARS]) + more
    if isinstance(value.data, bytes):
        kind = media_type(value.data)
        shown = kind or f"bytes {value.data[:_SHOWN_BYTES].hex(' ')}"
        more = " ..." if kind is None and len(value.data) > _SHOWN_BYTES else ""
        return f"{shown}{more}, {size(len(value.data))}"
    return _numbers(value.data)


def _numbers(data: Any) -> str:
    """Returns a number, or the first of several with their range and mean."""
    if not isinstance(data, list):
        return _number(data)
    flat = list(_flat(data))
    first = ", ".join(map(_number, flat[:_MAX_NUMBERS]))
    if len(flat) <= _MAX_NUMBERS:
        return f"[{first}]"
    known = [each for each in flat if isinstance(each, bool | int | float) and math.isfinite(each)]
    if not known:
        return f"[{first}, ...]"
    mean = math.fsum(known) / len(known)
    return f"[{first}, ...], {_number(min(known))} to {_number(max(known))}, mean {mean:.6g}"


def _flat(data: Any) -> Iterator[Any]:
    """Yields the numbers of nested lists."""
    if isinstance(data, list):
        return itertools.chain.from_iterable(map(_flat, data))
    return iter((data,))


def _number(value: Any) -> str:
    return f"{value:.6g}" if isinstance(value, float) else str(value)
