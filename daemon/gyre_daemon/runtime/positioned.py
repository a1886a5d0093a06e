"""Files that read at a position, without a file of the operating system behind them."""

import io
import os


class PositionedFile(io.RawIOBase):
    """Keeps the position; a subclass reads there."""

    def __init__(self, num_bytes: int) -> None:
        """At the beginning of so many bytes."""
        self._num_bytes, self._position = num_bytes, 0

    def readable(self) -> bool:
        """Whether it can be read: yes."""
        return True

    def seekable(self) -> bool:
        """Whether its position can be set: yes."""
        return True

    def tell(self) -> int:
        """The position of the next byte to read."""
        return self._position

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        """Set the position, which may be behind the end and is never negative."""
        base = {os.SEEK_SET: 0, os.SEEK_CUR: self._position, os.SEEK_END: self._num_bytes}[whence]
        self._position = max(0, base + offset)
        return self._position
