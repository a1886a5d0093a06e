"""Trainers that are not among the packages of `make setup`."""

from typing import Any

import pytest


def framework(name: str) -> Any:
    """The module; where it is not installed, the tests that ask for it are skipped."""
    return pytest.importorskip(name, reason=f"{name} is not installed: run `make frameworks`")
