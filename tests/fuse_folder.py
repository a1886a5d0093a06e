"""A folder behind a file system of FUSE whose server can be slow, or stop.

The server is a process that speaks the kernel's protocol on `/dev/fuse` itself, so that no library
is needed. It shows another folder, read-only, and the kernel asks it for every lookup and attribute
again. Run `python -m tests.fuse_folder SOURCE MOUNTPOINT` to have one; it ends with its input.
"""

import contextlib
import ctypes
import errno
import heapq
import json
import os
import random
import select
import signal
import stat
import struct
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NoReturn

_IN = struct.Struct("<IIQQIIII")  # length, opcode, unique, node, uid, gid, pid, padding
_OUT = struct.Struct("<IiQ")  # length, negative errno, unique
_INIT = struct.Struct("<IIII")  # major, minor, readahead, flags
_INIT_OUT = struct.Struct("<IIIIHHIIHHI28x")
_ATTRIBUTES = struct.Struct("<QQQQQQIIIIIIIIII")
_READ = struct.Struct("<QQIIQII")  # handle, offset, size, flags, owner, flags, padding
_MAX_BYTES = 1 << 17  # of a read, as the kernel's default
_ASYNC_READ, _PARALLEL_DIROPS, _MAX_PAGES = 1 << 0, 1 << 18, 1 << 22
_DIRECT_IO = 1 << 0
_MS_RDONLY, _MS_NOSUID, _MS_NODEV, _MNT_DETACH = 1, 2, 4, 2
_libc = ctypes.CDLL(None, use_errno=True)


def why_not() -> str:
    """Returns why this machine cannot mount such a folder; empty if it can."""
    if os.geteuid() != 0:
        return "only root may mount"
    if "\tfuse\n" not in Path("/proc/filesystems").read_text() or not Path("/dev/fuse").exists():
        return "this kernel has no FUSE"
    with _open_device() as device:
        return "" if device >= 0 else "/dev/fuse cannot be opened"


