"""A rank that is stopped inside a save is named with what happened to it, and to whom."""

from pathlib import Path

from tests.train_jobs import DEADLINE_S, Jobs, tiny_run


def test_a_rank_that_is_stopped_in_a_save_is_named_first(tmp_path: Path, tiny_jobs: Jobs) -> None:
    (tmp_path / "train.toml").write_text(
        tiny_run(tmp_path, run={"steps": 1, "timeout_s": 10}, data={"batch_size": 3})
    )
    job = tiny_jobs.start(
        "run", str(tmp_path / "train.toml"), "--nproc=3", module="tests.frozen_in_save"
    )
    errors = job.errors(DEADLINE_S)
    assert job.wait(DEADLINE_S) == 1, errors
    last = errors.strip().splitlines()[-1]
    assert last.startswith(
        "gyre-train: rank 2 is at fault: no sign of life within 5 s, so it has ended or was stopped"
    ), errors
    assert "writing a checkpoint" in last
    for word in ("Timed out", ".cc", "Traceback"):
        assert word not in errors
    logs = [path.read_text() for path in (tmp_path / "run").glob("rank-*.log")]
    assert logs
    assert any("writing a checkpoint failed: " in each and ".cc" in each for each in logs)
    assert not (tmp_path / "run/checkpoints/latest").exists()
