"""From a checkpoint of a run to the layout of `transformers`, each rank with its own shards."""

from pathlib import Path

import torch

from gyre_trainer import pretrained
from gyre_trainer.errors import ConfigError
from gyre_trainer.training import manifest, run_checkpoints
from gyre_trainer.training.build import restored
from gyre_trainer.training.config import TrainConfig, build
from gyre_trainer.training.library import LibraryConfig
from gyre_trainer.training.rank_context import join_job


def config_of(run: Path, num_ranks: int) -> TrainConfig:
    """A configuration of the model of a run, for ranks that only load and save it.

    Raises:
        CheckpointRejected: there is no checkpoint.
        ConfigError: its model is none of transformers.
    """
    checkpoint = _checkpoint_of(run)
    sections = {
        "run": {"out": str(run), "steps": 1, "device": "cpu"},
        "data": {"dataset": "none", "batch_size": num_ranks, "sequence_length": 1},
        "model": {key: value for key, value in manifest.model_of(checkpoint).items() if value},
    }
    config = build(TrainConfig, sections)
    if not isinstance(config.model, LibraryConfig):
        raise ConfigError(
            f"{checkpoint} is of a GPT of Gyre's own, which transformers does not know; "
            "only models of `model.pretrained` or `model.config` are exported"
        )
    return config


def export(config: TrainConfig, run: Path, out: Path, dtype: str) -> None:
    """Write the model of a run, as one of the ranks that the environment names.

    Args:
        config: as `config_of` gives it.
        run: a run directory, whose newest checkpoint is taken, or a checkpoint's directory.
        out: the folder to write.
        dtype: of the weights in the files.

    Raises:
        CheckpointRejected: the checkpoint is damaged.
        CheckpointFailed: a file cannot be written.
    """
    with join_job(config.run) as context:
        model, _ = restored(config, context, _checkpoint_of(run))
        pretrained.save_pretrained(model, out, dtype=getattr(torch, dtype))


def _checkpoint_of(run: Path) -> Path:
    if (run / manifest.NAME).exists():
        return run
    advice = "name the directory of a run with one, or that of a checkpoint"
    return run_checkpoints.latest(run / "checkpoints", advice)
