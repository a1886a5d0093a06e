"""Converts a dataset in parts: each is a file of successive samples, by its format's own writer.

A writer is made with an empty folder, the number of its file and the columns, takes batches, and is
closed at the end. It gets samples in the order of their ids, as numpy arrays and bytes. It raises
InvalidRequest at the beginning if the format cannot hold the columns, and makes nothing before the
first batch. `index` joins the values that all writers returned.
"""

import contextlib
import importlib
import io
import json
import os
import secrets
import shutil
import sys
import time
import types
import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from gyre_protos.v1 import loader_pb2 as pb

from gyre_client import __version__
from gyre_client.command.units import (
    Daemons,
    UnitFolder,
    ray_driver,
    run_units,
    unfinished_folder,
    write_whole,
)
from gyre_client.display import arrays_of
from gyre_client.errors import DaemonFault, InvalidRequest, NotInstalled
from gyre_client.transport.answers import (
    BFLOAT16,
    MAX_BYTES,
    OFFSETS_SUFFIX,
    SAMPLE_ID,
    BatchTensors,
    check_description,
)
from gyre_client.transport.connection import Connection

PRESENT_SUFFIX, SHAPE_SUFFIX = ".present", ".shape"

Array = npt.NDArray[Any]
Arrays = Mapping[str, Array]
# Bytes of a ragged field of uint8, an array of any other; None where the sample lacks the field.
Row = dict[str, bytes | Array | None]


@dataclass(frozen=True)
class Column:
    """One field of the samples to write.

    Attributes:
        name: The field's name.
        dtype: The dtype of its elements.
        shape: The shape of a sample; of an element if it is ragged.
        is_ragged: Whether samples differ in length, or in shape.
        is_bytes: Whether a sample is bytes.
        is_text: Whether these are UTF-8.
        is_optional: Whether samples may lack it.
        has_shapes: Whether each sample is an array with a separate shape.
    """

    name: str
    dtype: np.dtype[Any]
    shape: tuple[int, ...]
    is_ragged: bool
    is_bytes: bool
    is_text: bool
    is_optional: bool
    has_shapes: bool


def read_range(
    connection: Connection, request: pb.ReadSamplesRequest
) -> tuple[pb.DatasetDescription, str, Iterator[Arrays]]:
    """Asks for a range of samples; an empty one gives the description alone.

    Returns:
        The description, the identity of the transforms, and batches of successive samples.

    Raises:
        GyreError: The daemon refuses the dataset; later, a sample cannot be read.
    """
    chunks = iter(connection.read_samples(request))
    first = next(chunks, pb.SamplesChunk())
    check_description(first.description)
    return first.description, first.transforms, _batches(chunks, first.description.fields)


def _batches(chunks: Iterable[pb.SamplesChunk], fields: Sequence[pb.Field]) -> Iterator[Arrays]:
    ragged = [field.name for field in fields if field.ragged]
    layout, payload = pb.Layout(), bytearray()
    for chunk in chunks:
        if chunk.HasField("layout"):
            if len(payload) != layout.num_bytes:
                raise DaemonFault("the daemon sent a batch before the one before it was whole")
            layout, payload = chunk.layout, bytearray()
            _check(layout, fields)
        payload += chunk.data
        if len(payload) > layout.num_bytes:
            raise DaemonFault(f"the daemon sent more than a batch of {layout.num_bytes} bytes")
        if len(payload) == layout.num_bytes:
            yield arrays_of(layout, payload, ragged)
    if len(payload) != layout.num_bytes:
        raise DaemonFault("the daemon ended before the last batch was whole")


def _check(layout: pb.Layout, fields: Sequence[pb.Field]) -> None:
    ids = next((each for each in layout.tensors if each.name == SAMPLE_ID), pb.Tensor())
    if len(ids.shape) != 1 or not 0 < ids.shape[0] <= MAX_BYTES:
        raise DaemonFault("the daemon sent a batch without samples")
    BatchTensors(fields, ids.shape[0], has_mask=False).check(layout)


