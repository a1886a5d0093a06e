"""The daemon's log: events on standard error, the audit log, and the lines of gRPC's core.

Lines are JSON for programs, or text for a person at a terminal. An event has facts, which are short
values and never credentials.

The audit log says who opened which dataset, from which process, how much was read, and what was
refused. Its lines are events of the log. They are also written to a separate file where
the operator names one. The file is for the daemon's user only. It is opened again on SIGHUP, so it
can be rotated by renaming it. A thread writes it, because its file system may hang.

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
import threading
import time
from collections.abc import Iterator, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import TextIO

from gyre_protos.text import printable

from gyre_daemon.errors import ConfigError
from gyre_daemon.runtime.threads import Bucket, DaemonThreads

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


def start_log(level: str, style: str = "json") -> None:
    """Send events of this level and above to standard error.

    Args:
        level: debug, info, warning or error.
        style: json, text, or auto, which is text on a terminal and JSON elsewhere.
    """
    handler = logging.StreamHandler(sys.stderr)
    is_text = style == "text" or (style == "auto" and sys.stderr.isatty())
    handler.setFormatter(_TextFormatter() if is_text else JsonFormatter())
    handler.setLevel(level.upper())  # lines of the audit log are made at any level
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


_AUDIT = logging.getLogger("gyre_daemon.audit")
# Lines that wait while the file system hangs; more take memory, fewer are lost if it comes back.
_MAX_WAITING = 10_000
_MAX_FLUSH_S = 2.0
_FLAGS = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK


def audit_event(event: str, facts: Mapping[str, object]) -> None:
    """Write one line, whatever the log level.

    Args:
        event: in a few words that never vary.
        facts: the caller and the object. No secrets. Control characters are escaped.
    """
    _AUDIT.info(event, extra={"facts": dict(facts)})


def reopen_audit_file() -> None:
    """Open the file of the audit log again, if there is one; it may have been renamed."""
    for handler in _AUDIT.handlers:
        if isinstance(handler, AuditFile):
            handler.reopen()


class AuditFile(logging.Handler):
    """Appends the lines to a file as JSON."""

    def __init__(self, path: Path) -> None:
        """Open the file, and send all further lines there too.

        Raises:
            ConfigError: it cannot be opened, is no plain file, or others may read or write it.
        """
        super().__init__(logging.INFO)
        self.setFormatter(JsonFormatter())
        self._path = path
        self._descriptor = _open(path)
        self._threads = DaemonThreads(1, "gyre-audit")
        self._num_waiting, self._counting = 0, threading.Lock()
        self._is_closed = False
        _AUDIT.setLevel(logging.INFO)
        _AUDIT.addHandler(self)

    def reopen(self) -> None:
        """Open the file at the path again soon; the old one stays in use where that fails."""
        self._threads.submit(self._reopen)

    def emit(self, record: logging.LogRecord) -> None:
        """Append one line soon. A line that cannot be written goes to the daemon's log only."""
        with self._counting:
            is_full = self._num_waiting >= _MAX_WAITING
            self._num_waiting += not is_full
        if is_full:
            self._tell(f"{_MAX_WAITING} lines wait for its file system")
        else:
            self._threads.submit(self._write, f"{self.format(record)}\n".encode())

    def flush(self) -> None:
        """Wait for lines that are not written yet, but not long."""
        if not self._is_closed:
            with contextlib.suppress(TimeoutError):
                self._threads.submit(bool).result(_MAX_FLUSH_S)

    def close(self) -> None:
        """Write no further line."""
        if self._is_closed:
            return
        _AUDIT.removeHandler(self)
        self.flush()
        self._is_closed = True
        self._threads.submit(self._close)
        self._threads.shutdown()
        super().close()

    def _close(self) -> None:
        os.close(self._descriptor)

    def _reopen(self) -> None:
        try:
            descriptor = _open(self._path)
        except ConfigError as error:
            log_event("audit log not reopened", {"reason": error}, logging.ERROR)
            return
        os.close(self._descriptor)
        self._descriptor = descriptor

    def _write(self, line: bytes) -> None:
        try:
            os.write(self._descriptor, line)
        except OSError as error:
            self._tell(error.strerror)
        finally:
            with self._counting:
                self._num_waiting -= 1

    def _tell(self, reason: str | None) -> None:
        facts = {"file": self._path, "reason": reason}
        log_event("audit log not written", facts, logging.ERROR)


def _open(path: Path) -> int:
    try:
        descriptor = os.open(path, _FLAGS, 0o600)
    except OSError as error:
        raise ConfigError(f"audit_log: cannot open {path}: {error.strerror}") from error
    found = os.fstat(descriptor)
    if not path.is_file() or found.st_mode & 0o077 or found.st_uid != os.geteuid():
        os.close(descriptor)
        raise ConfigError(
            f"audit_log: {path} is no plain file of the daemon's user with mode 0600; "
            "remove it, or name another"
        )
    return descriptor


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
