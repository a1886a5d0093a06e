"""A checkpoint of two ranks of an earlier version, which is kept as data: a run resumes from it."""

import json
import tarfile
from pathlib import Path

import pytest

from tests.train_jobs import Jobs, tiny_run

KEPT = Path(__file__).parents[2] / "kept"


def test_a_kept_checkpoint_goes_on_with_the_same_steps(tmp_path: Path, tiny_jobs: Jobs) -> None:
    with tarfile.open(KEPT / "run.tar.xz") as tar:
        tar.extractall(tmp_path, filter="data")
    (tmp_path / "train.toml").write_text(tiny_run(tmp_path, run={"steps": 4, "log_every": 1}))
    status, errors = tiny_jobs.ran("run", str(tmp_path / "train.toml"), "--nproc=2", "--resume")
    assert status == 0, errors
    found, wanted = (
        [json.loads(line) for line in (folder / "history.jsonl").read_text().splitlines()][3:]
        for folder in (tmp_path / "run", KEPT)
    )
    assert [each["sample_ids"] for each in found] == [each["sample_ids"] for each in wanted]
    losses = [each["loss"] for each in wanted]
    assert [each["loss"] for each in found] == pytest.approx(losses, rel=1e-5)
