"""The example that trains a vision transformer from JPEG tars learns something."""

import os
import re
import subprocess
import sys
from pathlib import Path

EXAMPLE = Path(__file__).parents[3] / "examples/vision_transformer.py"


def test_held_out_images_are_named_better_than_by_chance(tmp_path: Path) -> None:
    sizes = ["--images", "1600", "--epochs", "4", "--width", "32", "--layers", "1"]
    command = [sys.executable, str(EXAMPLE), "--workdir", str(tmp_path), *sizes]
    environment = {name: value for name, value in os.environ.items() if name != "GYRE_ADDRESS"}
    environment["XDG_CACHE_HOME"] = str(tmp_path / "cache")
    environment["OMP_NUM_THREADS"] = "1"
    done = subprocess.run(
        command, env=environment, capture_output=True, text=True, timeout=240, check=False
    )
    assert done.returncode == 0, done.stderr
    losses = [float(each) for each in re.findall(r"loss ([\d.]+)", done.stdout)]
    (accuracy,) = re.findall(r"accuracy ([\d.]+)", done.stdout)
    assert losses[-1] < losses[0]
    assert float(accuracy) > 0.3  # by chance 0.125; with the example's own sizes 0.96
