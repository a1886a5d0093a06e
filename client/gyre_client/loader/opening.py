"""Asks the daemon for the description of a dataset, and opens the stream of its batches.

Shows how far the daemon is if it measures a dataset meanwhile.
"""

import contextlib
import logging
import os
import threading
import time
from collections.abc import Iterator, Mapping
from types import TracebackType
from typing import Any, Self

import torch
from gyre_protos.v1 import loader_pb2 as pb

from gyre_client.batches.device import CudaTransfer, DeviceStream
from gyre_client.batches.stream import BatchStream
from gyre_client.display.formatting import is_watched
from gyre_client.display.rates import measuring_line
from gyre_client.display.terminal import progress_bar
from gyre_client.errors import CursorRejected, GyreError
from gyre_client.loader.ranks import Agreement
from gyre_client.messages.answers import MAX_CURSOR_BYTES, check_same_dataset
from gyre_client.messages.arguments import mapping, shown
from gyre_client.targets.target import Target
from gyre_client.transport.connection import Connection
from gyre_client.transport.outage import Outage

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


def describe(
    target: Target,
    dataset: pb.DatasetRef,
    transforms: pb.TransformList | None,
    reattach_timeout_s: float,
) -> pb.DatasetDescription:
    """Returns the daemon's description of a dataset; waits for a daemon that is away.

    Raises:
        GyreError: See `Loader`.
    """
    with Connection(target.address) as connection, MeasuringWatch(target, dataset.name):
        return Outage(reattach_timeout_s).retry(
            lambda timeout_s: connection.describe(dataset, timeout_s, transforms=transforms),
            _pause,
        )


def _pause(seconds: float) -> bool:
    time.sleep(seconds)
    return False  # nothing ends it before


def open_stream(
    request: pb.OpenSessionRequest,
    generations: Iterator[int],
    unfinished: list[BatchStream],
    *,
    target: Target,
    description: pb.DatasetDescription,
    device: torch.device | None,
    token_dtype: str,
    reattach_timeout_s: float,
    stall_timeout_s: float,
    agreement: Agreement,
) -> BatchStream | DeviceStream:
    """Opens a session and returns its stream.

    Args:
        request: Which batches, and from where on.
        generations: Numbers the sessions of the reader.
        unfinished: Receives the stream before it is open.
        target: The daemon.
        description: The dataset's description.
        device: See `Loader`, as for the others.
        token_dtype: See `Loader`.
        reattach_timeout_s: See `Loader`.
        stall_timeout_s: See `Loader`.
        agreement: Compares the ranks.

    Raises:
        GyreError: The daemon refuses, or the dataset is another one than was described, or than
            that of another rank.
    """
    # Made first: a device that fails opens no session.
    transfer = None if device is None else CudaTransfer(device)
    stream = BatchStream(
        target, request, reattach_timeout_s, token_dtype, stall_timeout_s, generations
    )
    unfinished.append(stream)
    stream.open()
    check_same_dataset(stream.opened, description)
    agreement.check(stream.opened)
    return stream if transfer is None else DeviceStream(stream, transfer)


def cursor_of(state_dict: Mapping[str, Any]) -> bytes:
    """Returns the cursor of a loader's state.

    Raises:
        InvalidRequest: It is no dict of names and values.
        CursorRejected: It is no state of a `Loader`.
    """
    cursor = mapping("state_dict", state_dict).get("cursor")
    if not isinstance(cursor, bytes) or not 0 < len(cursor) <= MAX_CURSOR_BYTES:
        raise CursorRejected(
            f"this is no state of a Loader: it has {shown(sorted(state_dict))}, "
            f"and `cursor` must be bytes, at most {MAX_CURSOR_BYTES}"
        )
    return cursor
