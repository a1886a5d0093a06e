"""Turns fields whose samples differ in length into texts, JSON values, padded tensors and boxes."""

import json
from collections.abc import Mapping, Sequence
from itertools import pairwise
from math import isfinite
from typing import Any

import msgspec
import torch
from torch import Tensor

from gyre_client.errors import InvalidRequest, folded
from gyre_client.transport.arguments import mapping, shown, text

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
