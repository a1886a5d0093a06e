"""Compressed shards, unpacked once into a folder of the daemon's and read there as local files.

No range of a compressed file can be read. So a shard is unpacked when it is indexed, into a file
that is named after the shard's name, size and version, and that appears whole or not at all. Each
dataset has a folder with a lock file: a daemon that serves the dataset holds the lock shared, and
one that removes files holds it exclusively. So several daemons may use one folder.
"""

import contextlib
import fcntl
import hashlib
import os
import secrets
import shutil
import threading
import zlib
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import BinaryIO

from gyre_daemon.errors import CorruptSample, InvalidRequest, Overloaded
from gyre_daemon.runtime.listen import NotOurs, make_folder, open_ours
from gyre_daemon.storage.beneath import LocalFile
from gyre_daemon.storage.mounts import MOUNTS
from gyre_daemon.storage.shard import Shard

_LOCK = "lock"
_NEW = os.O_WRONLY | os.O_CREAT | os.O_EXCL
_ENDINGS = (".gz", ".tgz")
_READ_BYTES = 1 << 20
_PIECE_BYTES = 4 << 20
_GZIP = 31  # zlib's number for a gzip header and a window of 32 KiB
# What unpacks to more than both of these is refused as a bomb. Text shrinks to a tenth, and gzip
# can do a thousandth at most. A smaller factor would refuse archives of masks; at 1000 nothing
# would be refused.
_MAX_FACTOR = 500
_ALWAYS_ALLOWED_BYTES = 256 << 20


def is_compressed(name: str) -> bool:
    """Whether a shard must be unpacked, by its name."""
    return name.endswith(_ENDINGS)


def unpacked_name(name: str) -> str:
    """The name of a compressed shard once it is unpacked."""
    return name.removesuffix(".gz") if name.endswith(".gz") else name.removesuffix(".tgz") + ".tar"


def check_distinct(shards: Sequence[Shard], where: str) -> None:
    """Refuse a folder that has a shard twice, as it is and compressed.

    Raises:
        InvalidRequest: it has; `where` names the folder.
    """
    plain = {shard.name for shard in shards if not is_compressed(shard.name)}
    for shard in shards:
        if is_compressed(shard.name) and unpacked_name(shard.name) in plain:
            raise InvalidRequest(
                f"{where} has both {shard.name} and {unpacked_name(shard.name)}; name the ones "
                "you mean, by a pattern"
            )


class UnpackedShards:
    """The folder of all datasets that have compressed shards.

    Attributes:
        folder: made when it is needed.
    """

    def __init__(self, folder: Path, limit_bytes: int) -> None:
        """Make nothing yet."""
        self.folder = folder
        self._limit_bytes = limit_bytes
        self._lock = threading.Lock()

    def open(self, identity: str, shards: Sequence[Shard]) -> "UnpackedDataset":
        """The folder of one dataset, without files that no shard needs.

        Such files are left while another daemon serves the dataset.

        Raises:
            Overloaded: the folder cannot be made.
        """
        folder = self.folder / hashlib.blake2b(identity.encode(), digest_size=16).hexdigest()
        try:
            return UnpackedDataset(folder, shards, self)
        except OSError as error:
            raise Overloaded(
                f"compressed shards cannot be unpacked into {self.folder}: {error.strerror}; set "
                "`unpack_dir`",
                {"folder": self.folder, "reason": error.strerror or "unknown"},
            ) from error

    def write(self, shard: Shard, pieces: Iterable[bytes], target: Path) -> None:
        """Write a file, whole or not at all, within the limit.

        Raises:
            Overloaded: there is no room, even without the datasets that no daemon serves.
        """
        unfinished = target.with_name(f"{target.name}.{secrets.token_hex(8)}.tmp")
        try:
            with os.fdopen(open_ours(unfinished, _NEW), "wb") as file:
                for piece in pieces:
                    self._make_room(shard, len(piece), target.parent)
                    file.write(piece)
                    file.flush()
                os.fsync(file.fileno())
            unfinished.replace(target)
        except OSError as error:
            raise Overloaded(
                f"shard {shard.name} cannot be unpacked into {self.folder}: {error.strerror}. "
                "Free some space, set `unpack_dir`, or store the shard uncompressed.",
                {"shard": shard.name, "reason": error.strerror or "unknown"},
            ) from error
        finally:
            unfinished.unlink(missing_ok=True)

    def _make_room(self, shard: Shard, num_bytes: int, own: Path) -> None:
        with self._lock:
            excess = _num_bytes(self.folder) + num_bytes - self._limit_bytes
            if excess > 0:
                others = [each for each in self.folder.iterdir() if each.is_dir() and each != own]
                for folder in sorted(others, key=lambda each: each.stat().st_mtime_ns):
                    excess -= _remove_unused(folder) if excess > 0 else 0
        if excess > 0:
            needed, limit = self._limit_bytes + excess, self._limit_bytes
            raise Overloaded(
                f"there is no room to unpack shard {shard.name}: the unpacked shards in "
                f"{self.folder} would take {needed} bytes, and unpack_disk is {limit}. Raise it, "
                "or store the shards uncompressed.",
                {"shard": shard.name, "needed_bytes": needed, "limit_bytes": limit},
            )


