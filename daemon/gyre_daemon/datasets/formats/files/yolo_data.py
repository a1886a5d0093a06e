"""Reads `data.yaml` of ultralytics: the folders of images, and the names of their classes."""

import importlib.util
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from gyre_daemon.errors import ConfigError, CorruptSample

_MAX_BYTES = 1 << 20  # the parser takes some seconds for as much


@dataclass(frozen=True, slots=True)
class YoloData:
    """The contents of the file.

    Attributes:
        folders: with images, relative to the dataset's folder; an empty one is that folder.
        classes: the names, by number.
    """

    folders: tuple[str, ...]
    classes: tuple[str, ...]


def require_yaml() -> None:
    """Refuse the format where PyYAML is not installed.

    Raises:
        ConfigError: names the extra.
    """
    if importlib.util.find_spec("yaml") is None:
        raise ConfigError(
            "the format yolo needs PyYAML, which is not installed. "
            'Run pip install "gyre-ml[images]".'
        )


def yolo_data(name: str, data: bytes, split: str, images: Sequence[str]) -> YoloData:
    """Parse a file of these bytes for one split.

    Its `path` is not read: the dataset's folder is known.

    Args:
        name: of the file, for errors.
        data: all of it.
        split: whose folders are wanted.
        images: folders to use instead; empty for those of the split.

    Raises:
        CorruptSample: it is no YAML, or its classes make no sense.
        ConfigError: it has no such split, or one that Gyre cannot read.
    """
    document = _parsed(name, data)
    if "kpt_shape" in document:
        raise ConfigError(f"{name} describes keypoints, which are not read")
    try:
        classes = _classes(document.get("names"), document.get("nc"))
    except ValueError as error:
        facts = {"shard": name, "reason": str(error)}
        raise CorruptSample(f"the file {name} is damaged: {error}", facts) from error
    return YoloData(tuple(map(_folder, images or _split(name, document, split))), classes)


def _parsed(name: str, data: bytes) -> dict[str, Any]:
    """The mapping that the file is, of texts, lists and mappings.

    Texts are as they are written. To give them types, and to merge mappings that others refer to,
    takes as much time and memory as the writer of the file likes.
    """
    import yaml  # noqa: PLC0415  # only this format needs it

    reason = "it is no mapping"
    try:
        if len(data) > _MAX_BYTES:
            raise ValueError(f"it has {len(data)} bytes, more than {_MAX_BYTES}")
        document = yaml.load(data, yaml.BaseLoader)  # makes texts, lists and mappings
        if isinstance(document, dict):
            return document
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        reason = " ".join(str(error).split())
    raise CorruptSample(f"the file {name} is damaged: {reason}", {"shard": name, "reason": reason})


def _classes(names: Any, count: Any) -> tuple[str, ...]:
    """The names of classes, a list or a mapping from numbers; without names, their number."""
    if _is_given(count) and (not isinstance(count, str) or not re.fullmatch("[0-9]{1,9}", count)):
        raise ValueError(f"`nc` is {_shown(count)}, which is no number")
    if not _is_given(names) and _is_given(count) and 0 < int(count) <= 1 << 16:
        return tuple(f"class_{number}" for number in range(int(count)))
    if isinstance(names, dict):
        if set(names) != {str(number) for number in range(len(names))}:
            raise ValueError("the keys of `names` are not 0, 1, ...")
        names = [names[str(number)] for number in range(len(names))]
    if not isinstance(names, list) or not names:
        raise ValueError("it has no `names` of classes")
    for each in names:
        if not isinstance(each, str):
            raise ValueError(f"`names` has {_shown(each)}, which is no text")
    if _is_given(count) and int(count) != len(names):
        raise ValueError(f"`nc` is {count}, and `names` has {len(names)}")
    return tuple(names)


def _is_given(value: Any) -> bool:
    return value not in (None, "", "~", "null", "Null", "NULL")


def _shown(value: Any) -> str:
    """A text, or the type of another value: a list may stand for millions of others."""
    if isinstance(value, str):
        return f"{value!r:.100}"
    return "a mapping" if isinstance(value, dict) else "a list"


def _split(name: str, document: dict[str, Any], split: str) -> list[str]:
    found = document.get(split)
    folders: list[Any] = found if isinstance(found, list) else [found]
    if not all(isinstance(each, str) and _is_given(each) for each in folders) or not folders:
        splits = [each for each in ("train", "val", "test") if _is_given(document.get(each))]
        raise ConfigError(
            f"{name} has no folders of the split {split!r:.100}, but of "
            f"{', '.join(splits) or 'none'}. Set the option `split` to one of these, or list the "
            "folders of images in the option `images`."
        )
    for each in folders:
        parts = each.removeprefix("../").split("/")
        if each.startswith("/") or "://" in each or ".." in parts or each.endswith(".txt"):
            raise ConfigError(
                f"{name} says {each!r:.200} of the split {split!r:.100}, which is no folder in "
                "that of the dataset. List the folders of images in the option `images`."
            )
    return folders


def _folder(path: str) -> str:
    """A path without `.`; a first `..` comes from a file meant for another folder."""
    return "/".join(each for each in path.removeprefix("../").split("/") if each not in ("", "."))
