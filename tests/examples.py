"""Runs the scripts of `examples/` as a reader of them would."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
from gyre_client import Loader

from tests.preloaded.interpreter import Interpreter

FOLDER = Path(__file__).parents[1] / "examples"
# One attempt; a hung test ends after eight minutes.
DEADLINE_S = 300.0
# The examples that stop and resume: three epochs of 100 samples, in whole batches.
BATCH_SIZE, NUM_STEPS = 16, 18

# What torchrun starts, with the same variables: most of its time would be the imports of each rank.
_FORKED = """
import os, runpy, sys, torch
from gyre_trainer.training.launcher import launch
torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
_, num_ranks, *sys.argv = sys.argv

def be_rank(tell):
    runpy.run_path(sys.argv[0], run_name="__main__")
    return 0

if int(num_ranks) > 1:
    os.environ.update(TORCHELASTIC_RUN_ID="none", GROUP_RANK="0", TORCHELASTIC_RESTART_COUNT="0")
    sys.exit(launch(int(num_ranks), be_rank))
be_rank(None)
"""


def run_example(
    name: str,
    workdir: Path,
    *options: str,
    num_ranks: int = 1,
    interpreter: Interpreter | None = None,
) -> "subprocess.CompletedProcess[str]":
    """Runs ``examples/NAME.py`` to its end; it must end well.

    Its daemon is a private one, whose indexes go below the working folder.

    Args:
        name: Of the script, without its ending.
        workdir: What the script gets as ``--workdir``.
        options: Further arguments.
        num_ranks: More than one: torchrun starts that many.
        interpreter: Has the script's imports; the ranks are forked from it, without torchrun.
    """
    torchrun = ["-m", "torch.distributed.run", "--nproc-per-node", str(num_ranks)]
    rendezvous = ["--rdzv-backend", "c10d", "--rdzv-endpoint", "127.0.0.1:0"]
    launcher = [*torchrun, *rendezvous] if num_ranks > 1 else []
    script = [str(FOLDER / f"{name}.py"), "--workdir", str(workdir), *options]
    environment = {key: value for key, value in os.environ.items() if key != "GYRE_ADDRESS"}
    environment |= {"XDG_CACHE_HOME": str(workdir / "cache"), "OMP_NUM_THREADS": "1"}
    if interpreter:
        command = ["-c", _FORKED, str(num_ranks), *script]
        done = interpreter.run(command, environment, DEADLINE_S)
    else:
        done = subprocess.run(
            [sys.executable, *launcher, *script],
            env=environment,
            capture_output=True,
            text=True,
            timeout=DEADLINE_S,
            check=False,
        )
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    return done


def planned(folder: Path, rank: int, num_ranks: int) -> list[list[int]]:
    """What a rank's steps in such an example have to consume, read by a Loader of this process.

    The order follows from the number of samples, whatever they are.
    """
    if not (folder / "planned.bin").exists():  # a private daemon may still serve it
        np.zeros(100 * 9, np.uint16).tofile(folder / "planned.bin")
    options = {"sequence_length": 9, "dtype": "uint16"}
    place: dict[str, Any] = {"rank": rank, "world_size": num_ranks}
    with Loader(
        folder / "planned.bin",
        batch_size=BATCH_SIZE,
        tail="drop",
        format="tokens",
        options=options,
        **place,
    ) as loader:
        return [
            batch["sample_id"].tolist()
            for batch, _ in zip(loader.stream(), range(NUM_STEPS), strict=False)
        ]
