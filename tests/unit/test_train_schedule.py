import itertools

import pytest
from gyre_trainer.training.config import OptimizerConfig
from gyre_trainer.training.schedule import learning_rate

OPTIMIZER = OptimizerConfig(lr=1.0, min_lr=0.1, warmup_steps=10)


def test_warm_up_grows_by_equal_amounts_to_the_peak() -> None:
    rates = [learning_rate(step, 110, OPTIMIZER) for step in range(10)]
    assert rates == pytest.approx([(step + 1) / 10 for step in range(10)])


def test_the_decay_starts_at_the_peak_and_ends_at_the_floor() -> None:
    rates = [learning_rate(step, 111, OPTIMIZER) for step in range(10, 111)]
    assert rates[0] == pytest.approx(1.0)
    assert rates[50] == pytest.approx(0.55)  # half of the cosine: half of the way
    assert rates[-1] == pytest.approx(0.1)
    assert all(later <= earlier for earlier, later in itertools.pairwise(rates))


def test_steps_beyond_the_end_stay_at_the_floor() -> None:
    assert learning_rate(5000, 111, OPTIMIZER) == pytest.approx(0.1)


@pytest.mark.parametrize("num_steps", [1, 2])
def test_very_short_runs_have_a_rate(num_steps: int) -> None:
    short = OptimizerConfig(lr=1.0, min_lr=0.1, warmup_steps=num_steps)
    assert learning_rate(num_steps - 1, num_steps, short) == pytest.approx(1.0)
    assert learning_rate(0, num_steps, OptimizerConfig(lr=1.0, min_lr=0.1)) == pytest.approx(1.0)