class UnpackedDataset:
    """The unpacked shards of one dataset; they stay while this object lives.

    Attributes:
        folder: where they are.
    """

    def __init__(self, folder: Path, shards: Sequence[Shard], owner: UnpackedShards) -> None:
        """Lock the folder; see `UnpackedShards.open`.

        Raises:
            OSError: the folder cannot be made.
        """
        self.folder = folder
        self._owner = owner
        self._mount = MOUNTS.at(folder)
        names = {_file_name(shard) for shard in shards}
        self._lock = _lock_and_tidy(folder, {_LOCK, *names})

    def __del__(self) -> None:
        """Release the lock, so that other daemons may remove the files."""
        if hasattr(self, "_lock"):
            self._mount.close(self._lock)

    def find(self, shard: Shard) -> LocalFile | None:
        """The file of a shard that was unpacked before.

        None if there is none, or if the storage reports no versions, by which to know it again.
        """
        path = self.folder / _file_name(shard)
        try:
            os.close(open_ours(path, os.O_RDONLY))
        except (FileNotFoundError, NotOurs):
            return None
        return LocalFile.of(path) if shard.version else None

    def unpack(self, shard: Shard, source: BinaryIO) -> LocalFile:
        """Unpack a shard from a file that is read from its beginning to its end; waits for it.

        Raises:
            CorruptSample: it is damaged or truncated.
            Overloaded: there is no room.
        """
        path = self.folder / _file_name(shard)
        try:
            self._owner.write(shard, gunzipped(source), path)
        except ValueError as error:
            facts = {"shard": shard.name, "reason": str(error)}
            raise CorruptSample(f"shard {shard.name} cannot be unpacked: {error}", facts) from error
        return LocalFile.of(path)


def _file_name(shard: Shard) -> str:
    key = f"{shard.name}\n{shard.size_bytes}\n{shard.version}"
    return hashlib.blake2b(key.encode(), digest_size=16).hexdigest() + ".unpacked"


def _lock_and_tidy(folder: Path, names: set[str]) -> int:
    """Lock a folder shared; if no other daemon has a lock, remove all files but `names` first."""
    while True:
        make_folder(folder.parent)
        make_folder(folder)
        descriptor = open_ours(folder / _LOCK, os.O_RDWR | os.O_CREAT)
        with contextlib.suppress(BlockingIOError):
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            for file in folder.iterdir():
                if file.name not in names:
                    file.unlink()
        fcntl.flock(descriptor, fcntl.LOCK_SH)
        with contextlib.suppress(FileNotFoundError):
            if os.path.samestat(os.fstat(descriptor), (folder / _LOCK).stat()):
                return descriptor
        os.close(descriptor)  # another daemon removed the folder in between


def _remove_unused(folder: Path) -> int:
    """Remove a dataset's folder unless a daemon serves it; returns the bytes that were freed."""
    try:
        descriptor = open_ours(folder / _LOCK, os.O_RDWR)
    except (FileNotFoundError, NotOurs):
        return 0
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        num_bytes = _num_bytes(folder)
        shutil.rmtree(folder)
    except BlockingIOError:
        return 0
    finally:
        os.close(descriptor)
    return num_bytes


def _num_bytes(folder: Path) -> int:
    """The size of all files below a folder; files that vanish meanwhile do not count."""
    total = 0
    for place, _, files in os.walk(folder):
        for name in files:
            with contextlib.suppress(FileNotFoundError):
                total += (Path(place) / name).stat().st_size
    return total


def gunzipped(source: BinaryIO) -> Iterator[bytes]:
    """The content of a gzip file, in pieces of at most 4 MiB; its members one after the other.

    Raises:
        ValueError: it is no gzip file, or damaged, truncated or a bomb; says which.
    """
    num_read = num_unpacked = 0
    pending = source.read(_READ_BYTES)
    if not pending:
        raise ValueError("it is empty")
    while pending:
        decoder = zlib.decompressobj(_GZIP)
        has_more = False  # the decoder may hold more output
        while not decoder.eof:
            if not pending and not has_more and not (pending := source.read(_READ_BYTES)):
                raise ValueError("it is truncated")
            try:
                piece = decoder.decompress(pending, _PIECE_BYTES)
            except zlib.error as error:
                raise ValueError(f"it is no sound gzip file: {error}") from error
            rest = decoder.unused_data if decoder.eof else decoder.unconsumed_tail
            num_read += len(pending) - len(rest)
            num_unpacked += len(piece)
            if num_unpacked > max(_ALWAYS_ALLOWED_BYTES, _MAX_FACTOR * num_read):
                raise ValueError(
                    f"it unpacks to more than {_MAX_FACTOR} times its size: it is no archive of "
                    "samples"
                )
            pending, has_more = rest, len(piece) == _PIECE_BYTES
            if piece:
                yield piece
        # Tapes and some tools pad the file with zeros.
        pending = (pending or source.read(_READ_BYTES)).lstrip(b"\0")
