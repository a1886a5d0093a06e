"""Stores findings about shards in sidecar files, so that none is made twice.

A sidecar is next to its local shard. It is in the index folder instead if one is configured, if the
shard is remote, or if the shard's own folder cannot be written. It is valid for one size and
version of the shard. One that is stale reads as absent. One that is damaged, or that has arrays
which no inspection could have found, does too, with a warning: whoever can write next to a shard
can forge it. So a sidecar in a folder of the daemon's must be its user's or root's; one next to a
shard may also belong to the shard's owner, who decides what the shard says anyway.

The bytes of a sidecar are a few arrays of numbers or short text, and the key that they belong to: a
magic number, a digest of all that follows, the length of a header, the header, and the arrays. The
header is JSON of one shape: the key, and the name, dtype and shape of each array. Nothing is
compressed, so that a file needs no more memory than it has bytes. Nothing in a file is executed or
unpickled. A file whose arrays do not end where it ends is refused.
"""

import asyncio
import hashlib
import json
import logging
import math
import os
import re
import secrets
import stat
import struct
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext, suppress
from functools import lru_cache
from itertools import chain
from pathlib import Path
from typing import ParamSpec, TypeVar

import msgspec
import numpy as np
from msgspec import Struct

from gyre_daemon.errors import Overloaded
from gyre_daemon.runtime.events import log_event
from gyre_daemon.runtime.listen import NotOurs, is_ours, make_folder, open_ours
from gyre_daemon.runtime.threads import compute
from gyre_daemon.storage.beneath import LocalFile, OpenBeneath
from gyre_daemon.storage.mounts import MOUNTS

Arrays = Mapping[str, np.ndarray]
_MAGIC = b"GYREIDX\x03"
_DIGEST_BYTES = 32
_LENGTH = struct.Struct("<I")
_PREFIX_BYTES = len(_MAGIC) + _DIGEST_BYTES + _LENGTH.size
_ALIGNMENT_BYTES = 8
# Bounds of the header. A key has a version, such as an etag of some hundred characters.
_MAX_HEADER_BYTES = 64 << 10
_MAX_ARRAYS, _MAX_DIMS, _MAX_DIM = 64, 4, 1 << 40
_DTYPE = re.compile(r"[<>|](b1|[iu][1248]|U[0-9]{1,4})")
_NEW = os.O_WRONLY | os.O_CREAT | os.O_EXCL
Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")
SUFFIX = ".gyre-index"
_KEY_VERSION = 3
# A sidecar has at most four times the bytes of its shard: a line of text of three bytes and its end
# takes 16 bytes here. The constant is for datasets of many small files; a larger one lets a forged
# file take more memory for a moment.
_ALWAYS_ALLOWED_BYTES, _PER_SHARD_BYTE = 64 << 20, 4
# Sidecars that one thread reads one after the other, where each takes long. On a fast mount one
# thread reads all: several would wait for the interpreter's lock.
_TOGETHER_IF_SLOW = 4
# Takes arrays and raises ValueError if no inspection finds them.
Check = Callable[[Arrays], object]
Loaded = tuple[Arrays, bool]  # the arrays of a sidecar, and whether its whole key fits


class _Header(msgspec.Struct, array_like=True, forbid_unknown_fields=True):
    """The header of a file.

    Attributes:
        key: the subject of the arrays.
        arrays: name, dtype and shape of each.
    """

    key: str
    arrays: list[tuple[str, str, list[int]]]


# Made here, by one thread: msgspec prepares a Struct when it is first decoded, and crashes where
# several threads do that at once.
_HEADER = msgspec.json.Decoder(_Header)


def encode(key: str, arrays: Arrays) -> bytes:
    """The bytes of a file."""
    stored = {name: np.ascontiguousarray(array) for name, array in arrays.items()}
    header = _Header(
        key, [(name, each.dtype.str, list(arrays[name].shape)) for name, each in stored.items()]
    )
    text = msgspec.json.encode(header)
    parts = [_LENGTH.pack(len(text)), text]
    position = _PREFIX_BYTES + len(text)
    for array in stored.values():
        padding = -position % _ALIGNMENT_BYTES
        parts += [bytes(padding), array.tobytes()]
        position += padding + array.nbytes
    content = b"".join(parts)
    return _MAGIC + _digest(content) + content


