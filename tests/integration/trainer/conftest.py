"""Fixtures of tests that run jobs of `gyre-train`."""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from tests.preloaded.interpreter import Interpreter
from tests.train_jobs import DEADLINE_S, IMPORTS, Jobs


@pytest.fixture(scope="session")
def trainer_interpreter() -> Iterator[Interpreter]:
    """An interpreter that has imported what a run needs."""
    interpreter = Interpreter([*IMPORTS, "gyre_trainer.training.export"])
    yield interpreter
    interpreter.close()


@pytest.fixture
def tiny_jobs(tmp_path: Path, trainer_interpreter: Interpreter) -> Iterator[Jobs]:
    """Starts jobs, of `train_jobs.tiny_run` for one, whose tokens are there."""
    (np.arange(900) % 64).astype(np.uint16).tofile(tmp_path / "tokens.bin")
    jobs = Jobs(trainer_interpreter, tmp_path)
    yield jobs
    jobs.end(DEADLINE_S)
