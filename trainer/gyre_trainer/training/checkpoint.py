"""Checkpoints of a run: complete or absent, whichever process dies while one is written.

    RUN/checkpoints/
      step-00000120/        once it is complete and on disk; before, .writing-step-00000120
        checkpoint.json     step, model, and the loader's cursor: read and checked first
        .metadata, *.distcp model and optimizer, each shard by its owner
      latest                the name of the newest one

Model and optimizer shards are DTensors, so a checkpoint loads at any world size.
"""

import json
import os
import shutil
from base64 import b64decode, b64encode
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.checkpoint.stateful import Stateful

from gyre_trainer.errors import CheckpointFailed, CheckpointRejected
from gyre_trainer.training.gpt import GPTConfig

FORMAT = 1
_MANIFEST = "checkpoint.json"
_LATEST = "latest"
_OPTIONS = StateDictOptions(flatten_optimizer_state_dict=True)


@dataclass(frozen=True, slots=True)
class TrainState:
    """Everything that a checkpoint restores.

    The loader's `state_dict` has opaque bytes by name, the same on every rank.
    """

    model: torch.nn.Module
    optimizer: torch.optim.Optimizer
    loader: Stateful


class Checkpoints:
    """The checkpoints of a run. Every method is collective, with equal arguments on all ranks."""

    def __init__(self, folder: Path, keep: int, model_config: GPTConfig) -> None:
        self._folder = folder
        self._keep = keep
        self._model_config = model_config

    def save(self, state: TrainState, step: int) -> None:
        """Write a checkpoint that resumes at ``step``: on return it is durable and `latest`.

        The oldest checkpoints beyond ``keep`` are deleted.

        Raises:
            CheckpointFailed: the disk is full or cannot be written; `latest` keeps its value.
        """
        name = f"step-{step:08}"
        unfinished = self._folder / f".writing-{name}"
        model, optimizer = get_state_dict(state.model, state.optimizer, options=_OPTIONS)
        manifest = {
            "format": FORMAT,
            "step": step,
            "world_size": dist.get_world_size(),
            "model": asdict(self._model_config),
            "loader": {
                name: b64encode(value).decode() for name, value in state.loader.state_dict().items()
            },
        }
        try:
            _on_first_rank(lambda: _remove(unfinished))
            save({"model": model, "optimizer": optimizer}, checkpoint_id=unfinished)
            _on_first_rank(lambda: self._publish(unfinished, name, manifest))
        except (OSError, CheckpointException) as error:
            raise CheckpointFailed(
                f"checkpoint {self._folder / name} cannot be written: {_cause(error)}"
            ) from error

    def load(self, state: TrainState, path: Path) -> int:
        """Restore ``state`` in place from the checkpoint directory ``path``.

        A checkpoint of this run becomes `latest` again.

        Returns:
            The step to continue with.

        Raises:
            CheckpointRejected: it is not a checkpoint, is incomplete, or has another format or
                model; the message says what differs.
        """
        manifest = read_manifest(path, self._model_config)
        model, optimizer = get_state_dict(state.model, state.optimizer, options=_OPTIONS)
        try:
            load({"model": model, "optimizer": optimizer}, checkpoint_id=path)
        except CheckpointException as error:
            raise CheckpointRejected(
                f"checkpoint {path} cannot be read: {_cause(error)}"
            ) from error
        set_state_dict(
            state.model,
            state.optimizer,
            model_state_dict=model,
            optim_state_dict=optimizer,
            options=_OPTIONS,
        )
        state.loader.load_state_dict(
            {name: b64decode(value) for name, value in manifest["loader"].items()}
        )
        if path.absolute().parent == self._folder.absolute():
            _on_first_rank(lambda: _write_pointer(self._folder / _LATEST, path.name))
        return int(manifest["step"])

    def _publish(self, unfinished: Path, name: str, manifest: Mapping[str, Any]) -> None:
        (unfinished / _MANIFEST).write_text(json.dumps(manifest, indent=1) + "\n", encoding="utf-8")
        _fsync(unfinished / _MANIFEST)
        _fsync(unfinished)
        complete = self._folder / name
        _remove(complete)  # left by a run that was resumed from an earlier step
        unfinished.rename(complete)
        _write_pointer(self._folder / _LATEST, name)
        not_newer = sorted(path for path in self._folder.glob("step-*") if path.name <= name)
        for old in not_newer[: -self._keep]:
            shutil.rmtree(old)
        for torn in self._folder.glob(".writing-*"):
            shutil.rmtree(torn)


def exists(folder: Path) -> bool:
    """Whether a run's folder of checkpoints has a complete one."""
    return (folder / _LATEST).exists()


def latest(folder: Path) -> Path:
    """The newest complete checkpoint in a run's folder of checkpoints.

    Raises:
        CheckpointRejected: there is none.
    """
    try:
        return folder / (folder / _LATEST).read_text(encoding="utf-8").strip()
    except FileNotFoundError:
        raise CheckpointRejected(
            f"there is no checkpoint in {folder}; begin the run without --resume, "
            "or with --resume-if-any"
        ) from None


def read_manifest(path: Path, model_config: GPTConfig) -> dict[str, Any]:
    """The manifest of the checkpoint directory ``path``.

    Raises:
        CheckpointRejected: it is not a checkpoint, or has another format or model; the message
            says what differs.
    """
    try:
        manifest: dict[str, Any] = json.loads((path / _MANIFEST).read_text(encoding="utf-8"))
        written = manifest["format"]
    except (OSError, ValueError, KeyError, TypeError):
        raise CheckpointRejected(
            f"{path} is not a checkpoint: it has no readable {_MANIFEST}"
        ) from None
    if written != FORMAT:
        raise CheckpointRejected(
            f"checkpoint {path} has format {written}, but this version reads format {FORMAT}"
        )
    saved, wanted = manifest["model"], asdict(model_config)
    differences = [
        f"{key} is {saved.get(key)} there and {wanted.get(key)} here"
        for key in sorted(saved.keys() | wanted.keys())
        if saved.get(key) != wanted.get(key)
    ]
    if differences:
        raise CheckpointRejected(f"checkpoint {path} is of another model: {', '.join(differences)}")
    return manifest


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
