"""The run of this process: all processes of one launch of a script, on all machines.

[Note: The id of a run] Ranks must find each other before there is a process group,
and two runs must never take each other for one. The launcher gives all ranks of a run the same
variables, and at a time no two runs on a machine have the same: one port has one owner. But a run
that has ended may have had the same. So the variables only name a file, in which the first rank on
the machine writes a random id. Each rank keeps a shared lock on the file as long as it lives: the
rank that gets an exclusive lock is the first of a new run, and writes a new id. If there is a
process group, its store gives all machines the id of one of them.

[Note: The folder of a private daemon] Its socket and log are in a folder that only this user can
enter. Every client holds a shared lock on the folder, and the daemon holds a lock on a file in it.
The kernel drops both locks however a process ends. The daemon ends when no client is left; it, or
the last client, removes the folder under an exclusive lock. A folder without any lock belonged to
processes that were killed, and the next private daemon removes it.
"""

import atexit
import contextlib
import errno
import fcntl
import hashlib
import logging
import os
import re
import shutil
import stat
import sys
import tempfile
import threading
import time
import uuid
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gyre_client.errors import DaemonUnavailable
from gyre_client.transport.channel import MAX_SOCKET_PATH_BYTES

SOCKET = "gyre.sock"
LOG = "gyred.log"
NUM_LETTERS = 12  # of the name of a run on this machine
# A lock is held for so long where a daemon starts, or where it ends and the folder is removed.
LOCK_TIMEOUT_S = 90.0
_POLL_S = 0.02
_LOCK = f"{SOCKET}.lock"  # the daemon holds a lock on this file
_FILES = (
    SOCKET,
    f"{SOCKET}.side",
    _LOCK,
    LOG,
)
FUNCTIONS = "functions"  # a folder with functions that scripts pass to the daemon
_FOLDER_PREFIX = "gyred-"
_FOLDER_FLAGS = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


class PrivateFolder:
    """A folder in the system's folder for temporary files, with mode 0700; clients share it.

    Where the path of a socket there is too long for the system, it is in `/tmp`.

    Attributes:
        path: Where the folder is.
    """

    def __init__(self, name: str) -> None:
        """Makes the folder of this name, or joins its clients; removes abandoned folders.

        Raises:
            DaemonUnavailable: Another user's folder is in its place, or it cannot be locked.
        """
        root = temporary_folder()
        for path in root.glob(f"{_FOLDER_PREFIX}*"):
            # The folder belongs to another user, is in use, or has just gone.
            with contextlib.suppress(OSError):
                _clear(path)
        self.path = root / f"{_FOLDER_PREFIX}{name}"
        self._descriptor = -1
        while self._descriptor < 0:
            # Not with `exist_ok`, which raises if another process removes the folder meanwhile.
            with contextlib.suppress(FileExistsError):
                self.path.mkdir(mode=0o700)
            self._descriptor = _share(self.path)

    def is_last(self) -> bool:
        """Gives the lock up, unless no other client has one: then no further client can enter."""
        with contextlib.suppress(BlockingIOError):
            fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
        return False

    def remove(self) -> None:
        """Removes the folder with everything in it; for the last client."""
        shutil.rmtree(self.path, ignore_errors=True)
        self.leave()

    def leave(self) -> None:
        """Leaves the folder to other clients, or to the next private daemon that removes it."""
        fcntl.flock(self._descriptor, fcntl.LOCK_UN)  # also for forks that still have it open
        self.forget()

    def forget(self) -> None:
        """Closes the folder in a forked process, whose parent goes on with it."""
        os.close(self._descriptor)


def temporary_folder() -> Path:
    """Returns where private daemons of this machine have their folders."""
    root = Path(tempfile.gettempdir())
    socket = root / f"{_FOLDER_PREFIX}{'x' * NUM_LETTERS}" / SOCKET
    is_short = len(os.fsencode(socket)) <= MAX_SOCKET_PATH_BYTES
    return root if is_short else Path("/tmp")


def locked(descriptor: int, path: Path, kind: int) -> bool:
    """Locks the open file of a descriptor; false if it is not at the path any more.

    Raises:
        DaemonUnavailable: A process holds the lock for too long, or there are no locks.
    """
    deadline_s = time.monotonic() + LOCK_TIMEOUT_S
    while is_at(descriptor, path):
        try:
            fcntl.flock(descriptor, kind | fcntl.LOCK_NB)
            return is_at(descriptor, path)
        except BlockingIOError:
            if time.monotonic() > deadline_s:
                raise DaemonUnavailable(
                    f"{path} was locked by another process for {LOCK_TIMEOUT_S:.0f} s. End the "
                    "rest of this run, or remove it"
                ) from None
            time.sleep(_POLL_S)
        except OSError as error:
            raise DaemonUnavailable(
                f"{path} cannot be locked: {error.strerror}. Set TMPDIR to a folder of a local disk"
            ) from error
    return False


