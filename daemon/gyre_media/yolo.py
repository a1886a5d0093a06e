"""Images with boxes as YOLO and ultralytics lay them out: a text file of numbers for each image.

The form is that of https://docs.ultralytics.com/datasets/detect/: `data.yaml` names the folders
with images, and the classes. The labels of `images/a.jpg` are in `labels/a.txt`.
"""

import bisect
import importlib.util
import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from gyre_daemon.datasets.formats import FormatEntry
from gyre_daemon.datasets.formats.base import (
    IMAGES,
    Described,
    Manifest,
    ManifestColumn,
    ManifestPlace,
    renamed,
)
from gyre_daemon.datasets.formats.files import FilesFormat, FilesOptions, check_in_folder
from gyre_daemon.datasets.formats.sample_table import SampleTable
from gyre_daemon.errors import ConfigError, CorruptSample
from gyre_daemon.storage.shard import FileTable, Texts

_MAX_BYTES = 1 << 20  # of `data.yaml`; the parser takes some seconds for as much
# Numbers are parts of an image. Those of boxes at an edge are rounded; ultralytics takes as much.
_SLACK = 0.01


@dataclass(frozen=True, slots=True)
class YoloOptions:
    """The keys of a `yolo` dataset. Its location is a folder with all of its files.

    Attributes:
        data: the path of the YAML file in that folder.
        split: which folders of it: `train`, `val` or `test`.
        images: the paths of the folders with images in that folder, in place of those of `split`.
        fields: of `file`, `path`, `objects` and `num_objects`, those to serve; `image=file` serves
            the files under the name `image`. If empty, all but `path`.
    """

    data: str = "data.yaml"
    split: str = "train"
    images: tuple[str, ...] = ()
    fields: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        """Refuse paths that leave the folder."""
        renamed(self.fields, "fields")
        for key, path in [("data", self.data), *(("images", each) for each in self.images)]:
            check_in_folder("yolo", key, path)


class YoloFormat:
    """A `DescribedFormat`: the images of some folders, each described by a file of labels."""

    pattern = ""  # folders of images are `files`, unless somebody says more

    def __init__(self, options: YoloOptions) -> None:
        """Refuse to start without the library that reads YAML.

        Raises:
            ConfigError: PyYAML is not installed.
        """
        require_yaml()
        self._options = options
        self._files = FilesFormat(FilesOptions(fields=options.fields), covers_texts=True)

    def is_wanted(self, name: str) -> bool:
        stem, _, extension = name.rpartition(".")
        return bool(stem) and extension.lower() in (*IMAGES, "txt")

    def manifest_of(self, path: str) -> ManifestPlace:
        folder = path.rstrip("/")
        return ManifestPlace(f"{folder}/{self._options.data}", path)

    def index_of(self, table: FileTable, columns: Sequence[ManifestColumn]) -> SampleTable:
        """See `ListedFormat.index_of`; other labels make another index."""
        return self._files.index_of(table, columns)

    def described(self, name: str, data: bytes, names: Texts) -> Described:
        options = self._options
        about = yolo_data(name, data, options.split, options.images)
        paths = [names[number].decode() for number in range(len(names))]
        places = {path: number for number, path in enumerate(paths) if path.endswith(".txt")}
        inside = tuple(f"{folder}/" if folder else "" for folder in about.folders)
        images = [
            path
            for path in paths
            if path.startswith(inside) and path.rpartition(".")[2].lower() in IMAGES
        ]
        for folder, before in zip(about.folders, inside, strict=True):
            first = bisect.bisect_left(images, before)  # they are sorted
            if images and not "".join(images[first : first + 1]).startswith(before):
                raise ConfigError(
                    f"the folder {folder!r:.200}, of {name} or `images`, has no images"
                )
        texts = np.array([places.get(labels_path(path), -1) for path in images], np.int64)
        if images and (texts < 0).all():
            raise ConfigError(
                f"none of the {len(images)} images has labels; those of {images[0]:.200} were "
                f"looked for in {labels_path(images[0]):.200}"
            )
        return Described(Texts.of(path.encode() for path in images), texts, about)

    def manifest(self, described: Described, texts: Sequence[bytes]) -> Manifest:
        about: YoloData = described.about
        documents, counts = [], []  # bytes, not a million tuples for the collector to go through
        for number, text in enumerate(texts):
            try:
                objects = _objects(text, len(about.classes))
            except ValueError as error:
                name = labels_path(described.names[number].decode())
                raise CorruptSample(
                    f"the labels {name}, {error}", {"shard": name, "reason": str(error)}
                ) from error
            documents.append(_document(objects))
            counts.append(len(objects))
        columns = (
            ManifestColumn("objects", "json", Texts.of(documents), about.classes),
            ManifestColumn("num_objects", "number", np.array(counts, np.int64)),
        )
        return Manifest(described.names, columns)


def labels_path(image: str) -> str:
    """The path of an image's labels: its last folder `images` is `labels` there."""
    before, folder, after = f"/{image}".rpartition("/images/")
    stem = f"{before}/labels/{after}" if folder else after
    return stem.rpartition(".")[0].removeprefix("/") + ".txt"


def _objects(text: bytes, num_classes: int) -> list[tuple[int, tuple[float, ...]]]:
    """The class and the box of each object: center, width and height.

    Raises:
        ValueError: a line has no object; names it.
    """
    found = []
    for number, line in enumerate(text.decode("utf-8-sig").splitlines(), 1):
        if not line.strip():
            continue
        try:
            found.append(_object([float(each) for each in line.split()], num_classes))
        except ValueError as error:
            raise ValueError(f"line {number}: {error}") from error
    return list(dict.fromkeys(found))  # a line that repeats another is no object


def _object(numbers: Sequence[float], num_classes: int) -> tuple[int, tuple[float, ...]]:
    label, *places = numbers
    is_polygon = len(places) >= 6 and len(places) % 2 == 0
    if len(places) != 4 and not is_polygon:
        raise ValueError(
            f"it has {len(numbers)} numbers; wanted are a class and 4 of a box, or a class and at "
            "least 3 points of a polygon"
        )
    if label not in range(num_classes):
        raise ValueError(f"it has the class {label:g}, and there are {num_classes} classes, from 0")
    if wrong := [each for each in places if not -_SLACK <= each <= 1 + _SLACK]:
        raise ValueError(
            f"it has {wrong[0]:g}, but coordinates are fractions of the image, from 0 to 1"
        )
    if not is_polygon and min(places[2:]) < 0:
        raise ValueError(f"it has a box of width {places[2]:g} and height {places[3]:g}")
    return int(label), _around(places) if is_polygon else tuple(places)


def _around(polygon: Sequence[float]) -> tuple[float, ...]:
    """The smallest box around points x, y."""
    x, y = polygon[::2], polygon[1::2]
    left, top, right, bottom = min(x), min(y), max(x), max(y)
    return (left + right) / 2, (top + bottom) / 2, right - left, bottom - top


def _document(objects: Sequence[tuple[int, tuple[float, ...]]]) -> bytes:
    """JSON of lists that have a value for each object."""
    lists: dict[str, list[Any]] = {
        "bbox": [box for _, box in objects],
        "label": [label for label, _ in objects],
    }
    return json.dumps(lists, separators=(",", ":")).encode()


@dataclass(frozen=True, slots=True)
class YoloData:
    """The contents of `data.yaml`.

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


YOLO = FormatEntry.of(YoloFormat, YoloOptions)
