"""The audit log: who opened which dataset, from which process, and how much was read.

It has refusals too. Its lines are events of the daemon's log. They are also written
to a file of their own where the operator names one. The file is for the daemon's user only. It is
opened again on SIGHUP, so it can be rotated by renaming it. A thread writes it, because its file
system may hang.
"""

import contextlib
import logging
import os
import threading
from collections.abc import Mapping
from pathlib import Path

from gyre_daemon.errors import ConfigError
from gyre_daemon.runtime.events import JsonFormatter, log_event
from gyre_daemon.runtime.threads import DaemonThreads

_LOGGER = logging.getLogger("gyre_daemon.audit")
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
    _LOGGER.info(event, extra={"facts": dict(facts)})


def reopen_audit_file() -> None:
    """Open the file of the audit log again, if there is one; it may have been renamed."""
    for handler in _LOGGER.handlers:
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
        _LOGGER.setLevel(logging.INFO)
        _LOGGER.addHandler(self)

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
        _LOGGER.removeHandler(self)
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
