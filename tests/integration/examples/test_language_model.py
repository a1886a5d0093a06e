"""The example that trains a language model from raw text learns something."""

import re
from pathlib import Path

from tests.examples import run_example


def test_the_loss_falls(tmp_path: Path) -> None:
    sizes = ["--steps", "20", "--width", "32", "--layers", "1", "--documents", "400"]
    done = run_example("language_model", tmp_path, *sizes)
    losses = [float(each) for each in re.findall(r"loss ([\d.]+)", done.stdout)]
    assert len(losses) == 2
    assert losses[1] < losses[0] < 9
