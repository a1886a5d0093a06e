"""Prints the test files that the last change touches and that `make test` does not run whole.

The change is all since the merge base with `origin/main`. Where HEAD is that commit or there is no
such branch, it is the last day's commits, or at least the last one; `GYRE_BASE` names another base.
Changed tests come first, then the folders of `.ci/touched.txt` to which most changed files lead.
"""

import os
import re
import subprocess
import sys
from collections import Counter
from datetime import datetime, timedelta
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def main() -> None:
    """Print the files, one a line; what was compared goes to standard error."""
    base = find_base()
    changed = git("diff", "--name-only", base).splitlines() if base else ["tests/conftest.py"]
    files = [each for each in touched(changed) if each not in selected()]
    since = f"{base[:12]}: {len(changed)} changed files" if base else "a base that is not here"
    print(f"since {since} touch {len(files)} test files beyond `make test`", file=sys.stderr)
    print(*files, sep="\n", end="\n" if files else "")


def git(*arguments: str) -> str:
    """The output of a git command; empty if it fails."""
    return subprocess.run(
        ["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=False
    ).stdout.strip()


def find_base() -> str:
    """The commit to compare with; empty if this clone has none."""
    head = git("rev-parse", "HEAD")
    if named := os.environ.get("GYRE_BASE"):
        return git("rev-parse", "--verify", f"{named}^{{commit}}")
    base = git("merge-base", "origin/main", "HEAD")
    if base and base != head:
        return base
    day_before = datetime.fromisoformat(git("log", "-1", "--format=%cI")) - timedelta(days=1)
    older = git("rev-list", "-1", f"--before={day_before.isoformat()}", "HEAD")
    return older or git("rev-parse", "--verify", "HEAD~1")


def touched(changed: list[str]) -> list[str]:
    """The test files for these changed files, in the order in which they are to run."""
    lines = (ROOT / ".ci" / "touched.txt").read_text().splitlines()
    table = {
        path: folders
        for path, *folders in (
            line.partition("#")[0].split() for line in lines if line.partition("#")[0].strip()
        )
    }
    first: list[str] = []
    weights: Counter[str] = Counter()
    for name in changed:
        if re.fullmatch(r"tests/.*/test_\w+\.py", name):
            first += [name] if (ROOT / name).exists() else []
        elif name.startswith("tests/"):
            weights[str(Path(name).parent)] += 1
        else:
            matching = [path for path in table if name.startswith(path)]
            weights.update(table[max(matching, key=len)] if matching else [])
    folders = sorted(weights, key=lambda folder: (-weights[folder], folder))
    return list(
        dict.fromkeys([*sorted(first), *(file for each in folders for file in tests_in(each))])
    )


def tests_in(path: str) -> list[str]:
    """The test files of a folder, sorted; a file is itself."""
    found = [ROOT / path] if path.endswith(".py") else sorted((ROOT / path).rglob("test_*.py"))
    return [each.relative_to(ROOT).as_posix() for each in found]


def selected() -> set[str]:
    """The test files that `make test` runs whole."""
    lines = (ROOT / "tests" / "selected.txt").read_text().splitlines()
    whole = {line for line in lines if line.startswith("tests/") and "::" not in line}
    left_out = {
        line.partition("=")[2].partition("::")[0]
        for line in lines
        if line.startswith(("--ignore=", "--deselect="))
    }
    return {file for path in whole for file in tests_in(path)} - left_out


if __name__ == "__main__":
    main()
