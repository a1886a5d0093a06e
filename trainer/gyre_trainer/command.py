"""The command `gyre-train`. Where the extra `trainer` is missing it says so in one line; otherwise it is `gyre_trainer.cli`."""

import sys

from gyre_trainer import __version__


def main() -> int:
    """Run the command line and return its exit status: 2 where the extra is missing."""
    try:
        from gyre_trainer import cli  # noqa: PLC0415  (it imports what only the extra brings)

        return cli.main()
    except ModuleNotFoundError as error:
        return _do_without(error)


def _do_without(error: ModuleNotFoundError) -> int:
    if sys.argv[1:] == ["--version"]:
        print(f"gyre-train {__version__}")
        return 0
    print(f'gyre-train needs {error.name}, which is not installed: pip install "gyre-ml[trainer]"', file=sys.stderr)
    return 2
