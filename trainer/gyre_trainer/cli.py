"""The command `gyre-train`.

Exit status: 0 when the run is complete; 2 for what the user can mend (flags, configuration, a checkpoint or a dataset that does
not fit), told in one sentence; 128 + N after signal N; else 1, with a traceback.
"""

import argparse
import os
import signal
import sys
import traceback
from collections.abc import Sequence
from pathlib import Path

from gyre_client.errors import GyreError

from gyre_trainer import checkpoint
from gyre_trainer.config import TrainConfig, load
from gyre_trainer.errors import RingError, TrainError
from gyre_trainer.last_words import Launcher
from gyre_trainer.launch import Launch
from gyre_trainer.train import train

LATEST = "latest"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return its exit status; as a rank, started by a launcher or by torchrun, be that rank."""
    launcher = Launcher.of(os.environ)
    if launcher:
        launcher.die_with()
    options = _parse(arguments)
    if launcher or "RANK" in os.environ:
        return _be_rank(options, launcher)
    try:
        config = load(options.config, options.set)
        config.require_divisible(options.nproc)
        _checkpoint(config, options.resume)
    except TrainError as error:
        print(f"gyre-train: error: {error}", file=sys.stderr)
        return 2
    command = [sys.executable, "-m", "gyre_trainer", *(sys.argv[1:] if arguments is None else arguments)]
    return Launch(command, options.nproc).run()


def _be_rank(options: argparse.Namespace, launcher: Launcher | None) -> int:
    """Train as one rank; after a failure the process ends at once, for a rank that lingers keeps the others waiting."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    try:
        config = load(options.config, options.set)
        train(config, _checkpoint(config, options.resume))
    except Exception as error:
        mendable = isinstance(error, TrainError | GyreError) and not isinstance(error, RingError)
        status, text = (2, str(error)) if mendable else (1, traceback.format_exc())
        if launcher:
            launcher.tell(status, text)
        else:
            print(f"gyre-train: rank {os.environ['RANK']}: {text}", file=sys.stderr)
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)
    return 0


def _checkpoint(config: TrainConfig, resume: str | None) -> Path | None:
    """The checkpoint directory that `--resume` means."""
    if resume is None:
        return None
    path = checkpoint.latest(Path(config.run.out) / "checkpoints") if resume == LATEST else Path(resume)
    checkpoint.read_manifest(path, config.model)
    return path


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="gyre-train", description="Train with Rotated Tensor Parallelism on a Gyre dataset.")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    run = commands.add_parser("run", help="run a training configuration to its end")
    run.add_argument("config", type=Path, metavar="CONFIG.toml")
    run.add_argument(
        "--nproc", type=_positive, default=1, help="ranks to start on this machine (default 1; not under torchrun)"
    )
    run.add_argument(
        "--resume",
        nargs="?",
        const=LATEST,
        metavar="CHECKPOINT",
        help="go on from a checkpoint directory, or from the run's latest",
    )
    run.add_argument(
        "--set", action="append", default=[], metavar="SECTION.KEY=VALUE", help="override one value of the configuration"
    )
    return parser.parse_args(arguments)


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, but is {value}")
    return value
