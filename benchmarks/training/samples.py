"""Both datasets as objects on disk, and their samples one by one.

From the files, or from a server of the same files.

    text      samples of SEQUENCE_LENGTH + 1 bytes of the library's sources, sorted by file; objects
    `0000.bin`
    glyphs    images and labels, sorted by label; tar shards `0000.tar`

A sample is what the daemon makes of it: a dict of tensors with the same names.
"""

import http.client
import os
import threading
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Literal, Protocol
from urllib.parse import urlsplit

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.utils.data import Dataset

from benchmarks.training import glyphs, text

Name = Literal["text", "glyphs"]
Sample = dict[str, Tensor]

SEQUENCE_LENGTH = 64
STRIDE = 64
NPY_HEADER_BYTES = 128


@dataclass(frozen=True)
class Scale:
    """How much data there is.

    Attributes:
        text_bytes: of the library, at most.
        text_object_bytes: of an object.
        glyphs_per_class: images of each character.
        glyphs_per_object: images of a shard.
        held_out_per_class: images of each character that no model is trained on; held-out text is
            as large a part.
    """

    text_bytes: int = 1 << 30
    text_object_bytes: int = 512 << 10
    glyphs_per_class: int = 320
    glyphs_per_object: int = 620
    held_out_per_class: int = 16


@dataclass(frozen=True)
class Stored:
    """A dataset on disk.

    Attributes:
        name: which one.
        folder: with its objects, all of which the dataset consists of.
        stride: of text, bytes from the begin of one sample to that of the next.
    """

    name: Name
    folder: Path
    stride: int = STRIDE

    @property
    def objects(self) -> list[str]:
        """The names of the objects, sorted."""
        return sorted(
            path.name for path in self.folder.iterdir() if path.suffix in (".bin", ".tar")
        )

    def config(self, place: str) -> dict[str, object]:
        """The dataset's table for the daemon.

        Args:
            place: of the objects, a path or a URL, without a slash at its end.
        """
        last, suffix = Path(self.objects[-1]).stem, Path(self.objects[-1]).suffix
        config: dict[str, object] = {"uri": f"{place}/{{0000..{last}}}{suffix}"}
        if self.name == "glyphs":
            return {**config, "format": "webdataset"}
        return {
            **config,
            "format": "tokens",
            "dtype": "uint8",
            "sequence_length": SEQUENCE_LENGTH + 1,
            "stride": self.stride,
        }

    @cached_property
    def places(self) -> npt.NDArray[np.int64]:
        """int64 [N, 5], by sample id.

        The object's number, begin and end of its bytes, begin and end of a glyph's label.
        """
        if self.name == "glyphs":
            places: npt.NDArray[np.int64] = np.load(self.folder / "places.npy")
            return places
        parts = []
        for number, name in enumerate(self.objects):
            begins = np.arange(
                0, (self.folder / name).stat().st_size - SEQUENCE_LENGTH, self.stride
            )
            ends = begins + SEQUENCE_LENGTH + 1
            parts.append(np.stack([np.full(len(begins), number), begins, ends, ends, ends], axis=1))
        return np.concatenate(parts)


def write(folder: Path, scale: Scale) -> None:
    """Write `text` and `glyphs`, and their held-out parts `held-text` and `held-glyphs`.

    Existing datasets are kept.
    """
    if folder.exists():
        return
    unfinished = folder.with_name(f"{folder.name}.{os.getpid()}")
    for name, held_out in (("text", False), ("held-text", True)):
        (unfinished / name).mkdir(parents=True)
        content = text.library_text(
            held_out=held_out, max_bytes=scale.text_bytes // (text.HELD_OUT_OF if held_out else 1)
        )
        for number, begin in enumerate(range(0, len(content), scale.text_object_bytes)):
            (unfinished / name / f"{number:04}.bin").write_bytes(
                content[begin : begin + scale.text_object_bytes]
            )
    _write_glyphs(unfinished / "glyphs", scale.glyphs_per_class, scale.glyphs_per_object, seed=0)
    _write_glyphs(
        unfinished / "held-glyphs", scale.held_out_per_class, scale.glyphs_per_object, seed=1
    )
    unfinished.rename(folder)


