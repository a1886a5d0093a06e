"""A defect of a program is told in one sentence; only GYRE_TRACEBACK=1 shows where it is."""

import os
import subprocess
import sys

import pytest

# The program's own entry point, whose command line has a defect.
_RUN = """
import sys
from {module} import main
import {cli} as cli

def defect(*arguments):
    raise KeyError("x\\x1b[2J")

cli.main = defect
sys.exit(main())
"""
PROGRAMS = {
    "gyre": ("gyre_client.__main__", "gyre_client.command.cli"),
    "gyred": ("gyre_daemon.__main__", "gyre_daemon.cli"),
    "gyre-train": ("gyre_trainer.command", "gyre_trainer.cli"),
}


def run(program: str, **variables: str) -> subprocess.CompletedProcess[str]:
    module, cli = PROGRAMS[program]
    environment = {key: value for key, value in os.environ.items() if key != "GYRE_TRACEBACK"}
    return subprocess.run(
        [sys.executable, "-c", _RUN.format(module=module, cli=cli)],
        env=environment | variables,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )


@pytest.mark.parametrize("program", PROGRAMS)
def test_a_defect_is_one_sentence(program: str) -> None:
    done = run(program)
    assert done.returncode == 70
    assert done.stdout == ""
    assert done.stderr == (
        f"{program}: internal error: KeyError: 'x\\x1b[2J'; "
        "set GYRE_TRACEBACK=1 to see where, and report it\n"
    )


@pytest.mark.parametrize("program", PROGRAMS)
def test_whoever_asks_is_shown_where_it_is(program: str) -> None:
    done = run(program, GYRE_TRACEBACK="1")
    assert done.returncode == 70
    first, *traceback = done.stderr.splitlines()
    assert first == f"{program}: internal error: KeyError: 'x\\x1b[2J'; report it"
    assert traceback[0] == "Traceback (most recent call last):"
    assert "in defect" in traceback[-2]
