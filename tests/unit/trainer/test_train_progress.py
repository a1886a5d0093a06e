import io

from gyre_trainer.training.history import StepRecord
from gyre_trainer.training.recorder import Progress, describe


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


def test_a_log_gets_a_line_now_and_then_and_the_last_one() -> None:
    now_s = 0.0
    log = io.StringIO()
    progress = Progress(100, log, clock_s=lambda: now_s)
    for step in range(100):
        progress.show([record(step)])
        now_s += 0.5
    lines = log.getvalue().splitlines()
    assert 8 <= len(lines) <= 12
    assert lines[-1].startswith("step 100/100")
    progress.say("a checkpoint")
    assert log.getvalue().endswith("\na checkpoint\n")
