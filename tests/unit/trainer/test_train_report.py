from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from gyre_trainer.training.history import StepRecord
from gyre_trainer.training.recorder import draw_loss, final_loss, smoothed
from PIL import Image

RECORD = StepRecord(0, 0, 3.0, 1e-3, 64, 0.5, 0.1, "")


def records(*losses: float) -> list[StepRecord]:
    return [replace(RECORD, step=step, loss=loss) for step, loss in enumerate(losses)]


def test_the_final_loss_is_the_mean_of_the_last_twenty_steps_or_fewer() -> None:
    assert final_loss(records(*[9.0] * 5, *[1.0, 3.0] * 10)) == pytest.approx(2.0)
    assert final_loss(records(1.0, 2.0)) == pytest.approx(1.5)


def test_smoothing_keeps_constants_and_does_not_lag() -> None:
    assert smoothed(np.full(100, 2.5)) == pytest.approx(np.full(100, 2.5))
    line = np.arange(400.0)
    assert smoothed(line)[100:300] == pytest.approx(line[100:300])
    noisy = line + np.random.default_rng(0).normal(size=400)
    assert np.std(smoothed(noisy)[50:350] - line[50:350]) < 0.4


@pytest.mark.parametrize("num_steps", [1, 2, 300])
@pytest.mark.parametrize("resumed_at", [[], [1, 2]])
def test_the_curve_is_a_picture_of_some_size_for_runs_of_any_length(
    tmp_path: Path, num_steps: int, resumed_at: list[int]
) -> None:
    draw_loss(records(*np.linspace(5, 2, num_steps)), resumed_at, "a title", tmp_path / "loss.png")
    with Image.open(tmp_path / "loss.png") as picture:
        assert picture.width > 1000
        # something is drawn
        assert sum(count > 0 for count in picture.convert("L").histogram()) > 50
