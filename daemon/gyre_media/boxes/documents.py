"""JSON that describes the objects of an image. Pure."""

import json
from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

_JSON: msgspec.json.Decoder[Any] = msgspec.json.Decoder()


def parsed(data: npt.NDArray[np.uint8]) -> Any:
    """The value of a JSON document.

    Raises:
        ValueError: it is not valid JSON.
    """
    try:
        return _JSON.decode(data.data)
    except msgspec.DecodeError:
        return json.loads(data.tobytes())  # reads the NaN that Python writes, or raises the error


def values_at(document: Any, key: str) -> Any:
    """The value at a key, with dots between the keys of nested objects.

    In a list, the key is looked up in each element. So `objects.bbox` finds the boxes of
    `{"objects": {"bbox": [...]}}` and of `{"objects": [{"bbox": ...}, ...]}`.

    Raises:
        ValueError: an object lacks the key.
    """
    return _at(document, key.split(".") if key else [], key)


def _at(value: Any, keys: Sequence[str], whole: str) -> Any:
    for place, key in enumerate(keys):
        if isinstance(value, list):
            return [_at(each, keys[place:], whole) for each in value]
        if not isinstance(value, dict) or key not in value:
            raise ValueError(f"its JSON has nothing under {key!r:.100} of the key {whole!r:.200}")
        value = value[key]
    return value


def column(
    found: Any, key: str, num_boxes: int, classes: Sequence[int | str] | None = None
) -> list[Any]:
    """The values of boxes, or their places in a list of classes.

    Raises:
        ValueError: there are more or fewer than boxes, or one is no class.
    """
    if not isinstance(found, list) or len(found) != num_boxes:
        has = f"{len(found)} values" if isinstance(found, list) else f"{found!r:.100}"
        raise ValueError(f"the key {key!r:.100} has {has} for {num_boxes} boxes")
    if classes is None:
        return found
    places = {value: place for place, value in enumerate(classes)}
    for place, value in enumerate(found):
        if not isinstance(value, int | str) or value not in places:
            raise ValueError(f"{key!r:.100} of box {place} is {value!r:.100}, none of `classes`")
    return [places[value] for value in found]
