"""Batches and batch groups: tensors over separate memory, or over a slot of an arena.

Fields whose samples differ in length become texts, JSON values, padded tensors and boxes on
request. Unsigned token ids become a dtype that `torch.nn.Embedding`, `max` and indexing accept.
"""

import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from math import isfinite
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt
import torch
from gyre_protos.v1 import loader_pb2 as pb
from torch import Tensor

from gyre_client.batches.arena import Loan, Memory
from gyre_client.errors import DaemonFault, InvalidRequest, folded
from gyre_client.transport.answers import BFLOAT16, OFFSETS_SUFFIX
from gyre_client.transport.arguments import choice, mapping, shown, text

_WIDER = {"int64": torch.int64, "int32": torch.int32, "stored": None}
_FITS_INT32 = ("uint8", "uint16")

# The dtype that a tensor is converted to, by the tensor's name.
Widened = Mapping[str, torch.dtype]


def widened(fields: Iterable[pb.Field], token_dtype: str) -> Widened:
    """Returns the conversions of a dataset's batches: its fields of unsigned token ids.

    `token_dtype` is `int64`, `int32`, or `stored` for no conversion at all.

    Raises:
        InvalidRequest: There is no such choice, or it cannot hold the ids of a field.
    """
    wider = choice("token_dtype", token_dtype, _WIDER)
    if wider is None:
        return {}
    unsigned = [each for each in fields if each.token_ids and each.dtype.startswith("uint")]
    for each in unsigned:
        if wider is torch.int32 and each.dtype not in _FITS_INT32:
            raise InvalidRequest(
                f"token_dtype is 'int32', which cannot hold every {each.dtype} id "
                f"of the field {each.name!r}; take 'int64'"
            )
    return {each.name: wider for each in unsigned}


def widen(tensors: Mapping[str, torch.Tensor], wider: Widened) -> dict[str, torch.Tensor]:
    """Returns a batch in new memory on the same device; nothing refers to the old memory.

    Other tensors are copied: they take only a few bytes per sample.
    """
    return {
        name: tensor.to(wider[name]) if name in wider else tensor.clone()
        for name, tensor in tensors.items()
    }


@dataclass(frozen=True, slots=True)
class TensorPlace:
    """The place of a tensor in a batch's memory.

    `dtype` is uint16 where numpy has none of this size; then `known_to_torch` is the tensor's.
    """

    name: str
    dtype: np.dtype[np.generic]
    shape: tuple[int, ...]
    offset_bytes: int
    known_to_torch: torch.dtype | None = None

    def view(self, memory: Memory) -> torch.Tensor:
        """Returns the tensor in a batch's memory on the host; it is writable if the memory is."""
        found = torch.from_numpy(np.ndarray(self.shape, self.dtype, memory, self.offset_bytes))
        return found.view(self.known_to_torch) if self.known_to_torch else found

    def view_on_device(self, payload: torch.Tensor) -> torch.Tensor:
        """Returns the tensor in a batch's memory on any device, uint8 [num_bytes]; see `view`."""
        dtype = self.known_to_torch or torch.from_numpy(np.empty(0, self.dtype)).dtype
        end_bytes = self.offset_bytes + math.prod(self.shape) * self.dtype.itemsize
        return payload[self.offset_bytes : end_bytes].view(dtype).view(self.shape)


@dataclass(frozen=True, slots=True)
class Layout:
    """The tensors of a batch's payload.

    `widened` are those to convert when they are taken out. `offsets` has those of each ragged
    field, and how many elements the field has.
    """

    places: Sequence[TensorPlace]
    num_bytes: int
    widened: Widened = field(default_factory=dict)
    offsets: Sequence[tuple[TensorPlace, int]] = ()

    def check_offsets(self, memory: Memory, begin: int = 0) -> None:
        """Checks that the samples of each ragged field follow each other and fill the field.

        Args:
            memory: uint8, with the payload of a batch.
            begin: Where in it the payload begins.

        Raises:
            DaemonFault: They do not.
        """
        for place, num_elements in self.offsets:
            offsets: npt.NDArray[np.int64] = np.ndarray(
                place.shape, place.dtype, memory, begin + place.offset_bytes
            )
            falls = np.count_nonzero(offsets[1:] < offsets[:-1])
            if falls or offsets[0] != 0 or offsets[-1] != num_elements:
                raise DaemonFault(
                    f"the daemon sent a batch in which {place.name!r} does not rise from 0 to "
                    f"{num_elements}, the number of the field's elements"
                )


