"""Where a sidecar lies, and who may have written it.

A sidecar in a folder of the daemon's must be its user's or root's. One next to a shard may also
belong to the shard's owner, who decides what the shard says anyway.
"""

import os
import secrets
import stat
from contextlib import closing, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from gyre_daemon.runtime.ownership import NotOurs, is_ours, make_folder, open_ours
from gyre_daemon.storage.beneath import LocalFile

_NEW = os.O_WRONLY | os.O_CREAT | os.O_EXCL


class SidecarPlace(Protocol):
    """A place for one sidecar."""

    def open(self) -> int:
        """Open the sidecar for reading; the caller owns the descriptor.

        Raises:
            NotOurs: somebody wrote it whose word does not count.
            OSError: there is none, or it cannot be read.
        """

    def write(self, data: bytes) -> None:
        """Replace the sidecar, whole or not at all.

        Raises:
            OSError: it cannot be written, or is one that must not be replaced.
        """


@dataclass(frozen=True, slots=True)
class InFolder:
    """A sidecar in a folder that belongs to the daemon's user or to root."""

    path: Path

    def __str__(self) -> str:
        """The path."""
        return str(self.path)

    def open(self) -> int:
        """See `SidecarPlace.open`."""
        return open_ours(self.path, os.O_RDONLY)

    def write(self, data: bytes) -> None:
        """See `SidecarPlace.write`; the folder is made if it is missing."""
        make_folder(self.path.parent)
        with closing(_Folder(os.open(self.path.parent, os.O_PATH | os.O_DIRECTORY))) as folder:
            folder.write(self.path.name, data, 0o600)


@dataclass(frozen=True, slots=True)
class BesideShard:
    """A sidecar next to a local shard; it has the shard's permissions to read."""

    file: LocalFile
    shard: LocalFile

    def __str__(self) -> str:
        """The path."""
        return str(self.file)

    def open(self) -> int:
        """See `SidecarPlace.open`."""
        descriptor = self.file.open()
        try:
            found = os.fstat(descriptor)
            shard = self.shard.stat()
            if not is_ours(found) and found.st_uid != shard.st_uid:
                raise NotOurs(
                    f"user {found.st_uid} wrote it, and the shard belongs to user {shard.st_uid}"
                )
            if found.st_mode & ~shard.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
                raise NotOurs("others may write it who may not write the shard")
        except OSError:
            os.close(descriptor)
            raise
        return descriptor

    def write(self, data: bytes) -> None:
        """See `SidecarPlace.write`; one that does not count stays."""
        with suppress(FileNotFoundError):
            os.close(self.open())
        mode = 0o600 | self.shard.stat().st_mode & (stat.S_IRGRP | stat.S_IROTH)
        with closing(_Folder(self.file.open_folder())) as folder:
            folder.write(self.file.path.name, data, mode)


class _Folder:
    """An open folder, in which files appear whole or not at all."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor

    def close(self) -> None:
        os.close(self._descriptor)

    def write(self, name: str, data: bytes, mode: int) -> None:
        unfinished = f"{name}.{secrets.token_hex(8)}.tmp"
        file = open_ours(Path(unfinished), _NEW, dir_fd=self._descriptor)
        try:
            with os.fdopen(file, "wb") as writer:
                writer.write(data)
                writer.flush()
                os.fchmod(file, mode)
                os.fsync(file)
            os.rename(unfinished, name, src_dir_fd=self._descriptor, dst_dir_fd=self._descriptor)
        except OSError:
            with suppress(FileNotFoundError):
                os.unlink(unfinished, dir_fd=self._descriptor)
            raise
