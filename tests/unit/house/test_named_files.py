"""Files that pages, comments and commands name are there."""

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]
TREES = "benchmarks", "client", "common", "daemon", "docs", "examples", "tests", "trainer"
# Results and decisions say what was so on their day; the changelog, what was so in a version.
DATED = "docs/benchmarks/", "docs/adr/", "CHANGELOG.md"
NAMED = re.compile(
    r"(?<![\w./,{-])((?:benchmarks|daemon|client|trainer|common|tests|examples)/[\w/]+\.\w+)"
)
COMMAND = re.compile(r"python -m (benchmarks(?:\.\w+)*)")


def texts() -> dict[str, str]:
    """The pages and the code, by their paths."""
    paths = [ROOT / name for name in ("README.md", "CONTRIBUTING.md", "pyproject.toml")]
    for tree in TREES:
        paths += [*(ROOT / tree).rglob("*.py"), *(ROOT / tree).rglob("*.md")]
    named = {path.relative_to(ROOT).as_posix(): path for path in paths}
    return {name: path.read_text() for name, path in named.items() if not name.startswith(DATED)}


def test_every_file_that_is_named_exists() -> None:
    found = {(name, path) for name, text in texts().items() for path in NAMED.findall(text)}
    found = {(name, path) for name, path in found if "NAME" not in path}  # a place for any name
    assert len(found) > 30
    assert {(name, path) for name, path in found if not (ROOT / path).exists()} == set()


def test_every_benchmark_that_is_named_exists() -> None:
    found = {(name, module) for name, text in texts().items() for module in COMMAND.findall(text)}
    assert len(found) > 50
    missing = {
        (name, module)
        for name, module in found
        if not (ROOT / f"{module.replace('.', '/')}.py").exists()
        and not (ROOT / module.replace(".", "/") / "__main__.py").exists()
    }
    assert missing == set()


def test_every_benchmark_with_a_command_is_listed() -> None:
    listed = set(COMMAND.findall((ROOT / "benchmarks/README.md").read_text()))
    commands = {
        path.relative_to(ROOT).with_suffix("").as_posix().replace("/", ".")
        for path in (ROOT / "benchmarks").rglob("*.py")
        if "__main__" in path.read_text() and path.name != "__main__.py"
    }
    assert commands == listed
