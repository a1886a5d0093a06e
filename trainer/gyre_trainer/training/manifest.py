"""`checkpoint.json`: the model of a checkpoint, where it resumes, and which files it has.

Every file has its size and its CRC-32 there, so damage is noticed before anything is loaded.
"""

import json
import os
import zlib
from base64 import b64decode, b64encode
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Annotated, Any

import msgspec
from gyre_client.transport.arguments import is_location
from msgspec import Meta

from gyre_trainer.errors import CheckpointRejected
from gyre_trainer.shards.tensor_files import open_regular, read_regular
from gyre_trainer.training.config import DataConfig, ModelConfig, OptimizerConfig
from gyre_trainer.training.config_file import AtLeast0, AtLeast1

FORMAT = 2
NAME = "checkpoint.json"
_CHUNK_BYTES = 2**22

# Keys of models that earlier checkpoints lack, with their meaning.
_LATER_KEYS = {"inside_documents": False}

Files = Mapping[str, tuple[int, int]]
"""Of each file, by its name: the bytes that it has, and their CRC-32."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """The file's keys.

    Attributes:
        step: the step that the run resumes at.
        world_size: the number of ranks that wrote it.
        model: the keys of the configuration of the model.
        optimizer: as `OptimizerConfig.kind` names it.
        loader: the loader's state, in base64.
        files: the other files of the directory.
        data: arguments of `gyre rewind` for the data; see `data_of`.
    """

    step: AtLeast0
    world_size: AtLeast1
    model: dict[str, Any]
    loader: dict[str, str]
    files: dict[Annotated[str, Meta(pattern=r"\A[\w.]+\Z")], tuple[Annotated[int, Meta(ge=0)], int]]
    data: dict[str, str] = field(default_factory=dict)
    optimizer: str = "adamw"  # all that earlier versions had
    format: int = FORMAT

    def loader_state(self) -> dict[str, bytes]:
        """The loader's state."""
        return {name: b64decode(value, validate=True) for name, value in self.loader.items()}

    def write(self, path: Path) -> None:
        """Write the manifest as JSON."""
        path.write_text(json.dumps(asdict(self), indent=1) + "\n", encoding="utf-8")


def data_of(data: DataConfig) -> dict[str, str]:
    """The dataset, its format and its options, the latter as JSON.

    A path is absolute. The table `storage` is left out, since it may hold credentials.
    """
    place = data.dataset
    if is_location(place, data.format or None) and "://" not in place:
        place = str(Path(place).expanduser().absolute())
    options = {key: value for key, value in data.options.items() if key != "storage"}
    return {"dataset": place, "format": data.format, "options": json.dumps(options, default=str)}


def encoded(state: Mapping[str, bytes]) -> dict[str, str]:
    """A loader's state as text."""
    return {name: b64encode(value).decode() for name, value in state.items()}


def model_of(path: Path) -> dict[str, Any]:
    """The keys of the configuration of the model in the checkpoint directory ``path``.

    Raises:
        CheckpointRejected: it is not a checkpoint, or has another format, or is damaged.
    """
    return _converted(path).model


def read(
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
    manifest = _converted(path)
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
    try:
        if not manifest.loader_state().get("cursor"):
            raise _damaged(path, "`loader` has no `cursor`, the place in the data")
    except ValueError as error:
        raise _damaged(path, f"`loader` is not base64: {error}") from None
    if ".metadata" not in manifest.files:
        raise _damaged(path, "`files` has no `.metadata`")
    return manifest


def _converted(path: Path) -> Manifest:
    try:
        table = json.loads(read_regular(path / NAME))
        written = table["format"]
    except (OSError, ValueError, RecursionError, LookupError, TypeError):
        raise CheckpointRejected(f"{path} is not a checkpoint: it has no readable {NAME}") from None
    if written != FORMAT:
        raise CheckpointRejected(
            f"checkpoint {path} has format {written!r:.40}, but this version reads format {FORMAT}"
        )
    try:
        manifest = msgspec.convert(table, Manifest)
    except msgspec.ValidationError as error:
        raise _damaged(path, str(error)) from None
    manifest.model.pop("objective", None)  # a key of earlier versions
    return manifest


def describe(paths: Iterable[Path]) -> dict[str, tuple[int, int]]:
    """Size and CRC-32 of each file, by its name.

    Raises:
        OSError: a file cannot be read.
    """
    return {path.name: _measured(path) for path in paths}


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


def rejection(path: Path, why: str) -> CheckpointRejected:
    """The error for a checkpoint that cannot be loaded."""
    return CheckpointRejected(
        f"checkpoint {path} cannot be read: {why}; resume from another one with --resume CHECKPOINT"
    )


def _damaged(path: Path, why: str) -> CheckpointRejected:
    return rejection(path / NAME, why)


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
