"""What each extra brings: all that its package imports, and none of what belongs to the others."""

import ast
import importlib.metadata
import sys
import tomllib
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parents[3]
TABLES = tomllib.loads((ROOT / "pyproject.toml").read_text())
PROJECT, GROUPS = TABLES["project"], TABLES["dependency-groups"]
OURS = {"gyre_daemon", "gyre_media", "gyre_client", "gyre_trainer", "gyre_protos", "gyre_common"}
# Whose interfaces `gyre_client.integrations` has, or which `gyre bench` measures: users bring
# them.
TRAINERS = {
    "datasets",
    "lightning",
    "megatron",
    "megatron-core",
    "ray",
    "torchtitan",
    "trl",
    "webdataset",
}
OF_IMPORT = importlib.metadata.packages_distributions()


def declared(*extras: str) -> Iterator[Requirement]:
    """The requirements of an installation with these extras and with the extras they name."""
    yield from map(Requirement, PROJECT["dependencies"])
    for extra in extras:
        for requirement in map(Requirement, PROJECT["optional-dependencies"][extra]):
            if requirement.name == PROJECT["name"]:
                yield from declared(*requirement.extras)
            else:
                yield requirement


def closure(requirements: Iterable[Requirement]) -> set[str]:
    """The names of all installed distributions that the requirements need, directly or not."""
    found: set[tuple[str, str]] = set()
    pending = [
        (requirement.name, extra)
        for requirement in requirements
        for extra in ("", *requirement.extras)
    ]
    while pending:
        name, extra = pending.pop()
        if (canonicalize_name(name), extra) not in found:
            found.add((canonicalize_name(name), extra))
            for needed in map(Requirement, importlib.metadata.requires(name) or []):
                if needed.marker is None or needed.marker.evaluate({"extra": extra}):
                    pending += [(needed.name, wanted) for wanted in ("", *needed.extras)]
    return {name for name, _ in found}


def imported(package: Path) -> set[str]:
    """The distributions that the modules of a package import by name."""
    modules: set[str] = set()
    for file in package.rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.Import):
                modules |= {alias.name for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and node.module:
                modules.add(node.module)
    tops = {module.partition(".")[0] for module in modules} - OURS - sys.stdlib_module_names
    return {
        canonicalize_name(name) for top in tops - {"google"} for name in OF_IMPORT.get(top, [top])
    } | of_google(modules)


def of_google(modules: set[str]) -> set[str]:
    """`google` is a namespace that two of our needs share."""
    owners = {"google.protobuf": "protobuf", "google.rpc": "googleapis-common-protos"}
    parts = {".".join(module.split(".")[:2]) for module in modules if module.startswith("google.")}
    return {owners[part] for part in parts}


@pytest.mark.parametrize(
    ("room", "extras"),
    [
        ("daemon", ["daemon", "objects", "hub", "arrow", "records", "text", "ray"]),
        ("media", ["daemon", "images", "media"]),
        ("client", ["client", "page", "transformers", "images", "arrow"]),
        ("trainer", ["trainer", "boards", "transformers"]),
        ("protos", []),
    ],
)
def test_an_extra_declares_all_that_its_package_imports(room: str, extras: list[str]) -> None:
    package = ROOT / ("daemon" if room == "media" else room) / f"gyre_{room}"
    needs = imported(package) - (TRAINERS if room == "client" else set())
    assert needs
    assert needs <= {canonicalize_name(requirement.name) for requirement in declared(*extras)}


@pytest.mark.parametrize("extra", ["daemon", "objects", "hub", "arrow", "images", "media", "text"])
def test_a_daemon_brings_no_torch(extra: str) -> None:
    names = closure(declared(extra))
    assert {"grpcio", "fsspec", "uvloop"} <= names
    assert not {"torch", "webdataset", "tensorboard", "matplotlib"} & names


def test_a_client_brings_nothing_of_daemon_or_trainer() -> None:
    names = closure(declared("client"))
    assert {"grpcio", "torch"} <= names
    assert not {"uvloop", "obstore", "tensorboard", "matplotlib", "pytest"} & names


def pinned() -> set[str]:
    lines = (ROOT / "constraints.txt").read_text().split()
    return {canonicalize_name(line.partition("==")[0]) for line in lines}


def test_every_need_is_pinned() -> None:
    """What is not installed for tests has a pin that cannot be followed further."""
    pins = pinned()
    developers = map(Requirement, GROUPS["dev"])
    needs = closure(each for each in developers if each.name != PROJECT["name"])
    needs |= closure(declared(*PROJECT["optional-dependencies"]))
    # What a build of torch for GPUs brings, it pins itself.
    of_a_device = {name for name in needs if name.startswith(("cuda-", "nvidia-", "triton"))}
    assert not needs - pins - of_a_device
    assert {"atheris", "torchao", "mosaicml-streaming", "datasets", "pip"} <= pins