def columns_of(description: pb.DatasetDescription) -> list[Column]:
    """Returns the fields of a dataset, without those that only say something of another.

    Raises:
        InvalidRequest: numpy has no such dtype.
    """
    names = {field.name for field in description.fields}

    def says_of(name: str, suffix: str) -> bool:
        return name.endswith(suffix) and name.removesuffix(suffix) in names

    for field in description.fields:
        if field.dtype == BFLOAT16:
            raise InvalidRequest(f"{field.name!r}: no format has bfloat16. Cast it to float32.")
    return [
        Column(
            field.name,
            np.dtype(field.dtype),
            tuple(field.shape),
            field.ragged,
            field.ragged and field.dtype == "uint8" and not field.shape
            and field.name + SHAPE_SUFFIX not in names,
            field.text,
            field.name + PRESENT_SUFFIX in names,
            field.name + SHAPE_SUFFIX in names,
        )
        for field in description.fields
        if not says_of(field.name, PRESENT_SUFFIX) and not says_of(field.name, SHAPE_SUFFIX)
    ]  # fmt: skip


def rows_of(arrays: Arrays, columns: Sequence[Column]) -> list[Row]:
    """Returns the samples of a batch, one by one."""
    return [
        {column.name: _value(arrays, column, row) for column in columns}
        for row in range(len(arrays[SAMPLE_ID]))
    ]


def _value(arrays: Arrays, column: Column, row: int) -> bytes | Array | None:
    name = column.name
    if column.is_optional and not arrays[name + PRESENT_SUFFIX][row]:
        return None
    if not column.is_ragged:
        return np.asarray(arrays[name][row])
    begin, end = arrays[name + OFFSETS_SUFFIX][row : row + 2].tolist()
    value = arrays[name][begin:end]
    if column.has_shapes:
        return value.reshape(arrays[name + SHAPE_SUFFIX][row])
    return value.tobytes() if column.is_bytes else value


# webdataset's own names for classes and numbers, which hold digits.
_INTEGERS = ("cls", "cls2", "index", "id")
_ROWS_PER_GROUP = 1000
_MAX_MDS_BYTES = (1 << 32) - 1  # an MDS file has offsets of 32 bits
_NO_LIMIT = 1 << 60


class Writer(ABC):
    """Writes one file."""

    def __init__(self, folder: Path, number: int, columns: Sequence[Column], dtype: str) -> None:
        """Checks the columns.

        Raises:
            InvalidRequest: The format cannot hold them.
        """
        self._folder, self._number, self._columns = folder, number, columns
        if dtype and type(self) is not TokensWriter:
            raise InvalidRequest("--dtype: only token files take one. Leave it out.")

    @abstractmethod
    def write(self, arrays: Arrays) -> None:
        """Writes the samples of one batch."""

    @abstractmethod
    def close(self) -> Any:
        """Finishes the file; returns a value for `index`, ready for JSON."""

    @staticmethod
    def index(about: Sequence[Any]) -> str:
        """Returns the contents of a file `index.json`; empty where the format has none."""
        return ""


