"""The command `gyre-train`.

Each subcommand imports its modules when it runs, so that what is refused is refused at once.

Exit status: 0 when the run is complete; 2 for an error that the user can correct (flags,
configuration, a checkpoint or a dataset that does not fit, files that cannot be written), with one
sentence about it; 128 + N after signal N; otherwise 1, with the name of the rank at fault, or with
a traceback where the trainer itself is wrong.
"""

import argparse
import importlib
import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

import shtab
from gyre_client.errors import GyreError
from gyre_common.program import internal_error

from gyre_trainer import __version__
from gyre_trainer.argument_types import positive, rate
from gyre_trainer.errors import ConfigError, RingError, TrainError
from gyre_trainer.training.config import TrainConfig, load, of_model
from gyre_trainer.training.launcher import Launcher
from gyre_trainer.training.out_of_memory import explained
from gyre_trainer.training.rank_failure import FailurePipe
from gyre_trainer.training.rank_variables import require_rank
from gyre_trainer.training.records.boards import require_installed
from gyre_trainer.training.run_folder import require_writable

if TYPE_CHECKING:
    from gyre_trainer.training.export import Export

LATEST = "latest"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command, or one rank of a launcher or torchrun; return the exit status."""
    try:
        return _main(arguments)
    finally:
        _flush_output()


def _main(arguments: Sequence[str] | None) -> int:
    try:
        options = _parse(arguments)
        if "RANK" in os.environ and options.be_rank:
            _require_rank(options)
            return _be_rank(options, None)
        config = options.read(options)
        if not options.be_rank:
            _print(options.show(config, options))
            return 0
        config.require_divisible(options.nproc)
        options.prepare(config, options)
    except TrainError as error:
        print(f"gyre-train: error: {_one_line(error)}", file=sys.stderr)
        return 2
    # Before the fork, so once for all ranks. Torch imports dynamo when it makes an optimizer.
    for module in (options.imports, "torch._dynamo"):
        importlib.import_module(module)
    launcher = Launcher(options.nproc)
    try:
        pipe = launcher.fork()
    except OSError as error:
        print(f"gyre-train: the ranks cannot be started: {error.strerror}", file=sys.stderr)
        return 1
    return _be_rank(options, pipe) if pipe else launcher.wait()


def _print(text: str) -> None:
    try:
        print(text)
    except OSError as error:
        _output_failed(error)


def _flush_output() -> None:
    """Write out what was printed, for the interpreter would fail to do it with a traceback."""
    try:
        if sys.stdout is not None:
            sys.stdout.flush()
    except OSError as error:
        _output_failed(error)


def _output_failed(error: OSError) -> NoReturn:
    """End with status 1. Where the reader of a pipe has ended, such as `head`, nobody is told."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    if not isinstance(error, BrokenPipeError):
        print(f"gyre-train: error: cannot write the output: {error.strerror}", file=sys.stderr)
    sys.exit(1)


def _require_rank(options: argparse.Namespace) -> None:
    require_rank(os.environ)
    if options.nproc > 1:
        raise ConfigError(
            f"--nproc is {options.nproc}, but this process is one rank already: RANK is set; "
            "leave --nproc out, or unset RANK"
        )


def _be_rank(options: argparse.Namespace, pipe: FailurePipe | None) -> int:
    """Run as a rank. A failure ends the process at once, so that no rank waits for it."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    try:
        options.be_rank(options.read(options), options)
    except Exception as error:
        is_expected = isinstance(error, TrainError | GyreError)
        status = 2 if is_expected and not isinstance(error, RingError) else 1
        told = "" if is_expected else explained(error)
        text = _one_line(error) if is_expected else told or internal_error(error)
        if pipe and told:
            pipe.send(status, f"rank {os.environ['RANK']}: {told}", names_rank=True)
        elif pipe:
            pipe.send(status, text, names_rank=isinstance(error, RingError))
        else:
            print(f"gyre-train: rank {os.environ['RANK']}: {text}", file=sys.stderr)
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)
    return 0


def _one_line(error: Exception) -> str:
    """The error's text on one line, without characters that a terminal would obey."""
    words = " ".join(str(error).split())
    return "".join(each if each.isprintable() else repr(each)[1:-1] for each in words)


def _prepare_run(config: TrainConfig, options: argparse.Namespace) -> None:
    require_writable(Path(config.run.out), "run.out")
    require_installed(config.boards)
    _require_beginning(options)
    _checkpoint(config, options)


