# ruff: noqa: PLC0415  # modules that take seconds are imported by the command that needs them
"""The commands of `gyre-train`, from parsed arguments."""

import argparse
import json
import os
import sys
from pathlib import Path

from gyre_trainer.errors import ConfigError
from gyre_trainer.training.boards import require_installed
from gyre_trainer.training.config import TrainConfig, load, of_model
from gyre_trainer.training.config_file import make_folder

LATEST = "latest"


def prepare_run(config: TrainConfig, options: argparse.Namespace) -> None:
    """Check, before any rank starts, what a run reads and needs, and make its folder."""
    require_installed(config.boards)
    _require_beginning(options)
    _checkpoint(config, options)
    make_folder(Path(config.run.out), "run.out")


def _require_beginning(options: argparse.Namespace) -> None:
    """Check that a run that begins with given weights begins."""
    if options.init_from is None:
        return
    if options.resume is not None:
        raise ConfigError(
            "--init-from begins a run at step 0 with the weights of a folder, and --resume "
            "continues one with all that its checkpoint has. Leave one of them out."
        )
    if not options.init_from.is_dir():
        raise ConfigError(
            f"--init-from {options.init_from} is no folder; name one that `gyre-train export` or "
            "transformers wrote"
        )


def run(config: TrainConfig, options: argparse.Namespace) -> None:
    """Train, as one rank."""
    from gyre_trainer.training.train import train

    _require_beginning(options)  # torchrun has not
    train(
        config,
        _checkpoint(config, options),
        init_from=options.init_from,
        may_restart=options.resume_if_any,
    )


def evaluate(config: TrainConfig, options: argparse.Namespace) -> None:
    """Print the loss on a dataset, as one rank."""
    from gyre_trainer.training import evaluation

    evaluation.evaluate(config, weights_to_evaluate(config, options), as_json=options.json)


def read_eval(options: argparse.Namespace) -> TrainConfig:
    """The configuration, for as many ranks as there are."""
    from gyre_trainer.training.evaluation import on_any_ranks

    config = load(options.config, options.set)
    return on_any_ranks(config, int(os.environ.get("WORLD_SIZE", options.nproc)))


def weights_to_evaluate(config: TrainConfig, options: argparse.Namespace) -> Path:
    """The directory of the weights, checked before ranks start."""
    if not config.eval.dataset:
        raise ConfigError(
            "`eval.dataset` is not set. Name the dataset to evaluate on: --set eval.dataset=NAME"
        )
    from gyre_trainer.training import manifest, run_checkpoints

    path: Path = options.weights or run_checkpoints.latest(
        Path(config.run.out) / "checkpoints", "name weights with --weights"
    )
    if not path.is_dir():
        raise ConfigError(f"--weights {path} is no folder")
    if (path / manifest.NAME).exists():
        manifest.read(path, config.model)
    return path


def export(config: TrainConfig, options: argparse.Namespace) -> None:
    """Write this rank's part of a checkpoint's model."""
    from gyre_trainer.training import export as exported

    exported.export(config, options.run, options.out, options.dtype)


def read_export(options: argparse.Namespace) -> TrainConfig:
    """The configuration of the run whose model is exported."""
    from gyre_trainer.training.export import config_of

    return config_of(options.run, int(os.environ.get("WORLD_SIZE", options.nproc)))


def plan(config: TrainConfig, options: argparse.Namespace) -> str:
    """The rule of each module, and the cost of a step, as tables or as JSON."""
    from gyre_trainer.accounting.plan import Rates, make_plan

    given = Rates(
        options.operations_per_s or 0.0,
        options.bytes_per_s or 0.0,
        options.bytes_per_s_between,
        options.ranks_per_host,
    )
    made = make_plan(config, options.ranks, given)
    memory_bytes = options.memory * 2**30 if options.memory else None
    if options.json:
        return json.dumps(made.as_object(memory_bytes), indent=1)
    return made.text(memory_bytes)


def check(_config: None, options: argparse.Namespace) -> str:
    """Compare rotated ranks with one process here; sets the exit status."""
    from gyre_trainer.check import report

    report.require_device(options.device)
    numbers = options.rows or range(1, report.NUM_ROWS + 1)
    rows = []
    for row in report.Checker(options.device, options.quick).rows(numbers):
        print(f"row {row.number}: {row.status} ({row.took_s:.0f} s)", file=sys.stderr, flush=True)
        rows.append(row)
    options.status = int(any(row.status == "failed" for row in rows))
    return report.as_json(options.device, rows) if options.json else report.table(rows)


def _checkpoint(config: TrainConfig, options: argparse.Namespace) -> Path | None:
    """The checkpoint directory to resume from; None to begin."""
    if options.resume is None and not options.resume_if_any:
        return None
    if options.resume == "":
        raise ConfigError("--resume is empty; name a checkpoint directory, or write --resume alone")
    from gyre_trainer.training import manifest, run_checkpoints

    folder = Path(config.run.out) / "checkpoints"
    if options.resume_if_any:
        path = run_checkpoints.latest(folder) if run_checkpoints.exists(folder) else None
    elif options.resume == LATEST:
        path = run_checkpoints.latest(folder)
    else:
        path = Path(options.resume)
        is_own = path.absolute().parent.resolve() == folder.resolve()
        if run_checkpoints.exists(folder) and not is_own:
            raise ConfigError(
                f"{folder} has checkpoints, so a run that began at {path} could later go on from "
                "them. Continue theirs by --resume alone, or choose another `run.out`"
            )
    if path:
        manifest.read(path, config.model, config.optimizer)
    return path


def read_plan(options: argparse.Namespace) -> TrainConfig:
    """The configuration, or that of a run of the given model."""
    of_run = options.model, options.sequence, options.batch
    if options.config is not None and not any(of_run):
        return load(options.config, options.set)
    if options.config is not None or not all(of_run):
        raise ConfigError("plan needs either CONFIG.toml, or --model, --sequence and --batch")
    return of_model(*of_run, options.set)
