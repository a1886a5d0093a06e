"""A dataset's description, progress and single samples, in words: for commands, pages, notebooks.

Samples come in one batch over gRPC, which needs no torch.
"""

import base64
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from math import prod
from typing import TYPE_CHECKING, Any, NamedTuple, Self

import grpc
from google.protobuf.message import Message
from gyre_protos.text import counted, printable
from gyre_protos.v1 import loader_pb2 as pb

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

_SIGNATURES = (
    (b"\xff\xd8\xff", "image/jpeg"),
    (b"\x89PNG\r\n\x1a\n", "image/png"),
    (b"GIF87a", "image/gif"),
    (b"GIF89a", "image/gif"),
    (b"fLaC", "audio/flac"),
    (b"OggS", "audio/ogg"),
    (b"ID3", "audio/mpeg"),
    (b"\xff\xfb", "audio/mpeg"),
    (b"\xff\xf3", "audio/mpeg"),
)
_RIFF = {b"WEBP": "image/webp", b"WAVE": "audio/wav"}
_MAX_MEDIUM_BYTES = 8 << 20  # larger images and sounds are named, not put into pages


def media_type(data: bytes) -> str | None:
    """Returns the type of an image or a sound by its first bytes; None if it is neither."""
    if data[:4] == b"RIFF":
        return _RIFF.get(data[8:12])
    return next((kind for start, kind in _SIGNATURES if data.startswith(start)), None)


class MediaBudget:
    """How many bytes of images and sounds a page may still have, so that it stays small."""

    def __init__(self, max_bytes: int) -> None:
        self._left = max_bytes

    def source(self, kind: str, data: bytes) -> str | None:
        """Returns the bytes as the source of an element; None if there are too many."""
        if len(data) > min(_MAX_MEDIUM_BYTES, self._left):
            return None
        self._left -= len(data)
        return f"data:{kind};base64,{base64.b64encode(data).decode()}"


def plain(message: Message) -> dict[str, Any]:
    """Returns a protocol message as JSON-ready values.

    Every field is there by its name: integers as integers, absent messages and options as None.
    """
    return {
        field.name: None
        if field.has_presence and not message.HasField(field.name)
        else _plain_value(getattr(message, field.name))
        for field in message.DESCRIPTOR.fields
    }


def _plain_value(value: Any) -> Any:
    if isinstance(value, Message):
        return plain(value)
    if isinstance(value, str | bool | int | float):
        return value
    if isinstance(value, Mapping):
        return {str(key): _plain_value(item) for key, item in value.items()}
    return [_plain_value(item) for item in value]


def size(num_bytes: float) -> str:
    """Returns a size in binary units: 1536 is "1.5 KiB"."""
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if num_bytes < 1024:
            return f"{num_bytes:.0f} B" if unit == "B" else f"{num_bytes:.1f} {unit}"
        num_bytes /= 1024
    return f"{num_bytes:.1f} PiB"


def is_watched() -> bool:
    """Whether a person may see progress: standard error is a terminal, or this is a notebook."""
    return sys.stderr.isatty() or "ipykernel" in sys.modules


_MAX_NOTE_CHARS = 40


class ProgressBar:
    """How much of a task is done, on a terminal or in a notebook; use it in a `with`."""

    def __init__(self, unit: str) -> None:
        """Shows nothing done yet.

        `unit` is the counted things, in the plural.
        """
        from tqdm.auto import tqdm  # noqa: PLC0415  # most commands draw no bar

        self._bar = tqdm(unit=f" {unit}", leave=False, dynamic_ncols=True, disable=not is_watched())

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self._bar.close()

    def update(self, num_done: int, num_all: int, note: str = "") -> None:
        """Shows how many of all are done, and a note on the last one."""
        if self._bar.total != num_all:
            self._bar.total = num_all
        if note:
            self._bar.set_postfix_str(printable(note)[:_MAX_NOTE_CHARS], refresh=False)
        self._bar.update(num_done - self._bar.n)


def facts_of(description: pb.DatasetDescription, *, is_path: bool) -> list[tuple[str, str]]:
    """Returns names and values of a dataset, for the head of a text or page."""
    least, greatest = description.least_shard_bytes, description.greatest_shard_bytes
    sizes = f": {size(least)} to {size(greatest)}" if description.num_shards > 1 else ""
    number, packing = description.num_left_out, description.packing
    left_out = f"; the filter leaves {number:,} out" if number else ""
    packed = [("packed", _packed(packing))] if description.HasField("packing") else []
    return [
        ("name", "-" if is_path else description.name),
        ("format", description.format),
        ("uri", description.uri),
        ("samples", f"{description.num_samples:,}{left_out}"),
        ("shards", f"{description.num_shards:,}{sizes}"),
        ("size", size(description.num_bytes)),
        ("fingerprint", description.fingerprint),
        *([("grows", "by shards behind all others (append)")] if description.grows else []),
        *packed,
        *([("transforms", ", ".join(description.transforms))] if description.transforms else []),
    ]


