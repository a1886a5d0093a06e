"""Where a run's figures are drawn next to its history: TensorBoard, and Weights & Biases.

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


def _is_installed(library: str) -> bool:
    """Whether it can be imported; a folder of that name, where runs are kept, is no library."""
    spec = importlib.util.find_spec(library)
    return spec is not None and spec.origin is not None


class Boards:
    """The boards of a run, which begins at a step or continues there.

    Steps count from 1: a figure of step 1 is known when one step was taken. A resumed run continues
    its run of Weights & Biases, whose own count of steps cannot go back, so the step is a figure of
    its own there, and the axis of all others.
    """

    def __init__(
        self, boards: BoardsConfig, out: Path, first_step: int, settings: Mapping[str, Any]
    ) -> None:
        """Open them.

        Args:
            boards: which ones.
            out: the run directory.
            first_step: figures there of this step and later ones are of lost weights.
            settings: the run's configuration, as others may read it.

        Raises:
            ConfigError: as `require_installed`.
            RecordsFailed: Weights & Biases does not begin the run.
        """
        require_installed(boards)
        self._tensorboard: Any = None
        self._wandb: Any = None
        if boards.tensorboard and _is_installed("tensorboard"):
            # A second, and only for rank 0 of runs that have it.
            from torch.utils.tensorboard import SummaryWriter  # noqa: PLC0415

            self._tensorboard = SummaryWriter(str(out / "tensorboard"), purge_step=first_step + 1)
        if boards.wandb_project:
            with _telling_of_wandb() as wandb:
                self._wandb = wandb.init(
                    project=boards.wandb_project,
                    id=_run_id(out / _RUN_ID),
                    name=out.name,
                    dir=str(out),
                    config=dict(settings),
                    resume="allow",
                    settings=wandb.Settings(console="off", silent=True),
                )
            self._wandb.define_metric("step", hidden=True)
            self._wandb.define_metric("*", step_metric="step")

    def add(self, step: int, figures: Mapping[str, float]) -> None:
        """Draw figures of the weights after ``step`` steps."""
        if self._tensorboard:
            for name, value in figures.items():
                self._tensorboard.add_scalar(name, value, step)
        if self._wandb:
            with _telling_of_wandb():
                self._wandb.log({"step": step, **figures})

    def close(self) -> None:
        """Write what is left."""
        if self._tensorboard:
            self._tensorboard.close()
        if self._wandb:
            with _telling_of_wandb():
                self._wandb.finish()


def _run_id(path: Path) -> str:
    if not path.exists():
        path.write_text(secrets.token_hex(4) + "\n", encoding="utf-8")
    return path.read_text(encoding="utf-8").strip()


@contextmanager
def _telling_of_wandb() -> Iterator[Any]:
    """A context with the library, whose errors become `RecordsFailed`."""
    import wandb  # noqa: PLC0415  # seconds, and only for rank 0 of runs that have it

    try:
        yield wandb
    except wandb.Error as error:
        raise RecordsFailed(
            f"Weights & Biases: {error}; set WANDB_MODE=offline, or `boards.wandb_project` to "
            '"", and continue with --resume-if-any'
        ) from error
