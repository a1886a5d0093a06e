"""Jobs of `gyre-train`, forked from an interpreter that has imported what a run needs."""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import psutil

from tests.conftest import to_toml
from tests.preloaded.interpreter import Forked, Interpreter

DEADLINE_S = 240.0
# A GPT as small as one can be.
TINY_GPT = {
    "vocab_size": 65,
    "num_layers": 1,
    "dim": 16,
    "num_heads": 2,
    "num_kv_heads": 2,
    "hidden_dim": 32,
}

# What the launcher imports before it forks its ranks, and what the first rank imports to record.
IMPORTS = (
    "torch._dynamo",
    "gyre_trainer.command",
    "gyre_trainer.training.train",
    "gyre_trainer.training.recorder",
)
# What runs of transformers' models import, and exports: seconds of each launcher and each rank.
LIBRARY_IMPORTS = (
    "gyre_trainer.training.export",
    "transformers.modeling_utils",
    "transformers.generation.utils",
    "transformers.models.auto.modeling_auto",
    "transformers.models.llama.modeling_llama",
)
# An import may have asked where temporary files go, before the job's environment said it.
_PROGRAM = (
    "import os, runpy, sys, tempfile; os.setsid(); tempfile.tempdir = None; del sys.argv[0]; "
    "runpy.run_module(sys.argv[0], run_name='__main__', alter_sys=True)"
)


def tiny_run(folder: Path, **tables: Mapping[str, Any]) -> str:
    """The configuration of two steps on FOLDER/tokens.bin, for FOLDER/run.

    Args:
        folder: Of the data and the run.
        tables: Keys of `run` and `data` to add or to replace, and other tables as they are.
    """
    run = {"out": str(folder / "run"), "steps": 2, "device": "cpu", "threads": 1}
    data = {
        "dataset": str(folder / "tokens.bin"),
        "format": "tokens",
        "options": {"dtype": "uint16", "sequence_length": 9},
        "batch_size": 4,
        "sequence_length": 8,
    }
    memory = {"min_numel": 0}
    changed = {
        name: {**own, **tables.get(name, {})}
        for name, own in (("run", run), ("data", data), ("memory", memory))
    }
    return to_toml({"model": TINY_GPT, **tables, **changed})


class Job:
    """A launcher and its ranks, in a session of its own.

    Attributes:
        pid: of the launcher, and of its session.
    """

    def __init__(self, forked: Forked, errors: Path) -> None:
        self.pid = forked.pid
        self._forked = forked
        self._errors = errors

    @property
    def returncode(self) -> int | None:
        """The exit status; None while it is not known to have ended."""
        return self._forked.returncode

    def poll(self) -> int | None:
        """The exit status; None while it runs."""
        return self._forked.poll()

    def wait(self, timeout_s: float) -> int:
        """Wait until the launcher has ended; return its exit status."""
        return self._forked.wait(timeout_s)

    def errors(self, timeout_s: float) -> str:
        """Wait until the launcher has ended; return what it wrote to standard error."""
        self._forked.wait(timeout_s)
        return self._errors.read_text()

    def end(self, timeout_s: float) -> None:
        """Kill what still runs of it."""
        if self.poll() is None:
            for child in psutil.Process(self.pid).children(recursive=True):
                child.kill()  # torchrun puts its ranks into sessions of their own
            self._forked.kill()
        self._forked.wait(timeout_s)


class Jobs:
    """Starts jobs, and ends what a test leaves running."""

    def __init__(self, interpreter: Interpreter, folder: Path) -> None:
        self._interpreter = interpreter
        self._folder = folder
        self._jobs: list[Job] = []

    def start(
        self,
        *arguments: str,
        environment: Mapping[str, str] = os.environ,
        module: str = "gyre_trainer",
    ) -> Job:
        """Start ``python -m module`` with arguments."""
        path = self._folder / f"errors-{len(self._jobs)}"
        command = ["-c", _PROGRAM, module, *arguments]
        with path.open("wb") as file:
            forked = self._interpreter.start(command, file, environment)
        self._jobs.append(Job(forked, path))
        return self._jobs[-1]

    def ran(self, *arguments: str) -> tuple[int, str]:
        """Run a job to its end; return its exit status, and what it wrote to standard error."""
        job = self.start(*arguments)
        errors = job.errors(DEADLINE_S)
        return job.wait(DEADLINE_S), errors

    def end(self, timeout_s: float) -> None:
        """Kill what still runs."""
        for job in self._jobs:
            job.end(timeout_s)
