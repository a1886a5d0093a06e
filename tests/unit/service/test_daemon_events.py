"""Lines of the daemon's log."""

import json
import logging
from collections.abc import Iterator

import pytest
from gyre_daemon.runtime.events import log_event, start_log


@pytest.fixture(autouse=True)
def own_logger() -> Iterator[None]:
    logger = logging.getLogger("gyre_daemon")
    before = logger.handlers[:], logger.propagate, logger.level
    yield
    logger.handlers[:], logger.propagate = before[:2]
    logger.setLevel(before[2])


def test_json_is_one_object_per_line(capsys: pytest.CaptureFixture[str]) -> None:
    start_log("info", "auto")  # pytest captures to something that is no terminal
    log_event("session open", {"job": "a b", "rank": 3})
    log_event("too small to tell", level=logging.DEBUG)
    (line,) = capsys.readouterr().err.splitlines()
    found = json.loads(line)
    assert (found["level"], found["event"], found["job"], found["rank"]) == (
        "info",
        "session open",
        "a b",
        3,
    )


def test_text_is_a_time_a_level_the_event_and_its_facts(capsys: pytest.CaptureFixture[str]) -> None:
    start_log("info", "text")
    log_event(
        "reload refused",
        {"reason": "no = sign", "added": ["a", "b c"], "removed": [], "pid": 7},
        logging.WARNING,
    )
    (line,) = capsys.readouterr().err.splitlines()
    assert (
        line[19:]
        == ' WARNING reload refused  reason="no = sign"  added=a,"b c"  removed=none  pid=7'
    )


def test_text_has_no_control_characters(capsys: pytest.CaptureFixture[str]) -> None:
    start_log("info", "text")
    log_event("session open", {"job": "x\x1b[2J\n\x9b1m", "dataset": "wörter"})
    (line,) = capsys.readouterr().err.splitlines()
    assert line.endswith(r'job="x\u001b[2J\n\u009b1m"  dataset=wörter')
