"""The command `gyred`, or one line that says which package is missing."""

import gc
import sys

from gyre_protos.program import foreign_command, run_program

from gyre_daemon import __version__


def main() -> None:
    """Run the command line; exits 2 where the extra `daemon` is not installed."""
    sys.exit(run_program("gyred", _run, needs_output=False))


def _run() -> int:
    if warning := foreign_command():
        print(f"gyred: {warning}", file=sys.stderr)
    gc.disable()  # passes over imports, which stay, are an eighth of the imports' time
    try:
        from gyre_daemon import cli  # noqa: PLC0415  # only the extra brings its imports
    except ModuleNotFoundError as error:
        if sys.argv[1:] == ["--version"]:
            print(f"gyred {__version__}")
            return 0
        text = (
            f'gyred needs {error.name}, which is not installed. Run pip install "gyre-ml[daemon]".'
        )
        print(text, file=sys.stderr)
        return 2
    gc.freeze()
    gc.enable()
    cli.main()
    return 0


if __name__ == "__main__":
    main()
