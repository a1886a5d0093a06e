"""The options of `files`, and the index of all files."""

import json
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from gyre_daemon.datasets.formats.base import Arrays, FieldSpec, Listing
from gyre_daemon.datasets.formats.files.classes import class_numbers
from gyre_daemon.datasets.formats.names import renamed
from gyre_daemon.datasets.formats.table import SampleTable
from gyre_daemon.errors import ConfigError
from gyre_daemon.storage.file_table import Texts, starts_of
from gyre_daemon.storage.shard import Shard

_FILE, _PATH, _CLASS = "file", "path", "class"
_UINT8, _INT64 = np.dtype(np.uint8), np.dtype("<i8")
# What cameras, microphones and people call images and audio. Whoever means other files says so.
_IMAGES = ("jpg", "jpeg", "png", "webp", "gif", "bmp", "tif", "tiff", "ppm")
_AUDIO = ("wav", "flac", "mp3", "ogg", "opus", "m4a")


@dataclass(frozen=True, slots=True)
class FilesOptions:
    """The keys of a `files` dataset.

    Attributes:
        extensions: of the files that count, without a dot, in upper or lower case; images and audio
            if empty.
        fields: of `file`, `class` and `path`, those to serve; `image=file` serves the files under
            the name `image`. If empty, `file`, and `class` if the files lie in folders.
        class_folder: which folder on the way to a file is its class: `last`, the one that it lies
            in, or `first`, the one in the dataset's folder.
    """

    extensions: tuple[str, ...] = ()
    fields: tuple[str, ...] = ()
    class_folder: str = "last"

    def __post_init__(self) -> None:
        """Refuse what no dataset can have."""
        for _, name in renamed(self.fields, "fields"):
            if name not in (_FILE, _PATH, _CLASS):
                raise ConfigError(
                    f"`fields` of a files dataset has {name!r:.100}; there are {_FILE}, {_CLASS} "
                    f"and {_PATH}"
                )
        if self.class_folder not in ("first", "last"):
            raise ConfigError(
                f"`class_folder` of a files dataset is {self.class_folder!r:.100}; it must be "
                "first or last"
            )
        if any(not each or "." in each or "/" in each for each in self.extensions):
            raise ConfigError(
                "`extensions` of a files dataset must be the ends of names behind their last dot, "
                'such as ["jpg", "png"]'
            )


class FilesFormat:
    """A `Format` of single files, of which nothing but the list is read."""

    pattern = "*.{" + ",".join(f"{name},{name.upper()}" for name in _IMAGES + _AUDIO) + "}"
    unpacks_gzip = False

    def __init__(self, options: FilesOptions) -> None:
        self._options = options
        self._extensions = frozenset(
            each.lower() for each in options.extensions or _IMAGES + _AUDIO
        )

    @property
    def inspection(self) -> Listing:
        """See `Format.inspection`."""
        return Listing(self._is_wanted)

    def assemble(self, shards: Sequence[Shard], inspected: Sequence[Arrays]) -> SampleTable:
        """See `Format.assemble`."""
        found = inspected[0]
        names = Texts(found["names"].tobytes(), found["name_ends"])
        starts = starts_of(names, found["size"])
        columns = {
            _PATH: (starts[:-1], names.sizes),
            _FILE: (starts[:-1] + names.sizes, found["size"]),
        }
        wanted = renamed(self._options.fields, "fields") or self._usual_fields(names)
        stored = [(field, name) for field, name in wanted if name != _CLASS]
        if not stored:
            raise ConfigError(f"`fields` of a files dataset must have {_FILE} or {_PATH}")
        fields = [
            FieldSpec(field, _UINT8, (), ragged=True, codec="bytes" if name == _FILE else "text")
            for field, name in stored
        ]
        indexed = []
        for field, _ in (each for each in wanted if each[1] == _CLASS):
            classes, numbers = class_numbers(names, is_last=self._options.class_folder == "last")
            indexed.append(numbers)
            fields.append(
                FieldSpec(field, _INT64, (), ragged=False, codec="indexed", categories=classes)
            )
        start, size = (
            np.stack([columns[name][part] for _, name in stored], axis=1) for part in range(2)
        )
        meaning = json.dumps([[spec.name, spec.codec, spec.categories] for spec in fields])
        return SampleTable(
            fields,
            [len(names)],
            start,
            size,
            identity=meaning.encode() + names.data,
            indexed=indexed,
        )

    def _is_wanted(self, name: str) -> bool:
        stem, dot, extension = name.rpartition(".")
        return bool(stem and dot) and extension.lower() in self._extensions

    def _usual_fields(self, names: Texts) -> list[tuple[str, str]]:
        return [(_FILE, _FILE), (_CLASS, _CLASS)] if b"/" in names.data else [(_FILE, _FILE)]
