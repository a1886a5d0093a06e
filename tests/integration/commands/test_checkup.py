"""`gyre status --check`: sentences about a real daemon, and its exit status."""

import json
from pathlib import Path

import pytest
from gyre_client.command.cli import main
from gyre_daemon.config import DaemonConfig, Size
from gyre_daemon.monitoring.metrics import Census, Metrics
from gyre_daemon.service import replies

from tests.conftest import Daemon, StartDaemon, to_toml
from tests.secure_daemons import write_secret
from tests.waiting import until

QUIET = {"max_requests": 1, "memory_budget": "64MiB", "cache_memory": "1MiB"}


def check(daemon: Daemon, capsys: pytest.CaptureFixture[str]) -> tuple[int, list[str]]:
    """Exit status and sentences; both forms of the output agree, unless a problem is new."""
    status, problems = 0, list[str]()

    def agree() -> bool:
        nonlocal status, problems
        capsys.readouterr()
        status = main(["status", "--check", "--json", "--address", daemon.address])
        problems = json.loads(capsys.readouterr().out)["problems"]
        again = main(["status", "--check", "--address", daemon.address])
        lines = capsys.readouterr().out.splitlines()
        return again == status and lines == (problems or ["nothing to change"])

    until(agree)
    return status, problems


def test_a_daemon_without_problems(
    gyred: StartDaemon, token_files: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert check(gyred(QUIET), capsys) == (0, [])


def test_each_problem_is_named_with_a_remedy(
    gyred: StartDaemon, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").write_text("")
    token = write_secret(tmp_path / "token", "x" * 32 + " 2020-01-01T00:00:00Z")
    config = {
        **QUIET,
        "max_requests": 1_000_000,
        "cache_dir": str(tmp_path / "file" / "cache"),
        "tokens": {"ci": str(token)},
    }
    daemon = gyred(config)
    assert daemon.reconfigure("memory_bugdet = 1")["event"] == "reload refused"
    known = (
        "no block is written to cache_dir",
        "raise LimitNOFILE= to 4000000",
        "the last reload was refused",
        "the token ci has expired: replace its file.",
    )

    def named() -> list[str]:
        status, problems = check(daemon, capsys)
        assert status == 1
        return [words for words in known if any(words in each for each in problems)]

    until(lambda: named() == list(known))
    daemon.reconfigure(to_toml({**config, "listen": [daemon.address]}))
    until(lambda: named() == [*known[:2], known[3]])


def test_a_control_group_below_budget_and_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    config = DaemonConfig(memory_budget=Size(4 << 30), cache_memory=Size(1 << 30), max_requests=1)
    census = Census("1", Metrics(), memory_budget_bytes=4 << 30, memory_abandoned_bytes=1 << 30)
    for limit, is_named in ((None, False), (64 << 30, False), (5 << 30, True)):
        monkeypatch.setattr(replies, "memory_limit_bytes", lambda limit=limit: limit)
        problems = replies.Checkup(config, []).problems(census)  # type: ignore[arg-type]
        assert is_named == any("its control group allows 5.0 GiB" in each for each in problems)
        assert any("clients keep 1.0 GiB" in each for each in problems)
