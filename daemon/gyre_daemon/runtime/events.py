"""The daemon's log: events on standard error, and the lines of gRPC's core.

Lines are JSON for programs, or text for a person at a terminal. An event has facts, which are short
values and never credentials.

Lines of gRPC's core become events: nothing else says why a TLS handshake failed, and a stranger
could otherwise fill the log with lines that are no JSON.
"""

import asyncio
import contextlib
import json
import logging
import os
import re
import sys
import time
from collections.abc import Iterator, Mapping
from datetime import UTC, datetime
from typing import TextIO

from gyre_protos.text import printable

from gyre_daemon.runtime.threads import Bucket

_LOGGER = logging.getLogger("gyre_daemon")


def log_event(
    event: str, facts: Mapping[str, object] | None = None, level: int = logging.INFO
) -> None:
    """Write one line.

    Args:
        event: in a few words that never vary.
        facts: the objects of the event, and amounts.
        level: one of the logging module's.
    """
    _LOGGER.log(level, event, extra={"facts": dict(facts or {})})


def debug_event(event: str, facts: Mapping[str, object]) -> None:
    """Write one line where `log_level` is `debug`."""
    if _LOGGER.isEnabledFor(logging.DEBUG):
        log_event(event, facts, logging.DEBUG)


def audit_event(event: str, facts: Mapping[str, object]) -> None:
    """Write one line of the audit log: who opened which dataset, how much was read, what was refused.

    Args:
        event: in a few words that never vary.
        facts: the caller and the object. No secrets.
    """
    log_event(event, facts)


def start_log(level: str, style: str = "json") -> None:
    """Send events of this level and above to standard error.

    Args:
        level: debug, info, warning or error.
        style: json, text, or auto, which is text on a terminal and JSON elsewhere.
    """
    handler = logging.StreamHandler(sys.stderr)
    is_text = style == "text" or (style == "auto" and sys.stderr.isatty())
    handler.setFormatter(_TextFormatter() if is_text else JsonFormatter())
    _LOGGER.handlers[:] = [handler]
    _LOGGER.propagate = False
    _LOGGER.setLevel(level.upper())


def log_to(stream: TextIO) -> None:
    """Write further events to another stream."""
    for handler in _LOGGER.handlers:
        if isinstance(handler, logging.StreamHandler):
            handler.setStream(stream)


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


_HANDSHAKE = re.compile(r"Handshake failed with error (.*)")
# OpenSSL's reason: the last but one part of `error:100000c0:SSL routines:...:REASON: more`.
_REASON = re.compile(r"OPENSSL_internal:(.*)")
_LINES, _LINES_PER_S = 20.0, 1 / 3
_READ_BYTES = 64 << 10
_MAX_CHARS = 300


@contextlib.contextmanager
def native_lines_as_events() -> Iterator[None]:
    """Log the lines that native code writes to standard error, until the context ends.

    The daemon's own events go where they went before. The last lines of native code before it
    crashes are lost.
    """
    loop = asyncio.get_running_loop()
    stderr = os.dup(sys.stderr.fileno())
    reader, writer = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
    lines = _Lines(reader)
    with os.fdopen(stderr, "w", buffering=1, errors="backslashreplace") as stream:
        os.dup2(writer, 2)
        os.close(writer)
        log_to(stream)
        loop.add_reader(reader, lines.read)
        try:
            yield
        finally:
            os.dup2(stderr, 2)
            lines.read()
            loop.remove_reader(reader)
            os.close(reader)
            log_to(sys.stderr)


class _Lines:
    def __init__(self, reader: int) -> None:
        self._reader = reader
        self._bucket = Bucket(_LINES, _LINES_PER_S, time.monotonic())
        self._num_unlogged = 0

    def read(self) -> None:
        """Log the available lines. A line that arrives in two parts becomes two events."""
        try:
            data = os.read(self._reader, _READ_BYTES)
        except BlockingIOError:
            return
        for line in data.decode(errors="replace").splitlines():
            self._log(line[:_MAX_CHARS])

    def _log(self, line: str) -> None:
        if not self._bucket.take(time.monotonic()):
            self._num_unlogged += 1
            return
        unlogged = {"not_logged_before": self._num_unlogged} if self._num_unlogged else {}
        self._num_unlogged = 0
        if failed := _HANDSHAKE.search(line):
            reason = _REASON.search(failed[1])
            facts = {"reason": reason[1] if reason else failed[1], **unlogged}
            log_event("TLS handshake failed", facts, logging.WARNING)
        else:
            log_event("message of a native library", {"text": line, **unlogged}, logging.WARNING)
