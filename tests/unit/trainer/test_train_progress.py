from gyre_trainer.training.history import StepRecord
from gyre_trainer.training.recorder import describe


def record(step: int) -> StepRecord:
    return StepRecord(step, 0, 2.0, 1e-3, 1000, 0.5, 0.05, "")


def test_the_line_shows_the_state_of_the_run() -> None:
    line = describe([record(8), record(9)], num_steps=250)
    for part in (
        "step  10/250",
        "loss 2.0000",
        "lr 1.00e-03",
        "2,000 tokens/s",
        "data wait 10.0%",
        "left 0:02:00",
    ):
        assert part in line
    assert "left 5:00:00" in describe([record(0)], num_steps=36_001)
