"""Images with the annotations of COCO: one JSON file says which objects each image has.

The form is that of https://cocodataset.org/#format-data: lists `images`, `annotations` and
`categories`.
"""

import codecs
import json
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np
from gyre_daemon.datasets.formats import FormatEntry
from gyre_daemon.datasets.formats.base import Manifest, ManifestColumn, ManifestPlace, renamed
from gyre_daemon.datasets.formats.files import (
    FilesFormat,
    FilesOptions,
    check_in_folder,
    checked_path,
)
from gyre_daemon.errors import CorruptSample
from gyre_daemon.storage.shard import Texts

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
    """The width and the height, if all images have them as whole numbers.

    Raises:
        ValueError: one does not fit into 64 bits.
    """
    for name in ("width", "height"):
        values = [_whole(getattr(each, name)) for each in images]
        if any(type(value) is not int for value in values):
            continue
        for number, value in enumerate(values):
            if value not in _INT64:
                raise ValueError(f"image {number} has the {name} {value}, more than 64 bits hold")
        yield ManifestColumn(name, "number", np.array(values, np.int64))


def _whole(value: Any) -> Any:
    """640 for 640.0, as some programs write it."""
    return int(value) if type(value) is float and value.is_integer() else value


def _places(what: str, ids: Sequence[int]) -> dict[int, int]:
    """The place of each id.

    Raises:
        ValueError: an id is there twice, or does not fit into 64 bits.
    """
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


def _described(objects: Iterable[_Annotation], labels: Mapping[int, int]) -> bytes:
    """JSON of lists that have a value for each object."""
    objects = list(objects)
    areas = [each.bbox[2] * each.bbox[3] if each.area is None else each.area for each in objects]
    lists: dict[str, list[Any]] = {
        "bbox": [each.bbox for each in objects],
        "label": [labels[each.category_id] for each in objects],
        "category_id": [each.category_id for each in objects],
        "area": areas,
        "iscrowd": [each.iscrowd for each in objects],
    }
    return json.dumps(lists, separators=(",", ":")).encode()


COCO = FormatEntry.of(CocoFormat, CocoOptions)
