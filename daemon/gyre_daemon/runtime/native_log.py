"""Log lines of gRPC's core on standard error, as events of the log.

Nothing else says why a TLS handshake failed. As it is, a stranger could fill the log with such
lines, which are no JSON, and put text of his own into them.
"""

import asyncio
import contextlib
import logging
import os
import re
import sys
import time
from collections.abc import Iterator

from gyre_daemon.runtime.bucket import Bucket
from gyre_daemon.runtime.events import log_event, log_to

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
