"""The audit log: who opened which dataset, from which process, and how much was read.

It has refusals too. Its lines are events of the daemon's log. They are also written
to a file of their own where the operator names one. The file is for the daemon's user only. It is
opened again on SIGHUP, so it can be rotated by renaming it.
"""

import logging
import os
from collections.abc import Mapping
from pathlib import Path

from gyre_daemon.errors import ConfigError
from gyre_daemon.runtime.events import JsonFormatter, log_event

_LOGGER = logging.getLogger("gyre_daemon.audit")
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
            try:
                handler.reopen()
            except ConfigError as error:
                log_event("audit log not reopened", {"reason": error}, logging.ERROR)


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
        _LOGGER.setLevel(logging.INFO)
        _LOGGER.addHandler(self)

    def reopen(self) -> None:
        """Open the file at the path again; the old one stays in use where that fails.

        Raises:
            ConfigError: as when it was opened first.
        """
        descriptor = _open(self._path)
        os.close(self._descriptor)
        self._descriptor = descriptor

    def emit(self, record: logging.LogRecord) -> None:
        """Append one line. A line that cannot be written goes to the daemon's log only."""
        try:
            os.write(self._descriptor, f"{self.format(record)}\n".encode())
        except OSError as error:
            facts = {"file": self._path, "reason": error.strerror}
            log_event("audit log not written", facts, logging.ERROR)

    def close(self) -> None:
        """Write no further line."""
        _LOGGER.removeHandler(self)
        os.close(self._descriptor)
        super().close()


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
