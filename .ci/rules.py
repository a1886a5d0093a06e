"""Rules of this repository that no other tool checks: its links, the files it names, a few calls.

Each function below returns its violations, one line each.
"""

import ast
import importlib
import importlib.util
import re
import subprocess
import sys
import unicodedata
from collections.abc import Callable, Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
FENCED = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\]\(([^)\s#]*)(?:#([^)\s]*))?\)")
# Results and decisions say what was so on their day; the changelog, what was so in a version.
DATED = ("docs/benchmarks/", "docs/adr/", "CHANGELOG.md")
NAMED = re.compile(
    r"(?<![\w./,{-])((?:benchmarks|daemon|client|trainer|protos|tests|examples)/[\w/]+\.\w+)"
)
COMMAND = re.compile(r"python -m (benchmarks(?:\.\w+)*)")
LOADS = re.compile(r"\btorch\.load\((?:[^()]|\([^()]*\))*\)|\bpickle\.loads?\(|\bjoblib\.load\(")
# The daemon's messages to its own processes, and to its tasks on a Ray cluster.
OWN_PIPES = ("datasets/shard_worker.py", "runtime/plug_ins.py")


def main() -> int:
    """Print all violations; 1 if there are any."""
    tracked = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, check=True)
    files = {
        name: (ROOT / name).read_text()
        for name in tracked.stdout.decode().split("\0")
        if name.endswith((".md", ".py", "pyproject.toml")) and (ROOT / name).is_file()
    }
    rules: tuple[Callable[[dict[str, str]], Iterator[str]], ...] = (
        broken_links,
        missing_files,
        missing_benchmarks,
        unsafe_loads,
        late_structs,
        joined_threads,
        missing_imports,
        promises_without_test,
        missing_selected,
    )
    found = [violation for rule in rules for violation in rule(files)]
    print(*found, sep="\n", end="\n" if found else "")
    return bool(found)


def broken_links(files: dict[str, str]) -> Iterator[str]:
    """Yield links between pages that lead to no file or to no heading."""
    pages = {ROOT / name: text for name, text in files.items() if name.endswith(".md")}
    plain = {path: FENCED.sub("", text) for path, text in pages.items()}
    headings = {
        path: {_anchor(each) for each in re.findall(r"^#{1,6} +(.*)$", text, re.MULTILINE)}
        for path, text in plain.items()
    }
    for path, text in plain.items():
        for target, anchor in LINK.findall(text):
            if "://" in target or target.startswith("mailto:"):
                continue
            place = (path.parent / target).resolve() if target else path
            if not place.exists() or (anchor and anchor not in headings.get(place, {anchor})):
                yield f"{path.relative_to(ROOT)}: the link {target}#{anchor} leads nowhere"


def _anchor(heading: str) -> str:
    """The anchor that MkDocs gives to a heading."""
    plain = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading)
    plain = unicodedata.normalize("NFKD", plain).encode("ascii", "ignore").decode()
    return re.sub(r"[-\s]+", "-", re.sub(r"[^\w\s-]", "", plain).strip().lower())


def missing_files(files: dict[str, str]) -> Iterator[str]:
    """Yield paths that pages, comments and commands name and that do not exist."""
    for name, text in _undated(files):
        for path in NAMED.findall(text):
            if "NAME" not in path and not (ROOT / path).exists():
                yield f"{name}: there is no {path}"


def missing_benchmarks(files: dict[str, str]) -> Iterator[str]:
    """Yield benchmarks that are named and do not exist, and those their README does not list."""
    for name, text in _undated(files):
        for module in COMMAND.findall(text):
            path = module.replace(".", "/")
            if f"{path}.py" not in files and f"{path}/__main__.py" not in files:
                yield f"{name}: there is no {module}"
    listed = set(COMMAND.findall(files["benchmarks/README.md"]))
    for name, text in files.items():
        if name.startswith("benchmarks/") and not name.endswith("__main__.py"):
            module = name.removesuffix(".py").replace("/", ".")
            if name.endswith(".py") and "__main__" in text and module not in listed:
                yield f"benchmarks/README.md: it does not list {module}"


def unsafe_loads(files: dict[str, str]) -> Iterator[str]:
    """Yield calls that could run code from the file they load; people copy examples and pages."""
    places = ("README.md", "docs/", "examples/", "client/", "daemon/", "trainer/", "benchmarks/")
    for name, text in files.items():
        if name.startswith(places) and not name.endswith(OWN_PIPES):
            for load in LOADS.findall(text):
                if "weights_only=True" not in load:
                    yield f"{name}: {load} may run code from the file"


