"""The file of the audit log."""

import json
import logging
import os
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from gyre_daemon.cli import main
from gyre_daemon.errors import ConfigError
from gyre_daemon.runtime.events import AuditFile, audit_event, reopen_audit_file

from tests.waiting import until


@pytest.fixture
def audit_file(tmp_path: Path) -> Iterator[AuditFile]:
    file = AuditFile(tmp_path / "audit.log")
    yield file
    file.close()


def lines(path: Path) -> list[dict[str, object]]:
    for handler in logging.getLogger("gyre_daemon.audit").handlers:
        handler.flush()
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_lines_are_appended_for_the_daemons_user_alone(
    audit_file: AuditFile, tmp_path: Path
) -> None:
    path = tmp_path / "audit.log"
    audit_event("session open", {"user": "uid:1004", "job": "x\x1b[2J\n\x9b1m\u2028"})
    audit_event("session closed", {"user": "uid:1004"})
    assert [line["event"] for line in lines(path)] == ["session open", "session closed"]
    assert lines(path)[0]["job"] == "x\x1b[2J\n\x9b1m\u2028"
    assert all(0x20 <= byte < 0x7F for line in path.read_bytes().splitlines() for byte in line)
    assert path.stat().st_mode & 0o777 == 0o600


def test_it_may_be_renamed(audit_file: AuditFile, tmp_path: Path) -> None:
    audit_event("one", {})
    (tmp_path / "audit.log").rename(tmp_path / "audit.log.1")
    audit_event("two", {})
    reopen_audit_file()
    audit_event("three", {})
    assert [line["event"] for line in lines(tmp_path / "audit.log.1")] == ["one", "two"]
    assert [line["event"] for line in lines(tmp_path / "audit.log")] == ["three"]


def test_where_it_cannot_be_opened_again_the_old_file_stays(
    audit_file: AuditFile, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "audit.log").rename(tmp_path / "audit.log.1")
    (tmp_path / "audit.log").mkdir()
    with caplog.at_level(logging.ERROR, "gyre_daemon"):
        reopen_audit_file()
        audit_event("one", {})
        assert [line["event"] for line in lines(tmp_path / "audit.log.1")] == ["one"]
    assert "audit log not reopened" in caplog.text


def test_a_file_system_that_hangs_holds_up_nobody(
    audit_file: AuditFile,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("gyre_daemon.runtime.events._MAX_WAITING", 2)
    monkeypatch.setattr("gyre_daemon.runtime.events._MAX_FLUSH_S", 0.01)
    answers = threading.Event()
    audit_file._threads.submit(answers.wait)
    with caplog.at_level(logging.ERROR, "gyre_daemon"):
        for name in ("one", "two", "three"):
            audit_event(name, {})
    assert "audit log not written" in caplog.text
    audit_file.close()
    answers.set()
    until(lambda: [line["event"] for line in lines(tmp_path / "audit.log")] == ["one", "two"])


@pytest.mark.parametrize("kind", ["link", "readable", "writable", "folder", "pipe", "no folder"])
def test_a_file_that_is_not_the_daemons_alone_is_refused(kind: str, tmp_path: Path) -> None:
    path = tmp_path / "audit.log"
    match kind:
        case "link":
            (tmp_path / "target").touch(0o600)
            path.symlink_to(tmp_path / "target")
        case "readable":
            path.touch()
            path.chmod(0o644)
        case "writable":
            path.touch()
            path.chmod(0o622)
        case "folder":
            path.mkdir()
        case "pipe":
            os.mkfifo(path, 0o600)
        case "no folder":
            path = tmp_path / "absent" / "audit.log"
    before = sorted(tmp_path.iterdir())
    with pytest.raises(ConfigError, match=r"^audit_log: .*audit\.log"):
        AuditFile(path)
    assert sorted(tmp_path.iterdir()) == before


def test_a_mistake_in_a_list_is_found_before_the_daemon_starts(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "gyre.toml"
    table = '[datasets.x]\nuri = "/x"\nformat = "tokens"\ndtype = "uint8"\nsequence_length = 4\n'
    for text, sentence in (
        (f'admin = ["usr:root"]\n{table}', "did you mean `user:root`?"),
        (f'{table}allow = ["uid:1", "team:a"]\n', "datasets.x.allow has the entry 'team:a'"),
    ):
        path.write_text(text)
        with pytest.raises(SystemExit) as ended:
            main(["check-config", "--config", str(path)])
        assert ended.value.code == 2
        assert sentence in capsys.readouterr().err
    path.write_text(f'{table}allow = ["uid:1", "job:a*"]\n')
    with pytest.raises(SystemExit) as ended:
        main(["check-config", "--config", str(path)])
    assert ended.value.code == 0
    assert 'allow = ["uid:1", "job:a*"]' in capsys.readouterr().out
