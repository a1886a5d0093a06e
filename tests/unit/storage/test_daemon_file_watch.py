"""The kernel says when a memory file is gone, whatever was done with its descriptors."""

import asyncio
import mmap
import os
import socket
from collections.abc import Callable

import pytest
from gyre_daemon.memory.arenas import Arena, Budget, FileWatch

NUM_BYTES = 1 << 20


def duplicated(descriptor: int) -> Callable[[], None]:
    other = os.dup(descriptor)
    return lambda: os.close(other)


def mapped(descriptor: int) -> Callable[[], None]:
    mapping = mmap.mmap(descriptor, 0, prot=mmap.PROT_READ)
    return mapping.close


def opened_as_path(descriptor: int) -> Callable[[], None]:
    other = os.open(f"/proc/self/fd/{descriptor}", os.O_PATH)
    return lambda: os.close(other)


def opened_again(descriptor: int) -> Callable[[], None]:
    other = os.open(f"/proc/self/fd/{descriptor}", os.O_RDONLY)
    return lambda: os.close(other)


def in_flight(descriptor: int) -> Callable[[], None]:
    """In a message that nobody has received."""
    one, other = socket.socketpair()
    socket.send_fds(one, [b"x"], [descriptor])

    def end() -> None:
        one.close()
        other.close()

    return end


@pytest.mark.parametrize("keep", [duplicated, mapped, opened_as_path, opened_again, in_flight])
def test_an_arena_counts_until_nothing_refers_to_its_file(
    keep: Callable[[int], Callable[[], None]],
) -> None:
    async def test() -> None:
        budget, files = Budget(NUM_BYTES), FileWatch()
        arena = Arena(NUM_BYTES, budget, files)
        arena.allocate(0, NUM_BYTES)
        arena.seal()
        descriptors = [arena.open_for(user) for user in ("uid:1", "uid:2")]
        give_up = keep(descriptors[0])
        for descriptor in descriptors:
            os.close(descriptor)
        files.look()
        assert budget.abandoned_bytes == 0, "it is in use"
        arena.close()
        files.look()
        assert budget.free_bytes == 0
        assert budget.abandoned_by == {"uid:1": NUM_BYTES // 2, "uid:2": NUM_BYTES // 2}
        budget.freed.clear()
        give_up()
        await asyncio.wait_for(budget.freed.wait(), 60)
        assert budget.abandoned_bytes == 0
        assert not budget.abandoned_by
        files.close()

    asyncio.run(test())


def test_a_client_gets_a_descriptor_that_cannot_write() -> None:
    async def test() -> None:
        files = FileWatch()
        arena = Arena(NUM_BYTES, files=files)
        arena.allocate(0, NUM_BYTES)
        arena.seal()
        descriptor = arena.open_for("uid:1")
        with pytest.raises(PermissionError):
            mmap.mmap(descriptor, 0, flags=mmap.MAP_SHARED)
        with pytest.raises(OSError, match="Bad file descriptor"):
            os.write(descriptor, b"x")
        os.close(descriptor)
        arena.close()
        files.close()

    asyncio.run(test())


def test_an_arena_that_nobody_was_handed_is_not_counted_and_not_watched() -> None:
    budget = Budget(NUM_BYTES)
    arena = Arena(NUM_BYTES, budget)
    arena.close()
    assert budget.free_bytes == NUM_BYTES
