"""The faults of an object storage, and how the benchmark begins and ends each."""

import contextlib
import os
import subprocess
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.loader.storage.objects import write_objects
from tests.object_server.process import ObjectServerProcess, object_server
from tests.object_server.script import Rule, Script

FIRST_BYTE_S: dict[str, Any] = {"first_byte_p50_s": 0.02, "first_byte_p99_s": 0.2}
VICTIM = "/data/0001.bin"
DISK_BYTES = 512 << 20
_CACHE = ('cache_memory = "16MiB"',)


@dataclass
class Scene:
    """An object server and a disk for the node cache.

    Attributes:
        root: whose folder `data` is the bucket.
        disk: a small file system, where a fault needs one.
        server: has the objects below `root`, from `start_server` on.
    """

    root: Path
    disk: Path
    server: ObjectServerProcess = field(init=False)
    _stack: ExitStack = field(default_factory=ExitStack)

    def follow(self, *rules: Rule, key: str = "", issued: str = "") -> None:
        """Answer normally, except for these rules."""
        self.server.follow(
            Script(rules=list(rules), accepted_key=key, issued_key=issued, **FIRST_BYTE_S)
        )

    def victim(self) -> bytes:
        """The correct bytes of one of the objects."""
        return (self.root / VICTIM[1:]).read_bytes()

    def stop_server(self) -> None:
        """Stop the server."""
        self._stack.close()

    def start_server(self, port: int = 0) -> None:
        """Start the server, at an old address or a new one."""
        self.server = self._stack.enter_context(object_server(self.root, port=port))
        self.follow()

    def restart_server(self) -> None:
        """Start the server at its old address."""
        self.start_server(int(self.server.url.rpartition(":")[2]))


Step = Callable[[Scene], None]


@dataclass(frozen=True)
class Fault:
    """One fault.

    Attributes:
        name: for the table.
        begin: makes it so.
        end: mends it.
        duration_s: between the two.
        prepare: before the daemon starts.
        num_samples: in the dataset.
        is_cached: through the node cache, with a folder on `disk`; otherwise every sample is a
            request.
        storage: settings beside the endpoint; keys by default.
        wants_errors: readers are told, and come back.
    """

    name: str
    begin: Step
    end: Step = lambda scene: scene.follow()
    duration_s: float = 30.0
    prepare: Step = lambda scene: scene.follow()
    num_samples: int = 32_768
    is_cached: bool = False
    storage: Mapping[str, object] = field(
        default_factory=lambda: {"access_key_id": "test", "secret_access_key": "test"}
    )
    wants_errors: bool = False

    @property
    def daemon_lines(self) -> Sequence[str]:
        """Lines for the daemon's configuration."""
        return _CACHE if self.is_cached else ()


def _rules(*rules: Rule) -> Step:
    return lambda scene: scene.follow(*rules)


def _store_victim(scene: Scene) -> None:
    """Store the victim under an etag that it will have again."""
    scene.follow()
    scene.server.put(VICTIM, scene.victim())


def _fill_disk(scene: Scene) -> None:
    """Take all free space of the disk."""
    with (scene.disk / "filler").open("wb") as filler, contextlib.suppress(OSError):
        while True:
            filler.write(bytes(1 << 20))
            filler.flush()


def _damage_cache(scene: Scene) -> None:
    """Damage a few bytes in every second block of 256 KiB."""
    for path in scene.disk.glob("cache/*.blocks"):
        with path.open("r+b") as file:
            for offset in range(1000, path.stat().st_size, 512 << 10):
                file.seek(offset)
                file.write(os.urandom(16))


def _expire(scene: Scene) -> None:
    """Expire the old credentials while the metadata service has no new ones."""
    scene.follow(key="second", issued="first")


FAULTS = [
    Fault("503 storm", _rules(Rule("status", status=503))),
    Fault("1 % stragglers of 5 s", _rules(Rule("delay", share=0.01, delay_s=5.0))),
    Fault("resets in mid-body, 5 %", _rules(Rule("reset", share=0.05))),
    Fault("wrong lengths, 5 %", _rules(Rule("short", share=0.025), Rule("truncate", share=0.025))),
    Fault("unreachable endpoint", Scene.stop_server, Scene.restart_server),
    Fault(
        "expired credentials",
        _expire,
        lambda scene: scene.follow(key="second", issued="second"),
        duration_s=5.0,
        prepare=lambda scene: scene.follow(key="first", issued="first"),
        storage={},
        wants_errors=True,
    ),
    Fault(
        "vanished object",
        lambda scene: scene.server.delete(VICTIM),
        lambda scene: scene.server.put(VICTIM, scene.victim()),
        duration_s=5.0,
        prepare=_store_victim,
        wants_errors=True,
    ),
    Fault(
        "replaced object",
        lambda scene: scene.server.put(VICTIM, bytes(len(scene.victim()))),
        lambda scene: scene.server.put(VICTIM, scene.victim()),
        duration_s=5.0,
        prepare=_store_victim,
        wants_errors=True,
    ),
    Fault(
        "full cache disk",
        _fill_disk,
        lambda scene: (scene.disk / "filler").unlink(),
        duration_s=5.0,
        num_samples=262_144,
        is_cached=True,
    ),
    Fault(
        "corrupted cache file", _damage_cache, lambda scene: None, duration_s=0.0, is_cached=True
    ),
]


@contextmanager
def scene_of(fault: Fault, folder: Path) -> Iterator[Scene]:
    """A context with all that a fault needs."""
    root, disk = folder / f"objects-{fault.num_samples}", folder / "disk"
    if not root.exists():
        write_objects(root, fault.num_samples)
    with ExitStack() as stack:
        if fault.is_cached:
            stack.enter_context(_small_disk(disk))
        scene = Scene(root, disk)
        stack.callback(scene.stop_server)
        scene.start_server()
        fault.prepare(scene)
        yield scene


@contextmanager
def _small_disk(folder: Path) -> Iterator[None]:
    folder.mkdir()
    subprocess.run(
        ["mount", "-t", "tmpfs", "-o", f"size={DISK_BYTES}", "none", str(folder)], check=True
    )
    try:
        yield
    finally:
        subprocess.run(["umount", str(folder)], check=True)
        folder.rmdir()
