import itertools

import pytest
from gyre_trainer.errors import ConfigError
from gyre_trainer.training.config import OptimizerConfig, TrainConfig, build, learning_rate

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


def rates(**keys: object) -> list[float]:
    """The rates of a run of 31 steps, 11 of them for warm-up."""
    optimizer = build(OptimizerConfig, {"lr": 1.0, "min_lr": 0.1, "warmup_steps": 11} | keys)
    return [learning_rate(step, 31, optimizer) for step in range(31)]


def test_a_linear_decay_falls_by_equal_amounts_to_the_floor() -> None:
    falling = rates(schedule="linear")[11:]
    assert falling[0] == pytest.approx(1.0)
    assert falling[-1] == pytest.approx(0.1)
    steps = [before - after for before, after in itertools.pairwise(falling)]
    assert steps == pytest.approx([0.9 / 19] * 19)


def test_a_constant_rate_stays_where_the_warm_up_ends() -> None:
    assert rates(schedule="constant")[10:] == [1.0] * 21


def test_a_stable_rate_falls_in_the_last_steps_alone() -> None:
    stable = rates(schedule="warmup-stable-decay", decay_steps=5)
    assert stable[10:26] == pytest.approx([1.0] * 16)
    assert stable[26:] == pytest.approx([0.82, 0.64, 0.46, 0.28, 0.1])
    assert rates(schedule="warmup-stable-decay", decay_steps=20)[30] == pytest.approx(0.1)


def test_decay_steps_belong_to_one_schedule_and_fit_into_the_run() -> None:
    for keys in ({"schedule": "warmup-stable-decay"}, {"decay_steps": 5}):
        with pytest.raises(ConfigError, match="decay steps"):
            rates(**keys)
    model = dict.fromkeys(("num_layers", "num_heads", "num_kv_heads"), 1)
    model |= {"vocab_size": 9, "dim": 2, "hidden_dim": 2, "max_seq_len": 4}
    sections = {
        "run": {"out": "nowhere", "steps": 9},
        "data": {"dataset": "none", "batch_size": 4, "sequence_length": 4},
        "optimizer": {"schedule": "warmup-stable-decay", "warmup_steps": 5, "decay_steps": 5},
        "model": model,
    }
    with pytest.raises(ConfigError, match="are 5 and 5, but the run has 9 steps"):
        build(TrainConfig, sections)
