"""The example that trains a vision transformer from JPEG tars learns something."""

import re
from pathlib import Path

from tests.examples import run_example


def test_held_out_images_are_named_better_than_by_chance(tmp_path: Path) -> None:
    sizes = ["--images", "1600", "--epochs", "4", "--width", "32", "--layers", "1"]
    done = run_example("vision_transformer", tmp_path, *sizes)
    losses = [float(each) for each in re.findall(r"loss ([\d.]+)", done.stdout)]
    (accuracy,) = re.findall(r"accuracy ([\d.]+)", done.stdout)
    assert losses[-1] < losses[0]
    assert float(accuracy) > 0.3  # by chance 0.125; with the example's own sizes 0.96
