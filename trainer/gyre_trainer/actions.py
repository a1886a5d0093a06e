# ruff: noqa: PLC0415  # modules that take seconds are imported by the command that needs them
"""The commands of `gyre-train`: each takes its parsed arguments, and returns the exit status.

What ranks need is checked and imported before they are forked.
"""

import argparse
import json
import os
import sys
from functools import partial
from pathlib import Path

from gyre_trainer.errors import ConfigError
from gyre_trainer.training.boards import require_installed
from gyre_trainer.training.config import TrainConfig, load, of_model
from gyre_trainer.training.config_file import make_folder
from gyre_trainer.training.launcher import on_ranks

LATEST = "latest"


def run(options: argparse.Namespace) -> int:
    """Train."""
    config = load(options.config, options.set)
    num_ranks = _num_ranks(options)
    config.require_divisible(num_ranks)
    if "RANK" not in os.environ:  # else the first rank checks it
        require_installed(config.boards)
    if options.init_from is not None and options.resume is not None:
        raise ConfigError(
            "--init-from begins a run at step 0 with the weights of a folder, and --resume "
            "continues one with all that its checkpoint has. Leave one of them out."
        )
    if options.init_from is not None and not options.init_from.is_dir():
        raise ConfigError(
            f"--init-from {options.init_from} is no folder; name one that `gyre-train export` or "
            "transformers wrote"
        )
    checkpoint = _checkpoint(config, options)
    make_folder(Path(config.run.out), "run.out")
    from gyre_trainer.training.train import train

    work = partial(
        train,
        config,
        checkpoint,
        init_from=options.init_from,
        may_restart=options.resume_if_any,
    )
    return on_ranks(num_ranks, work)


def evaluate(options: argparse.Namespace) -> int:
    """Print the loss on a dataset."""
    num_ranks = _num_ranks(options)
    config = load(options.config, options.set)
    if not config.eval.dataset:
        raise ConfigError(
            "`eval.dataset` is not set. Name the dataset to evaluate on: --set eval.dataset=NAME"
        )
    from gyre_trainer.training import evaluation, run_checkpoints

    weights: Path = options.weights or run_checkpoints.latest(
        Path(config.run.out) / "checkpoints", "name weights with --weights"
    )
    if not weights.is_dir():
        raise ConfigError(f"--weights {weights} is no folder")
    if (weights / run_checkpoints.MANIFEST).exists():
        run_checkpoints.read_manifest(weights, config.model)
    config = evaluation.on_any_ranks(config, num_ranks)
    return on_ranks(num_ranks, partial(evaluation.evaluate, config, weights, as_json=options.json))


def export(options: argparse.Namespace) -> int:
    """Write a checkpoint's model, each rank its part."""
    from gyre_trainer.training import export as exported

    num_ranks = _num_ranks(options)
    checkpoint = exported.checkpoint_of(options.run)
    config = exported.config_of(checkpoint, num_ranks)
    make_folder(options.out, "DIR")
    work = partial(exported.export, config, checkpoint, options.out, options.dtype)
    return on_ranks(num_ranks, work)


def plan(options: argparse.Namespace) -> int:
    """Print the rule of each module, and the cost of a step, as tables or as JSON."""
    of_run = options.model, options.sequence, options.batch
    if options.config is not None and not any(of_run):
        config = load(options.config, options.set)
    elif options.config is None and all(of_run):
        config = of_model(*of_run, options.set)
    else:
        raise ConfigError("plan needs either CONFIG.toml, or --model, --sequence and --batch")
    from gyre_trainer.accounting.plan import Rates, make_plan

    given = Rates(
        options.operations_per_s or 0.0,
        options.bytes_per_s or 0.0,
        options.bytes_per_s_between,
        options.ranks_per_host,
    )
    made = make_plan(config, options.ranks, given)
    memory_bytes = options.memory * 2**30 if options.memory else None
    text = (
        json.dumps(made.as_object(memory_bytes), indent=1)
        if options.json
        else made.text(memory_bytes)
    )
    print(text)
    return 0


def check(options: argparse.Namespace) -> int:
    """Compare rotated ranks with one process here; 1 if a row failed."""
    from gyre_trainer.check import report

    report.require_device(options.device)
    numbers = options.rows or range(1, report.NUM_ROWS + 1)
    rows = []
    for row in report.Checker(options.device, options.quick).rows(numbers):
        print(f"row {row.number}: {row.status} ({row.took_s:.0f} s)", file=sys.stderr, flush=True)
        rows.append(row)
    print(report.as_json(options.device, rows) if options.json else report.table(rows))
    return int(any(row.status == "failed" for row in rows))


def _num_ranks(options: argparse.Namespace) -> int:
    """The number of ranks, those of torchrun or those to start here."""
    if "RANK" not in os.environ:
        return int(options.nproc)
    for name in ("WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        if not os.environ.get(name, "").strip():
            raise ConfigError(
                f"RANK is set, but {name} is not; start the ranks with torchrun, or unset RANK and "
                "use --nproc"
            )
    if options.nproc > 1:
        raise ConfigError(
            f"--nproc is {options.nproc}, but this process is one rank already: RANK is set; "
            "leave --nproc out, or unset RANK"
        )
    try:
        return int(os.environ["WORLD_SIZE"])
    except ValueError:
        raise ConfigError(f"WORLD_SIZE is {os.environ['WORLD_SIZE']!r}, and no number") from None


def _checkpoint(config: TrainConfig, options: argparse.Namespace) -> Path | None:
    """The checkpoint directory to resume from; None to begin."""
    if options.resume is None and not options.resume_if_any:
        return None
    if options.resume == "":
        raise ConfigError("--resume is empty; name a checkpoint directory, or write --resume alone")
    from gyre_trainer.training import run_checkpoints

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
        run_checkpoints.read_manifest(path, config.model, config.optimizer)
    return path
