"""The faults: each is a context that makes it, and mends it at its end.

A fault yields what it was done to. It lasts for as long as its context is open.
"""

import os
import resource
import shutil
import signal
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from random import Random

import psutil

from tests.object_server.script import Rule
from tests.soak.cluster import LEASE_S, Cluster, kill

Note = Callable[..., None]  # writes a line of the driver's history
Make = Callable[[Cluster, Random, Note], AbstractContextManager[str]]


@dataclass(frozen=True)
class Fault:
    """A fault and for how long it lasts.

    Attributes:
        name: As the history has it.
        make: Begins and mends it.
        shortest_s: The least time between the two.
        longest_s: The most.
    """

    name: str
    make: Make
    shortest_s: float
    longest_s: float


@contextmanager
def client_killed(cluster: Cluster, draw: Random, note: Note) -> Iterator[str]:
    rank = draw.choice(cluster.ranks)
    rank.kill()
    yield rank.name
    rank.start()


@contextmanager
def job_killed(cluster: Cluster, draw: Random, note: Note) -> Iterator[str]:
    job = draw.choice(cluster.jobs)
    ranks = [rank for rank in cluster.ranks if rank.job is job]
    for rank in ranks:
        rank.kill()
    yield job.name
    for rank in ranks:
        rank.start()


@contextmanager
def client_frozen(cluster: Cluster, draw: Random, note: Note) -> Iterator[str]:
    rank = draw.choice(cluster.ranks)
    rank.signal(signal.SIGSTOP)
    try:
        yield rank.name
    finally:
        rank.signal(signal.SIGCONT)


@contextmanager
def daemon_killed(cluster: Cluster, draw: Random, note: Note) -> Iterator[str]:
    number = draw.randrange(len(cluster.daemons))
    kill(cluster.daemons[number])
    yield f"daemon {number}"
    cluster.daemons[number].restart()


@contextmanager
def daemon_stopped(cluster: Cluster, draw: Random, note: Note) -> Iterator[str]:
    number = draw.randrange(len(cluster.daemons))
    note("stopped", daemon=number, status=cluster.daemons[number].stop())
    yield f"daemon {number}"
    cluster.daemons[number].restart()


@contextmanager
def daemon_frozen(cluster: Cluster, draw: Random, note: Note) -> Iterator[str]:
    number = draw.randrange(len(cluster.daemons))
    process = cluster.daemons[number].process
    assert process
    process.send_signal(signal.SIGSTOP)
    try:
        yield f"daemon {number}"
    finally:
        process.send_signal(signal.SIGCONT)


@contextmanager
def copy_workers_killed(cluster: Cluster, draw: Random, note: Note) -> Iterator[str]:
    number = draw.randrange(len(cluster.daemons))
    workers = cluster.copy_workers(number)
    victims = draw.sample(workers, draw.randint(1, len(workers))) if workers else []
    for victim in victims:
        _kill(victim)
    yield f"{len(victims)} of {len(workers)} of daemon {number}"


def _kill(process: psutil.Process) -> None:
    try:
        process.kill()
    except psutil.NoSuchProcess:  # the daemon was faster
        return


@contextmanager
def shard_truncated(cluster: Cluster, draw: Random, note: Note) -> Iterator[str]:
    path = _a_shard(cluster, draw)
    with _put_back(cluster, path):
        os.truncate(path, draw.randrange(path.stat().st_size))
        yield path.name


@contextmanager
def shard_replaced(cluster: Cluster, draw: Random, note: Note) -> Iterator[str]:
    """Other bytes of the same size, as a new file."""
    path = _a_shard(cluster, draw)
    with _put_back(cluster, path):
        other = path.with_name(f"{path.name}.new")
        other.write_bytes(draw.randbytes(path.stat().st_size))
        other.replace(path)
        yield path.name


@contextmanager
def shard_removed(cluster: Cluster, draw: Random, note: Note) -> Iterator[str]:
    path = _a_shard(cluster, draw)
    with _put_back(cluster, path):
        path.unlink()
        yield path.name


