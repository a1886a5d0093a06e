"""One writer for each format that a dataset can be converted to: the format's own.

A writer is made with an empty folder and the columns, takes one row after the other, and is closed
at the end. It raises InvalidRequest at the beginning if the format cannot hold the columns.
"""

import importlib
import io
import sys
import types
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from gyre_client.convert.rows import Column, Row
from gyre_client.errors import InvalidRequest, NotInstalled

# webdataset's own names for classes and numbers, which hold digits.
_INTEGERS = ("cls", "cls2", "index", "id")
_ROWS_PER_GROUP = 1000


class Writer(Protocol):
    """Writes rows in one format."""

    def write(self, row: Row) -> None:
        """Writes one sample."""

    def close(self) -> None:
        """Finishes the last file."""


class WebdatasetWriter:
    """Tar shards by webdataset's `ShardWriter`: bytes as they are, numbers as npy or as digits."""

    def __init__(self, folder: Path, columns: Sequence[Column], samples_per_shard: int) -> None:
        webdataset = _needed("webdataset", "records")
        self._members: list[tuple[str, Column]] = []
        for column in columns:
            name = column.name.lower()
            is_plain = (
                column.is_bytes
                or name.rpartition(".")[2] in _INTEGERS
                or (name.rpartition(".")[2] == "npy")
            )
            self._members.append((name if is_plain else f"{name}.npy", column))
        names = [name for name, _ in self._members]
        if len(set(names)) < len(names) or any("/" in name for name in names):
            raise InvalidRequest(
                f"tar shards cannot have members with the extensions {', '.join(names)}; rename "
                "the columns"
            )
        self._number = 0
        self._writer = webdataset.ShardWriter(
            f"{str(folder).replace('%', '%%')}/%06d.tar",
            maxcount=samples_per_shard,
            encoder=False,
            verbose=0,
            mtime=0,
        )

    def write(self, row: Row) -> None:
        """See `Writer.write`."""
        sample: dict[str, Any] = {"__key__": f"{self._number:09d}"}
        for name, column in self._members:
            value = row[column.name]
            if value is not None:
                sample[name] = _member(name, value)
        self._writer.write(sample)
        self._number += 1

    def close(self) -> None:
        """See `Writer.close`."""
        self._writer.close()


class MdsWriter:
    """MDS shards by `MDSWriter` of mosaicml-streaming."""

    def __init__(self, folder: Path, columns: Sequence[Column], samples_per_shard: int) -> None:
        streaming = _streaming()
        self._columns = columns
        encodings = {column.name: _mds_encoding(column) for column in columns}
        self._writer = streaming.MDSWriter(out=str(folder), columns=encodings)

    def write(self, row: Row) -> None:
        """See `Writer.write`."""
        sample: dict[str, Any] = {}
        for column in self._columns:
            value = row[column.name]
            if isinstance(value, bytes):
                sample[column.name] = value.decode() if column.is_text else value
            else:
                assert value is not None
                sample[column.name] = value if column.shape else value[()]
        self._writer.write(sample)

    def close(self) -> None:
        """See `Writer.close`."""
        self._writer.finish()


class ParquetWriter:
    """Parquet files by pyarrow, with checksums of their pages."""

    def __init__(self, folder: Path, columns: Sequence[Column], samples_per_shard: int) -> None:
        self._arrow = _needed("pyarrow", "arrow")
        self._parquet = _needed("pyarrow.parquet", "arrow")
        self._folder, self._columns = folder, columns
        for column in columns:
            if column.has_shapes:
                raise InvalidRequest(
                    f"a Parquet column cannot hold arrays of different shapes: {column.name!r}; "
                    "convert to webdataset"
                )
        self._schema = self._arrow.schema([(column.name, self._type(column)) for column in columns])
        self._samples_per_shard = samples_per_shard
        self._rows: list[Row] = []
        self._num_written = 0
        self._file: Any = None

    def write(self, row: Row) -> None:
        """See `Writer.write`."""
        self._rows.append(row)
        in_file = self._num_written % self._samples_per_shard + len(self._rows)
        if len(self._rows) == _ROWS_PER_GROUP or in_file == self._samples_per_shard:
            self._flush()

    def close(self) -> None:
        """See `Writer.close`."""
        if self._rows:
            self._flush()
        if self._file:
            self._file.close()

    def _flush(self) -> None:
        if self._file is None:
            number = self._num_written // self._samples_per_shard
            self._file = self._parquet.ParquetWriter(
                self._folder / f"part-{number:06d}.parquet",
                self._schema,
                write_page_checksum=True,
            )
        arrays = [
            self._arrow.array([_plain(row[column.name], column) for row in self._rows], kind)
            for column, kind in zip(self._columns, self._schema.types, strict=True)
        ]
        table = self._arrow.Table.from_arrays(arrays, schema=self._schema)
        self._file.write_table(table, row_group_size=_ROWS_PER_GROUP)
        self._num_written += len(self._rows)
        self._rows = []
        if self._num_written % self._samples_per_shard == 0:
            self._file.close()
            self._file = None

    def _type(self, column: Column) -> Any:
        arrow = self._arrow
        if column.is_bytes:
            return arrow.string() if column.is_text else arrow.binary()
        kind = arrow.from_numpy_dtype(column.dtype)
        for size in reversed(column.shape):
            kind = arrow.list_(kind, size)
        return arrow.list_(kind) if column.is_ragged else kind


class TokensWriter:
    """Flat files of the ids of one column, back to back: where samples end is not kept."""

    def __init__(self, folder: Path, columns: Sequence[Column], samples_per_shard: int) -> None:
        names = ", ".join(column.name for column in columns)
        if len(columns) != 1 or columns[0].dtype.kind not in "iu" or columns[0].is_bytes:
            raise InvalidRequest(
                f"token files hold one column of integers, and there are {names}; choose one with "
                "--column"
            )
        if columns[0].is_optional:
            raise InvalidRequest(
                f"some samples lack {names!r}, which token files cannot say; convert to "
                "webdataset or parquet"
            )
        (self._column,) = columns
        self._folder, self._samples_per_shard = folder, samples_per_shard
        self._number = 0
        self._file: Any = None

    def write(self, row: Row) -> None:
        """See `Writer.write`."""
        shard, place = divmod(self._number, self._samples_per_shard)
        if not place:
            self.close()
            self._file = (self._folder / f"{shard:06d}.bin").open("wb")
        value = row[self._column.name]
        assert isinstance(value, np.ndarray)
        self._file.write(value.astype(self._column.dtype.newbyteorder("<")).tobytes())
        self._number += 1

    def close(self) -> None:
        """See `Writer.close`."""
        if self._file:
            self._file.close()


WRITERS: Mapping[str, Callable[[Path, Sequence[Column], int], Writer]] = {
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
