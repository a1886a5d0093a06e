"""The entry point of `gyre-train`: `gyre_trainer.cli`, or one line if its packages are missing."""

import signal
import sys

from gyre_protos.program import run_program

from gyre_trainer import __version__


def main() -> int:
    """Run the command line and return its exit status: 2 where the extra is missing."""
    return run_program("gyre-train", _run, needs_output=False)


def _run() -> int:
    # Ctrl-C ends the process without a traceback; a launcher passes it on to its ranks instead.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    try:
        # This imports packages that only the extra `trainer` installs.
        from gyre_trainer import cli  # noqa: PLC0415

        return cli.main()
    except ModuleNotFoundError as error:
        return _do_without(error)


def _do_without(error: ModuleNotFoundError) -> int:
    if sys.argv[1:] == ["--version"]:
        print(f"gyre-train {__version__}")
        return 0
    problem = f"gyre-train needs {error.name}, which is not installed."
    print(f'{problem} Run pip install "gyre-ml[trainer]".', file=sys.stderr)
    return 2
