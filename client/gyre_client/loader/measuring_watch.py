"""Says how far the daemon is that measures a dataset, while a loader waits for it."""

import contextlib
import logging
import os
import threading
from types import TracebackType
from typing import Self

from gyre_protos.v1 import loader_pb2 as pb

from gyre_client.display.progress import is_watched, progress_bar
from gyre_client.errors import GyreError
from gyre_client.messages.measuring import measuring_line
from gyre_client.targets.target import Target
from gyre_client.transport.connection import Connection

# The first line comes soon enough that the job does not seem to hang; further ones, at
# growing intervals, do not fill the log of a job that waits for hours.
FIRST_LOOK_S, LONGEST_PAUSE_S = 5.0, 60.0
_FRAME_S = 1.0  # between two looks of a bar
_LOOK_TIMEOUT_S = 2.0  # an answer that came later would hold up a loader that need not wait
_log = logging.getLogger("gyre_client")


class MeasuringWatch:
    """Watches the daemon while the context is open, and shows its progress in measuring.

    As a bar on a terminal or in a notebook, else as warnings in the log.

    An error that leaves the context says how far measuring was, if it was seen.
    """

    def __init__(self, target: Target, dataset: str) -> None:
        """Looks at the daemon of a target.

        Args:
            target: The loader's daemon.
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
        draws = is_watched() and os.environ.get("LOCAL_RANK", "0") == "0"
        with contextlib.ExitStack() as shown:
            bar, states = None, list[pb.MeasuringState]()
            while not self._over.wait(pause_s):
                pause_s = _FRAME_S if draws else min(2 * pause_s, LONGEST_PAUSE_S)
                with contextlib.suppress(GyreError):
                    states = self._look()
                    self._last = "; ".join(map(measuring_line, states))
                if not self._last or self._over.is_set():
                    continue
                if not draws:
                    _log.warning("waiting until samples are measured: %s", self._last)
                    continue
                bar = bar or shown.enter_context(progress_bar("samples measured"))
                num_done, num_all = (
                    sum(s.num_done for s in states),
                    sum(s.num_samples for s in states),
                )
                bar.update(num_done, num_all, ", ".join(s.dataset for s in states))

    def _look(self) -> list[pb.MeasuringState]:
        with Connection(self._target.address) as connection:
            states = connection.status(_LOOK_TIMEOUT_S).measurings
        return [s for s in states if self._dataset in ("", s.dataset)]
