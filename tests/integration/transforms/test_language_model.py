"""The example that trains a language model from raw text learns something."""

import os
import re
import subprocess
import sys
from pathlib import Path

EXAMPLE = Path(__file__).parents[3] / "examples/language_model.py"


def test_the_loss_falls(tmp_path: Path) -> None:
    sizes = ["--steps", "20", "--width", "32", "--layers", "1", "--documents", "400"]
    command = [sys.executable, str(EXAMPLE), "--workdir", str(tmp_path), *sizes]
    environment = {name: value for name, value in os.environ.items() if name != "GYRE_ADDRESS"}
    environment["XDG_CACHE_HOME"] = str(tmp_path / "cache")
    environment["OMP_NUM_THREADS"] = "1"
    done = subprocess.run(
        command, env=environment, capture_output=True, text=True, timeout=240, check=False
    )
    assert done.returncode == 0, done.stderr
    losses = [float(each) for each in re.findall(r"loss ([\d.]+)", done.stdout)]
    assert len(losses) == 2
    assert losses[1] < losses[0] < 9