def decode(data: bytes) -> tuple[str, Arrays]:
    """The key and the arrays of a file; the arrays cannot be written to and keep `data` alive.

    Raises:
        ValueError: the file is damaged or foreign; says how.
    """
    if not data.startswith(_MAGIC):
        raise ValueError("it is no index of this version")
    content = memoryview(data)[len(_MAGIC) + _DIGEST_BYTES :]
    if data[len(_MAGIC) : len(_MAGIC) + _DIGEST_BYTES] != _digest(content):
        raise ValueError("its checksum does not fit")
    if len(content) < _LENGTH.size:
        raise ValueError("it is cut off")
    (num_bytes,) = _LENGTH.unpack_from(content)
    if num_bytes > min(_MAX_HEADER_BYTES, len(content) - _LENGTH.size):
        raise ValueError("its header is cut off or too long")
    header = _decode_header(content[_LENGTH.size : _LENGTH.size + num_bytes])
    arrays, position = {}, _PREFIX_BYTES + num_bytes
    for name, dtype_name, shape in header.arrays:
        _check_shape(shape)
        dtype = _checked_dtype(dtype_name)
        position += -position % _ALIGNMENT_BYTES
        num_values = math.prod(shape)
        end = position + num_values * dtype.itemsize
        if name in arrays or end > len(data):
            raise ValueError(f"its array {name!r:.50} is there twice or cut off")
        arrays[name] = np.frombuffer(data, dtype, num_values, position).reshape(shape)
        position = end
    if position != len(data):
        raise ValueError("it goes on behind its arrays")
    return header.key, arrays


def _decode_header(text: memoryview) -> _Header:
    try:
        header = _HEADER.decode(text)
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
        raise ValueError("its header is damaged") from error
    if len(header.arrays) > _MAX_ARRAYS:
        raise ValueError(f"it has {len(header.arrays)} arrays")
    return header


def _check_shape(shape: list[int]) -> None:
    if len(shape) > _MAX_DIMS or not all(0 <= size <= _MAX_DIM for size in shape):
        raise ValueError(f"it has an array of shape {shape!r:.100}")


@lru_cache
def _checked_dtype(name: str) -> np.dtype[np.generic]:
    dtype = np.dtype(name) if _DTYPE.fullmatch(name) else None
    if dtype is None or not dtype.itemsize:
        raise ValueError(f"it has an array of {name!r:.50}")
    return dtype


def _digest(content: bytes | memoryview) -> bytes:
    return hashlib.blake2b(content, digest_size=_DIGEST_BYTES).digest()


class InFolder(Struct, frozen=True):
    """The place of a sidecar, or of a report, in a folder of the daemon's user or of root."""

    folder: Path
    name: str

    def __str__(self) -> str:
        """The path."""
        return f"{self.folder}/{self.name}"

    def open(self, _: OpenBeneath | None = None) -> int:
        """Open the sidecar for reading; the caller owns the descriptor.

        Raises:
            NotOurs: somebody wrote it whose word does not count.
            OSError: there is none, or it cannot be read.
        """
        return open_ours(self.folder / self.name, os.O_RDONLY)

    def write(self, data: bytes) -> None:
        """Replace the sidecar, whole or not at all; the folder is made if it is missing.

        Raises:
            OSError: it cannot be written, or is one that must not be replaced.
        """
        make_folder(self.folder)
        folder = os.open(self.folder, os.O_PATH | os.O_DIRECTORY)
        _write(folder, self.name, data, 0o600)


class BesideShard(Struct, frozen=True):
    """The place of a sidecar next to a local shard, with the shard's permissions to read."""

    file: LocalFile
    shard: LocalFile

    def __str__(self) -> str:
        """The path."""
        return str(self.file)

    @property
    def folder(self) -> str:
        """The folder of the shard."""
        return str(self.file).rpartition("/")[0] or "/"

    def open(self, open_beneath: OpenBeneath | None = None) -> int:
        """See `InFolder.open`, and `LocalFile.open` for the argument."""
        descriptor = self.file.open(open_beneath)
        try:
            found = os.fstat(descriptor)
            may_write = found.st_mode & (stat.S_IWGRP | stat.S_IWOTH)
            if is_ours(found) and not may_write:
                return descriptor
            shard = self.shard.stat()
            if not is_ours(found) and found.st_uid != shard.st_uid:
                raise NotOurs(
                    f"user {found.st_uid} wrote it, and the shard belongs to user {shard.st_uid}"
                )
            if may_write & ~shard.st_mode:
                raise NotOurs("others may write it who may not write the shard")
        except OSError:
            os.close(descriptor)
            raise
        return descriptor

    def write(self, data: bytes) -> None:
        """See `InFolder.write`; one that does not count stays."""
        with suppress(FileNotFoundError):
            os.close(self.open())
        mode = 0o600 | self.shard.stat().st_mode & (stat.S_IRGRP | stat.S_IROTH)
        _write(self.file.open_folder(), self.file.base_name, data, mode)


SidecarPlace = InFolder | BesideShard


