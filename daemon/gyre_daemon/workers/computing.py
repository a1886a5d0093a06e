"""The compute workers' side. Which class computes is told by the request to fork.

A process may get any bytes and run any code, so it must not have the daemon's memory: its server is
a new program, and its own memory is limited.
"""

import contextlib
import gc
import importlib
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

from gyre_daemon.workers.protocol import Kind, Message


class Computation(Protocol):
    """What the processes of one pool do; each has an instance."""

    @classmethod
    def preload(cls) -> None:
        """Import common modules: once in the server, for all that it forks later."""

    def answer(self, body: memoryview, descriptors: Sequence[int]) -> bytes:
        """The reply's body.

        Args:
            body: of the request.
            descriptors: that came along; they are the callee's.
        """


class ComputeWork:
    """See `process.Work`; the body of `FORK` is NAME MODULE:CLASS."""

    def __init__(self) -> None:
        """Have nothing imported yet."""
        self.name = "gyre-compute"
        self._known: dict[str, type[Computation]] = {}
        self._computation: Computation | None = None

    def prepare(self, body: bytes | bytearray) -> None:
        """Import the class with its imports."""
        _, target = body.decode().split(" ")
        if target not in self._known:
            module, _, name = target.partition(":")
            found: type[Computation] = getattr(importlib.import_module(module), name)
            found.preload()
            self._known[target] = found
            gc.collect()
            gc.freeze()

    def begin(self, body: bytes | bytearray) -> None:
        """Become a process of one pool."""
        with contextlib.suppress(OSError):  # the kernel ends this process before the daemon
            Path("/proc/self/oom_score_adj").write_text("500")
        self.name, target = body.decode().split(" ")
        self._computation = self._known[target]()

    def answer(self, request: Message) -> Message:
        """Have the class compute the reply."""
        assert self._computation
        answer = self._computation.answer(memoryview(request.body), request.descriptors)
        return Message(Kind.DONE, body=answer)
