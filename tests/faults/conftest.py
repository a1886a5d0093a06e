"""Fixtures that several files of fault tests share."""

from pathlib import Path

import pytest

from tests.conftest import Daemon, StartDaemon
from tests.faults.served_tokens import TOKENS


@pytest.fixture
def tokens(gyred: StartDaemon, token_files: Path) -> Daemon:
    """A daemon with the dataset `tokens` and a short lease."""
    return gyred({"lease_s": 2.0, "datasets": {"tokens": {"uri": str(token_files), **TOKENS}}})
