"""Copy workers: their copies, their mappings, and how they are replaced."""

import mmap
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
from gyre_daemon.memory.arenas import Arena
from gyre_daemon.workers import copy_workers as pool
from gyre_daemon.workers import supervisor
from gyre_daemon.workers.copy_workers import NO_COPY_WORKERS, CopyWorkers, Ranges, new_key
from hypothesis import given
from hypothesis import strategies as st

FILE = np.random.default_rng(0).integers(0, 256, 1000, np.uint8).tobytes()
FILES = {1: memoryview(FILE), 7: memoryview(FILE[::-1])}
ARENA_BYTES = 1 << 16
SERVER = """
import socket, sys
from gyre_daemon.workers.copy_workers import CopyWork
from gyre_daemon.workers.supervisor import serve
serve(socket.socket(fileno=int(sys.argv[1])), CopyWork())
"""


def ranges_of(rows: list[tuple[int, int, int, int]]) -> Ranges:
    file, start, size, target = (np.array(column, np.int64) for column in zip(*rows, strict=True))
    return Ranges(file, start, size, target)


@given(
    st.lists(
        st.tuples(
            st.sampled_from([1, 7]), st.integers(0, 900), st.integers(1, 100), st.integers(0, 3)
        ),
        min_size=1,
    )
)
def test_ranges_of_any_size_are_copied(drawn: list[tuple[int, int, int, int]]) -> None:
    rows, place = [], 0
    for file, start, size, gap in drawn:
        rows.append((file, start, size, place + gap))
        place += gap + size
    arena = bytearray(place)
    Ranges.from_bytes(ranges_of(rows).to_bytes()).copy(FILES, memoryview(arena))
    expected = bytearray(place)
    for file, start, size, target in rows:
        expected[target : target + size] = FILES[file][start : start + size]
    assert arena == expected


@given(
    st.integers(1, 40),
    st.lists(st.integers(0, 23), min_size=1, max_size=40),
    st.integers(0, 39),
    st.sets(st.integers(1, 39)),
    st.booleans(),
)
def test_rows_of_a_matrix_are_copied(
    size: int, rows: list[int], first: int, gaps: set[int], is_straight: bool
) -> None:
    """One size, starts at multiples of it or not, targets that follow each other but for gaps."""
    starts = [first + (0 if is_straight else row % 2) + row * size for row in rows]
    targets = [index * size + 8 * sum(gap <= index for gap in gaps) for index in range(len(rows))]
    arena, expected = bytearray(targets[-1] + size), bytearray(targets[-1] + size)
    columns = (np.array(column, np.int64) for column in ([1], starts, [size], targets))
    Ranges.from_bytes(Ranges(*columns).to_bytes()).copy(FILES, memoryview(arena))
    for start, target in zip(starts, targets, strict=True):
        expected[target : target + size] = FILE[start : start + size]
    assert arena == expected


@pytest.mark.parametrize("starts", [[0, 995], [990, 1000], [5, 2000], [980, 997]])
def test_a_file_that_is_too_short_is_noticed(starts: list[int]) -> None:
    for sizes in ([10], [10, 9]):
        columns = (np.array(column, np.int64) for column in ([1], starts, sizes, [0, 10]))
        with pytest.raises(ValueError, match=r"."):
            Ranges(*columns).copy(FILES, memoryview(bytearray(100)))


@dataclass
class Served:
    """An open file."""

    key: int
    descriptor: int


@pytest.fixture
def file(tmp_path: Path) -> Iterator[Served]:
    (tmp_path / "shard").write_bytes(FILE)
    descriptor = os.open(tmp_path / "shard", os.O_RDWR)
    yield Served(new_key(), descriptor)
    os.close(descriptor)


@pytest.fixture
def copy_workers(monkeypatch: pytest.MonkeyPatch) -> Iterator[CopyWorkers]:
    """With a fork server in a new program: threads of gRPC here survive no fork."""

    def spawned(_: object) -> supervisor.ForkServer:
        return supervisor.ForkServer.spawned(SERVER, os.environ)

    monkeypatch.setattr(supervisor.ForkServer, "forked", spawned)
    with CopyWorkers(2) as copy_workers:
        yield copy_workers


