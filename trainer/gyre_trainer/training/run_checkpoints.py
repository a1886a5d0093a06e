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
import json
import os
import pickle
import re
import shutil
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path, PosixPath
from typing import Annotated, Any, ClassVar, TypeVar

import msgspec
import torch
import torch.distributed as dist
from gyre_client.transport.arguments import is_location
from msgspec import Meta
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
from gyre_trainer.shards.tensor_files import open_regular, read_regular
from gyre_trainer.training.config import DataConfig, ModelConfig, OptimizerConfig, TrainConfig
from gyre_trainer.training.config_file import AtLeast0, AtLeast1, require_regular

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
        """Read a value other than a tensor: numbers, texts, and lists and dicts of these."""
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


FORMAT = 2
MANIFEST = "checkpoint.json"
_CHUNK_BYTES = 2**22

# Keys of models that earlier checkpoints lack, with their meaning.
_LATER_KEYS = {"inside_documents": False}

Files = Mapping[str, tuple[int, int]]
"""Of each file, by its name: the bytes that it has, and their CRC-32."""

_LATEST = "latest"
_NAME = re.compile(r"step-[0-9]{8,}")
_OPTIONS = StateDictOptions(flatten_optimizer_state_dict=True)
Result = TypeVar("Result")


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """The keys of `checkpoint.json`: the model, where the run resumes, and all files.

    Attributes:
        step: the step that the run resumes at.
        world_size: the number of ranks that wrote it.
        model: the keys of the configuration of the model.
        optimizer: as `OptimizerConfig.kind` names it.
        loader: the loader's state; as JSON in base64.
        files: the other files of the directory.
        data: arguments of `gyre rewind` for the data; see `data_of`.
    """

    step: AtLeast0
    world_size: AtLeast1
    model: dict[str, Any]
    loader: dict[str, bytes]
    files: dict[Annotated[str, Meta(pattern=r"\A[\w.]+\Z")], tuple[Annotated[int, Meta(ge=0)], int]]
    data: dict[str, str] = field(default_factory=dict)
    optimizer: str = "adamw"  # all that earlier versions had
    format: int = FORMAT


def data_of(data: DataConfig) -> dict[str, str]:
    """The dataset, its format and its options, the latter as JSON.

    A path is absolute. The table `storage` is left out, since it may hold credentials.
    """
    place = data.dataset
    if is_location(place, data.format or None) and "://" not in place:
        place = str(Path(place).expanduser().absolute())
    options = {key: value for key, value in data.options.items() if key != "storage"}
    return {"dataset": place, "format": data.format, "options": json.dumps(options, default=str)}


def read_manifest(
    path: Path, model_config: ModelConfig, optimizer: OptimizerConfig | None = None
) -> Manifest:
    """The manifest of the checkpoint directory ``path``.

    Args:
        path: of the checkpoint.
        model_config: of the model that takes its values.
        optimizer: of the run that goes on from there; None where only weights are read.

    Raises:
        CheckpointRejected: it is not a checkpoint, or has another format, model or optimizer, or is
            damaged; the message names the difference, or names the key.
    """
    manifest = parse_manifest(path)
    wanted = json.loads(json.dumps(asdict(model_config)))
    later = {key: value for key, value in _LATER_KEYS.items() if key in wanted}
    saved = later | manifest.model
    differences = [
        f"{key} is {saved.get(key)!r:.40} there and {wanted.get(key)!r} here"
        for key in sorted(saved.keys() | wanted.keys())
        if saved.get(key) != wanted.get(key) or type(saved.get(key)) is not type(wanted.get(key))
    ]
    if differences:
        raise CheckpointRejected(f"checkpoint {path} is of another model: {', '.join(differences)}")
    if optimizer is not None and optimizer.kind != manifest.optimizer:
        raise CheckpointRejected(
            f"checkpoint {path} has states of {manifest.optimizer!r:.40}, but `optimizer.name` "
            f"says {optimizer.kind}. Resume with the same one, or begin with --init-from and the "
            "exported weights."
        )
    if not manifest.loader.get("cursor"):
        raise _rejection(path / MANIFEST, "`loader` has no `cursor`, the place in the data")
    if ".metadata" not in manifest.files:
        raise _rejection(path / MANIFEST, "`files` has no `.metadata`")
    return manifest


