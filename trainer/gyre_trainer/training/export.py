"""From a checkpoint of a run to the layout of `transformers`, each rank with its own shards."""

from pathlib import Path

import torch

from gyre_trainer import pretrained
from gyre_trainer.errors import ConfigError
from gyre_trainer.training.build import restored
from gyre_trainer.training.config import TrainConfig, build
from gyre_trainer.training.library import LibraryConfig
from gyre_trainer.training.rank_context import join_job
from gyre_trainer.training.run_checkpoints import MANIFEST, latest, parse_manifest


def checkpoint_of(run: Path) -> Path:
    """The checkpoint's directory that ``run`` is, or the newest one of the run's directory."""
    if (run / MANIFEST).exists():
        return run
    advice = "name the directory of a run with one, or that of a checkpoint"
    return latest(run / "checkpoints", advice)


def config_of(checkpoint: Path, num_ranks: int) -> TrainConfig:
    """A configuration of a checkpoint's model, for ranks that only load and save it.

    Raises:
        CheckpointRejected: it is no checkpoint.
        ConfigError: its model is none of transformers.
    """
    sections = {
        "run": {"out": str(checkpoint), "steps": 1, "device": "cpu"},
        "data": {"dataset": "none", "batch_size": num_ranks, "sequence_length": 1},
        "model": {key: value for key, value in parse_manifest(checkpoint).model.items() if value},
    }
    config = build(TrainConfig, sections)
    if not isinstance(config.model, LibraryConfig):
        raise ConfigError(
            f"{checkpoint} is of a GPT of Gyre's own, which transformers does not know; "
            "only models of `model.pretrained` or `model.config` are exported"
        )
    return config


def export(config: TrainConfig, checkpoint: Path, out: Path, dtype: str) -> None:
    """Write a checkpoint's model, as one of the ranks that the environment names.

    Args:
        config: as `config_of` gives it.
        checkpoint: the directory.
        out: the folder to write.
        dtype: of the weights in the files.

    Raises:
        CheckpointRejected: the checkpoint is damaged.
        CheckpointFailed: a file cannot be written.
    """
    with join_job(config.run) as context:
        model, _ = restored(config, context, checkpoint)
        pretrained.save_pretrained(model, out, dtype=getattr(torch, dtype))