class FuseFolder:
    """A mounted folder, and the process that serves it."""

    def __init__(self, source: Path, mountpoint: Path, **behaviour: float) -> None:
        """Mounts it.

        Args:
            source: The folder to show.
            mountpoint: An empty folder.
            behaviour: As for `behave`.
        """
        self.path = mountpoint
        self._server = subprocess.Popen(
            [sys.executable, "-m", "tests.fuse_folder", str(source), str(mountpoint)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=Path(__file__).parents[1],
        )
        self.behave(**behaviour)

    def __enter__(self) -> "FuseFolder":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def behave(self, **behaviour: float) -> dict[str, int]:
        """Changes the behaviour, and returns how often each operation was asked for.

        Args:
            behaviour: `delay_s` of each read; `tail_s`, the delay of a share `tail_share` of them;
                `is_direct`, 1 to keep the kernel's page cache out of files opened from now on;
                `has_flush`, 0 to have the kernel never ask when a file is closed. While it does,
                not even a process that is killed can end before it was answered.

        Returns:
            The counts by name (`lookup`, `open`, `read`, ...), and as `most_reads` how many reads
            were in flight at once since the last change.
        """
        assert self._server.stdin
        assert self._server.stdout
        self._server.stdin.write(json.dumps(behaviour) + "\n")
        self._server.stdin.flush()
        counts: dict[str, int] = json.loads(self._server.stdout.readline())
        return counts

    def stop(self) -> None:
        """Stops the server: whatever touches the folder from now on waits."""
        self._server.send_signal(signal.SIGSTOP)

    def go_on(self) -> None:
        """Lets the server answer again, also what waits."""
        self._server.send_signal(signal.SIGCONT)

    def close(self) -> None:
        """Ends the server, which fails what waits for it, and removes the mount."""
        self._server.kill()
        self._server.communicate()
        _libc.umount2(os.fsencode(self.path), _MNT_DETACH)


@contextlib.contextmanager
def _open_device() -> Iterator[int]:
    try:
        device = os.open("/dev/fuse", os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        yield -1
        return
    try:
        yield device
    finally:
        os.close(device)


class _Failure(OSError):
    """What the kernel is answered instead of a result."""


class _Server:
    """Answers the kernel in one thread; reads that are delayed wait in a heap."""

    def __init__(self, device: int, source: Path) -> None:
        self._device = device
        self._paths = {1: source}  # by node
        self._nodes = {source: 1}
        self._files: dict[int, int | list[os.DirEntry[str]]] = {}  # by handle
        self._next_handle = 1
        self._delayed: list[tuple[float, int, Callable[[], None]]] = []
        self._behaviour = {"delay_s": 0.0, "tail_s": 0.0, "tail_share": 0.0}
        self._behaviour |= {"is_direct": 0.0, "has_flush": 1.0}
        self._counts: Counter[str] = Counter(most_reads=0)
        self._random = random.Random(1)

    def run(self) -> None:
        """Answers until standard input ends or the folder is unmounted."""
        asked = b""
        while True:
            timeout = max(0.0, self._delayed[0][0] - time.monotonic()) if self._delayed else None
            ready, _, _ = select.select([self._device, 0], [], [], timeout)
            while self._delayed and self._delayed[0][0] <= time.monotonic():
                heapq.heappop(self._delayed)[2]()
            if 0 in ready:
                asked += (read := os.read(0, 4096))
                if not read:
                    return
                *lines, asked = asked.split(b"\n")
                for line in lines:
                    self._change(json.loads(line))
            if self._device in ready:
                try:
                    request = os.read(self._device, _MAX_BYTES + 4096)
                except OSError as error:
                    if error.errno == errno.ENODEV:  # unmounted
                        return
                    if error.errno in (errno.EAGAIN, errno.ENOENT, errno.EINTR):
                        continue
                    raise
                self._answer(request)

    def _change(self, changes: dict[str, float]) -> None:
        """Behaves otherwise from now on, and prints the counts until now."""
        self._behaviour |= changes
        print(json.dumps(self._counts), flush=True)
        if changes:
            self._counts["most_reads"] = 0

    def _answer(self, request: bytes) -> None:
        _, opcode, unique, node, *_ = _IN.unpack_from(request)
        name = _NAMES.get(opcode, "other")
        self._counts[name] += 1
        if name in ("forget", "batch_forget", "interrupt"):
            return  # the kernel wants no answer
        if name == "read":
            self._read_later(unique, request[_IN.size :])
            return
        method = getattr(self, f"_{name}", None)
        try:
            if method is None:
                raise _Failure(errno.ENOSYS, name)
            self._reply(unique, 0, method(node, request[_IN.size :]))
        except OSError as error:
            self._reply(unique, -(error.errno or errno.EIO))

    def _reply(self, unique: int, error: int, data: bytes = b"") -> None:
        with contextlib.suppress(FileNotFoundError):  # nobody waits for it any more
            os.write(self._device, _OUT.pack(_OUT.size + len(data), error, unique) + data)

    def _init(self, node: int, data: bytes) -> bytes:
        _, _, readahead, flags = _INIT.unpack_from(data)
        flags &= _ASYNC_READ | _PARALLEL_DIROPS | _MAX_PAGES
        return _INIT_OUT.pack(7, 31, readahead, flags, 512, 384, _MAX_BYTES, 1, 32, 0, 0)

    def _lookup(self, node: int, data: bytes) -> bytes:
        path = self._paths[node] / os.fsdecode(data.rstrip(b"\0"))
        found = self._attributes(path)
        node = self._nodes.setdefault(path, len(self._nodes) + 1)
        self._paths[node] = path
        return struct.pack("<QQQQII", node, 0, 0, 0, 0, 0) + found

    def _getattr(self, node: int, data: bytes) -> bytes:
        return struct.pack("<QII", 0, 0, 0) + self._attributes(self._paths[node])

    def _readlink(self, node: int, data: bytes) -> bytes:
        return os.fsencode(self._paths[node].readlink())

    def _open(self, node: int, data: bytes) -> bytes:
        if struct.unpack_from("<I", data)[0] & os.O_ACCMODE != os.O_RDONLY:
            raise _Failure(errno.EROFS, "read-only")
        flags = _DIRECT_IO if self._behaviour["is_direct"] else 0
        return self._handle(os.open(self._paths[node], os.O_RDONLY | os.O_CLOEXEC), flags)

    def _release(self, node: int, data: bytes) -> bytes:
        file = self._files.pop(struct.unpack_from("<Q", data)[0])
        if isinstance(file, int):
            os.close(file)
        return b""

    def _opendir(self, node: int, data: bytes) -> bytes:
        with os.scandir(self._paths[node]) as entries:
            return self._handle(sorted(entries, key=lambda entry: entry.name), 0)

    def _readdir(self, node: int, data: bytes) -> bytes:
        handle, offset, size, *_ = _READ.unpack_from(data)
        entries, answer = self._files[handle], b""
        assert isinstance(entries, list)
        for number, entry in enumerate(entries[offset:], offset + 1):
            name, kind = (
                os.fsencode(entry.name),
                stat.S_IFMT(entry.stat(follow_symlinks=False).st_mode),
            )
            one = struct.pack("<QQII", entry.inode(), number, len(name), kind >> 12) + name
            one += b"\0" * (-len(one) % 8)
            if len(answer) + len(one) > size:
                break
            answer += one
        return answer

    def _releasedir(self, node: int, data: bytes) -> bytes:
        return self._release(node, data)

    def _statfs(self, node: int, data: bytes) -> bytes:
        return struct.pack("<5Q4I24x", 1, 0, 0, 1, 0, 4096, 255, 4096, 0)

    def _access(self, node: int, data: bytes) -> bytes:
        return b""

    def _flush(self, node: int, data: bytes) -> bytes:
        if not self._behaviour["has_flush"]:
            raise _Failure(errno.ENOSYS, "flush")
        return b""

    def _read_later(self, unique: int, data: bytes) -> None:
        handle, offset, size, *_ = _READ.unpack_from(data)

        def answer() -> None:
            file = self._files[handle]
            assert isinstance(file, int)
            try:
                self._reply(unique, 0, os.pread(file, size, offset))
            except OSError as error:
                self._reply(unique, -(error.errno or errno.EIO))

        is_late = self._random.random() < self._behaviour["tail_share"]
        delay_s = self._behaviour["tail_s" if is_late else "delay_s"]
        if not delay_s:
            answer()
            return
        heapq.heappush(self._delayed, (time.monotonic() + delay_s, unique, answer))
        self._counts["most_reads"] = max(self._counts["most_reads"], len(self._delayed))

    def _handle(self, file: Any, flags: int) -> bytes:
        handle, self._next_handle = self._next_handle, self._next_handle + 1
        self._files[handle] = file
        return struct.pack("<QII", handle, flags, 0)

    def _attributes(self, path: Path) -> bytes:
        found = path.lstat()
        times = (found.st_atime_ns, found.st_mtime_ns, found.st_ctime_ns)
        return _ATTRIBUTES.pack(
            found.st_ino,
            found.st_size,
            found.st_blocks,
            *(time_ns // 10**9 for time_ns in times),
            *(time_ns % 10**9 for time_ns in times),
            found.st_mode,
            found.st_nlink,
            found.st_uid,
            found.st_gid,
            0,
            4096,
            0,
        )


_NAMES = {
    1: "lookup",
    2: "forget",
    3: "getattr",
    5: "readlink",
    14: "open",
    15: "read",
    17: "statfs",
    18: "release",
    25: "flush",
    26: "init",
    27: "opendir",
    28: "readdir",
    29: "releasedir",
    34: "access",
    36: "interrupt",
    42: "batch_forget",
}


def main(source: Path, mountpoint: Path) -> None:
    """Mounts the folder and serves it until standard input ends, also by the death of its writer.

    Another process of the same group removes the mount then: the server may be stopped.
    """
    with _open_device() as device:
        options = f"fd={device},rootmode=40755,user_id=0,group_id=0,allow_other".encode()
        flags = _MS_RDONLY | _MS_NOSUID | _MS_NODEV
        if _libc.mount(b"test", os.fsencode(mountpoint), b"fuse.test", flags, options):
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()), str(mountpoint))
        server = os.getpid()
        if os.fork() == 0:
            os.close(device)
            _clean_up_after(server, mountpoint)
        _Server(device, source).run()


def _clean_up_after(server: int, mountpoint: Path) -> NoReturn:
    """Waits for the server, or for the end of its input, and then ends both."""
    os.setsid()
    process, poll = os.pidfd_open(server), select.poll()
    os.close(1)
    poll.register(process, select.POLLIN)
    poll.register(0, 0)  # a hang-up is told in any case
    poll.poll()
    with contextlib.suppress(ProcessLookupError):
        signal.pidfd_send_signal(process, signal.SIGKILL)
    _libc.umount2(os.fsencode(mountpoint), _MNT_DETACH)
    os._exit(0)


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
