"""Live bytes after a step, when no thread of gloo holds tensors of it any more.

A thread of gloo wakes the caller of a collective first, and lets go of the tensors after that. They
are Python's, so it needs the interpreter's lock for it, which the caller may have by then. So what
was averaged last may be alive for some milliseconds after backward, with no reference in Python.
"""

import time
from collections.abc import Sequence
from typing import Any
from weakref import ref

import torch
from gyre_trainer.accounting.counters import Counters
from torch import Tensor

_TIMEOUT_S = 10.0  # for what is never released, so that it is counted


class SettledBytes(Counters):  # type: ignore[no-untyped-call]
    """Live bytes, of which `settled` are alike in every run."""

    def __init__(self) -> None:
        super().__init__()
        self._reduced: list[ref[torch.UntypedStorage]] = []

    def _count(self, func: Any, given: Sequence[Tensor], result: Any) -> None:
        super()._count(func, given, result)
        if func is torch.ops.c10d.allreduce_.default:
            self._reduced += [ref(tensor.untyped_storage()) for tensor in given]

    def settled(self) -> int:
        """Bytes alive once all that was all-reduced is released, or after 10 s."""
        deadline_s = time.monotonic() + _TIMEOUT_S
        while any(each() is not None for each in self._reduced) and time.monotonic() < deadline_s:
            time.sleep(0.001)
        return self.live_bytes