def shared_arena(copy_workers: CopyWorkers) -> Arena:
    arena = Arena(ARENA_BYTES)
    copy_workers.map(arena.key, arena.descriptor)
    arena.seal()
    return arena


def copies(copy_workers: CopyWorkers, arena: Arena, file: Served, start: int = 0) -> bool:
    """Whether a copy was done; if so, the bytes are in the arena."""
    if copy_workers.copy(arena.key, [file], ranges_of([(file.key, start, 500, 64)])) is None:
        return False
    slot = arena.take(1000)
    assert slot
    assert bytes(slot.memory[64:564]) == FILE[start : start + 500]
    arena.put_back(slot)
    return True


def mapped(pid: int, what: str) -> bool:
    return what in Path(f"/proc/{pid}/maps").read_text()


def eventually(holds: Callable[[], bool]) -> bool:
    deadline_s = time.monotonic() + 120
    while not holds() and time.monotonic() < deadline_s:
        time.sleep(0.01)
    return holds()


def ended(pid: int) -> bool:
    return not Path(f"/proc/{pid}").exists()


def num_faults(pids: list[int]) -> int:
    """Page faults of these processes that needed no disk."""
    return sum(
        int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[7]) for pid in pids
    )


def test_an_arena_is_written_to_with_few_page_faults(copy_workers: CopyWorkers) -> None:
    """Each worker makes the page table entries of a range at once, and only once."""
    num_pages = 2048
    size = num_pages * mmap.PAGESIZE
    arena = Arena(2 * size)
    arena.allocate(0, 2 * size)
    copy_workers.map(arena.key, arena.descriptor)
    file = Served(new_key(), os.memfd_create("file"))
    os.write(file.descriptor, bytes(size))
    before = num_faults(copy_workers.pids)
    for _ in range(4):
        assert copy_workers.copy(arena.key, [file], ranges_of([(file.key, 0, size, 0)])) == 0
    assert num_faults(copy_workers.pids) - before < num_pages // 2
    os.close(file.descriptor)


def test_a_pool_without_workers_copies_nothing(file: Served) -> None:
    arena = shared_arena(NO_COPY_WORKERS)
    assert not copies(NO_COPY_WORKERS, arena, file)
    NO_COPY_WORKERS.unmap(arena.key)
    NO_COPY_WORKERS.forget(file.key)
    assert NO_COPY_WORKERS.pids == []


def test_workers_map_an_arena_until_they_are_told_to_unmap_it(
    copy_workers: CopyWorkers, file: Served
) -> None:
    arena = shared_arena(copy_workers)
    inode = f" {os.fstat(arena.descriptor).st_ino} "
    assert copies(copy_workers, arena, file)
    assert all(mapped(pid, inode) for pid in copy_workers.pids)
    copy_workers.unmap(arena.key)
    assert not any(mapped(pid, inode) for pid in copy_workers.pids)
    assert not copies(copy_workers, arena, file)


def test_an_arena_that_is_sealed_cannot_be_mapped(copy_workers: CopyWorkers, file: Served) -> None:
    """Only workers that had mapped it before it was sealed may write into it."""
    arena = Arena(ARENA_BYTES)
    arena.seal()
    copy_workers.map(arena.key, arena.descriptor)
    assert not copies(copy_workers, arena, file)
    assert copies(copy_workers, shared_arena(copy_workers), file)


def test_files_are_unmapped_when_nobody_needs_them(copy_workers: CopyWorkers, file: Served) -> None:
    arena = shared_arena(copy_workers)
    assert copies(copy_workers, arena, file)
    assert any(mapped(pid, "/shard") for pid in copy_workers.pids)
    copy_workers.forget(file.key)
    other = Served(new_key(), os.memfd_create("other"))
    os.write(other.descriptor, FILE)
    at_once = [
        threading.Thread(target=copies, args=(copy_workers, arena, other)) for _ in range(50)
    ]
    for thread in at_once:
        thread.start()
    for thread in at_once:
        thread.join()
    assert eventually(
        lambda: (
            copies(copy_workers, arena, other)
            and not any(mapped(pid, "/shard") for pid in copy_workers.pids)
        )
    )
    os.close(other.descriptor)