def _require_beginning(options: argparse.Namespace) -> None:
    """Check that a run that begins with given weights begins."""
    if options.init_from is None:
        return
    if options.resume is not None:
        raise ConfigError(
            "--init-from begins a run at step 0 with the weights of a folder, and --resume "
            "continues one with all that its checkpoint has; leave one of them out"
        )
    if not options.init_from.is_dir():
        raise ConfigError(
            f"--init-from {options.init_from} is no folder; name one that `gyre-train export` or "
            "transformers wrote"
        )


def _prepare_trace(_config: TrainConfig, options: argparse.Namespace) -> None:
    require_writable(options.out, "--out")


def _run(config: TrainConfig, options: argparse.Namespace) -> None:
    # Torch's distributed packages take two seconds.
    from gyre_trainer.training.train import train  # noqa: PLC0415

    _require_beginning(options)  # under torchrun nobody has
    train(
        config,
        _checkpoint(config, options),
        init_from=options.init_from,
        may_restart=options.resume_if_any,
    )


def _trace(config: TrainConfig, options: argparse.Namespace) -> None:
    # Torch's distributed packages take two seconds.
    from gyre_trainer.training.trace import trace  # noqa: PLC0415

    trace(config, options.out, options.steps)


def _export(config: TrainConfig, options: argparse.Namespace) -> None:
    # Torch's distributed packages take two seconds.
    from gyre_trainer.training.export import export  # noqa: PLC0415

    export(config, _given_export(options))


def _read_export(options: argparse.Namespace) -> TrainConfig:
    return _given_export(options).config(int(os.environ.get("WORLD_SIZE", options.nproc)))


def _given_export(options: argparse.Namespace) -> "Export":
    # Torch's distributed packages take two seconds.
    import torch  # noqa: PLC0415

    from gyre_trainer.training.export import Export  # noqa: PLC0415

    return Export(options.run, options.out, getattr(torch, options.dtype))


def _plan(config: TrainConfig, options: argparse.Namespace) -> str:
    # FSDP2 and fake tensors take a second to import.
    from gyre_trainer.accounting import plan_tables  # noqa: PLC0415

    given = plan_tables.GivenRates(options.operations_per_s, options.bytes_per_s)
    return plan_tables.text(
        config, options.ranks, given, options.memory * 2**30 if options.memory else None
    )


def _memory(config: TrainConfig, options: argparse.Namespace) -> str:
    # FSDP2 and fake tensors take a second to import.
    from gyre_trainer.accounting import plan_tables  # noqa: PLC0415

    # Only this command draws.
    from gyre_trainer.accounting.memory_plot import draw  # noqa: PLC0415

    require_writable(options.out.parent, "--out")
    costs = plan_tables.step_costs(config, options.ranks)
    try:
        draw(costs, f"One step of {options.config.stem} on rank 0 of {options.ranks}", options.out)
    except OSError as error:
        raise ConfigError(f"--out is {options.out}: {error.strerror}") from error
    return plan_tables.peaks(costs)


def _checkpoint(config: TrainConfig, options: argparse.Namespace) -> Path | None:
    """The checkpoint directory to resume from; None to begin."""
    if options.resume is None and not options.resume_if_any:
        return None
    if options.resume == "":
        raise ConfigError("--resume is empty; name a checkpoint directory, or write --resume alone")
    # This imports torch.distributed.checkpoint, which takes a second.
    from gyre_trainer.training.checkpoints import manifest, run_checkpoints  # noqa: PLC0415

    folder = Path(config.run.out) / "checkpoints"
    if options.resume_if_any:
        path = run_checkpoints.latest(folder) if run_checkpoints.exists(folder) else None
    elif options.resume == LATEST:
        path = run_checkpoints.latest(folder)
    else:
        path = Path(options.resume)
    if path:
        manifest.read(path, config.model)
    return path


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="gyre-train", description="Train with Rotated Tensor Parallelism on a Gyre dataset."
    )
    parser.add_argument("--version", action="version", version=f"gyre-train {__version__}")
    shtab.add_argument_to(parser)
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    _add_run(commands.add_parser("run", help="run a training configuration to its end"))
    _add_trace(
        commands.add_parser(
            "trace", help="profile a few steps on random tokens; every rotation step is named"
        )
    )
    _add_export(
        commands.add_parser(
            "export", help="write a checkpoint's model in the layout of transformers"
        )
    )
    shows = commands.add_parser(
        "plan", help="show what each module becomes, and what a step costs a rank"
    )
    _add_plan(shows)
    shows = commands.add_parser(
        "memory", help="draw the live bytes of one step, beside FSDP2 and DDP"
    )
    _add_shows(shows)
    shows.add_argument(
        "--out", type=Path, default=Path("memory.png"), metavar="PNG", help="default memory.png"
    )
    shows.set_defaults(show=_memory)
    return parser.parse_args(arguments)


