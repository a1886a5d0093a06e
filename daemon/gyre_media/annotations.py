"""Images with annotations, as COCO and YOLO have them.

COCO, https://cocodataset.org/#format-data, has one JSON file with lists `images`, `annotations` and
`categories`. YOLO, https://docs.ultralytics.com/datasets/detect/, has `data.yaml` with the folders
of images and the classes, and a text file of numbers for each image: the labels of `images/a.jpg`
are in `labels/a.txt`.
"""

import codecs
import importlib.util
import json
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
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
from gyre_daemon.datasets.formats.files import (
    FilesFormat,
    FilesOptions,
    check_in_folder,
    checked_path,
)
from gyre_daemon.datasets.formats.sample_table import SampleTable
from gyre_daemon.errors import ConfigError, CorruptSample
from gyre_daemon.storage.shard import FileTable, Texts

_INT64 = range(-(1 << 63), 1 << 63)


class _Image(msgspec.Struct):
    """An image; its size is in pixels, and anything else says nothing of it."""

    id: int
    file_name: str
    width: Any = None
    height: Any = None


class _Annotation(msgspec.Struct):
    """An object in an image. Its bbox is left, top, width and height in pixels."""

    image_id: int
    category_id: int
    bbox: list[float]
    area: float | None = None
    iscrowd: int = 0


class _Category(msgspec.Struct):
    id: int
    name: str


class _Document(msgspec.Struct):
    images: list[_Image]
    annotations: list[_Annotation]
    categories: list[_Category]


_DECODER = msgspec.json.Decoder(_Document)


@dataclass(frozen=True, slots=True)
class CocoOptions:
    """The keys of a `coco` dataset. Its location is a folder with all of its files.

    Attributes:
        annotations: the path of the JSON file in that folder, such as
            `annotations/instances_val2017.json`.
        images: the path of the folder with the images in that folder, such as `val2017`; that
            folder itself if empty.
        fields: of `file`, `path`, `objects`, `image_id`, `num_objects`, `width` and `height`, those
            to serve; `image=file` serves the files under the name `image`. If empty, all but
            `path`.
    """

    annotations: str
    images: str = ""
    fields: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        """Refuse paths that leave the folder."""
        renamed(self.fields, "fields")
        check_in_folder("coco", "annotations", self.annotations)
        if self.images:
            check_in_folder("coco", "images", self.images)


class CocoFormat(FilesFormat):
    """A `ManifestFormat` whose manifest is a file of annotations."""

    pattern = ""  # many files end with .json
    reads_apart = True

    def __init__(self, options: CocoOptions) -> None:
        super().__init__(FilesOptions(fields=options.fields))
        self._annotations, self._images = options.annotations, options.images.strip("/")

    def manifest_of(self, path: str) -> ManifestPlace | None:
        folder = path.rstrip("/")
        return ManifestPlace(f"{folder}/{self._annotations}", path)

    def read_manifest(self, name: str, data: bytes) -> Manifest:
        try:
            return _manifest(_DECODER.decode(data.removeprefix(codecs.BOM_UTF8)), self._images)
        except (ValueError, RecursionError) as error:
            raise CorruptSample(
                f"the annotations {name} are damaged: {error}",
                {"shard": name, "reason": str(error)},
            ) from error


def _manifest(document: _Document, folder: str) -> Manifest:
    categories = sorted(document.categories, key=lambda each: each.id)
    labels = _places("categories", [each.id for each in categories])
    rows = _places("images", [each.id for each in document.images])
    objects: list[list[_Annotation]] = [[] for _ in rows]
    for number, each in enumerate(document.annotations):
        _check(number, each, rows, labels)
        objects[rows[each.image_id]].append(each)
    paths = (f"{folder}/{each.file_name}" if folder else each.file_name for each in document.images)
    names = Texts.of(checked_path(row, path) for row, path in enumerate(paths, 1))
    described = Texts.of(_described(each, labels) for each in objects)
    classes = tuple(each.name for each in categories)
    columns = (
        ManifestColumn("objects", "json", described, classes),
        ManifestColumn("image_id", "number", np.array([*rows], np.int64)),
        ManifestColumn("num_objects", "number", np.array([*map(len, objects)], np.int64)),
        *_sizes(document.images),
    )
    return Manifest(names, columns)


def _sizes(images: Sequence[_Image]) -> Iterator[ManifestColumn]:
    """The width and the height, if all images have them as whole numbers."""
    for name in ("width", "height"):
        found = [getattr(each, name) for each in images]
        # 640 for 640.0, as some programs write it
        values = [int(v) if isinstance(v, float) and v.is_integer() else v for v in found]
        if any(type(value) is not int for value in values):
            continue
        if wrong := [value for value in values if value not in _INT64]:
            raise ValueError(f"an image has the {name} {wrong[0]}, more than 64 bits hold")
        yield ManifestColumn(name, "number", np.array(values, np.int64))


