"""When a request is sent a second time because its answer is late: Dean and Barroso, "The Tail at Scale", 2013. Pure: no clock.

An answer is late when 95 of 100 answers of its size came sooner of late. The first of the two that arrives counts. A budget
keeps the second requests to one in twenty, so that nothing is doubled when everything is slow.
"""

from collections import deque

_SHARE = 0.05
_RESERVE = 16.0
_QUANTILE = 0.95
_MEMORY = 512
_MIN_KNOWN = 32
_EVERY = 32  # answers between two looks at the quantile


class Hedges:
    """What one endpoint's answers took of late, by size, and the budget of second requests."""

    def __init__(self) -> None:
        self._answers: dict[int, _Answers] = {}
        self._tokens = _RESERVE

    def note(self, num_bytes: int, duration_s: float) -> None:
        """An answer came whole."""
        size = size_class(num_bytes)
        answers = self._answers.get(size)
        if answers is None:
            answers = self._answers[size] = _Answers()
        answers.add(duration_s)

    def late_after_s(self, size: int) -> float | None:
        """After how long a request of a size class is late; None while too little is known."""
        answers = self._answers.get(size)
        return answers.quantile_s if answers else None

    def earn(self) -> None:
        """A read was begun."""
        self._tokens = min(_RESERVE, self._tokens + _SHARE)

    def take(self) -> bool:
        """Whether a second request may be sent now; if so, it counts as sent."""
        if self._tokens < 1:
            return False
        self._tokens -= 1
        return True


class _Answers:
    """The last answers of one size class."""

    def __init__(self) -> None:
        self._durations_s: deque[float] = deque(maxlen=_MEMORY)
        self._num_new = 0
        self.quantile_s: float | None = None

    def add(self, duration_s: float) -> None:
        self._durations_s.append(duration_s)
        self._num_new += 1
        if self._num_new >= _EVERY and len(self._durations_s) >= _MIN_KNOWN:
            self._num_new = 0
            self.quantile_s = sorted(self._durations_s)[int(len(self._durations_s) * _QUANTILE)]


def size_class(num_bytes: int) -> int:
    """Sizes within a factor of four have one class."""
    return num_bytes.bit_length() // 2