def _add_run(run: argparse.ArgumentParser) -> None:
    _add_config(run)
    _add_nproc(run)
    resumes = run.add_mutually_exclusive_group()
    resumes.add_argument(
        "--resume",
        nargs="?",
        const=LATEST,
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
    run.set_defaults(be_rank=_run, imports="gyre_trainer.training.train", prepare=_prepare_run)


def _add_trace(traces: argparse.ArgumentParser) -> None:
    _add_config(traces)
    _add_nproc(traces)
    traces.add_argument(
        "--out",
        type=Path,
        default=Path("trace"),
        metavar="FOLDER",
        help="where rank-*.json are written (default trace)",
    )
    traces.add_argument("--steps", type=positive, default=3, help="steps to record (default 3)")
    traces.set_defaults(
        be_rank=_trace, imports="gyre_trainer.training.trace", prepare=_prepare_trace
    )


def _add_export(exports: argparse.ArgumentParser) -> None:
    exports.add_argument(
        "run", type=Path, metavar="RUN", help="a run directory, or a checkpoint's directory"
    )
    exports.add_argument("out", type=Path, metavar="DIR", help="the folder that is written")
    exports.add_argument(
        "--dtype",
        choices=("float32", "bfloat16"),
        default="float32",
        help="of the weights in the files (default float32, as they were trained)",
    )
    _add_nproc(exports)
    exports.set_defaults(
        be_rank=_export,
        imports="gyre_trainer.training.export",
        read=_read_export,
        prepare=lambda _, options: require_writable(options.out, "DIR"),
    )


def _add_plan(plan: argparse.ArgumentParser) -> None:
    plan.add_argument("config", type=Path, nargs="?", metavar="CONFIG.toml")
    _add_set(plan)
    _add_ranks(plan)
    of_model = plan.add_argument_group("a model of transformers instead of CONFIG.toml")
    of_model.add_argument(
        "--model", metavar="PATH", help="a folder with config.json, or that file; needs no weights"
    )
    of_model.add_argument("--sequence", type=positive, help="tokens of a sample")
    of_model.add_argument("--batch", type=positive, help="samples of all ranks in a step")
    rates = plan.add_argument_group("the ranks")
    rates.add_argument(
        "--operations-per-s",
        type=rate,
        metavar="RATE",
        help="floating-point operations of a rank (default: measured here)",
    )
    rates.add_argument(
        "--bytes-per-s",
        type=rate,
        metavar="RATE",
        help="bytes that a rank sends (default: a copy in this machine's memory)",
    )
    rates.add_argument(
        "--memory", type=rate, metavar="GIB", help="of a rank; chooses the fastest that fits"
    )
    plan.set_defaults(show=_plan, be_rank=None, read=_read_plan)


def _read_plan(options: argparse.Namespace) -> TrainConfig:
    """The configuration, or that of a run of the given model."""
    flags = {"--model": options.model, "--sequence": options.sequence, "--batch": options.batch}
    if options.config is not None:
        given = [flag for flag, value in flags.items() if value is not None]
        if given:
            raise ConfigError(f"{given[0]} says what CONFIG.toml says; leave one of them out")
        return load(options.config, options.set)
    missing = [flag for flag, value in flags.items() if value is None]
    if missing:
        raise ConfigError(f"plan needs CONFIG.toml, or a model: {', '.join(missing)} missing")
    return of_model(options.model, options.sequence, options.batch, options.set)


def _add_shows(shows: argparse.ArgumentParser) -> None:
    """Options of the commands without ranks, which compute on fake tensors."""
    _add_config(shows)
    _add_ranks(shows)
    shows.set_defaults(be_rank=None)


def _add_ranks(shows: argparse.ArgumentParser) -> None:
    shows.add_argument(
        "--ranks",
        type=positive,
        default=4,
        help="number of ranks of the job; this machine needs none of them (default 4)",
    )


def _add_config(command: argparse.ArgumentParser) -> None:
    command.add_argument("config", type=Path, metavar="CONFIG.toml")
    command.set_defaults(read=lambda options: load(options.config, options.set))
    _add_set(command)


def _add_set(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="SECTION.KEY=VALUE",
        help="override one value of the configuration",
    )


def _add_nproc(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "--nproc",
        type=positive,
        default=1,
        help="ranks to start on this machine (default 1; not under torchrun)",
    )