class WebdatasetWriter(Writer):
    """Tar shards by webdataset's `ShardWriter`: bytes as they are, numbers as npy or as digits."""

    def __init__(self, folder: Path, number: int, columns: Sequence[Column], dtype: str) -> None:
        super().__init__(folder, number, columns, dtype)
        self._webdataset = _needed("webdataset", "records")
        self._members: list[tuple[str, Column]] = []
        for column in columns:
            name = column.name.lower()
            extension = name.rpartition(".")[2]
            if column.is_bytes:
                is_read_as_such = extension not in (*_INTEGERS, "npy")
                kind = "txt" if column.is_text else "bin"
            else:
                is_digits = column.dtype.kind in "iub" and not (column.shape or column.is_ragged)
                is_read_as_such = extension == "npy" or (extension in _INTEGERS and is_digits)
                kind = "npy"
            self._members.append((name if is_read_as_such else f"{name}.{kind}", column))
        names = [name for name, _ in self._members]
        # ShardWriter leaves out names that begin with an underscore
        if len(set(names)) < len(names) or any("/" in name or name[0] == "_" for name in names):
            raise InvalidRequest(
                f"tar shards cannot have members with the extensions {', '.join(names)}; rename "
                "the columns"
            )
        self._writer: Any = None

    def write(self, arrays: Arrays) -> None:
        if not self._writer:
            self._writer = self._webdataset.ShardWriter(
                f"{str(self._folder).replace('%', '%%')}/%06d.tar",
                start_shard=self._number,
                maxcount=_NO_LIMIT,
                maxsize=_NO_LIMIT,
                encoder=False,
                verbose=0,
                mtime=0,
            )
        ids = arrays[SAMPLE_ID].tolist()
        for number, row in zip(ids, rows_of(arrays, self._columns), strict=True):
            sample: dict[str, Any] = {"__key__": f"{number:09d}"}
            for name, column in self._members:
                value = row[column.name]
                if value is not None:
                    sample[name] = _member(name, value)
            self._writer.write(sample)

    def close(self) -> None:
        self._writer.close()


class MdsWriter(Writer):
    """MDS shards by `MDSWriter` of mosaicml-streaming."""

    def __init__(self, folder: Path, number: int, columns: Sequence[Column], dtype: str) -> None:
        super().__init__(folder, number, columns, dtype)
        self._streaming = _streaming()
        self._encodings = {column.name: _mds_encoding(column) for column in columns}
        self._writer: Any = None
        self._num_bytes = 0

    def write(self, arrays: Arrays) -> None:
        if not self._writer:
            self._writer = self._streaming.MDSWriter(
                out=str(self._folder), columns=self._encodings, size_limit=None
            )
        self._num_bytes += sum(arrays[column.name].nbytes for column in self._columns)
        if self._num_bytes > _MAX_MDS_BYTES:
            raise InvalidRequest("an MDS shard has at most 4 GiB; lower --samples-per-shard")
        for row in rows_of(arrays, self._columns):
            sample: dict[str, Any] = {}
            for column in self._columns:
                value = row[column.name]
                if isinstance(value, bytes):
                    sample[column.name] = value.decode() if column.is_text else value
                else:
                    assert value is not None
                    sample[column.name] = value if column.shape else value[()]
            self._writer.write(sample)

    def close(self) -> Any:
        self._writer.finish()
        path = self._folder / "index.json"
        (shard,) = json.loads(path.read_text())["shards"]
        path.unlink()
        name = f"shard.{self._number:05d}.mds"
        (self._folder / shard["raw_data"]["basename"]).rename(self._folder / name)
        shard["raw_data"]["basename"] = name
        return shard

    @staticmethod
    def index(about: Sequence[Any]) -> str:
        return json.dumps({"shards": about, "version": 2}, sort_keys=True)


class ParquetWriter(Writer):
    """Parquet files by pyarrow, with checksums of their pages."""

    def __init__(self, folder: Path, number: int, columns: Sequence[Column], dtype: str) -> None:
        super().__init__(folder, number, columns, dtype)
        self._arrow = _needed("pyarrow", "arrow")
        self._parquet = _needed("pyarrow.parquet", "arrow")
        for column in columns:
            if column.has_shapes:
                raise InvalidRequest(
                    f"a Parquet column cannot hold arrays of different shapes: {column.name!r}; "
                    "convert to webdataset"
                )
        self._schema = self._arrow.schema([(column.name, self._type(column)) for column in columns])
        self._rows: list[Row] = []
        self._file: Any = None

    def write(self, arrays: Arrays) -> None:
        self._rows += rows_of(arrays, self._columns)
        while len(self._rows) >= _ROWS_PER_GROUP:
            self._flush()

    def close(self) -> None:
        if self._rows:
            self._flush()
        self._file.close()

    def _flush(self) -> None:
        if self._file is None:
            path = self._folder / f"part-{self._number:06d}.parquet"
            self._file = self._parquet.ParquetWriter(path, self._schema, write_page_checksum=True)
        rows, self._rows = self._rows[:_ROWS_PER_GROUP], self._rows[_ROWS_PER_GROUP:]
        arrays = [
            self._arrow.array([_plain(row[column.name], column) for row in rows], kind)
            for column, kind in zip(self._columns, self._schema.types, strict=True)
        ]
        table = self._arrow.Table.from_arrays(arrays, schema=self._schema)
        self._file.write_table(table, row_group_size=_ROWS_PER_GROUP)

    def _type(self, column: Column) -> Any:
        arrow = self._arrow
        if column.is_bytes:
            return arrow.string() if column.is_text else arrow.binary()
        kind = arrow.from_numpy_dtype(column.dtype)
        for size in reversed(column.shape):
            kind = arrow.list_(kind, size)
        return arrow.list_(kind) if column.is_ragged else kind


