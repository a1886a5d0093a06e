"""Resolves each `pip install` that a message names, next to torch and transformers 5.

Nothing is installed. Where a message fills in the extra, every extra is resolved.
"""

import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
NAME = PROJECT["name"]
COMMAND = re.compile(r"pip install (?:--[\w-]+ )*(\"[^\"]+\"|'[^']+'|[\w.\[\]=<>,-]+)")
DEADLINE_S = 600


def main() -> int:
    """Print a line for each requirement; 1 if one cannot be resolved."""
    requirements = sorted(set(told()))
    status = 0
    for requirement in requirements:
        error = unresolved(requirement)
        print(f"{requirement}: {error or 'ok'}", flush=True)
        status |= bool(error)
    return status


def told() -> Iterator[str]:
    """The requirements that messages of the packages name."""
    extras = PROJECT["optional-dependencies"]
    for package in ("client", "daemon", "protos", "trainer"):
        for path in (ROOT / package).rglob("*.py"):
            for named in COMMAND.findall(path.read_text()):
                requirement = named.strip("\"'.")
                is_filled_in = "{" in requirement
                yield from (f"{NAME}[{each}]" for each in extras) if is_filled_in else [requirement]


def unresolved(requirement: str) -> str:
    """Why pip cannot install it; empty if it can."""
    wanted = requirement.replace(NAME, str(ROOT), 1)
    pins = (ROOT / "constraints.txt").read_text().split()
    (torch,) = (each for each in pins if each.startswith("torch=="))
    command = [sys.executable, "-m", "pip", "install", "--dry-run", "--ignore-installed", "--quiet"]
    try:
        done = subprocess.run(
            [*command, torch, "transformers>=5", wanted],
            capture_output=True,
            text=True,
            timeout=DEADLINE_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return f"pip found no versions in {DEADLINE_S} s"
    errors = [line for line in done.stderr.splitlines() if "ERROR" in line]
    return "" if done.returncode == 0 else (errors or ["pip failed"])[-1]


if __name__ == "__main__":
    sys.exit(main())
