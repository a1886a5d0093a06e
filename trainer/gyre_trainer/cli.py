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
from functools import partial

from gyre_client.errors import GyreError
from gyre_protos.program import internal_error
from gyre_protos.text import printable

from gyre_trainer.commands.parser import parse
from gyre_trainer.errors import ConfigError, RingError, TrainError
from gyre_trainer.training.launcher import FailurePipe, Launcher, explained


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command, or one rank of a launcher or torchrun; return the exit status."""
    try:
        options = parse(arguments)
        if "RANK" in os.environ and options.be_rank:
            _require_rank(options)
            return _be_rank(options)
        config = options.read(options)
        if not options.be_rank:
            print(options.show(config, options))
            return int(getattr(options, "status", 0))
        config.require_divisible(options.nproc)
        options.prepare(config, options)
    except TrainError as error:
        print(f"gyre-train: error: {_one_line(error)}", file=sys.stderr)
        return 2
    # Before the fork, so once for all ranks. Torch imports dynamo when it makes an optimizer.
    for module in (options.imports, "torch._dynamo"):
        importlib.import_module(module)
    try:
        return Launcher(options.nproc).run(partial(_be_rank, options))
    except OSError as error:
        print(f"gyre-train: the ranks cannot be started: {error.strerror}", file=sys.stderr)
        return 1


def _require_rank(options: argparse.Namespace) -> None:
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


def _be_rank(options: argparse.Namespace, pipe: FailurePipe | None = None) -> int:
    """Run as a rank. A failure ends the process at once, so that no rank waits for it."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    try:
        options.be_rank(options.read(options), options)
    except Exception as error:
        rank, is_expected = os.environ["RANK"], isinstance(error, TrainError | GyreError)
        status = 2 if is_expected and not isinstance(error, RingError) else 1
        text = _one_line(error) if is_expected else explained(error) or internal_error(error)
        if pipe is None:
            print(f"gyre-train: rank {rank}: {text}", file=sys.stderr)
        elif status == 2:
            pipe.send(status, f"error: {text}")
        else:  # that of a ring begins with the rank at fault
            pipe.send(status, text if is_expected else f"rank {rank}: {text}")
        sys.stdout.flush()
        sys.stderr.flush()
        _abort_rings()
        os._exit(status)
    return 0


def _abort_rings() -> None:
    """Abort the process groups of this rank's rings, so that hops on a device end."""
    if registry := sys.modules.get("gyre_trainer.comm.ring"):
        registry.abort_all()


def _one_line(error: Exception) -> str:
    """The error's text on one line, without characters that a terminal would obey."""
    return printable(" ".join(str(error).split()))
