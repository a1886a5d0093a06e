"""The memory of batches is given back by those who hold it.

What still refers to it does not matter, nor whether a garbage collector runs.
"""

import asyncio
import contextlib
import gc
import socket
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from gyre_client import Loader
from gyre_client.errors import CorruptSample
from gyre_daemon.access.policy import peer_principal
from gyre_daemon.memory import sidechannel
from gyre_daemon.memory.arenas import Arena, ArenaRegistry, Arenas, Budget, FileWatch, Slot
from gyre_daemon.memory.share import share_within
from gyre_daemon.memory.sidechannel import Peer
from gyre_daemon.runtime.threads import NO_JOB, FairExecutor
from gyre_daemon.sessions.session import ClientArenas
from gyre_daemon.storage.reads import ArenaClosed

from tests.arenas import mapped_arena_bytes
from tests.conftest import Daemon, StartDaemon
from tests.waiting import until

NUM_BYTES = 1 << 20


@pytest.fixture
def _no_collector() -> Iterator[None]:
    gc.disable()
    yield
    gc.enable()


def num_mapped() -> int:
    return Path("/proc/self/maps").read_text().count("gyre-arena")


def num_descriptors() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


def made() -> Arena:
    arena = Arena(NUM_BYTES)
    arena.allocate(0, NUM_BYTES)
    arena.seal()
    return arena


def failure(slot: Slot) -> Exception:
    """An error whose traceback has a frame that refers to a slot, to views of it, and to itself."""
    view = np.frombuffer(slot.memory, np.uint8)
    try:
        raise ValueError(slot, view)
    except ValueError as error:
        kept = error
    return kept


@pytest.mark.usefixtures("_no_collector")
def test_frames_and_tracebacks_keep_no_arena_mapped() -> None:
    before, descriptors = num_mapped(), num_descriptors()
    arena = made()
    slot = arena.take(NUM_BYTES)
    assert slot
    error = failure(slot)
    assert num_mapped() == before + 1
    arena.close()
    assert num_mapped() == before
    assert num_descriptors() == descriptors
    assert error.args[0] is slot


def test_memory_is_there_until_the_last_lease_is_returned() -> None:
    arena, gone = made(), threading.Event()
    arena.when_unmapped(gone.set)
    slot = arena.take(NUM_BYTES)
    assert slot
    with arena.lease():
        assert arena.acquire()
        arena.close()
        arena.close()
        slot.memory[:1] = b"x"
        arena.release()
        assert not gone.is_set()
        assert bytes(slot.memory[:1]) == b"x"
    assert gone.is_set()
    assert not arena.acquire()
    with pytest.raises(ArenaClosed), arena.lease():
        pass


@pytest.mark.usefixtures("_no_collector")
def test_arenas_that_are_closed_while_a_thread_writes_go_when_it_has_written() -> None:
    share = share_within(NUM_BYTES, 4, 1 << 30)

    async def write() -> None:
        before = num_mapped()
        registry = ArenaRegistry(1 << 30)
        with ThreadPoolExecutor(1) as threads:
            workers = FairExecutor(threads, 1)
            arenas = Arenas(share, Budget(0), registry, workers)
            await arenas.allocate(NO_JOB)
            slot = arenas.take(NUM_BYTES)
            assert slot
            begun, may_end = threading.Event(), threading.Event()

            def fill() -> None:
                with slot.arena.lease():
                    begun.set()
                    may_end.wait()
                    slot.memory[:] = bytes(NUM_BYTES)

            filling = asyncio.create_task(workers.run(NO_JOB, 0, 0, fill))
            await asyncio.to_thread(begun.wait)
            filling.cancel()
            arenas.close()
            assert num_mapped() == before + 1
            assert registry.num_bytes > 0
            may_end.set()
        await asyncio.sleep(0)  # the thread's message arrives
        assert num_mapped() == before
        assert registry.num_bytes == 0

    asyncio.run(write())


