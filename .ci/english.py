"""Counts constructions that good English uses rarely, for each 1,000 words of the repository.

Prints a table and fails if a rate is above the one in `.ci/english.txt`. A change that lowers rates
stores them: `python .ci/english.py --store`. For "what", the aim is 1.5.

Also fails if less than nine in ten error messages and help texts say the problem, their first
sentence, in 120 characters. `python .ci/english.py --long` prints the longer ones.
"""

import ast
import io
import re
import subprocess
import sys
import tokenize
from collections import Counter, defaultdict
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
STORED = ROOT / ".ci" / "english.txt"
CODE = ("client", "daemon", "trainer", "benchmarks", "examples")
COUNTED = {
    "what": r"\bwhat\b",
    "that is/are/has": r"\bthat (?:is|are|has)\b",
    "beside": r"\bbesides?\b",
    "lies": r"\blies?\b",
    "of its own": r"\bof (?:its|their|our|your|one's) own\b",
    "nobody": r"\bnobody\b",
    "so many": r"\bso many\b",
    "of which": r"\bof which\b",
}
PROBLEM_CHARS, FITTING_SHARE = 120, 0.9
VALUE = "x" * 8  # in place of what a message fills in
END_OF_SENTENCE = re.compile(r"(?<=[.!?])\s+(?=[A-Z`\"])|\n")
WORD = re.compile(r"[A-Za-z][A-Za-z'-]*")
FENCED = re.compile(r"^ *```.*?^ *```$", re.MULTILINE | re.DOTALL)


def main() -> int:
    """Print the rates; 1 if one is above the stored rate."""
    words: Counter[str] = Counter()
    hits: dict[str, Counter[str]] = defaultdict(Counter)
    for kind, text in texts():
        words[kind] += len(WORD.findall(text))
        for name, pattern in COUNTED.items():
            hits[name][kind] += len(re.findall(pattern, text, re.IGNORECASE))
    rates = {
        (name, kind): round(1000 * hits[name][kind] / words[kind], 2)
        for name in COUNTED
        for kind in words
    }
    table = drawn(rates, list(words))
    print(table, end="")
    problems = [END_OF_SENTENCE.split(message)[0] for message in messages()]
    long = [problem for problem in problems if len(problem) > PROBLEM_CHARS]
    share = 1 - len(long) / len(problems)
    print(f"problems in {PROBLEM_CHARS} characters: {share:.1%} of {len(problems)} messages")
    if "--long" in sys.argv[1:]:
        print(*sorted(long, key=len, reverse=True), sep="\n")
    if "--store" in sys.argv[1:]:
        STORED.write_text(table)
        return 0
    higher = [key for key, limit in stored().items() if rates.get(key, 0.0) > limit]
    for name, kind in higher:
        print(f'"{name}" in {kind}: above the rate in {STORED.relative_to(ROOT)}. Rewrite some.')
    if share < FITTING_SHARE:
        print("Too many problems are long. Make the fix a second sentence; see --long.")
    return bool(higher) or share < FITTING_SHARE


def texts() -> Iterator[tuple[str, str]]:
    """Yield the kind and the text of all that people read, code fragments left out."""
    command = ["git", "ls-files", "-z", "--", *CODE, "docs", "protos", "*.md"]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, check=True).stdout.decode()
    for name in sorted({each for each in listed.split("\0") if each}):
        path = ROOT / name
        if not path.is_file() or "_pb2" in name:
            continue
        if name.endswith(".md"):
            yield "pages", re.sub(r"`[^`]*`", "x", FENCED.sub("", path.read_text()))
        elif name.endswith(".proto"):
            yield "comments", "\n".join(re.findall(r"//(.*)", path.read_text()))
        elif name.endswith(".py"):
            yield from texts_of_code(path.read_text())


def texts_of_code(source: str) -> Iterator[tuple[str, str]]:
    """Yield docstrings, comments, and strings of several words."""
    module = ast.parse(source)
    docstrings = {  # those of attributes, too
        node.value
        for node in ast.walk(module)
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
    }
    for node in ast.walk(module):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            if node in docstrings:
                yield "docstrings", re.sub(r"`[^`]*`", "x", node.value)
            elif len(WORD.findall(node.value)) >= 3:
                yield "messages", node.value
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            yield "comments", re.sub(r"`[^`]*`", "x", token.string.lstrip("#"))


def messages() -> Iterator[str]:
    """Yield the texts of errors that are raised, and of flags' help, with VALUE for values."""
    for path in (each for folder in CODE[:4] for each in sorted((ROOT / folder).rglob("*.py"))):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call):
                found = node.exc.args
            elif isinstance(node, ast.Call):
                found = [each.value for each in node.keywords if each.arg == "help"]
            else:
                continue
            yield from (text for each in found if len((text := filled(each)).split()) >= 3)


def filled(node: ast.expr) -> str:
    """The text of a string, with VALUE for each value in it; empty for other expressions."""
    if isinstance(node, ast.Constant):
        return node.value if isinstance(node.value, str) else ""
    if isinstance(node, ast.JoinedStr):
        return "".join(
            VALUE if isinstance(each, ast.FormattedValue) else filled(each) for each in node.values
        )
    return ""


def drawn(rates: dict[tuple[str, str], float], kinds: list[str]) -> str:
    """Returns the rates as a table: a row for each construction, a column for each kind."""
    kinds = sorted(kinds)
    lines = [f"{'per 1,000 words':16}" + "".join(f"{kind:>12}" for kind in kinds)]
    lines += [
        f"{name:16}" + "".join(f"{rates[name, kind]:12.2f}" for kind in kinds) for name in COUNTED
    ]
    return "\n".join(lines) + "\n"


def stored() -> dict[tuple[str, str], float]:
    """The rates of the stored table."""
    head, *rows = STORED.read_text().splitlines()
    kinds = head[16:].split()
    return {
        (row[:16].strip(), kind): float(rate)
        for row in rows
        for kind, rate in zip(kinds, row[16:].split(), strict=True)
    }


if __name__ == "__main__":
    sys.exit(main())
