"""Checkpoints of a run: complete or absent, whichever process dies while one is written.

    RUN/checkpoints/
      step-00000120/        once it is complete and on disk; before, .writing-step-00000120
        checkpoint.json     step, model, the loader's cursor, and size and CRC-32 of each file
        .metadata, *.distcp model and optimizer, each shard by its owner
      latest                the name of the newest one

Model and optimizer shards are DTensors, so a checkpoint loads at any world size. The manifest is
read and checked first, then every file, and only then something is loaded.

Reads what torch.distributed.checkpoint wrote, without running code that a file names.

[Note: Checkpoints of strangers]

A pickle names functions and classes, and an ordinary unpickler imports and calls them. torch
unpickles in two places: the file `.metadata`, and every value that is no tensor. `SafeReader` reads
the first with an unpickler that knows exactly the classes that torch writes there. `SafePlanner`
reads the others as `torch.load(weights_only=True)` does, and torch itself reads tensors so.

    load(state, storage_reader=SafeReader(path), planner=SafePlanner())
"""

import collections
import io
import os
import pickle
import re
import shutil
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path, PosixPath
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException
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
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_state_dict,
    set_model_state_dict,
    set_state_dict,
)
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.checkpoint.stateful import Stateful
from torch.futures import Future

from gyre_trainer.errors import CheckpointFailed, CheckpointRejected
from gyre_trainer.optimizers.shard import keep_saved_states
from gyre_trainer.shards.tensor_files import open_regular
from gyre_trainer.training import manifest
from gyre_trainer.training.config import ModelConfig, TrainConfig
from gyre_trainer.training.config_file import require_regular
from gyre_trainer.training.manifest import Files, Manifest

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
_LAYOUTS = {str(it): it for it in vars(torch).values() if isinstance(it, torch.layout)}
_KNOWN: dict[tuple[str, str], Any] = {
    **{(cls.__module__, cls.__qualname__): cls for cls in _CLASSES},
    **{("torch", name): it for name, it in vars(torch).items() if isinstance(it, torch.dtype)},
    ("torch", "Size"): torch.Size,
    ("torch.serialization", "_get_layout"): _LAYOUTS.__getitem__,  # by the name of a layout
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
        path = Path(self.path) / ".metadata"
        try:
            with open_regular(path) as file:
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

    def names(self) -> list[str]:
        """Of all tensors and values."""
        return list(self.read_metadata().state_dict_metadata)

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


_LATEST = "latest"
_NAME = re.compile(r"step-[0-9]{8,}")
_OPTIONS = StateDictOptions(flatten_optimizer_state_dict=True)


@dataclass(frozen=True, slots=True)
class TrainState:
    """Everything that a checkpoint restores.

    The loader's `state_dict` has opaque bytes by name, the same on every rank.
    """

    model: torch.nn.Module
    optimizers: Sequence[torch.optim.Optimizer]
    loader: Stateful


class Checkpoints:
    """The checkpoints of a run. Every method is collective, with equal arguments on all ranks."""

    def __init__(self, config: TrainConfig) -> None:
        self._folder = Path(config.run.out) / "checkpoints"
        self._config = config

    def save(self, state: TrainState, step: int) -> None:
        """Write a checkpoint that resumes at ``step``: on return it is durable and `latest`.

        The oldest checkpoints beyond ``keep`` are deleted.

        Raises:
            CheckpointFailed: the disk is full or cannot be written; `latest` keeps its value.
        """
        name = f"step-{step:08}"
        unfinished = self._folder / f".writing-{name}"
        model, optimizer = get_state_dict(state.model, state.optimizers, options=_OPTIONS)
        try:
            _on_first_rank(lambda: _remove(unfinished))
            save({"model": model, "optimizer": optimizer}, checkpoint_id=unfinished)
            written = Manifest(
                step=step,
                world_size=dist.get_world_size(),
                model=asdict(self._config.model),
                optimizer=self._config.optimizer.kind,
                loader=manifest.encoded(state.loader.state_dict()),
                files=_described(unfinished),
                data=manifest.data_of(self._config.data),
            )
            _on_first_rank(lambda: self._publish(unfinished, name, written))
        except (OSError, CheckpointException) as error:
            raise CheckpointFailed(
                f"checkpoint {self._folder / name} cannot be written: {_cause(error)}"
            ) from error

    def load(self, state: TrainState, path: Path) -> int:
        """Restore ``state`` in place from the checkpoint directory ``path``.

        Optimizers keep the options that they have, such as `weight_decay`. A checkpoint of this run
        becomes `latest` again.

        Returns:
            The step to continue with.

        Raises:
            CheckpointRejected: it is not a checkpoint, is incomplete, or has another format or
                model; the message names the difference.
        """
        saved = manifest.read(path, self._config.model, self._config.optimizer)
        _require_whole(path, saved.files)
        given = [
            {name: group[name] for name in each.defaults}
            for each in state.optimizers
            for group in each.param_groups
        ]
        keep_saved_states(state.model, state.optimizers, SafeReader(path).names())
        model, optimizer = get_state_dict(state.model, state.optimizers, options=_OPTIONS)
        try:
            _load({"model": model, "optimizer": optimizer}, path)
        except CheckpointRejected as error:
            if "_scale" not in str(error) or saved.world_size == dist.get_world_size():
                raise
            raise CheckpointRejected(
                f"checkpoint {path} does not fit {dist.get_world_size()} ranks: they cut a matrix "
                f"along another dim, where moments of 8 bits have their blocks. Resume on "
                f"{saved.world_size} ranks."
            ) from error
        set_state_dict(
            state.model,
            state.optimizers,
            model_state_dict=model,
            optim_state_dict=optimizer,
            options=_OPTIONS,
        )
        groups = (group for each in state.optimizers for group in each.param_groups)
        for group, options in zip(groups, given, strict=True):
            group.update(options)
        state.loader.load_state_dict(saved.loader_state())
        if path.absolute().parent == self._folder.absolute():
            _on_first_rank(lambda: _write_pointer(self._folder / _LATEST, path.name))
        return saved.step

    def _publish(self, unfinished: Path, name: str, written: Manifest) -> None:
        written.write(unfinished / manifest.NAME)
        _fsync(unfinished / manifest.NAME)
        _fsync(unfinished)
        complete = self._folder / name
        _remove(complete)  # left by a run that was resumed from an earlier step
        unfinished.rename(complete)
        _write_pointer(self._folder / _LATEST, name)
        not_newer = sorted(path for path in self._folder.glob("step-*") if path.name <= name)
        for old in not_newer[: -self._config.checkpoint.keep]:
            shutil.rmtree(old)
        for torn in self._folder.glob(".writing-*"):
            shutil.rmtree(torn)


def load_model(model: torch.nn.Module, path: Path, model_config: ModelConfig) -> int:
    """Restore a model alone, in place, from the checkpoint directory ``path``; collective.

    Returns:
        The checkpoint's step.

    Raises:
        CheckpointRejected: as `Checkpoints.load`.
    """
    saved = manifest.read(path, model_config)
    _require_whole(path, saved.files)
    state = get_model_state_dict(model)
    _load({"model": state}, path)
    set_model_state_dict(model, state)
    return saved.step


def _load(state: dict[str, Any], path: Path) -> None:
    try:
        load(state, storage_reader=SafeReader(path), planner=SafePlanner())
    except CheckpointException as error:
        raise manifest.rejection(path, _cause(error)) from error


def exists(folder: Path) -> bool:
    """Whether a run's folder of checkpoints has a complete one."""
    return (folder / _LATEST).exists()


def latest(
    folder: Path, advice: str = "begin the run without --resume, or with --resume-if-any"
) -> Path:
    """The newest complete checkpoint in a run's folder of checkpoints.

    Args:
        folder: of the checkpoints.
        advice: for the error, where there is none.

    Raises:
        CheckpointRejected: there is none.
        ConfigError: `latest` is no regular file.
    """
    try:
        require_regular(folder / _LATEST)
        name = (folder / _LATEST).read_bytes()[:100].decode(errors="replace").strip()
    except FileNotFoundError:
        raise CheckpointRejected(f"there is no checkpoint in {folder}; {advice}") from None
    except OSError as error:
        raise CheckpointRejected(f"{folder / _LATEST} cannot be read: {error.strerror}") from error
    if not _NAME.fullmatch(name):
        raise CheckpointRejected(
            f"{folder / _LATEST} holds {name!r}, which is no checkpoint's name; "
            "resume from a directory with --resume CHECKPOINT"
        )
    return folder / name


def _described(folder: Path) -> dict[str, tuple[int, int]]:
    """Size and CRC-32 of every file of the checkpoint: each rank reads those that it wrote."""
    own = [*folder.glob(f"__{dist.get_rank()}_*")]
    if dist.get_rank() == 0:
        own.append(folder / ".metadata")
    here: Files | OSError
    try:
        here = manifest.describe(own)
    except OSError as error:
        here = error
    everyone = [here] * dist.get_world_size()
    dist.all_gather_object(everyone, here)
    files: dict[str, tuple[int, int]] = {}
    for each in everyone:
        if isinstance(each, OSError):
            raise each
        files.update(each)
    return files


def _require_whole(path: Path, files: Files) -> None:
    """Refuse a checkpoint with a damaged file, on every rank; the ranks share the files."""
    rank, size = dist.get_rank(), dist.get_world_size()
    own = dict([*sorted(files.items())][rank::size])
    everyone = [""] * size
    dist.all_gather_object(everyone, manifest.damage(path, own))
    if damage := next(filter(None, everyone), ""):
        raise manifest.rejection(path, damage)


def _on_first_rank(act: Callable[[], None]) -> None:
    """Call ``act`` on rank 0; the other ranks return after it, and fail if it failed."""
    failure: list[BaseException | None] = [None]
    if dist.get_rank() == 0:
        try:
            act()
        except OSError as error:
            failure[0] = error
    dist.broadcast_object_list(failure, src=0)
    if failure[0] is not None:
        raise failure[0]


def _cause(error: BaseException) -> str:
    """The failure of the first rank that failed, on one line."""
    if isinstance(error, CheckpointException):
        _, (error, _) = min(error.failures.items())
    return " ".join(f"{type(error).__name__}: {error}".split())


def _remove(folder: Path) -> None:
    if folder.exists():
        shutil.rmtree(folder)


def _write_pointer(pointer: Path, name: str) -> None:
    """Let the file ``pointer`` hold ``name``, atomically, and sync it and its folder to disk."""
    written = pointer.with_suffix(".writing")
    written.unlink(missing_ok=True)  # left by a run that was killed
    written.write_text(name + "\n", encoding="utf-8")
    _fsync(written)
    written.rename(pointer)
    _fsync(pointer.parent)


def _fsync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
