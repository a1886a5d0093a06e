"""The trainer's packages are small and documented, and public names come from one module."""

import ast
from pathlib import Path

import pytest
from gyre_trainer import rotate

ROOT = Path(rotate.__file__).parent
PACKAGES = sorted(path.parent for path in ROOT.rglob("__init__.py"))
MAX_MODULES = 16


@pytest.mark.parametrize(
    "folder", PACKAGES, ids=lambda folder: folder.relative_to(ROOT.parent).as_posix()
)
def test_a_package_has_few_modules_and_says_what_it_is_for(folder: Path) -> None:
    assert len(list(folder.glob("*.py"))) <= MAX_MODULES
    told = ast.get_docstring(ast.parse((folder / "__init__.py").read_text(encoding="utf-8")))
    assert told is not None
    assert len(told.splitlines()) >= 5
    if folder != ROOT:
        assert "In: " in told
        assert "Out: " in told
        assert " import" in told  # who may


def test_every_public_name_comes_from_one_module() -> None:
    functions = "linear_cross_entropy make_mesh materialize no_sync plan_of rotate rotate_all"
    assert {"RotationPolicy", *functions.split()} <= set(rotate.__all__)
    assert all(hasattr(rotate, name) for name in rotate.__all__)
