"""When a request is sent a second time because its answer is late: Dean and Barroso, "The Tail at Scale", 2013. Pure: no clock.

An answer is late when 95 of 100 answers of its size came sooner of late. The first of the two that arrives counts. A budget
keeps the second requests to one in twenty, so that nothing is doubled when everything is slow, and goes to those who wait for
the next batch.

Answers that came say little while many are still awaited: the first to come are the fast ones. So at first it is the 64
requests that were sent first that count, and late is what is not there when all but three of them are.
"""

from collections import Counter, deque
from collections.abc import Hashable, Iterable
from typing import Protocol, TypeVar

_SHARE = 0.05
_RESERVE, _KEPT = 16.0, 8.0
_QUANTILE = 0.95
_MEMORY = 512
_COHORT = 64  # requests sent first
_MIN_KNOWN = 32
_EVERY = 32  # answers between two looks at the quantile


class Hedges:
    """What one endpoint's answers took of late, by size, and the budget of second requests."""

    def __init__(self) -> None:
        self._answers: dict[int, _Answers] = {}
        self._tokens = _RESERVE

    def begin(self, size: int) -> bool:
        """A request of a size class was sent; gives whether it is one of the first, of which `end_early` must be told."""
        answers = self._of(size)
        if answers.num_early >= _COHORT:
            return False
        answers.num_early += 1
        return True

    def end_early(self, size: int) -> None:
        """One of the first requests of a size class was answered, or failed, or nobody waits for it any more."""
        self._of(size).end_early()

    def note(self, num_bytes: int, duration_s: float) -> None:
        """An answer came whole, or was waited for so long before its twin came."""
        self._of(size_class(num_bytes)).add(duration_s)

    def late_after_s(self, size: int) -> float | None:
        """After how long a request of a size class is late; None while too little is known."""
        answers = self._answers.get(size)
        return answers.quantile_s if answers else None

    def earn(self) -> None:
        """A read was sent."""
        if self._tokens < _RESERVE:
            self._tokens += _SHARE

    @property
    def may_take(self) -> bool:
        """Some second request may be sent now."""
        return self._tokens >= 1

    def take(self, *, is_needed_first: bool = True) -> bool:
        """Whether a second request may be sent now; if so, it counts as sent.

        A part is kept for what is needed first: where that is late, nothing else is sent that would bring a token.
        """
        if self._tokens < (1 if is_needed_first else 1 + _KEPT):
            return False
        self._tokens -= 1
        return True

    def _of(self, size: int) -> "_Answers":
        answers = self._answers.get(size)
        if answers is None:
            answers = self._answers[size] = _Answers()
        return answers


class _Answers:
    """The last answers of one size class."""

    def __init__(self) -> None:
        self.num_early = 0
        self.quantile_s: float | None = None
        self._num_early_ended = 0
        self._durations_s: deque[float] = deque(maxlen=_MEMORY)
        self._num_to_come = _MIN_KNOWN  # before the next look at the quantile

    def add(self, duration_s: float) -> None:
        self._durations_s.append(duration_s)
        self._num_to_come -= 1
        if self._num_to_come <= 0:
            self._look()

    def end_early(self) -> None:
        self._num_early_ended += 1
        if self.quantile_s is None and self._num_to_come <= 0:
            self._look()

    def _look(self) -> None:
        if self._num_early_ended < self.num_early * _QUANTILE:
            return
        durations_s = sorted(self._durations_s)
        if self.quantile_s is None and self.num_early:  # what is there now is the slowest of all but the late ones
            self.quantile_s, self._num_to_come = durations_s[-1], _MEMORY
        else:
            self.quantile_s, self._num_to_come = durations_s[int(len(durations_s) * _QUANTILE)], _EVERY


class Late(Protocol):
    """A request whose answer is late."""

    @property
    def flow(self) -> Hashable:
        """For which job it is."""

    @property
    def urgency(self) -> int:
        """Among the job's requests the lowest is needed first."""


Request = TypeVar("Request", bound=Late)


def most_needed_first(late: Iterable[Request]) -> list[Request]:
    """Of each job those that it needs first, the jobs in turns."""
    turns: Counter[Hashable] = Counter()
    in_turns = []
    for request in sorted(late, key=lambda each: each.urgency):
        in_turns.append((turns[request.flow], request))
        turns[request.flow] += 1
    return [request for _, request in sorted(in_turns, key=lambda each: each[0])]


def size_class(num_bytes: int) -> int:
    """Sizes within a factor of four have one class."""
    return num_bytes.bit_length() // 2