@pytest.mark.usefixtures("_no_collector")
def test_an_arena_that_is_made_while_its_stream_ends_is_given_back() -> None:
    """The task that makes it may learn that it is cancelled only after it has made it."""
    share = share_within(NUM_BYTES, 48, 1 << 30, in_groups=True)

    async def make() -> None:
        before = num_mapped()
        registry = ArenaRegistry(1 << 30)
        with ThreadPoolExecutor(1) as threads:
            arenas = Arenas(share, Budget(0), registry, FairExecutor(threads, 1))
            await arenas.allocate(NO_JOB)
            made = asyncio.Event()
            completing = asyncio.create_task(arenas.complete(NO_JOB, made.set))
            while arenas.take(share.group_bytes):
                pass
            await asyncio.sleep(0)
            assert num_mapped() == before + 2, "another arena is being made"
            arenas.close()
            assert num_mapped() == before + 1
            await made.wait()
            completing.cancel()
        assert num_mapped() == before
        await asyncio.sleep(0)  # the arena's message arrives
        assert registry.num_bytes == 0

    asyncio.run(make())


def test_a_connection_carries_the_arenas_of_so_many_sessions(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Those of a session that is over count for as long as it holds batches that others read."""
    monkeypatch.setattr(sidechannel, "_MOST_SESSIONS", 2)
    said: list[str] = []

    def client(name: str) -> ClientArenas:
        return ClientArenas(lambda _: (), lambda: said.append(f"{name} left"))

    async def share() -> None:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        peer, files = Peer(ours, peer_principal(ours)), FileWatch()
        arena = Arena(NUM_BYTES, None, files)
        arena.seal()

        def shares(arenas: ClientArenas, name: str) -> bool:
            return arenas.share(name, peer, arena, partial(said.append, f"{name} is gone"))

        first, second, third = client("first"), client("second"), client("third")
        assert shares(first, "first")
        assert shares(second, "second")
        assert not shares(third, "third")
        first.end(partial(said.append, "first is released"), holds=False)
        assert said == ["first is released"]
        assert shares(third, "third")
        second.end(partial(said.append, "second is released"), holds=True)
        assert not shares(client("fourth"), "fourth")
        arena.leave()
        assert said[1:] == ["third left"]
        peer.hang_up()
        assert sorted(said[2:]) == ["second is released", "third is gone"]
        arena.close()
        files.close()
        theirs.close()

    asyncio.run(share())


def shared_bytes(daemon: Daemon) -> int:
    assert daemon.process
    return mapped_arena_bytes(daemon.process.pid)


def num_files(daemon: Daemon) -> int:
    """Memory files that the daemon has open."""
    assert daemon.process
    num = 0
    for link in Path(f"/proc/{daemon.process.pid}/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):  # closed meanwhile
            num += "gyre-arena" in str(link.readlink())
    return num


def fail(daemon: Daemon, seed: int) -> None:
    with (
        Loader("tokens", batch_size=64, seed=seed, address=daemon.address) as loader,
        pytest.raises(CorruptSample),
    ):
        for _ in range(200):
            next(loader)


def test_sessions_that_end_with_an_error_keep_no_memory(gyred: StartDaemon, tmp_path: Path) -> None:
    path, length = tmp_path / "tokens.bin", 1 << 14
    np.arange(256 * length, dtype="<u2").tofile(path)
    tokens = {"uri": str(path), "format": "tokens", "dtype": "uint16", "sequence_length": length}
    daemon = gyred({"memory_budget": "256MiB", "datasets": {"tokens": tokens}})
    with Loader("tokens", batch_size=64, address=daemon.address) as loader:
        next(loader)
    path.write_bytes(path.read_bytes()[: 250 * 2 * length])  # reads beyond it fail
    for seed in range(40):
        fail(daemon, seed)
    until(lambda: shared_bytes(daemon) == 0)  # until the threads have written
    until(lambda: num_files(daemon) == 0)
    assert not [event for event in daemon.events() if event["event"] == "memory not given back yet"]
