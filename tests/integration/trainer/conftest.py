"""Fixtures of tests that run jobs of `gyre-train`."""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from tests.conftest import StartDaemon
from tests.preloaded.interpreter import Interpreter
from tests.served_runs import CONFIG, Trainer, write_data
from tests.train_jobs import DEADLINE_S, IMPORTS, LIBRARY_IMPORTS, Jobs


@pytest.fixture(scope="session")
def trainer_interpreter() -> Iterator[Interpreter]:
    """An interpreter that has imported what a run needs, models of transformers among them."""
    interpreter = Interpreter([*IMPORTS, *LIBRARY_IMPORTS])
    yield interpreter
    interpreter.close()


@pytest.fixture
def tiny_jobs(tmp_path: Path, trainer_interpreter: Interpreter) -> Iterator[Jobs]:
    """Starts jobs, of `train_jobs.tiny_run` for one, whose tokens are there."""
    (np.arange(900) % 64).astype(np.uint16).tofile(tmp_path / "tokens.bin")
    jobs = Jobs(trainer_interpreter, tmp_path)
    yield jobs
    jobs.end(DEADLINE_S)


@pytest.fixture(scope="module")
def served_bytes(shared_gyred: StartDaemon, tmp_path_factory: pytest.TempPathFactory) -> str:
    """The address of one daemon that serves `bytes` to all runs of a file."""
    data = write_data(tmp_path_factory.mktemp("served") / "bytes")
    return shared_gyred({"datasets": {"bytes": data}}).address


@pytest.fixture
def trainer(
    tmp_path: Path, served_bytes: str, trainer_interpreter: Interpreter
) -> Iterator[Trainer]:
    """Starts `gyre-train` on that daemon's data."""
    config_path = tmp_path / "train.toml"
    config_path.write_text(CONFIG)
    jobs = Jobs(trainer_interpreter, tmp_path)
    yield Trainer(config_path, served_bytes, jobs)
    jobs.end(DEADLINE_S)
