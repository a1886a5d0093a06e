"""Says how far the daemon is that measures a dataset, while a loader waits for it."""

import contextlib
import logging
import threading
from types import TracebackType
from typing import Self

from gyre_client.errors import GyreError
from gyre_client.messages.measuring import measuring_line
from gyre_client.targets.target import Target
from gyre_client.transport.connection import Connection

# The first line comes soon enough that nobody takes the job for one that hangs; further ones, at
# growing intervals, do not fill the log of a job that waits for hours.
FIRST_LOOK_S, LONGEST_PAUSE_S = 5.0, 60.0
_LOOK_TIMEOUT_S = 2.0  # an answer that came later would hold up a loader that need not wait
_log = logging.getLogger("gyre_client")


class MeasuringWatch:
    """Looks at the daemon while the context is open, and logs what it measures, as a warning.

    An error that leaves the context says how far measuring was, if it was seen.
    """

    def __init__(self, target: Target, dataset: str) -> None:
        """Looks at the daemon of a target.

        Args:
            target: Of the loader.
            dataset: The name that it waits for; "" for one without a definition.
        """
        self._dataset = dataset
        self._target = target
        self._over = threading.Event()
        self._last = ""
        self._thread = threading.Thread(target=self._run, name="gyre-measuring", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._over.set()
        self._thread.join()
        if isinstance(error, GyreError) and self._last:
            raise error.told(f"{error}. The daemon measures, {self._last}") from error

    def _run(self) -> None:
        pause_s = FIRST_LOOK_S
        while not self._over.wait(pause_s):
            pause_s = min(2 * pause_s, LONGEST_PAUSE_S)
            with contextlib.suppress(GyreError), Connection(self._target.address) as connection:
                states = connection.status(_LOOK_TIMEOUT_S).measurings
                waited_for = [s for s in states if self._dataset in ("", s.dataset)]
                self._last = "; ".join(map(measuring_line, waited_for))
            if self._last and not self._over.is_set():
                _log.warning("waiting until samples are measured: %s", self._last)
