"""Examples of trainers that `make frameworks` installs, stopped inside an epoch and resumed."""

import json
import os
import sys
from pathlib import Path

import pytest

from tests.examples import planned, run_example
from tests.frameworks import framework


@pytest.fixture(autouse=True)
def with_frameworks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("GYRE_ADDRESS", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("PYTHONPATH", os.fspath(Path(sys.prefix) / "frameworks"))


@pytest.mark.parametrize(
    ("example", "needs", "num_ranks"),
    [("torchtitan_loop", "torchtitan", 2), ("megatron_loop", "megatron.core", 2)],
)
def test_a_stopped_and_resumed_run_consumes_what_is_planned(
    example: str, needs: str, num_ranks: int, tmp_path: Path
) -> None:
    framework(needs)
    run_example(example, tmp_path, num_ranks=num_ranks)
    for rank in range(num_ranks):
        consumed = json.loads((tmp_path / f"rank-{rank}.json").read_text())
        assert consumed == planned(tmp_path, rank, num_ranks), f"rank {rank}"


def test_preferences_are_learnt(tmp_path: Path) -> None:
    framework("trl")
    run_example("trl_preferences", tmp_path)
    losses = json.loads((tmp_path / "losses.json").read_text())
    assert len(losses) == 16
    assert losses[-1] < losses[0]