def _write(folder: int, name: str, data: bytes, mode: int) -> None:
    """Write a file that appears whole or not at all, and close its open folder."""
    unfinished = f"{name}.{secrets.token_hex(8)}.tmp"
    try:
        file = open_ours(Path(unfinished), _NEW, dir_fd=folder)
        try:
            with os.fdopen(file, "wb") as writer:
                writer.write(data)
                writer.flush()
                os.fchmod(file, mode)
                os.fsync(file)
            os.rename(unfinished, name, src_dir_fd=folder, dst_dir_fd=folder)
        except OSError:
            with suppress(FileNotFoundError):
                os.unlink(unfinished, dir_fd=folder)
            raise
    finally:
        os.close(folder)


class SidecarKey(Struct, frozen=True):
    """The subject of a sidecar; it is valid for exactly this.

    Attributes:
        location: of the dataset, redacted; keeps equal names of different datasets apart.
        shard: the shard's relative name.
        size_bytes: the shard's size.
        version: the shard's version.
        kind: name and version of the arrays.
    """

    location: str
    shard: str
    size_bytes: int
    version: str
    kind: str

    def encoded(self) -> str:
        """The key as stored; without the location, since mounts move."""
        return json.dumps([_KEY_VERSION, self.size_bytes, self.version, self.kind])

    @property
    def max_bytes(self) -> int:
        """The most bytes that its sidecar may have."""
        return max(_ALWAYS_ALLOWED_BYTES, self.size_bytes * _PER_SHARD_BYTE)


class SidecarOf(Struct, frozen=True):
    """A shard whose sidecar is wanted; see `SidecarStore.load`."""

    key: SidecarKey
    local: LocalFile | None
    check: Check