class TokensWriter(Writer):
    """Flat files of the ids of one column, back to back: where samples end is not kept."""

    def __init__(self, folder: Path, number: int, columns: Sequence[Column], dtype: str) -> None:
        super().__init__(folder, number, columns, dtype)
        names = ", ".join(column.name for column in columns)
        if len(columns) != 1 or columns[0].dtype.kind not in "iu" or columns[0].is_bytes:
            raise InvalidRequest(
                f"token files hold one column of integers, and there are {names}; choose one with "
                "--column, or make one with --transform tokenize"
            )
        if columns[0].is_optional:
            raise InvalidRequest(
                f"some samples lack {names!r}, which token files cannot say; convert to "
                "webdataset or parquet"
            )
        (self._column,) = columns
        self._dtype = np.dtype(dtype or self._column.dtype).newbyteorder("<")
        self._file: Any = None

    def write(self, arrays: Arrays) -> None:
        if not self._file:
            self._file = (self._folder / f"{self._number:06d}.bin").open("wb")
        ids = arrays[self._column.name]
        limits = np.iinfo(self._dtype)
        if ids.size and not limits.min <= ids.min() <= ids.max() <= limits.max:
            found = ids.min() if ids.min() < limits.min else ids.max()
            raise InvalidRequest(
                f"--dtype {self._dtype.name}: an id is {found}. Take a larger one."
            )
        self._file.write(ids.astype(self._dtype, copy=False).tobytes())

    def close(self) -> None:
        self._file.close()


WRITERS: Mapping[str, type[Writer]] = {
    "webdataset": WebdatasetWriter,
    "mds": MdsWriter,
    "parquet": ParquetWriter,
    "tokens": TokensWriter,
}


def _member(name: str, value: bytes | npt.NDArray[Any]) -> bytes:
    if isinstance(value, bytes):
        return value
    if not name.endswith("npy"):
        return str(int(value)).encode()
    file = io.BytesIO()
    np.lib.format.write_array(file, value, allow_pickle=False)
    return file.getvalue()


def _mds_encoding(column: Column) -> str:
    if column.is_optional:
        raise InvalidRequest(
            f"MDS cannot leave a column out of a sample, and some lack {column.name!r}; convert to "
            "webdataset or parquet"
        )
    if column.is_bytes:
        return "str" if column.is_text else "bytes"
    if column.is_ragged:
        raise InvalidRequest(
            f"MDS arrays have one shape, and those of {column.name!r} differ; convert to "
            "webdataset or parquet"
        )
    if column.dtype.kind not in "iuf":
        raise InvalidRequest(
            f"MDS has no encoding for {column.name!r}, which is {column.dtype}; leave it out with "
            "--column, or convert to webdataset or parquet"
        )
    if not column.shape:
        return column.dtype.name
    return f"ndarray:{column.dtype.name}:{','.join(map(str, column.shape))}"


