"""From a checkpoint of a run to the layout of `transformers`, each rank with its own shards."""

from dataclasses import dataclass
from pathlib import Path

import torch

from gyre_trainer import pretrained
from gyre_trainer.errors import ConfigError
from gyre_trainer.training import manifest, run_checkpoints
from gyre_trainer.training.build import restored
from gyre_trainer.training.config import TrainConfig, build
from gyre_trainer.training.library import LibraryConfig
from gyre_trainer.training.rank_context import join_job


@dataclass(frozen=True, slots=True)
class Export:
    """An export and its folder.

    Attributes:
        run: a run directory, whose newest checkpoint is taken, or a checkpoint's directory.
        out: the folder to write.
        dtype: of the weights in the files.
    """

    run: Path
    out: Path
    dtype: torch.dtype

    @property
    def checkpoint(self) -> Path:
        """The checkpoint's directory.

        Raises:
            CheckpointRejected: the run has none.
        """
        if (self.run / manifest.NAME).exists():
            return self.run
        advice = "name the directory of a run with one, or that of a checkpoint"
        return run_checkpoints.latest(self.run / "checkpoints", advice)

    def config(self, num_ranks: int) -> TrainConfig:
        """A configuration of the checkpoint's model, for ranks that only load and save it.

        Raises:
            CheckpointRejected: it is no checkpoint.
            ConfigError: its model is none of transformers.
        """
        model = manifest.model_of(self.checkpoint)
        sections = {
            "run": {"out": str(self.run), "steps": 1, "device": "cpu"},
            "data": {"dataset": "none", "batch_size": num_ranks, "sequence_length": 1},
            "model": {key: value for key, value in model.items() if value},
        }
        config = build(TrainConfig, sections)
        if not isinstance(config.model, LibraryConfig):
            raise ConfigError(
                f"{self.checkpoint} is of a GPT of Gyre's own, which transformers does not know; "
                "only models of `model.pretrained` or `model.config` are exported"
            )
        return config


def export(config: TrainConfig, given: Export) -> None:
    """Write the model of a checkpoint, as one of the ranks that the environment names.

    Raises:
        CheckpointRejected: the checkpoint is damaged.
        CheckpointFailed: a file cannot be written.
    """
    with join_job(config.run) as context:
        model, _ = restored(config, context, given.checkpoint)
        pretrained.save_pretrained(model, given.out, dtype=given.dtype)