def late_structs(files: dict[str, str]) -> Iterator[str]:
    """Yield calls of msgspec in a function that name a Struct of the module.

    msgspec prepares a Struct when a type with it is first used. Where two threads do that at once,
    the process crashes: seen with msgspec 0.22. Decoders are made at import.
    """
    for name, text in files.items():
        if not name.startswith(("client/", "daemon/", "trainer/")):
            continue
        if "msgspec.Struct" not in text:
            continue
        module = ast.parse(text)
        structs = {
            node.name
            for node in ast.walk(module)
            if isinstance(node, ast.ClassDef)
            and any(ast.unparse(base) == "msgspec.Struct" for base in node.bases)
        }
        for function in ast.walk(module):
            if isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef):
                for call in ast.walk(function):
                    if isinstance(call, ast.Call) and _uses(call, structs):
                        yield f"{name}: make this decoder at import: {ast.unparse(call)}"


def _uses(call: ast.Call, structs: set[str]) -> bool:
    return ast.unparse(call.func).startswith("msgspec.") and any(
        isinstance(name, ast.Name) and name.id in structs for name in ast.walk(call)
    )


def joined_threads(files: dict[str, str]) -> Iterator[str]:
    """Yield uses of executors whose threads all callers share, or that the interpreter joins.

    A mount or a driver that hangs would hold up all datasets, and the end of the daemon.
    """
    instead = "use a thread of its mount (`MOUNTS`), `compute`, or `in_thread`"
    for name, text in files.items():
        if not name.startswith("daemon/"):
            continue
        for node in ast.walk(ast.parse(text)):
            used = node.attr if isinstance(node, ast.Attribute) else getattr(node, "id", "")
            if used in ("to_thread", "run_in_executor", "ThreadPoolExecutor"):
                yield f"{name}:{node.lineno}: {used}: {instead}"


def missing_imports(files: dict[str, str]) -> Iterator[str]:
    """Yield names that a page imports and that do not exist."""
    imports = re.compile(r"^from (gyre_\w+[\w.]*) import (?:\(([^)]*)\)|([^#\n]*))", re.MULTILINE)
    for page, text in files.items():
        if page != "README.md" and not re.fullmatch(r"docs/[\w-]+\.md", page):
            continue
        code = "\n".join(body for kind, body in FENCED.findall(text) if kind == "python")
        for module, several, line in imports.findall(code):
            for name in re.findall(r"(\w+)(?: as \w+)?,?", several or line):
                there = hasattr(importlib.import_module(module), name)
                if not there and not importlib.util.find_spec(f"{module}.{name}"):
                    yield f"{page}: {module} has no {name}"


def promises_without_test(files: dict[str, str]) -> Iterator[str]:
    """Yield promises of the security page that name no test, and tests that do not exist."""
    page = files["docs/security.md"]
    promises = [line for line in page.splitlines() if re.match(r"\| .*\.(py\)|\.) ", line)]
    links = re.findall(r"\[(\w+)\]\(\.\./((?:tests|\.ci)/\S+\.py)\)", page)
    if len(promises) != len(links):
        yield f"docs/security.md: {len(promises)} promises, {len(links)} tests"
    for name, path in links:
        if f"def {name}(" not in files.get(path, ""):
            yield f"docs/security.md: {path} has no {name}"


def missing_selected(files: dict[str, str]) -> Iterator[str]:
    """Yield lines of the files that select tests which name no file, class or function."""
    selected = (ROOT / "tests" / "selected.txt").read_text().splitlines()
    touched = (ROOT / ".ci" / "touched.txt").read_text()
    named = [
        re.sub("^--(ignore|deselect)=", "", line) for line in selected if line and line[0] != "#"
    ]
    named += re.sub(r"^#.*", "", touched, flags=re.MULTILINE).split()
    for each in named:
        path, *inside = each.partition("[")[0].split("::")
        if not (ROOT / path).exists() or not all(
            re.search(rf"(?:class|def) {name}\b", files[path]) for name in inside
        ):
            yield f"tests/selected.txt or .ci/touched.txt: there is no {each}"


def _undated(files: dict[str, str]) -> Iterator[tuple[str, str]]:
    return (each for each in files.items() if not each[0].startswith((*DATED, ".ci/")))


if __name__ == "__main__":
    sys.exit(main())