class SidecarStore:
    """Loads and saves sidecars, in threads of the mounts that they lie on.

    Several daemons may share one folder, since files only ever appear whole. A folder of the
    daemon's whose mount hangs counts as one that cannot be used, so that datasets elsewhere open;
    for the folder of a shard it waits.
    """

    def __init__(self, index_dir: str, fallback_dir: Path, suffix: str = SUFFIX) -> None:
        """Name the folders; nothing is read or made yet.

        Args:
            index_dir: the folder of all sidecars; empty to store them next to their shards.
            fallback_dir: for sidecars that cannot be written next to a shard.
            suffix: of the files; each kind of sidecar has its own.
        """
        self._index_dir = Path(index_dir) if index_dir else None
        self._fallback = fallback_dir
        self._suffix = suffix
        self._warned: set[str] = set()

    def sibling(self, suffix: str) -> "SidecarStore":
        """The store of another kind of sidecars in the same folders."""
        return SidecarStore(str(self._index_dir or ""), self._fallback, suffix)

    async def load(self, key: SidecarKey, local: LocalFile | None, check: Check) -> Arrays | None:
        """The arrays stored under exactly this key, or None.

        Args:
            key: of the sidecar.
            local: the shard, if it is on this machine.
            check: refuses arrays that no inspection finds.
        """
        (found,) = await self.load_all([SidecarOf(key, local, check)])
        return found[0] if found and found[1] else None

    async def load_all(self, wanted: Sequence[SidecarOf]) -> list[Loaded | None]:
        """The arrays of each kind last stored for shards, and whether the whole key fits.

        None if there are none for any size and version of a shard. Only the arrays of a key that
        fits are checked.

        One thread reads those of one folder, and several do where the folder's mount is slow.
        """
        found: list[Loaded | None] = [None] * len(wanted)
        places = [self._candidates(each.key, each.local) for each in wanted]
        waiting: Sequence[int] = range(len(wanted))
        while waiting:
            by_folder: dict[object, list[tuple[int, SidecarPlace]]] = {}
            for number in waiting:
                if place := next(places[number], None):
                    by_folder.setdefault(place.folder, []).append((number, place))
            for some in by_folder.values():
                of_place = [(place, wanted[number]) for number, place in some]
                try:
                    loaded = await self._loaded_in_threads(of_place)
                except TimeoutError as error:
                    self._warn(some[0][1], error)
                    continue
                for (number, _), its in zip(some, loaded, strict=True):
                    found[number] = its if its and its[1] else found[number] or its
            asked = [number for some in by_folder.values() for number, _ in some]
            waiting = [number for number in asked if not (its := found[number]) or not its[1]]
        return found

    async def _loaded_in_threads(
        self, wanted: Sequence[tuple[SidecarPlace, SidecarOf]]
    ) -> list[Loaded | None]:
        """As `load_all`, from one place for each in one folder."""
        place = wanted[0][0]
        is_slow = MOUNTS.at(place.folder).latency.is_slow
        size = _TOGETHER_IF_SLOW if is_slow else len(wanted)
        parts = (wanted[first : first + size] for first in range(0, len(wanted), size))
        loaded = await asyncio.gather(*(_in_thread(place, self._loaded, part) for part in parts))
        return [*chain.from_iterable(loaded)]

    def _loaded(self, wanted: Sequence[tuple[SidecarPlace, SidecarOf]]) -> list[Loaded | None]:
        """As `load_all`, from one place for each in one folder; waits for the disk."""
        first = wanted[0][0]
        root = first.file.root.held() if isinstance(first, BesideShard) else nullcontext()
        try:
            with root as open_beneath:
                return [
                    self._one_loaded(place, each.key, each.check, open_beneath)
                    for place, each in wanted
                ]
        except OSError:
            return [None] * len(wanted)

    def _one_loaded(
        self, place: SidecarPlace, key: SidecarKey, check: Check, open_beneath: OpenBeneath | None
    ) -> Loaded | None:
        """As `load_all`, of one shard from one place; waits for the disk."""
        try:
            stored, arrays = decode(_read(place, key.max_bytes, open_beneath))
            if stored == key.encoded():
                check(arrays)
                return arrays, True
        except NotOurs as error:
            self._warn(place, error)
            return None
        except OSError:
            return None
        except ValueError as error:
            facts = {"shard": key.shard, "path": place, "reason": error}
            log_event("index thrown away", facts, logging.WARNING)
            return None
        return (arrays, False) if _kind(stored) == key.kind else None

    async def save(self, key: SidecarKey, local: LocalFile | None, arrays: Arrays) -> None:
        """Store arrays whole or not at all.

        Raises:
            Overloaded: no folder could take them; names the first one and why.
        """
        data = await compute(encode, key.encoded(), arrays)
        failures: list[tuple[SidecarPlace, OSError]] = []
        for place in self._candidates(key, local):
            try:
                await _in_thread(place, place.write, data)
            except OSError as failure:
                failures.append((place, failure))
            else:
                return
        place, error = failures[0]
        raise Overloaded(
            f"the index of shard {key.shard} ({len(data)} bytes) cannot be stored at {place}: "
            f"{error.strerror}. Free some space, or set `index_dir` to another folder.",
            {"shard": key.shard, "needed_bytes": len(data), "reason": error.strerror or "unknown"},
        ) from error

    async def try_to_save(self, key: SidecarKey, local: LocalFile | None, arrays: Arrays) -> None:
        """Store arrays as `save` does; where that fails, log it and go on without them."""
        try:
            await self.save(key, local, arrays)
        except Overloaded as error:
            log_event("index not stored", {"shard": key.shard, "reason": error}, logging.WARNING)

    def _warn(self, place: SidecarPlace, error: OSError) -> None:
        """Log once for each folder that it has an index that does not count."""
        folder = str(place.folder)
        if folder in self._warned:
            return
        self._warned.add(folder)
        facts = {"folder": folder, "first": place, "reason": error.strerror}
        log_event("index ignored", facts, logging.WARNING)

    def _candidates(self, key: SidecarKey, local: LocalFile | None) -> Iterator[SidecarPlace]:
        """Where the sidecar may lie, the best place first."""
        if local and not self._index_dir:
            yield BesideShard(local.sibling(local.base_name + self._suffix), local)
        digest = hashlib.blake2b(f"{key.location}\n{key.shard}".encode(), digest_size=16)
        yield InFolder(self._index_dir or self._fallback, digest.hexdigest() + self._suffix)


async def _in_thread(
    place: SidecarPlace,
    work: Callable[Arguments, Result],
    *args: Arguments.args,
    **kwargs: Arguments.kwargs,
) -> Result:
    """Call `work`, which touches a place, in a thread of its mount.

    Raises:
        TimeoutError: the mount of a folder of the daemon's hangs.
    """
    run = MOUNTS.answered if isinstance(place, InFolder) else MOUNTS.run
    return await run(str(place.folder), work, *args, **kwargs)


def _read(place: SidecarPlace, max_bytes: int, open_beneath: OpenBeneath | None) -> bytes:
    """The bytes of a sidecar.

    Raises:
        OSError: there is none that counts.
        ValueError: it is larger than this.
    """
    descriptor = place.open(open_beneath)
    try:
        num_bytes = os.fstat(descriptor).st_size
        if num_bytes > max_bytes:
            raise ValueError(f"it has {num_bytes} bytes, more than {max_bytes}")
        data = os.read(descriptor, num_bytes)  # at most 2 GiB
        while more := num_bytes > len(data) and os.read(descriptor, num_bytes - len(data)):
            data += more
        return data
    finally:
        os.close(descriptor)


def _kind(stored: str) -> str | None:
    """The kind of a stored key; None if it is none."""
    try:
        parts = json.loads(stored)
    except (ValueError, RecursionError):
        return None
    return parts[-1] if isinstance(parts, list) and parts else None
