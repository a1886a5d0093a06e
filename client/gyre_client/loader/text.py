"""Converts fields of ragged bytes to strings and to JSON objects."""

import json
from collections.abc import Mapping
from itertools import pairwise
from typing import Any

import msgspec
from torch import Tensor

from gyre_client.errors import InvalidRequest
from gyre_client.messages.arguments import mapping, text
from gyre_client.tracebacks import folded

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
