"""What is built.

A wheel with the five packages and nothing else at its top, the same one from the sdist, an editable
one.
"""

import tarfile
import zipfile
from pathlib import Path

import pytest
from hatchling.builders.sdist import SdistBuilder
from hatchling.builders.wheel import WheelBuilder

ROOT = Path(__file__).resolve().parents[3]
ROOMS = ("daemon", "media", "client", "trainer", "protos")
PACKAGES = {f"gyre_{room}" for room in ROOMS}


def wheel_names(root: Path, folder: Path, version: str = "standard") -> set[str]:
    """The files in the wheel that the source tree at `root` gives."""
    (path,) = WheelBuilder(str(root)).build(directory=str(folder), versions=[version])
    with zipfile.ZipFile(path) as wheel:
        return set(wheel.namelist())


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> set[str]:
    return wheel_names(ROOT, tmp_path_factory.mktemp("wheel"))


def test_the_wheel_holds_its_packages_and_nothing_else_at_its_top(wheel: set[str]) -> None:
    tops = {name.partition("/")[0] for name in wheel}
    assert {top for top in tops if not top.endswith(".dist-info")} == PACKAGES


def test_the_wheel_holds_types_contract_and_licence(wheel: set[str]) -> None:
    assert {f"{package}/py.typed" for package in PACKAGES} <= wheel
    assert "gyre_protos/v1/loader.proto" in wheel
    assert any(name.endswith(".dist-info/licenses/LICENSE") for name in wheel)


def test_the_wheel_holds_every_source_file(wheel: set[str]) -> None:
    sources = {
        str(file.relative_to(ROOT / folder))
        for folder in ("daemon", "client", "trainer", "protos")
        for pattern in ("*.py", "*.pyi")
        for file in (ROOT / folder).rglob(pattern)
    }
    assert sources == {name for name in wheel if name.endswith((".py", ".pyi"))}


def test_the_sdist_builds_the_same_wheel(wheel: set[str], tmp_path: Path) -> None:
    (path,) = SdistBuilder(str(ROOT)).build(directory=str(tmp_path), versions=["standard"])
    with tarfile.open(path) as sdist:
        sdist.extractall(tmp_path, filter="data")
    (root,) = (child for child in tmp_path.iterdir() if child.is_dir())
    assert wheel_names(root, tmp_path / "dist") == wheel


def test_an_editable_install_points_to_the_five_folders(tmp_path: Path) -> None:
    (path,) = WheelBuilder(str(ROOT)).build(directory=str(tmp_path), versions=["editable"])
    with zipfile.ZipFile(path) as wheel:
        (pth,) = (name for name in wheel.namelist() if name.endswith(".pth"))
        folders = wheel.read(pth).decode().split()
    assert {Path(folder) for folder in folders} == {
        ROOT / name for name in ("daemon", "client", "trainer", "protos")
    }
