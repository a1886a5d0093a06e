"""Ragged bytes as text and as objects."""

import json
from collections.abc import Mapping
from itertools import pairwise
from typing import Any

from torch import Tensor

from gyre_client.errors import InvalidRequest


def texts(batch: Mapping[str, Tensor], name: str) -> list[str]:
    """Returns the field's samples as text, one string each.

    Raises:
        InvalidRequest: The batch has no such field, or it is not ragged bytes.
        UnicodeDecodeError: A sample is not UTF-8.
    """
    return [sample.decode() for sample in _samples(batch, name)]


def objects(batch: Mapping[str, Tensor], name: str) -> list[Any]:
    """Returns what the field's samples say in JSON, one object each.

    Raises:
        InvalidRequest: The batch has no such field, or it is not ragged bytes.
        json.JSONDecodeError: A sample is not JSON.
    """
    return [json.loads(sample) for sample in _samples(batch, name)]


def _samples(batch: Mapping[str, Tensor], name: str) -> list[bytes]:
    offsets_name = f"{name}.offsets"
    if offsets_name not in batch or batch[name].element_size() != 1:
        raise InvalidRequest(f"{name!r} is not a field of ragged bytes; the batch has {', '.join(batch)}")
    data = batch[name].numpy().tobytes()
    offsets = batch[offsets_name].tolist()
    return [data[start:end] for start, end in pairwise(offsets)]