def test_a_worker_that_dies_is_replaced_by_one_that_has_its_arenas(
    copy_workers: CopyWorkers, file: Served
) -> None:
    """The file shrinks after it was mapped, so reading beyond its end raises SIGBUS."""
    arena, before = shared_arena(copy_workers), copy_workers.pids
    big = Served(new_key(), os.memfd_create("big"))
    os.posix_fallocate(big.descriptor, 0, 8 * mmap.PAGESIZE)
    assert copy_workers.copy(arena.key, [big], ranges_of([(big.key, 0, 8 * mmap.PAGESIZE, 0)])) == 0
    os.ftruncate(big.descriptor, mmap.PAGESIZE)
    assert (
        copy_workers.copy(arena.key, [big], ranges_of([(big.key, 4 * mmap.PAGESIZE, 10, 0)]))
        is None
    )
    (survivor,) = copy_workers.pids
    assert all(ended(pid) for pid in set(before) - {survivor})
    assert eventually(lambda: copies(copy_workers, arena, file) and len(copy_workers.pids) == 2)
    os.kill(survivor, signal.SIGKILL)
    shared_arena(copy_workers)
    assert survivor not in copy_workers.pids
    assert copies(copy_workers, arena, file), (
        "the new one has the arena, though it was sealed before"
    )
    assert eventually(lambda: bool(shared_arena(copy_workers)) and len(copy_workers.pids) == 2)
    os.close(big.descriptor)


def parent_of(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


def test_a_worker_that_hangs_is_killed_and_replaced(
    file: Served, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Its copy is not done, and it never writes to the arena again."""
    monkeypatch.setattr(supervisor, "_MAX_REPLY_S", 1)
    with CopyWorkers(1) as copy_workers:
        arena = shared_arena(copy_workers)
        (hung,) = copy_workers.pids
        os.kill(hung, signal.SIGSTOP)
        assert not copies(copy_workers, arena, file)
        assert [record.__dict__["facts"]["reason"] for record in caplog.records] == [
            "it did not answer in 1 s"
        ]
        assert ended(hung)
        assert eventually(lambda: copies(copy_workers, arena, file))
        assert hung not in copy_workers.pids


def test_a_worker_that_stays_busy_holds_up_no_other_copy(
    file: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As one does that waits for a mount which hangs; then the kernel copies for the others."""
    monkeypatch.setattr(pool, "_PATIENCE_S", 0.05)
    with CopyWorkers(1) as copy_workers:
        arena, closed = shared_arena(copy_workers), shared_arena(copy_workers)
        (busy,) = copy_workers.pids
        os.kill(busy, signal.SIGSTOP)
        first: list[bool] = []
        copying = threading.Thread(target=lambda: first.append(copies(copy_workers, arena, file)))
        copying.start()
        assert eventually(lambda: not copy_workers._idle)
        assert not copies(copy_workers, arena, file)
        later = shared_arena(copy_workers)
        copy_workers.unmap(closed.key)
        os.kill(busy, signal.SIGCONT)
        copying.join()
        assert first == [True]
        assert copies(copy_workers, arena, file)
        assert not copies(copy_workers, later, file), "it was not told of it"
        assert not copies(copy_workers, closed, file), "it has unmapped it meanwhile"


def test_workers_are_not_replaced_once_their_fork_server_has_died(
    copy_workers: CopyWorkers,
    file: Served,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """The workers that are left go on; without any, nothing is copied."""
    arena = shared_arena(copy_workers)
    (fork_server,) = {parent_of(pid) for pid in copy_workers.pids}
    os.kill(fork_server, signal.SIGKILL)
    first, second = copy_workers.pids
    os.kill(first, signal.SIGKILL)
    later = shared_arena(copy_workers)
    assert eventually(lambda: "copy workers are not replaced any more" in caplog.text)
    assert copy_workers.pids == [second]
    assert copies(copy_workers, arena, file)
    assert copies(copy_workers, later, file)
    os.kill(second, signal.SIGKILL)
    assert eventually(lambda: not copies(copy_workers, arena, file))
    assert copy_workers.pids == []
    assert ended(fork_server)


def test_a_closed_pool_leaves_no_process(file: Served) -> None:
    with CopyWorkers(3) as copy_workers:
        pids = copy_workers.pids
        assert len(pids) == 3
        arena = shared_arena(copy_workers)
        assert copies(copy_workers, arena, file)
    assert all(ended(pid) for pid in pids)
    assert not copies(copy_workers, arena, file)