@dataclass(slots=True)  # not frozen: one is made per batch, and that would take three times as long
class Batch:
    """One rank's part of one global step.

    `memory` is uint8 [num_bytes], and only this process writes to it. `cursor` resumes after the
    batch.
    """

    step: int
    cursor: bytes
    memory: Memory
    layout: Layout

    @property
    def tensors(self) -> dict[str, torch.Tensor]:
        """The tensors by name: views that keep the memory alive, or copies if one is converted."""
        layout = self.layout
        tensors = {place.name: place.view(self.memory) for place in layout.places}
        return widen(tensors, layout.widened) if layout.widened else tensors

    def copied(self) -> "Batch":
        """Returns the same batch in new memory."""
        copy = read_payload(len(self.memory), lambda: self.memory.data)
        return Batch(self.step, self.cursor, copy, self.layout)


@dataclass(slots=True)  # not frozen: as above
class Position:
    """Where a consumer stands in a stream of batches. It never changes: another one replaces it.

    Attributes:
        cursor: Resumes here.
        batch: The number of the next batch.
        rest: The next batch, once it has left the queue. So the memory of a batch that was taken
            belongs to its tensors alone as soon as the position is replaced.
    """

    cursor: bytes
    batch: int
    rest: Any = None


class BatchGroup:
    """Successive batches in one piece of memory, which lives as long as the group or a tensor."""

    def __init__(
        self,
        first_step: int,
        cursors: Sequence[bytes],
        layouts: Sequence[Layout],
        memory: Memory,
        offsets: Sequence[int] = (0,),
        loan: Loan | None = None,
    ) -> None:
        """Makes a group.

        `memory` is uint8 [num_bytes], with all payloads; they begin at `offsets`, in bytes, as many
        as `layouts`. Each cursor resumes after its batch.
        """
        self.first_step = first_step
        self.behind = first_step + len(offsets)
        self._cursors = cursors
        self._layouts = layouts
        self._memory = memory
        self._offsets = offsets
        self._loan = loan

    def __len__(self) -> int:
        """The number of batches."""
        return len(self._offsets)

    @property
    def last_cursor(self) -> bytes:
        """The cursor that resumes after the whole group."""
        return self._cursors[-1]

    def batch(self, step: int, *, copies: bool = False) -> Batch:
        """Returns the batch of a step, which the group keeps; in new memory if it `copies`.

        A widened batch is copied in any case.
        """
        row = step - self.first_step
        layout, offset = self._layouts[row], self._offsets[row]
        memory = self._memory[offset : offset + layout.num_bytes]
        batch = Batch(step, self._cursors[row], memory, layout)
        if layout.widened:
            return batch
        if copies:
            return batch.copied()
        if self._loan is not None:
            self._loan.is_read = True
        return batch


def read_payload(num_bytes: int, next_chunk: Callable[[], memoryview]) -> Memory:
    """Returns new memory, uint8 [num_bytes], which chunks fill front to back.

    The system gives it page by page, and numpy copies without the interpreter's lock.

    Raises:
        DaemonFault: This process can have no such memory, or a chunk is longer than the rest.
    """
    try:
        # torch aligns memory to 64 bytes, numpy does not
        memory: Memory = torch.empty(num_bytes, dtype=torch.uint8, device="cpu").numpy()
    except RuntimeError:
        raise DaemonFault(
            f"the daemon sent a batch of {num_bytes} bytes, for which this process has no memory"
        ) from None
    begin = 0
    while begin < num_bytes:
        data = next_chunk()
        end = begin + len(data)
        if end > num_bytes:
            raise DaemonFault(
                f"a payload chunk of {len(data)} bytes came where {num_bytes - begin} end the batch"
            )
        memory[begin:end] = np.frombuffer(data, np.uint8)
        begin = end
    return memory


def read_layouts(group: pb.BatchGroup, read: Callable[[pb.Layout], Layout]) -> list[Layout]:
    """Returns one layout per batch of a group; a group may send one layout for all.

    Raises:
        DaemonFault: The number of layouts does not match the batches, or one cannot be read.
    """
    num_batches, num_layouts = len(group.cursors.own), len(group.layouts)
    if num_layouts == 1:
        return [read(group.layouts[0])] * num_batches
    if num_layouts != num_batches:
        raise DaemonFault(
            f"the {num_batches} batches from step {group.first_step} on "
            f"come with {num_layouts} layouts"
        )
    return [read(each) for each in group.layouts]