def _plain(value: bytes | npt.NDArray[Any] | None, column: Column) -> Any:
    if isinstance(value, bytes):
        return value.decode() if column.is_text else value
    return None if value is None else value.tolist()


def _needed(module: str, extra: str) -> Any:
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        raise NotInstalled.needs("this format", error.name, extra) from error


def _streaming() -> Any:
    """mosaicml-streaming, without its vision datasets, which import torchvision."""
    sys.modules.setdefault("streaming.vision", types.ModuleType("streaming.vision"))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            return importlib.import_module("streaming")
        except ModuleNotFoundError as error:
            raise NotInstalled(
                f"MDS needs {error.name}, which is not installed. Convert to parquet, or where "
                "mosaicml-streaming is installed, which does not go with transformers 5."
            ) from error


_FILES = "files"
Show = Callable[[int, int, float], None]


@dataclass(frozen=True, slots=True)
class Conversion:
    """A dataset and the form to write it in.

    Without `transforms`, samples get those of the dataset's definition; without `names`, all
    columns are written. `dtype` is of the ids in token files; empty for the column's own.
    """

    dataset: pb.DatasetRef
    transforms: pb.TransformList | None
    kind: str
    names: Sequence[str] = ()
    samples_per_shard: int = 10_000
    dtype: str = ""

    def request(self, first: int, stop: int) -> pb.ReadSamplesRequest:
        """Returns the request for some of the samples."""
        return pb.ReadSamplesRequest(
            dataset=self.dataset, transforms=self.transforms, first=first, stop=stop
        )


@dataclass(frozen=True, slots=True)
class OutputFile:
    """The samples `[first, stop)`, which go into one file; see `units.Unit`.

    The fingerprint and the identity of the transforms are those at the beginning. All nodes see
    `folder`.
    """

    number: int
    first: int
    stop: int
    conversion: Conversion
    fingerprint: str
    transforms: str
    folder: Path

    def run(self, connection: Connection, advance: Callable[[int, int], None]) -> dict[str, Any]:
        """Writes the file, whole or not at all; a second time with the same bytes."""
        conversion = self.conversion
        request = conversion.request(self.first, self.stop)
        description, transforms, batches = read_range(connection, request)
        if (description.fingerprint, transforms) != (self.fingerprint, self.transforms):
            raise InvalidRequest("the dataset has changed while it was being converted; try again")
        columns = select_columns(columns_of(description), conversion.names)
        unfinished = self.folder / f"unfinished-{secrets.token_hex(6)}"
        writer = WRITERS[conversion.kind](unfinished, self.number, columns, conversion.dtype)
        num_samples = num_elements = 0
        about: Any = None
        try:
            unfinished.mkdir()
            with contextlib.ExitStack() as closing:
                for arrays in batches:
                    if not num_samples:
                        closing.callback(_ignoring_errors, writer.close)
                    writer.write(arrays)
                    size = len(arrays["sample_id"])
                    elements = sum(arrays[column.name].size for column in columns)
                    num_samples, num_elements = num_samples + size, num_elements + elements
                    advance(size, elements)
                closing.pop_all()
            if num_samples:
                about = writer.close()
            files = sorted(unfinished.iterdir())
            num_bytes = sum(map(_synced, files))
            for path in files:
                path.rename(self.folder / _FILES / path.name)
        except OSError as error:
            raise InvalidRequest(
                f"{self.folder} cannot be written: {error.strerror or error}"
            ) from error
        finally:
            shutil.rmtree(unfinished, ignore_errors=True)
        result = {"samples": num_samples, "elements": num_elements, "bytes": num_bytes}
        return {**result, "files": [path.name for path in files], "about": about}