def _places(what: str, ids: Sequence[int]) -> dict[int, int]:
    """The place of each id."""
    places = {each: place for place, each in enumerate(ids)}
    if len(places) < len(ids):
        ((twice, _),) = Counter(ids).most_common(1)
        raise ValueError(f"two {what} have the id {twice}")
    if any(each not in _INT64 for each in ids):
        raise ValueError(f"an id of {what} does not fit into 64 bits")
    return places


def _check(
    number: int, each: _Annotation, rows: Mapping[int, int], labels: Mapping[int, int]
) -> None:
    if each.image_id not in rows:
        raise ValueError(
            f"annotation {number} has the image_id {each.image_id}, which no image has"
        )
    if each.category_id not in labels:
        raise ValueError(
            f"annotation {number} has the category_id {each.category_id}, which no category has"
        )
    if len(each.bbox) != 4:
        raise ValueError(f"annotation {number} has a bbox of {len(each.bbox)} numbers, not 4")


def _described(objects: Sequence[_Annotation], labels: Mapping[int, int]) -> bytes:
    return _json_of(
        bbox=[each.bbox for each in objects],
        label=[labels[each.category_id] for each in objects],
        category_id=[each.category_id for each in objects],
        area=[each.bbox[2] * each.bbox[3] if each.area is None else each.area for each in objects],
        iscrowd=[each.iscrowd for each in objects],
    )


def _json_of(**lists: list[Any]) -> bytes:
    """JSON of lists that have a value for each object."""
    return json.dumps(lists, separators=(",", ":")).encode()


COCO = FormatEntry.of(CocoFormat, CocoOptions)

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
        if importlib.util.find_spec("yaml") is None:
            raise ConfigError(
                "the format yolo needs PyYAML, which is not installed. "
                'Run pip install "gyre-ml[images]".'
            )
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
        about = _yolo_data(name, data, self._options)
        paths = [names[number].decode() for number in range(len(names))]
        places = {path: number for number, path in enumerate(paths) if path.endswith(".txt")}
        inside = tuple(f"{folder}/" if folder else "" for folder in about.folders)
        images = [
            path
            for path in paths
            if path.startswith(inside) and path.rpartition(".")[2].lower() in IMAGES
        ]
        for folder, before in zip(about.folders, inside, strict=True):
            if images and not any(path.startswith(before) for path in images):
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
            documents.append(
                _json_of(bbox=[box for _, box in objects], label=[label for label, _ in objects])
            )
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
    """The class and the box of each object: center, width and height."""
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


@dataclass(frozen=True, slots=True)
class YoloData:
    """The contents of `data.yaml`.

    Attributes:
        folders: with images, relative to the dataset's folder; an empty one is that folder.
        classes: the names, by number.
    """

    folders: tuple[str, ...]
    classes: tuple[str, ...]


def _yolo_data(name: str, data: bytes, options: YoloOptions) -> YoloData:
    """Parse `data.yaml`. Its `path` is not read: the dataset's folder is known.

    Raises:
        CorruptSample: it is no YAML, or its classes make no sense.
        ConfigError: it has no such split, or one that Gyre cannot read.
    """
    try:
        document = _parsed(data)
        classes = _classes(document.get("names"), document.get("nc"))
    except ValueError as error:
        reason = " ".join(str(error).split())
        facts = {"shard": name, "reason": reason}
        raise CorruptSample(f"the file {name} is damaged: {reason}", facts) from error
    if "kpt_shape" in document:
        raise ConfigError(f"{name} describes keypoints, which are not read")
    folders = options.images or _split(name, document, options.split)
    return YoloData(tuple(map(_folder, folders)), classes)


def _parsed(data: bytes) -> dict[str, Any]:
    """The mapping that the file is, of texts, lists and mappings.

    Texts are as they are written. To give them types, and to merge mappings that others refer to,
    takes as much time and memory as the writer of the file likes.
    """
    import yaml  # noqa: PLC0415  # only this format needs it

    if len(data) > _MAX_BYTES:
        raise ValueError(f"it has {len(data)} bytes, more than {_MAX_BYTES}")
    try:
        document = yaml.load(data, yaml.BaseLoader)  # makes texts, lists and mappings
    except (yaml.YAMLError, RecursionError) as error:
        raise ValueError(str(error)) from error
    if not isinstance(document, dict):
        raise ValueError("it is no mapping")
    return document


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
