import json
from dataclasses import replace
from pathlib import Path

import pytest
from gyre_trainer.training.history import StepRecord
from gyre_trainer.training.recorder import Report, final_loss, write_report

RECORD = StepRecord(0, 0, 3.0, 1e-3, 64, 0.5, 0.1, "")


def records(*losses: float) -> list[StepRecord]:
    return [replace(RECORD, step=step, loss=loss) for step, loss in enumerate(losses)]


def test_the_final_loss_is_the_mean_of_the_last_twenty_steps_or_fewer() -> None:
    assert final_loss(records(*[9.0] * 5, *[1.0, 3.0] * 10)) == pytest.approx(2.0)
    assert final_loss(records(1.0, 2.0)) == pytest.approx(1.5)


def test_the_report_is_json_with_every_figure(tmp_path: Path) -> None:
    report = Report(
        steps=2,
        final_loss=1.5,
        num_tokens=128,
        tokens_per_s=64.0,
        data_wait_share=0.25,
        epochs=0.5,
        position=8,
        world_size=2,
        num_parameters=99,
        compute_dtype="float32",
        peak_memory_bytes=(1, 2),
        resumed_at=(),
        eval_loss=None,
    )
    write_report(report, tmp_path / "report.json")
    content = json.loads((tmp_path / "report.json").read_text())
    assert content["peak_memory_bytes"] == [1, 2]
    assert content["eval_loss"] is None
