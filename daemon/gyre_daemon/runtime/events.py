"""The daemon's log: events on standard error; and its state, for the service manager.

Lines are JSON for programs, or text for a person at a terminal. An event has facts, which are short
values and never credentials. State lines go to the datagram socket that `NOTIFY_SOCKET` names.
"""

import asyncio
import json
import logging
import os
import socket
import sys
from collections.abc import Mapping
from datetime import UTC, datetime

from gyre_protos.text import printable

_LOGGER = logging.getLogger("gyre_daemon")


def log_event(
    event: str, facts: Mapping[str, object] | None = None, level: int = logging.INFO
) -> None:
    """Write one line: the event, in a few words that never vary, and its objects and amounts."""
    _LOGGER.log(level, event, extra={"facts": dict(facts or {})})


def debug_event(event: str, facts: Mapping[str, object]) -> None:
    """Write one line where `log_level` is `debug`."""
    if _LOGGER.isEnabledFor(logging.DEBUG):
        log_event(event, facts, logging.DEBUG)


def start_log(level: str, style: str = "json") -> None:
    """Send events of this level and above to standard error.

    The style is json, text, or auto: text on a terminal and JSON elsewhere.
    """
    handler = logging.StreamHandler(sys.stderr)
    is_text = style == "text" or (style == "auto" and sys.stderr.isatty())
    handler.setFormatter(_TextFormatter() if is_text else JsonFormatter())
    _LOGGER.handlers[:] = [handler]
    _LOGGER.propagate = False
    _LOGGER.setLevel(level.upper())


class _TextFormatter(logging.Formatter):
    """`2026-11-22 19:46:32 WARNING reload refused  reason="..."`, in local time."""

    def format(self, record: logging.LogRecord) -> str:
        time = datetime.fromtimestamp(record.created).astimezone().strftime("%Y-%m-%d %H:%M:%S")
        facts = getattr(record, "facts", {})
        line = f"{time} {record.levelname:7} {printable(record.getMessage())}"
        line += "".join(f"  {key}={_shown(value)}" for key, value in facts.items())
        if record.exc_info:
            line += "\n" + printable(self.formatException(record.exc_info), kept="\n")
        return line


def _shown(value: object) -> str:
    """A fact as one word or quoted, with control characters escaped, as a terminal obeys them."""
    if isinstance(value, list | tuple):
        return ",".join(map(_shown, value)) or "none"
    text = str(value)
    if text and text.isprintable() and not any(letter in ' ,="' for letter in text):
        return text
    return printable(json.dumps(text, ensure_ascii=not text.isprintable()))


class JsonFormatter(logging.Formatter):
    """One JSON object per line, in UTC; other characters than ASCII are escaped."""

    def format(self, record: logging.LogRecord) -> str:
        """The line of an event."""
        line = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "event": record.getMessage(),
            **getattr(record, "facts", {}),
        }
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line, default=str).replace("\x7f", "\\u007f")


def notify(state: str) -> None:
    """Send a state such as `READY=1` to the service manager, if there is one."""
    address = os.environ.get("NOTIFY_SOCKET", "")
    if not address:
        return
    if address.startswith("@"):
        address = "\0" + address[1:]
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as sender:
        try:
            sender.sendto(state.encode(), socket.MSG_DONTWAIT, address)
        except OSError:
            return  # the daemon serves on without a manager that listens


async def ping_watchdog() -> None:
    """Tell the manager that the event loop runs, twice in each watchdog interval, until cancelled.

    Returns at once where the manager has set no watchdog for this process.
    """
    interval_us = os.environ.get("WATCHDOG_USEC", "")
    meant_for = os.environ.get("WATCHDOG_PID", "")
    if (
        not interval_us.isdecimal()
        or int(interval_us) == 0
        or meant_for not in ("", str(os.getpid()))
    ):
        return
    while True:
        notify("WATCHDOG=1")
        await asyncio.sleep(int(interval_us) / 2e6)