def parse_manifest(path: Path) -> Manifest:
    """The manifest of the checkpoint directory ``path``, of any model.

    Raises:
        CheckpointRejected: it is not a checkpoint, or has another format, or is damaged.
    """
    try:
        table = json.loads(read_regular(path / MANIFEST))
        written = table["format"]
    except (OSError, ValueError, RecursionError, LookupError, TypeError):
        raise CheckpointRejected(
            f"{path} is not a checkpoint: it has no readable {MANIFEST}"
        ) from None
    if written != FORMAT:
        raise CheckpointRejected(
            f"checkpoint {path} has format {written!r:.40}, but this version reads format {FORMAT}"
        )
    try:
        manifest = msgspec.convert(table, Manifest)
    except msgspec.ValidationError as error:
        raise _rejection(path / MANIFEST, str(error)) from None
    manifest.model.pop("objective", None)  # a key of earlier versions
    return manifest


def damage(path: Path, files: Files) -> str:
    """The fault of the first damaged one of ``files`` in the directory ``path``, or ""."""
    for name, (size, crc) in files.items():
        try:
            there, found = _measured(path / name, size)
            if there != size:
                return f"the file {name} has {there} bytes instead of {size}"
        except FileNotFoundError:
            return f"the file {name} is missing"
        except OSError as error:
            return f"the file {name} cannot be read: {error.strerror}"
        if found != crc:
            return f"the file {name} is damaged: its CRC-32 is {found:08x} instead of {crc:08x}"
    return ""


def _rejection(path: Path, why: str) -> CheckpointRejected:
    """The error for a checkpoint that cannot be loaded."""
    return CheckpointRejected(
        f"checkpoint {path} cannot be read: {why}; resume from another one with --resume CHECKPOINT"
    )


def _measured(path: Path, expected: int | None = None) -> tuple[int, int]:
    """The size and the CRC-32; a file of another size than the expected one is not read."""
    size = crc = 0
    with open_regular(path) as file:
        there = os.fstat(file.fileno()).st_size
        if expected not in (None, there):
            return there, 0
        while chunk := file.read(_CHUNK_BYTES):
            size, crc = size + len(chunk), zlib.crc32(chunk, crc)
    return size, crc


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
                loader=state.loader.state_dict(),
                files=_described(unfinished),
                data=data_of(self._config.data),
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
        saved = read_manifest(path, self._config.model, self._config.optimizer)
        _require_whole(path, saved.files)
        given = [
            {name: group[name] for name in each.defaults}
            for each in state.optimizers
            for group in each.param_groups
        ]
        names = SafeReader(path).read_metadata().state_dict_metadata
        keep_saved_states(state.model, state.optimizers, names)
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
        state.loader.load_state_dict(saved.loader)
        if path.absolute().parent == self._folder.absolute():
            _on_first_rank(lambda: _write_pointer(self._folder / _LATEST, path.name))
        return saved.step

    def _publish(self, unfinished: Path, name: str, written: Manifest) -> None:
        text = msgspec.json.format(msgspec.json.encode(written), indent=1)
        (unfinished / MANIFEST).write_bytes(text + b"\n")
        _fsync(unfinished / MANIFEST)
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
    saved = read_manifest(path, model_config)
    _require_whole(path, saved.files)
    state = get_model_state_dict(model)
    _load({"model": state}, path)
    set_model_state_dict(model, state)
    return saved.step


def _load(state: dict[str, Any], path: Path) -> None:
    try:
        load(state, storage_reader=SafeReader(path), planner=SafePlanner())
    except CheckpointException as error:
        raise _rejection(path, _cause(error)) from error


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
    everyone = _on_all_ranks(lambda: {path.name: _measured(path) for path in own})
    return {name: each for files in everyone for name, each in files.items()}


def _require_whole(path: Path, files: Files) -> None:
    """Refuse a checkpoint with a damaged file, on every rank; the ranks share the files."""
    own = dict([*sorted(files.items())][dist.get_rank() :: dist.get_world_size()])
    everyone = _on_all_ranks(lambda: damage(path, own))
    if found := next(filter(None, everyone), ""):
        raise _rejection(path, found)


def _on_first_rank(act: Callable[[], None]) -> None:
    """Call ``act`` on rank 0; the other ranks return after it, and fail if it failed."""
    _on_all_ranks(lambda: act() if dist.get_rank() == 0 else None)


def _on_all_ranks(act: Callable[[], Result]) -> list[Result]:
    """What ``act`` returns on each rank; all ranks fail if one failed."""
    here: Result | OSError
    try:
        here = act()
    except OSError as error:
        here = error
    everyone: list[Any] = [here] * dist.get_world_size()
    dist.all_gather_object(everyone, here)
    for each in everyone:
        if isinstance(each, OSError):
            raise each
    return everyone


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
