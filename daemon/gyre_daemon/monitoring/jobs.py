"""What each job has had from this daemon since it started. Pure; the number of jobs that are told apart is bounded.

Clients choose the names of jobs, so their number has no bound of its own: every loader that is given none makes one up. Beyond
`MAX_JOBS` a new job takes the place of the one that has been without a session for longest; where every place is in use, it is
counted under `OTHERS` for as long as its session lives, so that no counter ever falls while somebody reads it.
"""

from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field

from gyre_daemon.monitoring.occupancy import WindowTimes

MAX_JOBS = 64
OTHERS = "_others"  # of every job that has no place of its own


@dataclass(frozen=True, slots=True)
class SessionTotals:
    """What a session has done; those of several can be added.

    Attributes:
        num_batches: sent.
        num_bytes: of their payload.
        times: of its window.
        trainer_waited_s: its trainer had no batch to go on with, as the client tells.
    """

    num_batches: int = 0
    num_bytes: int = 0
    times: WindowTimes = field(default_factory=WindowTimes)
    trainer_waited_s: float = 0.0

    def __add__(self, other: "SessionTotals") -> "SessionTotals":
        return SessionTotals(
            self.num_batches + other.num_batches,
            self.num_bytes + other.num_bytes,
            self.times + other.times,
            self.trainer_waited_s + other.trainer_waited_s,
        )


@dataclass(slots=True)
class _Place:
    past: SessionTotals = field(default_factory=SessionTotals)
    num_open: int = 0


class Jobs:
    """The jobs that are told apart, and what their sessions that have ended did."""

    def __init__(self, max_jobs: int = MAX_JOBS) -> None:
        self._max_jobs = max_jobs
        self._places: OrderedDict[str, _Place] = OrderedDict()  # those without a session in the order in which they lost it

    def open(self, name: str) -> str:
        """A session of this job begins; gives the name that it is counted under until it is closed."""
        if name not in self._places and not self._make_room():
            name = OTHERS
        self._places.setdefault(name, _Place()).num_open += 1
        return name

    def close(self, name: str, totals: SessionTotals) -> None:
        """A session that was opened under this name has ended."""
        place = self._places[name]
        place.past += totals
        place.num_open -= 1
        self._places.move_to_end(name)

    def totals(self, live: Iterable[tuple[str, SessionTotals]]) -> Mapping[str, SessionTotals]:
        """Of every job, its sessions that have ended and those that have not.

        Args:
            live: of every open session, the name that it is counted under and its totals now.
        """
        sums = {name: place.past for name, place in self._places.items()}
        for name, totals in live:
            sums[name] += totals
        return sums

    def __iter__(self) -> Iterator[str]:
        return iter(self._places)

    def _make_room(self) -> bool:
        """Whether there is a place for one job more; whoever has been without a session for longest loses his to it."""
        if sum(name != OTHERS for name in self._places) < self._max_jobs:
            return True
        idle = next((name for name, place in self._places.items() if not place.num_open and name != OTHERS), None)
        if idle is not None:
            del self._places[idle]
        return idle is not None
