"""Runs the scripts of `examples/` as a reader of them would."""

import os
import subprocess
import sys
from pathlib import Path

FOLDER = Path(__file__).parents[1] / "examples"
# One attempt; a hung test ends after eight minutes.
DEADLINE_S = 300.0


def run_example(
    name: str, workdir: Path, *options: str, num_ranks: int = 1
) -> "subprocess.CompletedProcess[str]":
    """Runs ``examples/NAME.py`` to its end; it must end well.

    Its daemon is a private one, whose indexes go below the working folder.

    Args:
        name: Of the script, without its ending.
        workdir: What the script gets as ``--workdir``.
        options: Further arguments.
        num_ranks: More than one: torchrun starts that many.
    """
    torchrun = ["-m", "torch.distributed.run", "--nproc-per-node", str(num_ranks)]
    rendezvous = ["--rdzv-backend", "c10d", "--rdzv-endpoint", "127.0.0.1:0"]
    launcher = [*torchrun, *rendezvous] if num_ranks > 1 else []
    script = [str(FOLDER / f"{name}.py"), "--workdir", str(workdir)]
    environment = {key: value for key, value in os.environ.items() if key != "GYRE_ADDRESS"}
    done = subprocess.run(
        [sys.executable, *launcher, *script, *options],
        env=environment | {"XDG_CACHE_HOME": str(workdir / "cache"), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
        check=False,
    )
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    return done