def read_layout(layout: pb.Layout, widened: Widened, ragged: Iterable[str] = ()) -> Layout:
    """Returns a layout.

    `BatchTensors` has checked the message.
    """
    places = {tensor.name: _place(tensor) for tensor in layout.tensors}
    offsets = [(places[name + OFFSETS_SUFFIX], places[name].shape[0]) for name in ragged]
    return Layout(list(places.values()), layout.num_bytes, widened, offsets)


def read_cursors(cursors: pb.Cursors) -> list[bytes]:
    """Returns the cursors of a batch group's message, which has their common bytes once."""
    common, num = cursors.common, cursors.num_before
    return [own[:num] + common + own[num:] for own in cursors.own]


def _place(tensor: pb.Tensor) -> TensorPlace:
    own = torch.bfloat16 if tensor.dtype == BFLOAT16 else None
    dtype = np.dtype("uint16" if own else tensor.dtype)
    return TensorPlace(tensor.name, dtype, tuple(tensor.shape), tensor.offset_bytes, own)


_JSON: msgspec.json.Decoder[Any] = msgspec.json.Decoder()


@folded
def texts(batch: Mapping[str, Tensor], name: str) -> list[str]:
    """Returns a field's samples as text.

        for batch in loader:
            captions = texts(batch, "txt")  # as many strings as the batch has samples

    Args:
        batch: A batch from a `Loader`, in host memory.
        name: A field of ragged bytes in UTF-8: the batch has the tensors `name`, uint8
            [total bytes], and `name.offsets`, int64 [samples + 1].

    Raises:
        InvalidRequest: The batch has no such field, or it is not ragged bytes.
        UnicodeDecodeError: A sample is not UTF-8.
    """
    return [sample.decode() for sample in _samples(batch, name)]


@folded
def objects(batch: Mapping[str, Tensor], name: str) -> list[Any]:
    """Returns a field's samples, which are JSON, as Python objects.

        labels = [each["label"] for each in objects(batch, "json")]

    Args:
        batch: A batch from a `Loader`, in host memory.
        name: A field of ragged bytes, each sample one JSON document; see `texts`.

    Raises:
        InvalidRequest: The batch has no such field, or it is not ragged bytes.
        json.JSONDecodeError: A sample is not JSON.
    """
    return [_parsed(sample) for sample in _samples(batch, name)]


def _parsed(document: bytes) -> Any:
    """Returns the same as `json.loads`, in a fifth of its time if the document is strict JSON."""
    try:
        return _JSON.decode(document)
    except msgspec.DecodeError:
        return json.loads(document)  # Python's reads more, and raises the error if it cannot


def _samples(batch: Mapping[str, Tensor], name: str) -> list[bytes]:
    offsets_name = f"{text('name', name)}.offsets"
    tensors = mapping("batch", batch)
    data, offsets = tensors.get(name), tensors.get(offsets_name)
    is_field = isinstance(data, Tensor) and isinstance(offsets, Tensor)
    if data is None or offsets is None or not is_field or data.element_size() != 1:
        raise InvalidRequest(
            f"{name!r} is not a field of ragged bytes; the batch has {', '.join(tensors)}"
        )
    found = data.cpu().numpy().tobytes()
    return [found[start:end] for start, end in pairwise(offsets.tolist())]


# To copy row by row takes about 0.4 us a row, and a boolean index 17 ns an element.
_MIN_MEAN_LENGTH = 24
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@folded
def padded(batch: Mapping[str, Tensor], name: str, value: float = 0) -> tuple[Tensor, Tensor]:
    """Returns a field's samples as one tensor, each padded behind its end.

        for batch in loader:
            tokens, mask = padded(batch, "tokens", value=pad_id)

    Args:
        batch: A batch from a `Loader`, on any device.
        name: A field whose samples differ in length: the batch has the tensors `name`,
            [elements of all samples, ...], and `name.offsets`, int64 [samples + 1]. Or one whose
            samples all have one length: `name` is [samples, length, ...], and nothing is padded.
        value: Fills up the samples; a number that the field's dtype holds.

    Returns:
        [samples, longest, ...], of the field's dtype and on its device, and bool [samples,
        longest], true for elements of samples and false for padding.

    Raises:
        InvalidRequest: The batch has no such field, its samples have no length or differ in several
            dims, or `value` is no number that the dtype holds.
    """
    offsets_name = f"{text('name', name)}.offsets"
    tensors = mapping("batch", batch)
    data, offsets = tensors.get(name), tensors.get(offsets_name)
    if isinstance(data, Tensor) and offsets is None and data.ndim > 1:
        _check_value(data.dtype, value)
        return data.detach().clone(), data.new_ones(data.shape[:2], dtype=torch.bool)
    if not isinstance(data, Tensor) or not isinstance(offsets, Tensor):
        raise InvalidRequest(
            f"{name!r} is not a field whose samples differ in length; the batch has "
            f"{', '.join(tensors)}"
        )
    if f"{name}.shape" in tensors:
        raise InvalidRequest(
            f"the samples of {name!r} differ in several dims, and only the first can be padded; "
            f"{name}.shape has their shapes"
        )
    _check_value(data.dtype, value)
    lengths = offsets.diff()
    longest = int(lengths.max()) if len(lengths) else 0
    mask = torch.arange(longest, device=lengths.device) < lengths[:, None]
    found = data.new_full((len(lengths), longest, *data.shape[1:]), value)
    _fill(_as_bits(found), _as_bits(data), offsets, mask)
    return found, mask


