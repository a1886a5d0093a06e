"""The command `gyred`. Where the extra `daemon` is not installed it says so in one line; otherwise it is `gyre_daemon.cli`."""

import sys

from gyre_daemon import __version__


def main() -> None:
    """Run the command line; exits 2 where the extra is missing."""
    try:
        from gyre_daemon import cli  # noqa: PLC0415  (it imports what only the extra brings)
    except ModuleNotFoundError as error:
        _do_without(error)
    else:
        cli.main()


def _do_without(error: ModuleNotFoundError) -> None:
    if sys.argv[1:] == ["--version"]:
        print(f"gyred {__version__}")
        return
    print(f'gyred needs {error.name}, which is not installed: pip install "gyre-ml[daemon]"', file=sys.stderr)
    sys.exit(2)
