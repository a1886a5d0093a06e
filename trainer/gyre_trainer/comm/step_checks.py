"""Numbers that a device has and that a step must find as expected, read once a step.

A host that read each number when it arrives would wait for the device. So the numbers stay there,
side by side, until just before the optimizer's step, which would spread an error.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

# Numbers of a step: one for each hop and guard. Without an optimizer of torch that reads them, they
# are read at the largest capacity.
_FIRST_CAPACITY = 1_024
_LARGEST_CAPACITY = 2**16

Failure = Callable[[int], None]
"""Takes the number that was found, and raises."""


class StepChecks:
    """Compares numbers of a step: on a CPU at once, elsewhere when `read` is called."""

    def __init__(self) -> None:
        self._numbers: Tensor | None = None
        self._expected: list[tuple[int, Failure]] = []

    @property
    def is_pending(self) -> bool:
        """Whether there is anything to read."""
        return bool(self._expected)

    def require(self, number: Tensor, expected: int, fail: Failure) -> None:
        """Require that ``number``, a scalar, is ``expected``; else ``fail`` is called.

        The tensor may be written to afterwards.
        """
        if number.device.type != "cpu":
            self.note(number, expected, fail)
        elif (found := int(number)) != expected:
            fail(found)

    def note(self, number: Tensor, expected: int, fail: Failure) -> None:
        """Let the next `read` compare a number; nothing waits for the device now."""
        count = len(self._expected)
        if count == _LARGEST_CAPACITY:
            self.read()
            count = 0
        if self._numbers is None:
            self._numbers = torch.empty(_FIRST_CAPACITY, dtype=torch.int64, device=number.device)
        elif count == len(self._numbers):
            self._numbers = torch.cat((self._numbers, torch.empty_like(self._numbers)))
        self._numbers[count].copy_(number)
        self._expected.append((expected, fail))

    def read(self) -> None:
        """Wait until the device has all numbers, and compare them, the earliest first."""
        expected, self._expected = self._expected, []
        if not expected:
            return
        assert self._numbers is not None
        here = torch.empty(len(expected), dtype=torch.int64, pin_memory=self._numbers.is_cuda)
        here.copy_(self._numbers[: len(expected)], non_blocking=True)
        if self._numbers.is_cuda:
            arrived = torch.cuda.Event()  # type: ignore[no-untyped-call]
            arrived.record()
            arrived.synchronize()
        for found, (wanted, fail) in zip(here.tolist(), expected, strict=True):
            if found != wanted:
                fail(found)

    def forget(self) -> None:
        """Drop the noted numbers, as the ring has failed."""
        self._expected = []


def on_device(values: Sequence[float], like: Tensor) -> Tensor:
    """The values as a tensor like ``like``, in dtype and device, without waiting for the device."""
    if not like.is_cuda:
        return like.new_tensor(values)
    return torch.tensor(values, dtype=like.dtype).pin_memory().to(like.device, non_blocking=True)
