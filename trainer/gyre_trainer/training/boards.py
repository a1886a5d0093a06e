"""Where a run's figures are drawn beside its history: TensorBoard, and Weights & Biases.

The extra `boards` installs both. Only rank 0 opens them.
"""

import importlib.util
import secrets
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gyre_trainer.errors import ConfigError, RecordsFailed

_RUN_ID = "wandb-run"  # the file in the run directory that names the run


@dataclass(frozen=True, slots=True)
class BoardsConfig:
    """Where figures are drawn; `wandb_project` is "" for none."""

    tensorboard: bool = True
    wandb_project: str = ""


def require_installed(boards: BoardsConfig) -> None:
    """Check that wandb is there if it is wanted, without importing it.

    Raises:
        ConfigError: it is missing; the message names the extra that brings it.
    """
    if boards.wandb_project and not _is_installed("wandb"):
        raise ConfigError(
            "`boards.wandb_project` is set, but wandb is not installed. "
            "Run pip install 'gyre-ml[boards]'."
        )


def opened(
    boards: BoardsConfig, out: Path, first_step: int, settings: Mapping[str, Any]
) -> "list[_TensorBoard | _WeightsAndBiases]":
    """The boards of a run, which begins at ``first_step`` or continues there.

    Steps count from 1: a figure of step 1 is known when one step was taken.

    Args:
        boards: which ones.
        out: the run directory.
        first_step: figures that are there of this step and later ones are of lost weights.
        settings: the run's configuration, as others may read it.

    Raises:
        ConfigError: as `require_installed`.
        RecordsFailed: Weights & Biases does not begin the run.
    """
    require_installed(boards)
    found: list[_TensorBoard | _WeightsAndBiases] = []
    if boards.tensorboard and _is_installed("tensorboard"):
        found.append(_TensorBoard(out / "tensorboard", first_step))
    if boards.wandb_project:
        found.append(_WeightsAndBiases(boards.wandb_project, out, settings))
    return found


def _is_installed(library: str) -> bool:
    """Whether it can be imported; a folder of that name, where runs are kept, is no library."""
    spec = importlib.util.find_spec(library)
    return spec is not None and spec.origin is not None


class _TensorBoard:
    def __init__(self, folder: Path, first_step: int) -> None:
        # A second, and only for rank 0 of runs that have it.
        from torch.utils.tensorboard import SummaryWriter  # noqa: PLC0415

        self._writer = SummaryWriter(str(folder), purge_step=first_step + 1)

    def add(self, step: int, shown: Mapping[str, float]) -> None:
        for name, value in shown.items():
            self._writer.add_scalar(name, value, step)

    def close(self) -> None:
        self._writer.close()


class _WeightsAndBiases:
    """One run of a project, which a resumed run continues.

    Its own count of steps cannot go back, so the step is a figure of its own, and the axis of all
    others.
    """

    def __init__(self, project: str, out: Path, settings: Mapping[str, Any]) -> None:
        # Seconds, and only for rank 0 of runs that have it.
        import wandb  # noqa: PLC0415

        self._error: type[Exception] = wandb.Error
        path = out / _RUN_ID
        if not path.exists():
            path.write_text(secrets.token_hex(4) + "\n", encoding="utf-8")
        with self._telling():
            self._run: Any = wandb.init(
                project=project,
                id=path.read_text(encoding="utf-8").strip(),
                name=out.name,
                dir=str(out),
                config=dict(settings),
                resume="allow",
                settings=wandb.Settings(console="off", silent=True),
            )
        self._run.define_metric("step", hidden=True)
        self._run.define_metric("*", step_metric="step")

    def add(self, step: int, shown: Mapping[str, float]) -> None:
        with self._telling():
            self._run.log({"step": step, **shown})

    def close(self) -> None:
        with self._telling():
            self._run.finish()

    @contextmanager
    def _telling(self) -> Iterator[None]:
        try:
            yield
        except self._error as error:
            raise RecordsFailed(
                f"Weights & Biases: {error}; set WANDB_MODE=offline, or `boards.wandb_project` to "
                '"", and continue with --resume-if-any'
            ) from error