def fields_of(fields: Iterable[pb.Field]) -> tuple[tuple[str, ...], list[tuple[str, ...]]]:
    """Returns the heads and the rows of the table of fields."""
    heads, has_media = ("FIELD", "DTYPE", "SHAPE"), any(field.media_type for field in fields)
    rows = [(field.name, field.dtype, _shape(field)) for field in fields]
    if not has_media:
        return heads, list(rows)
    media = [field.media_type for field in fields]
    return (*heads, "MEDIA TYPE"), [(*row, each) for row, each in zip(rows, media, strict=True)]


def _packed(packing: pb.Packing) -> str:
    """Returns how well documents fill the sequences, and how many were cut or left out."""
    ends = {"drop": "left out", "truncate": "cut short", "split": "split"}
    filled = f"{packing.length:,}, of which {packing.efficiency:.2%} is filled"
    documents = counted(packing.num_documents, "document", ",")
    parts = [f"{documents} by {packing.field} into sequences of {filled}"]
    if packing.num_overlong:
        parts.append(f"{packing.num_overlong:,} longer ones {ends[packing.overlong]}")
    if packing.num_empty:
        parts.append(f"{packing.num_empty:,} empty ones left out")
    return "; ".join(parts)


def _shape(field: pb.Field) -> str:
    sizes = (["*"] if field.ragged else []) + [str(length) for length in field.shape]
    return f"[{', '.join(sizes)}]"


def measuring_line(state: pb.MeasuringState) -> str:
    """Returns a line such as `wiki: 1,200 of 40,000 samples (3.0%), 85/s, 456 s left`."""
    done, whole = state.num_done, max(state.num_samples, 1)
    line = (
        f"{printable(state.dataset)}: {done:,} of {counted(state.num_samples, 'sample', ',')} "
        f"({done / whole:.1%})"
    )
    num_new = done - state.num_reused
    if num_new <= 0 or state.elapsed_s <= 0:
        return line
    rate = num_new / state.elapsed_s
    left_s = max(state.num_samples - done, 0) / rate
    return f"{line}, {rate:,.0f}/s, {left_s:,.0f} s left"


_HEARTBEATS_PER_LEASE = 4


class Value(NamedTuple):
    """One field of one sample.

    Attributes:
        dtype: The dtype of its tensor.
        shape: The shape of its tensor.
        data: The bytes of a ragged field of uint8; else its numbers, where bfloat16 is float32 and
            a complex number is two.
    """

    dtype: str
    shape: Sequence[int]
    data: "bytes | npt.NDArray[Any]"


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

    `transforms` are applied to them; None for those of the dataset's definition. `description`
    is of the dataset with these transforms.

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

    `request` is the one for `located`. `first` is a multiple of `num_rows`, which divides the
    global batch. `job` names the session that reads them.

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
    value = array[row, ...] if offsets is None else array[offsets[row] : offsets[row + 1]]
    shape = list(value.shape)
    if field.ragged and field.dtype == "uint8":
        return Value(field.dtype, shape, value.tobytes())
    if field.dtype == BFLOAT16:  # the upper half of a float32
        value = (value[..., None].astype("uint32") << 16).view("float32")[..., 0]
    if field.dtype.startswith("complex"):
        value = value[..., None].view(value.real.dtype)
    return Value(field.dtype, shape, value)


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
    ids = value.data[:_MAX_TOKENS]
    if len(ids) < 2:
        return None
    return [*ids] if isinstance(ids, bytes) else ids.tolist()


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


def _numbers(data: "npt.NDArray[Any]") -> str:
    """Returns a number, or the first of several with their range and mean."""
    import numpy as np  # noqa: PLC0415  # most commands do without it

    if not data.ndim:
        return _number(data.item())
    flat = data.reshape(-1)
    first = ", ".join(map(_number, flat[:_MAX_NUMBERS].tolist()))
    if len(flat) <= _MAX_NUMBERS:
        return f"[{first}]"
    known = flat[np.isfinite(flat)]
    if not len(known):
        return f"[{first}, ...]"
    with np.errstate(all="ignore"):
        mean = known.mean(dtype=np.float64)
    least, greatest = _number(known.min().item()), _number(known.max().item())
    return f"[{first}, ...], {least} to {greatest}, mean {mean:.6g}"


def _number(value: Any) -> str:
    return f"{value:.6g}" if isinstance(value, float) else str(value)