def _fill(found: Tensor, data: Tensor, offsets: Tensor, mask: Tensor) -> None:
    """Copy samples into their rows."""
    if data.device.type != "cpu" or len(data) < _MIN_MEAN_LENGTH * len(found):
        found[mask] = data
        return
    rows, values, bounds = found.numpy(), data.numpy(), offsets.tolist()
    for row, (begin, end) in enumerate(pairwise(bounds)):
        rows[row, : end - begin] = values[begin:end]


def _as_bits(tensor: Tensor) -> Tensor:
    """The same memory as numbers that numpy and indexing know, whatever the dtype is."""
    bits = _BITS.get(tensor.element_size())
    return tensor.detach().view(bits) if bits else tensor.detach()


def _check_value(dtype: torch.dtype, value: object) -> None:
    if not _holds(dtype, value):
        raise InvalidRequest(f"value is {shown(value)}; it must be a number of {dtype}")


def _holds(dtype: torch.dtype, value: object) -> bool:
    """Whether a tensor of a dtype can be filled with a value; fractions may be rounded."""
    if not isinstance(value, int | float):
        return False
    if dtype == torch.bool:
        return value in (0, 1)
    if dtype.is_floating_point or dtype.is_complex:
        is_number = isinstance(value, int) or isfinite(value)
        return abs(value) <= torch.finfo(dtype).max if is_number else True
    limits = torch.iinfo(dtype)
    return value == value // 1 and limits.min <= value <= limits.max


@folded
def detections(
    batch: Mapping[str, Tensor], *fields: str, boxes: str = "boxes", count: str = "num_boxes"
) -> list[dict[str, Tensor]]:
    """Returns the boxes of each sample and their fields, as torchvision's detection models want.

        for batch in loader:
            targets = detections(batch, "labels")
            losses = model(list(batch["image"]), targets)

    Args:
        batch: A batch from a `Loader`, on any device, whose transforms end with `sanitize_boxes`.
        fields: The names of other fields that have a value for each box.
        boxes: The name of the boxes.
        count: The name of their numbers.

    Returns:
        For each sample a dict with `boxes`, [n, 4], and the other fields, [n, ...], where n is the
        number of its boxes. They share the memory of the batch.

    Raises:
        InvalidRequest: The batch has no such fields.
    """
    tensors, names = mapping("batch", batch), [boxes, *fields]
    for name in [boxes, count, *fields]:
        if not isinstance(tensors.get(text("name", name)), Tensor):
            advice = (
                f"name {name!r} in `fields` of sanitize_boxes, and have a transform make it, such "
                "as decode_boxes by its `fields`"
                if name in fields
                else "let its transforms end with sanitize_boxes"
            )
            raise InvalidRequest(
                f"the batch has no field {name!r}, only {', '.join(tensors)}; {advice}"
            )
    columns = {name: _rows(tensors, name) for name in names}
    return [
        {name: rows[place][:num] for name, rows in columns.items()}
        for place, num in enumerate(tensors[count].tolist())
    ]


def _rows(tensors: Mapping[str, Tensor], name: str) -> Sequence[Tensor]:
    """The values of each sample: as many for all, or between offsets."""
    offsets = tensors.get(f"{name}.offsets")
    if isinstance(offsets, Tensor):
        return [tensors[name][begin:end] for begin, end in pairwise(offsets.tolist())]
    return tensors[name].unbind()
