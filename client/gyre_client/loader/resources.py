"""The resources that a Loader must release, in a separate object for the Loader's finalizer."""

import os

from gyre_client.batches.batch import Position
from gyre_client.batches.device import DeviceStream
from gyre_client.batches.stream import BatchStream
from gyre_client.errors import ForkedProcess, InvalidRequest
from gyre_client.targets.target import Target

FORK_ADVICE = (
    "In a DataLoader use num_workers=0: the daemon fetches and decodes in parallel already. "
    "Elsewhere, make the Loader in the process that reads from it"
)


class LoaderResources:
    """A Loader's target and stream.

    Attributes:
        pid: The process that made them, which alone may use and release them.
        target: The daemon.
        stream: None where no session is open.
        position: Where the loader stands while no session is open.
        unfinished: Streams being opened or closed; an interrupt may have left them here.
        is_released: Whether they were released, so that no session can be opened.
    """

    def __init__(self, target: Target) -> None:
        self.pid = os.getpid()
        self.target = target
        self.stream: BatchStream | DeviceStream | None = None
        self.position = Position(b"", 0)
        self.unfinished: list[BatchStream] = []
        self.is_released = False
        self._holds_target = True

    def open_stream(self) -> BatchStream | DeviceStream | None:
        """Returns the stream if it is open in this process, which needs no further check."""
        return self.stream if self.pid == os.getpid() else None

    def check_usable(self) -> None:
        """Checks that a session may be opened here.

        Raises:
            ForkedProcess: This is another process than the one that made them.
            InvalidRequest: They were released.
        """
        if self.pid != os.getpid():
            raise ForkedProcess(
                f"this Loader was made by process {self.pid}, "
                f"but process {os.getpid()} reads it. {FORK_ADVICE}"
            )
        if self.is_released:
            raise InvalidRequest("this Loader is closed")

    def close_stream(self) -> None:
        """Ends the session, drops batches read ahead, and keeps the position."""
        stream = self.stream
        if stream is not None:
            self.unfinished.append(stream.source)
            self.position = Position(stream.position.cursor, stream.position.batch)
            self.stream = None
            stream.close()
        self.finish()

    def finish(self) -> None:
        """Ends sessions that an interrupt kept from being opened or closed."""
        while self.unfinished:
            stream = self.unfinished[-1]
            if self.stream is None or stream is not self.stream.source:
                stream.close()
            self.unfinished.pop()

    def release(self) -> None:
        """Ends the session and lets go of a private daemon; may be repeated after an interrupt."""
        if self.pid == os.getpid():  # a forked child's copy owns nothing
            self.is_released = True
            self.close_stream()
            if self._holds_target:
                self._holds_target = False  # first: released twice, it would end another's daemon
                self.target.release()
