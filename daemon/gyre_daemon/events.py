"""The daemon's log: one event per line, as JSON, on standard error. Facts are short values; no credential is ever one."""

import json
import logging
import sys
from collections.abc import Mapping
from datetime import UTC, datetime

_LOGGER = logging.getLogger("gyre_daemon")


def log_event(event: str, facts: Mapping[str, object] | None = None, level: int = logging.INFO) -> None:
    """Write one line.

    Args:
        event: what happened, in two or three words that never vary.
        facts: to what, and how much.
        level: of the logging module.
    """
    _LOGGER.log(level, event, extra={"facts": dict(facts or {})})


def start_log(level: str) -> None:
    """Send events of this level and above to standard error."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(_JsonFormatter())
    _LOGGER.handlers[:] = [handler]
    _LOGGER.propagate = False
    _LOGGER.setLevel(level.upper())


class _JsonFormatter(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        line = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "event": record.getMessage(),
            **getattr(record, "facts", {}),
        }
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line, default=str)
