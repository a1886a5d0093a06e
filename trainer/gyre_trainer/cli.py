"""The command `gyre-train`.

Each subcommand imports its modules when it runs, so that what is refused is refused at once.

Exit status: 0 when the run is complete; 2 for an error that the user can correct (flags,
configuration, a checkpoint or a dataset that does not fit, files that cannot be written), with one
sentence about it; 128 + N after signal N; otherwise 1, with the name of the rank at fault, or with
a traceback where the trainer itself is wrong.
"""

import argparse
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import shtab

from gyre_trainer import __version__, actions
from gyre_trainer.errors import TrainError
from gyre_trainer.training.launcher import one_line


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command, or one rank of torchrun; return the exit status."""
    options = parse(arguments)
    try:
        status: int = options.act(options)
    except TrainError as error:
        print(f"gyre-train: error: {one_line(error)}", file=sys.stderr)
        return 2
    return status


def _above_0(kind: Callable[[str], float], most: float) -> Callable[[str], float]:
    """The type of an argument: a number above 0, up to ``most``."""

    def number(text: str) -> float:
        if not 0 < (value := kind(text)) <= most:
            raise argparse.ArgumentTypeError(f"{text} is not above 0 and up to {most}")
        return value

    return number


_count = _above_0(int, 65_536)  # more ranks or steps would keep a machine busy for ever
_rate = _above_0(float, sys.float_info.max)


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Parse the command line; an error ends the process with status 2, as argparse does."""
    parser = argparse.ArgumentParser(
        prog="gyre-train", description="Train with Rotated Tensor Parallelism on a Gyre dataset."
    )
    parser.add_argument("--version", action="version", version=f"gyre-train {__version__}")
    shtab.add_argument_to(parser)
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    def add(name: str, about: str) -> argparse.ArgumentParser:
        summary = f"{about[0].upper()}{about[1:]}."
        return commands.add_parser(name, help=about, description=summary)

    _add_run(add("run", "run a training configuration to its end"))
    _add_eval(add("eval", "print a checkpoint's loss and perplexity on a whole dataset"))
    _add_export(add("export", "write a checkpoint's model in the layout of transformers"))
    _add_plan(add("plan", "show what each module becomes, and what a step costs a rank"))
    _add_check(add("check", "compare rotated ranks with one process on this machine's devices"))
    return parser.parse_args(arguments)


def _add_run(run: argparse.ArgumentParser) -> None:
    _add_config(run)
    _add_nproc(run)
    resumes = run.add_mutually_exclusive_group()
    resumes.add_argument(
        "--resume",
        nargs="?",
        const=actions.LATEST,
        metavar="CHECKPOINT",
        help="continue from a checkpoint directory, or from the run's latest",
    )
    resumes.add_argument(
        "--resume-if-any",
        action="store_true",
        help="continue from the run's latest checkpoint, or start if there is none yet; "
        "for a service that restarts",
    )
    run.add_argument(
        "--init-from",
        type=Path,
        metavar="DIR",
        help="begin at step 0 with the weights of a folder that `gyre-train export` or "
        "transformers wrote",
    )
    run.set_defaults(act=actions.run)


def _add_eval(evaluates: argparse.ArgumentParser) -> None:
    _add_config(evaluates)
    _add_nproc(evaluates)
    evaluates.add_argument(
        "--weights",
        type=Path,
        metavar="DIR",
        help="a checkpoint's directory (default: the run's latest), or a folder that "
        "`gyre-train export` or transformers wrote",
    )
    evaluates.add_argument("--json", action="store_true", help="print one JSON object")
    evaluates.set_defaults(act=actions.evaluate)


def _add_export(exports: argparse.ArgumentParser) -> None:
    exports.add_argument(
        "run", type=Path, metavar="RUN", help="a run directory, or a checkpoint's directory"
    )
    exports.add_argument("out", type=Path, metavar="DIR", help="the folder to write")
    exports.add_argument(
        "--dtype",
        choices=("float32", "bfloat16"),
        default="float32",
        help="of the weights in the files (default float32, as they were trained)",
    )
    _add_nproc(exports)
    exports.set_defaults(act=actions.export)


def _add_plan(plan: argparse.ArgumentParser) -> None:
    plan.add_argument("config", type=Path, nargs="?", metavar="CONFIG.toml")
    _add_set(plan)
    plan.add_argument(
        "--ranks",
        type=_count,
        default=4,
        help="number of ranks of the job; this machine needs none of them (default 4)",
    )
    of_model = plan.add_argument_group("a model of transformers instead of CONFIG.toml")
    of_model.add_argument(
        "--model", metavar="PATH", help="a folder with config.json, or that file; needs no weights"
    )
    of_model.add_argument("--sequence", type=_above_0(int, 2**20), help="tokens of a sample")
    of_model.add_argument("--batch", type=_count, help="samples of all ranks in a step")
    rates = plan.add_argument_group("the ranks")
    rates.add_argument(
        "--operations-per-s",
        type=_rate,
        metavar="RATE",
        help="floating-point operations of a rank (default: measured here)",
    )
    rates.add_argument(
        "--bytes-per-s",
        type=_rate,
        metavar="RATE",
        help="bytes that a rank sends inside a host (default: a copy in this machine's memory)",
    )
    rates.add_argument(
        "--bytes-per-s-between",
        type=_rate,
        metavar="RATE",
        help="bytes that a host sends to another one, by one link for all its ranks",
    )
    rates.add_argument(
        "--ranks-per-host", type=_count, default=8, help="ranks of a host (default 8)"
    )
    rates.add_argument(
        "--memory", type=_rate, metavar="GIB", help="of a rank; chooses the fastest that fits"
    )
    plan.add_argument("--json", action="store_true", help="print one JSON object")
    plan.set_defaults(act=actions.plan)


def _add_check(check: argparse.ArgumentParser) -> None:
    check.add_argument(
        "--device", choices=("cpu", "cuda"), required=True, help="where all ranks compute"
    )
    check.add_argument(
        "--rows",
        type=int,
        choices=range(1, 9),
        nargs="+",
        metavar="N",
        help="these rows of the table alone",
    )
    check.add_argument("--quick", action="store_true", help="a few models of each row")
    check.add_argument("--json", action="store_true", help="JSON instead of a table")
    check.set_defaults(act=actions.check)


def _add_config(command: argparse.ArgumentParser) -> None:
    command.add_argument("config", type=Path, metavar="CONFIG.toml")
    _add_set(command)


def _add_set(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="SECTION.KEY=VALUE",
        help="override one value of the configuration; repeatable",
    )


def _add_nproc(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "--nproc",
        type=_count,
        default=1,
        help="ranks to start on this machine (default 1; not under torchrun)",
    )
