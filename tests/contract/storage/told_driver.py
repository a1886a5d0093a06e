"""An fsspec driver over memory that tells of its files what a test wants."""

import itertools
from typing import Any, ClassVar

from fsspec.spec import AbstractFileSystem


class ToldFileSystem(AbstractFileSystem):  # type: ignore[misc]
    """Files of this process.

    Attributes:
        files: number of the version, and bytes, by path.
        tells: takes the number of a version and returns what the driver tells of it.
        num_looks: how often a file was looked at.
        caches: whether listings are remembered, as some drivers do.
    """

    protocol = "told"
    files: ClassVar[dict[str, tuple[int, bytes]]] = {}
    tells: ClassVar[Any] = None
    num_looks: ClassVar[int] = 0
    caches: ClassVar[bool] = False
    _numbers = itertools.count(1)

    @classmethod
    def put(cls, path: str, data: bytes) -> None:
        cls.files[path] = next(cls._numbers), data

    def info(self, path: str, **_: Any) -> dict[str, Any]:
        path = self._strip_protocol(path)
        type(self).num_looks += 1
        parent = self._parent(path)
        if self.caches and parent in self.dircache:
            return next(each for each in self.dircache[parent] if each["name"] == path)
        found = self._described(path)
        if self.caches:
            self.dircache[parent] = [found]
        return found

    def _described(self, path: str) -> dict[str, Any]:
        if path not in self.files:
            raise FileNotFoundError(path)
        number, data = self.files[path]
        return {"name": path, "type": "file", "size": len(data), **type(self).tells(number)}

    def invalidate_cache(self, path: str | None = None) -> None:
        self.dircache.clear()

    def cat_file(self, path: str, start: Any = None, end: Any = None, **_: Any) -> bytes:
        return self.files[self._strip_protocol(path)][1][start:end]
