"""How often one node asks the Hugging Face Hub, which limits the requests of an address or a user.

All datasets and jobs of a daemon share one budget. When the hub says that it was asked too often
(status 429), all of them wait as long as it says. Threads and the event loop use it.
"""

import threading
import time
from concurrent.futures import ThreadPoolExecutor

# The hub counts requests in windows of five minutes, so a minute's worth may be asked at once.
_BURST_S = 60.0
# Where the hub does not say how long to wait.
_USUAL_HOLD_S = 10.0
# A request that would wait longer fails, with what the hub said.
MAX_WAIT_S = 30.0
_NUM_THREADS = 8


class HubBudget:
    """A token bucket, and a time before which nothing is sent.

    Attributes:
        closed: set when nobody may ask any more; threads that wait for their turn wait for it, too.
        threads: wait for the hub's answers, or for their turn, and do nothing else.
    """

    def __init__(self, requests_per_s: float) -> None:
        """Full at first.

        Args:
            requests_per_s: in the long run.
        """
        self._per_s = requests_per_s
        self.closed = threading.Event()
        self.threads = ThreadPoolExecutor(_NUM_THREADS, thread_name_prefix="gyre-hub")
        self._lock = threading.Lock()
        self._next = 0.0  # when the last request that was let in should be sent, if all are paced
        self._held_until = 0.0

    def close(self) -> None:
        """Begin nothing more."""
        self.closed.set()
        self.threads.shutdown(wait=False, cancel_futures=True)

    def held_s(self) -> float:
        """How long nothing may be sent from now on."""
        return max(0.0, self._held_until - time.monotonic())

    def reserve(self) -> float:
        """Take a token, for a request that is to be sent after this time in seconds.

        After the time `held_s` must be looked at again, because others may have been refused.
        """
        with self._lock:
            now = time.monotonic()
            self._next = max(self._next, now - _BURST_S, self._held_until) + 1 / self._per_s
            return max(0.0, self._next - now)

    def hold(self, seconds: float) -> None:
        """The hub refused a request; send nothing for this time."""
        with self._lock:
            until = time.monotonic() + (seconds or _USUAL_HOLD_S)
            self._held_until = max(self._held_until, until)


def retry_after_s(text: str) -> float:
    """How long an answer says to wait, in its `Retry-After`; 0 if it does not say."""
    text = text.strip()
    return float(text) if text.isdecimal() and len(text) < 7 else 0.0
