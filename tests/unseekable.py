"""A file that cannot seek, as object storage streams it."""

import io
from typing import Any


class Unseekable(io.RawIOBase):
    """Reads these bytes once, from the first to the last."""

    def __init__(self, data: bytes) -> None:
        self._data = io.BytesIO(data)

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        return self._data.readinto(buffer)

    def tell(self) -> int:
        return self._data.tell()
