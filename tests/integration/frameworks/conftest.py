"""Trainers that `make frameworks` installs in a folder of their own, behind all other packages."""

import sys
from pathlib import Path

from tests.distributed.conftest import one_thread, ranks

__all__ = ["one_thread", "ranks"]

sys.path.append(str(Path(sys.prefix) / "frameworks"))
