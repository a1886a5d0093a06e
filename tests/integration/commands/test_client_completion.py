"""Completion for shells, of all three commands."""

import subprocess
import sys

import pytest

COMMANDS = {"gyre": "gyre_client", "gyred": "gyre_daemon", "gyre-train": "gyre_trainer"}
WORDS = {
    "gyre": ["describe", "--io-block"],
    "gyred": ["check-config", "--memory-budget"],
    "gyre-train": ["plan", "--nproc"],
}


def completion(command: str, shell: str) -> str:
    asked = [sys.executable, "-m", COMMANDS[command], "--print-completion", shell]
    return subprocess.run(asked, capture_output=True, text=True, timeout=120, check=True).stdout


@pytest.mark.parametrize("command", COMMANDS)
def test_bash_accepts_the_completion_script(command: str) -> None:
    script = completion(command, "bash")
    checked = subprocess.run(
        ["bash", "-n"], input=script, capture_output=True, text=True, timeout=60, check=False
    )
    assert (checked.returncode, checked.stderr) == (0, "")
    assert all(word in script for word in WORDS[command])


def test_bash_completes_a_subcommand() -> None:
    """As the shell itself asks for it: with the words of the line, and where the cursor is."""
    script = completion("gyre", "bash")
    asking = (
        "COMP_WORDS=(gyre desc); COMP_CWORD=1; "
        '$(complete -p gyre | sed "s/.*-F \\([^ ]*\\).*/\\1/"); echo "${COMPREPLY[@]}"'
    )
    answer = subprocess.run(
        ["bash"],
        input=f"{script}\n{asking}\n",
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert answer.stdout.split() == ["describe"]


@pytest.mark.parametrize("shell", ["zsh", "tcsh"])
def test_other_shells_have_a_completion_script(shell: str) -> None:
    script = completion("gyre", shell)
    assert "describe" in script
