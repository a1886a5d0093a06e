"""Fixtures of tests that run jobs of `gyre-train`."""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from tests.preloaded.interpreter import Interpreter
from tests.train_jobs import DEADLINE_S, IMPORTS, Jobs


@pytest.fixture
def tiny_jobs(tmp_path: Path) -> Iterator[Jobs]:
    """Starts jobs, of `train_jobs.tiny_run` for one, whose tokens are there."""
    (np.arange(900) % 64).astype(np.uint16).tofile(tmp_path / "tokens.bin")
    interpreter = Interpreter([*IMPORTS, "gyre_trainer.training.export"])
    jobs = Jobs(interpreter, tmp_path)
    yield jobs
    jobs.end(DEADLINE_S)
    interpreter.close()
