"""`python -m gyre_client` is the `gyre` command."""

import sys

from gyre_protos.program import run_program


def main() -> int:
    """Runs one command and returns its exit status."""
    return run_program("gyre", _run)


def _run() -> int:
    # Imported late: the imports take a while, in which a user may press Ctrl-C.
    from gyre_client.command import cli  # noqa: PLC0415

    return cli.main()


if __name__ == "__main__":
    sys.exit(main())