def is_at(descriptor: int, path: Path) -> bool:
    """Returns whether the path still leads to the open file of a descriptor."""
    try:
        return os.path.samestat(os.fstat(descriptor), path.lstat())
    except FileNotFoundError:
        return False


def _share(path: Path) -> int:
    """Returns a descriptor of the folder, locked; -1 if another process removed it meanwhile."""
    try:
        folder = os.open(path, _FOLDER_FLAGS)
    except FileNotFoundError:
        return -1
    try:
        if os.fstat(folder).st_uid != os.geteuid():
            raise DaemonUnavailable(
                f"the folder of the private daemon, {path}, belongs to another user. Remove it"
            )
        if locked(folder, path, fcntl.LOCK_SH):
            return folder
    except BaseException:
        os.close(folder)
        raise
    os.close(folder)
    return -1


def _clear(path: Path) -> None:
    """Removes an abandoned folder of this user, unless it holds files of others."""
    folder = os.open(path, _FOLDER_FLAGS)
    try:
        with os.scandir(folder) as entries:
            is_ours = {entry.name for entry in entries} <= {*_FILES, FUNCTIONS}
        if not is_ours or os.fstat(folder).st_uid != os.geteuid():
            return
        fcntl.flock(folder, fcntl.LOCK_EX | fcntl.LOCK_NB)
        _check_daemon_is_gone(folder)
        for name in _FILES:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(name, dir_fd=folder)
        with contextlib.suppress(FileNotFoundError):
            shutil.rmtree(FUNCTIONS, dir_fd=folder)
        path.rmdir()
    finally:
        os.close(folder)


def _check_daemon_is_gone(folder: int) -> None:
    """Raises BlockingIOError if a daemon holds its lock file."""
    try:
        lock = os.open(_LOCK, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=folder)
    except FileNotFoundError:
        return
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    finally:
        os.close(lock)


_LAUNCH = ("MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RUN_ID", "SLURM_JOB_ID", "SLURM_STEP_ID")
_PREFIX = "gyre-run-"
_FLAGS = os.O_NOFOLLOW | os.O_CLOEXEC
_MAX_NAME_CHARS = 100

_log = logging.getLogger("gyre_client")


@dataclass(frozen=True, slots=True)
class Run:
    """One run.

    Attributes:
        run_id: Random; the same on all ranks.
        on_node: Random; the same on the ranks of one machine.
    """

    run_id: str
    on_node: str

    @property
    def name(self) -> str:
        """The name for a job without one: as torchelastic or Slurm do, or the id."""
        torchelastic = os.environ.get("TORCHELASTIC_RUN_ID", "")
        slurm = [os.environ.get(each, "") for each in ("SLURM_JOB_ID", "SLURM_STEP_ID")]
        for name in ("" if torchelastic == "none" else torchelastic, ".".join(filter(None, slurm))):
            if name and name.isprintable() and len(name) <= _MAX_NAME_CHARS:
                return name
        return f"job-{self.run_id}"


def this_run() -> Run:
    """Returns the run of this process; a process that was started alone is a run."""
    with _membership.lock:
        on_node = _membership.on_node() or agreed(f"node/{machine()}", _membership.drawn)
    return Run(agreed("run", on_node), on_node)


def launched_as() -> tuple[int, int]:
    """Returns rank and world size, of torch.distributed or as the launcher says; or 0 and 1."""
    return launched() or (0, 1)


def launched() -> tuple[int, int] | None:
    """Returns the same; None without a process group and a launcher."""
    distributed = _distributed()
    if distributed is not None:
        return distributed.get_rank(), distributed.get_world_size()
    names = ("RANK", "WORLD_SIZE"), ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS")
    for rank, world_size in names:
        with contextlib.suppress(KeyError, ValueError):
            return int(os.environ[rank]), int(os.environ[world_size])
    return None


def launched_here() -> tuple[int, int]:
    """Returns rank and number of ranks on this node, as the launcher says; or 0 and 1."""
    with contextlib.suppress(KeyError, ValueError):
        return int(os.environ["LOCAL_RANK"]), max(1, int(os.environ["LOCAL_WORLD_SIZE"]))
    with contextlib.suppress(KeyError, ValueError, IndexError):
        # such as `4(x2),3`: four on the first two nodes, three on the third
        tasks = re.findall(r"(\d+)(?:\(x(\d+)\))?", os.environ["SLURM_STEP_TASKS_PER_NODE"])
        by_node = [int(num) for num, times in tasks for _ in range(int(times or 1))]
        return int(os.environ["SLURM_LOCALID"]), by_node[int(os.environ["SLURM_NODEID"])]
    return 0, 1