def _a_shard(cluster: Cluster, draw: Random) -> Path:
    return draw.choice(sorted((*cluster.tokens.glob("*.bin"), *cluster.tars.glob("*.tar"))))


@contextmanager
def _put_back(cluster: Cluster, path: Path) -> Iterator[None]:
    """Restores a shard as `cp -p` from a backup does, and indexes it as its error asks for."""
    aside = path.parent.with_name(f"{path.name}.aside")
    shutil.copy2(path, aside)
    try:
        yield
    finally:
        aside.replace(path)
    for number in range(len(cluster.daemons)):
        cluster.take_checksums(number, path.parent.name)


@contextmanager
def descriptors_exhausted(cluster: Cluster, draw: Random, note: Note) -> Iterator[str]:
    """No descriptor is free in a daemon, and one of its clients connects again."""
    number = draw.randrange(len(cluster.daemons))
    process = cluster.daemons[number].process
    assert process
    before = resource.prlimit(process.pid, resource.RLIMIT_NOFILE)
    used = psutil.Process(process.pid).num_fds() + draw.randint(0, 3)
    resource.prlimit(process.pid, resource.RLIMIT_NOFILE, (used, before[1]))
    rank = draw.choice([each for each in cluster.ranks if each.job.daemons[each.rank] == number])
    try:
        rank.kill()
        rank.start()
        yield f"daemon {number} has {used}, {rank.name} comes back"
    finally:
        resource.prlimit(process.pid, resource.RLIMIT_NOFILE, before)


@contextmanager
def storage_troubled(cluster: Cluster, draw: Random, note: Note) -> Iterator[str]:
    rule = Rule(
        draw.choice(("status", "reset", "truncate", "short", "silence", "slow")),
        share=draw.choice((0.1, 0.5, 1.0)),
        delay_s=draw.uniform(0.1, 2.0),
    )
    cluster.server.misbehave(rule)
    cluster.server.hang_up()
    yield f"{rule.fault}, share {rule.share}"
    cluster.server.misbehave()


@contextmanager
def clock_jumped(cluster: Cluster, draw: Random, note: Note) -> Iterator[str]:
    """The wall clock of all daemons goes forth or back; the monotonic clock does not."""
    seconds = draw.choice((-86_400, -3600, -10, 10, 3600, 86_400))
    cluster.clock.write_text(f"{seconds:+d}")
    yield f"{seconds:+d} s"


FAULTS = (
    Fault("client killed", client_killed, 0.0, 1.0),
    Fault("job killed", job_killed, 0.0, 1.0),
    Fault("client frozen", client_frozen, LEASE_S * 1.2, LEASE_S * 1.5),
    Fault("daemon killed", daemon_killed, 0.0, 1.5),
    Fault("daemon stopped", daemon_stopped, 0.0, 1.5),
    Fault("daemon frozen", daemon_frozen, LEASE_S * 0.5, LEASE_S * 1.5),
    Fault("copy workers killed", copy_workers_killed, 0.0, 1.0),
    Fault("shard truncated", shard_truncated, 0.5, 2.0),
    Fault("shard replaced", shard_replaced, 0.5, 2.0),
    Fault("shard removed", shard_removed, 0.5, 2.0),
    Fault("descriptors exhausted", descriptors_exhausted, 1.0, 3.0),
    Fault("storage troubled", storage_troubled, 1.0, 4.0),
    Fault("clock jumped", clock_jumped, 1.0, 3.0),
)


def usable(cluster: Cluster) -> list[Fault]:
    """Returns the faults that can be made here: the clock needs libfaketime."""
    return [each for each in FAULTS if each.make is not clock_jumped or cluster.has_faked_clock]


def in_turns(draw: Random, faults: list[Fault]) -> Iterator[Fault]:
    """Yields faults without end: all of them in a random order, again and again."""
    while True:
        yield from draw.sample(faults, len(faults))