def _write_glyphs(folder: Path, num_per_class: int, num_per_object: int, seed: int) -> None:
    folder.mkdir()
    labels = np.repeat(np.arange(len(glyphs.CHARACTERS)), num_per_class)
    parts = []
    for number, first in enumerate(range(0, len(labels), num_per_object)):
        of_object = labels[first : first + num_per_object]
        places = glyphs.write_shard(folder / f"{number:04}.tar", first, of_object, seed)
        parts.append(np.insert(places, 0, number, axis=1))
    np.save(folder / "places.npy", np.concatenate(parts))


class ReadRange(Protocol):
    """A function that reads a part of an object."""

    def __call__(self, name: str, begin: int, end: int) -> bytes:
        """The bytes [begin, end)."""


class Files:
    """The files of a folder as objects."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._opened: dict[str, int] = {}

    def __call__(self, name: str, begin: int, end: int) -> bytes:
        """See `ReadRange`."""
        if name not in self._opened:
            self._opened[name] = os.open(self._folder / name, os.O_RDONLY)
        return os.pread(self._opened[name], end - begin, begin)

    def close(self) -> None:
        """Close the files."""
        while self._opened:
            os.close(self._opened.popitem()[1])


class Web:
    """Objects of a server; each thread keeps a connection open."""

    def __init__(self, url: str) -> None:
        parts = urlsplit(url)
        self._host, self._port, self._path = parts.hostname or "", parts.port or 80, parts.path
        self._local, self._connections = threading.local(), list[http.client.HTTPConnection]()

    def __call__(self, name: str, begin: int, end: int) -> bytes:
        """See `ReadRange`."""
        if not hasattr(self._local, "connection"):
            self._local.connection = http.client.HTTPConnection(self._host, self._port)
            self._connections.append(self._local.connection)
        connection: http.client.HTTPConnection = self._local.connection
        connection.request(
            "GET", f"{self._path}/{name}", headers={"Range": f"bytes={begin}-{end - 1}"}
        )
        body = connection.getresponse().read()
        if len(body) != end - begin:
            raise RuntimeError(f"{name}, bytes {begin} to {end}: {len(body)} bytes came")
        return body

    def close(self) -> None:
        """Close the connections of all threads."""
        while self._connections:
            self._connections.pop().close()


class Samples(Dataset[Sample]):
    """Samples by id, each read by itself, with one request."""

    def __init__(self, stored: Stored, read: ReadRange) -> None:
        self._objects, self._places, self._read = stored.objects, stored.places, read
        self._parse = _PARSERS[stored.name]

    def __len__(self) -> int:
        return len(self._places)

    def __getitem__(self, index: int) -> Sample:
        number, begin, end, label_begin, label_end = self._places[index].tolist()
        body = bytearray(self._read(self._objects[number], begin, label_end))
        return {
            **self._parse(body, end - begin, label_begin - begin),
            "sample_id": torch.tensor(int(index)),
        }


def _parse_text(body: bytearray, size: int, label: int) -> Sample:
    return {"tokens": torch.frombuffer(body, dtype=torch.uint8)}


def _parse_glyph(body: bytearray, size: int, label: int) -> Sample:
    pixels = torch.frombuffer(
        body, dtype=torch.uint8, count=size - NPY_HEADER_BYTES, offset=NPY_HEADER_BYTES
    )
    return {"npy": pixels.view(3, glyphs.SIZE, glyphs.SIZE), "cls": torch.tensor(int(body[label:]))}


_PARSERS: dict[Name, Callable[[bytearray, int, int], Sample]] = {
    "text": _parse_text,
    "glyphs": _parse_glyph,
}