def convert_dataset(
    connection: Connection,
    conversion: Conversion,
    target: Path,
    engine: str,
    daemons: Daemons,
    show: Show,
) -> dict[str, int]:
    """Writes a dataset into a new folder, which appears once everything is written.

    Until then the files are in `unfinished_folder(target)`. After an error or a kill, the same call
    goes on there.

    `show` is told how many samples are written, how many there are, and how many elements come a
    second.

    Returns:
        The numbers of `samples`, `elements`, `files` and `bytes`.

    Raises:
        InvalidRequest: The folder exists or cannot be made, or the format cannot hold the columns.
        NotInstalled: The format's writer is missing.
    """
    description, transforms, _ = read_range(connection, conversion.request(0, 0))
    columns = select_columns(columns_of(description), conversion.names)
    WRITERS[conversion.kind](target, 0, columns, conversion.dtype)  # refuses columns; makes nothing
    if target.exists() or target.is_symlink():
        raise InvalidRequest(f"{target} exists already; name a folder that does not")
    job = {
        "dataset": description.fingerprint,
        "transforms": transforms,
        "format": conversion.kind,
        "columns": [column.name for column in columns],
        "samples-per-shard": conversion.samples_per_shard,
        "dtype": conversion.dtype,
        "gyre": __version__,
    }
    step, num_samples = conversion.samples_per_shard, description.num_samples
    with UnitFolder(unfinished_folder(target), job) as folder:
        parts = [
            OutputFile(
                number,
                first,
                min(first + step, num_samples),
                conversion,
                description.fingerprint,
                transforms,
                folder.path,
            )
            for number, first in enumerate(range(0, num_samples, step))
        ]
        (folder.path / _FILES).mkdir(exist_ok=True)
        for abandoned in folder.path.glob("unfinished-*"):
            shutil.rmtree(abandoned, ignore_errors=True)
        num_done = sum(each["samples"] for each in folder.results().values())
        num_elements, began_s = 0, time.monotonic()

        def advance(more_samples: int, more_elements: int) -> None:
            nonlocal num_done, num_elements
            num_done, num_elements = num_done + more_samples, num_elements + more_elements
            elapsed_s = max(time.monotonic() - began_s, 1e-9)
            show(num_done, num_samples, num_elements / elapsed_s)

        with ray_driver(engine) as driver:
            run_units(parts, folder, driver, connection, daemons, advance)
        return _finished(folder, len(parts), conversion.kind, target)


def _finished(folder: UnitFolder, num_parts: int, kind: str, target: Path) -> dict[str, int]:
    """Moves the files to where they belong, and returns their numbers."""
    results, files = folder.results(), folder.path / _FILES
    wanted = {name for result in results.values() for name in result["files"]}
    found = {path.name for path in files.iterdir()}
    if len(results) != num_parts or not wanted <= found:
        raise InvalidRequest(
            f"{folder.path} lacks files that were written. Remove it, and begin anew"
        )
    for name in found - wanted:  # the index of a command that was ended here
        (files / name).unlink()
    about = [results[number]["about"] for number in sorted(results) if results[number]["files"]]
    if text := WRITERS[kind].index(about):
        write_whole(files / "index.json", text)
    _synced(files)
    files.rename(target)
    _synced(target.parent)
    folder.remove()
    sums = {key: sum(each[key] for each in results.values()) for key in ("samples", "elements")}
    paths = [path for path in target.rglob("*") if path.is_file()]
    return {**sums, "files": len(paths), "bytes": sum(path.stat().st_size for path in paths)}


def select_columns(columns: Sequence[Column], names: Sequence[str]) -> list[Column]:
    """Returns the columns of these names; all if there are none.

    Raises:
        InvalidRequest: There is no such column.
    """
    by_name = {column.name: column for column in columns}
    for name in names:
        if name not in by_name:
            raise InvalidRequest(
                f"there is no column {name!r}; the dataset has {', '.join(by_name)}"
            )
    return [by_name[name] for name in names] if names else list(columns)


def _ignoring_errors(close: Callable[[], object]) -> None:
    """Closes a file to throw it away, after an error."""
    with contextlib.suppress(Exception):
        close()


def _synced(path: Path) -> int:
    """Waits until a file or folder is on the disk, and returns its size."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
        return os.fstat(descriptor).st_size
    finally:
        os.close(descriptor)