def agreed(key: str, mine: str) -> str:
    """Returns the first rank's value for a key; without a process group, `mine`.

    No rank waits for another one.
    """
    if _distributed() is None:
        return mine
    store = _default_store()
    if store is _membership.store_of_parent:
        return mine
    try:
        return store.compare_set(f"gyre/{key}", "", mine).decode() or mine
    except (RuntimeError, NotImplementedError) as error:  # its host has ended, or it has no values
        _log.info("the ranks cannot be asked through the process group: %s", error)
        return mine


def ordinal(key: str) -> int:
    """Returns how often this process has asked with this key before."""
    with _membership.lock:
        _membership.counts[key] += 1
        return _membership.counts[key] - 1


class _Membership:
    """The facts that this process has about its run.

    Attributes:
        drawn: Random; the id of a run where nothing else tells it.
        store_of_parent: In a forked process: its parent's store, which it must not use.
        counts: See `ordinal`.
        lock: For threads.
    """

    def __init__(self) -> None:
        self._file = -1
        self.store_of_parent: Any = None
        self._reset()
        os.register_at_fork(after_in_child=self._after_fork)

    def _after_fork(self) -> None:
        self._reset()
        self.store_of_parent = None if _distributed() is None else _default_store()

    def _reset(self) -> None:
        if self._file >= 0:  # of the parent, which keeps its lock
            os.close(self._file)
        self._file, self._id = -1, ""
        self.drawn = uuid.uuid4().hex[:NUM_LETTERS]
        self.counts: Counter[str] = Counter()
        self.lock = threading.RLock()

    def on_node(self) -> str:
        """Returns the id that the ranks of this run on this machine share; "" if nothing tells."""
        path = None if self._id else _meeting_file()
        if path is not None:
            try:
                self._join(path)
            except (OSError, DaemonUnavailable) as error:
                _log.warning("this rank cannot find others on its node: %s", error)
                self._id = self.drawn
        return self._id

    def _join(self, path: Path) -> None:
        """Takes the id from the file, or writes one."""
        for other in path.parent.glob(f"{_PREFIX}{os.geteuid()}-*"):
            with contextlib.suppress(OSError):  # in use, or gone by now
                _remove_unused(other)
        while not self._id:
            file = os.open(path, os.O_RDWR | os.O_CREAT | _FLAGS, 0o600)
            try:
                found = os.fstat(file)
                if found.st_uid != os.geteuid() or not stat.S_ISREG(found.st_mode):
                    raise PermissionError(errno.EPERM, f"{path} is another user's. Remove it")
                with contextlib.suppress(BlockingIOError):
                    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    os.pwrite(file, self.drawn.encode(), 0)
                # A shared lock: no id is written any more.
                if locked(file, path, fcntl.LOCK_SH):
                    self._id = os.pread(file, NUM_LETTERS, 0).decode()
            finally:
                if self._id:
                    self._file = file
                else:
                    os.close(file)
        atexit.register(self._leave, path)

    def _leave(self, path: Path) -> None:
        """Removes the file if this is the last rank on the machine."""
        if self._file >= 0:
            os.close(self._file)
            self._file = -1
            with contextlib.suppress(OSError):
                _remove_unused(path)


_membership = _Membership()


def _remove_unused(path: Path) -> None:
    """Removes the file of a run without ranks."""
    file = os.open(path, os.O_RDWR | _FLAGS)
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if is_at(file, path):
            path.unlink()
    finally:
        os.close(file)


def _meeting_file() -> Path | None:
    """Returns the file of this launch; None where this process was not launched as one of many."""
    facts = [os.environ.get(name, "") for name in _LAUNCH]
    if launched_as()[1] == 1 or not (facts[1] or facts[4]):
        return None
    with contextlib.suppress(OSError):  # two containers may use one port, each in its network
        facts.append(str(Path("/proc/self/ns/net").stat().st_ino))
    facts.append(machine())  # the folder may be one of several machines
    digest = hashlib.sha256("\0".join(facts).encode()).hexdigest()[:NUM_LETTERS]
    return temporary_folder() / f"{_PREFIX}{os.geteuid()}-{digest}"


def machine() -> str:
    """Returns an id of this machine, the same in all of its containers."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return os.uname().nodename


def _default_store() -> Any:
    """Returns the store of the default process group.

    Private: torch has no public way to it. A collective would wait for ranks that make no Loader.
    """
    return sys.modules["torch.distributed.distributed_c10d"]._get_default_store()


def _distributed() -> Any:
    """Returns torch.distributed if it has a process group; it is not imported here."""
    module: Any = sys.modules.get("torch.distributed")
    is_there = module is not None and module.is_available() and module.is_initialized()
    return module if is_there else None
