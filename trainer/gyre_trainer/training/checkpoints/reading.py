"""Reads the files of torch.distributed.checkpoint, without running code that a file names.

[Note: Checkpoints of strangers]

A pickle names functions and classes, and an ordinary unpickler imports and calls them. torch
unpickles in two places: the file `.metadata`, and every value that is no tensor. `SafeReader` reads
the first with an unpickler that knows exactly the classes that torch writes there. `SafePlanner`
reads the others as `torch.load(weights_only=True)` does, and torch itself reads tensors so.

    load(state, storage_reader=SafeReader(path), planner=SafePlanner())
"""

import collections
import io
import pickle
from pathlib import Path, PosixPath
from typing import Any, ClassVar

import torch
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader, _StorageInfo
from torch.distributed.checkpoint.metadata import (
    _MEM_FORMAT_ENCODING,
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner, ReadItem
from torch.futures import Future
from torch.serialization import _get_layout

from gyre_trainer.errors import CheckpointRejected
from gyre_trainer.shards.tensor_files import open_regular

_CLASSES = (
    _MEM_FORMAT_ENCODING,
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
    _StorageInfo,
    collections.OrderedDict,
)
_KNOWN: dict[tuple[str, str], Any] = {
    **{(cls.__module__, cls.__qualname__): cls for cls in _CLASSES},
    **{("torch", name): it for name, it in vars(torch).items() if isinstance(it, torch.dtype)},
    ("torch", "Size"): torch.Size,
    ("torch.serialization", "_get_layout"): _get_layout,
    ("pathlib", "PosixPath"): PosixPath,
    ("pathlib._local", "PosixPath"): PosixPath,  # written by Python 3.13
}


class _Unpickler(pickle._Unpickler):
    """Knows the classes of `_KNOWN` alone, and changes none of them.

    It is Python's own unpickler in Python: in the C form nothing can be put between an instruction
    and what it does.
    """

    def find_class(self, module: str, name: str) -> Any:
        """The class, if it may be in `.metadata`."""
        try:
            return _KNOWN[module, name]
        except KeyError:
            raise pickle.UnpicklingError(
                f"it names {module}.{name}, which no checkpoint has"
            ) from None

    def _build(self) -> None:
        """As the instruction BUILD, which sets an object's attributes, but not a class's."""
        if callable(self.stack[-2]):  # type: ignore[attr-defined]  # typeshed has the C form's
            raise pickle.UnpicklingError("it changes a class or a function")
        super().load_build()  # type: ignore[misc]

    dispatch: ClassVar = {**pickle._Unpickler.dispatch, pickle.BUILD[0]: _build}  # type: ignore[dict-item]


class SafeReader(FileSystemReader):
    """A `FileSystemReader` that runs no code of the checkpoint, and reads no file outside of it."""

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """The checkpoint's metadata.

        Raises:
            CheckpointRejected: it is damaged, or holds something else than metadata.
        """
        path = self._get_metadata_path(kwargs.get("rank"))
        try:
            with open_regular(Path(path)) as file:
                metadata: Metadata = _Unpickler(file).load()
            _require_metadata(metadata)
        except OSError as error:
            raise CheckpointRejected(f"{path} cannot be read: {error.strerror}") from error
        except Exception as error:  # of an unpickler on damaged bytes
            told = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
            raise CheckpointRejected(f"{path} is no metadata of a checkpoint: {told}") from error
        metadata.storage_meta = metadata.storage_meta or StorageMeta()
        metadata.storage_meta.load_id = self.load_id
        return metadata

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Read the tensors of a plan.

        Raises:
            CheckpointRejected: a file of the checkpoint is missing, or is no regular file.
        """
        for name in {self.storage_data[item.storage_index].relative_path for item in plan.items}:
            path = Path(self.path) / name
            try:
                open_regular(path).close()  # torch would wait for a pipe
            except OSError as error:
                raise CheckpointRejected(f"{path} cannot be read: {error.strerror}") from error
        return super().read_data(plan, planner)


class SafePlanner(DefaultLoadPlanner):
    """A `DefaultLoadPlanner` that runs no code of the checkpoint."""

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        """Read one value that is no tensor: numbers, texts, and lists and dicts of these."""
        try:
            plain = torch.load(value, weights_only=True)
        except Exception as error:  # of an unpickler on damaged bytes
            name = read_item.dest_index.fqn
            raise CheckpointRejected(
                f"the value {name} is damaged, or something else than numbers, texts and tensors"
            ) from error
        written = io.BytesIO()
        torch.save(plain, written)
        written.seek(0)
        super().load_bytes(read_item, written)


def _require_metadata(metadata: Any) -> None:
    """Check the types of everything that torch takes from the metadata."""
    if type(metadata) is not Metadata or not isinstance(metadata.storage_meta, StorageMeta | None):
        raise TypeError("it is another object")
    for name, entry in metadata.state_dict_metadata.items():
        if not isinstance(name, str):
            raise TypeError(f"{name!r} is no name of a tensor")
        if isinstance(entry, TensorStorageMetadata):
            _require_sizes(entry.size, *(chunk.sizes for chunk in entry.chunks))
            _require_sizes(*(chunk.offsets for chunk in entry.chunks))
            if not isinstance(entry.properties.dtype, torch.dtype):
                raise TypeError(f"{name} has no dtype")
        elif not isinstance(entry, BytesStorageMetadata):
            raise TypeError(f"{name} is neither a tensor nor a value")
    for index, place in metadata.storage_data.items():
        if type(index) is not MetadataIndex or type(place) is not _StorageInfo:
            raise TypeError(f"{index!r} is no place in a file")
        if PosixPath(place.relative_path).name != place.relative_path:
            raise ValueError(f"{place.relative_path!r} is no file in the checkpoint")
        _require_sizes([place.offset, place.length])


def _require_sizes(*sizes: Any) -> None:
    for each in sizes:
        if not all(type(size) is int and 0 <= size < 2**63 for size in each):
            raise ValueError(f"{each!r} are no sizes")
