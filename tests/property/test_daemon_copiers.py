"""What copiers copy, and who has what mapped when."""

import mmap
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
from gyre_daemon.copiers import NO_COPIERS, Copiers, Ranges, new_key
from gyre_daemon.memory.arena import Arena
from hypothesis import given
from hypothesis import strategies as st

FILE = np.random.default_rng(0).integers(0, 256, 1000, np.uint8).tobytes()
FILES = {1: memoryview(FILE), 7: memoryview(FILE[::-1])}
ARENA_BYTES = 1 << 16


def ranges_of(rows: list[tuple[int, int, int, int]]) -> Ranges:
    file, start, size, target = (np.array(column, np.int64) for column in zip(*rows, strict=True))
    return Ranges(file, start, size, target)


@given(st.lists(st.tuples(st.sampled_from([1, 7]), st.integers(0, 900), st.integers(1, 100), st.integers(0, 3)), min_size=1))
def test_ranges_of_any_size_land(drawn: list[tuple[int, int, int, int]]) -> None:
    rows, place = [], 0
    for file, start, size, gap in drawn:
        rows.append((file, start, size, place + gap))
        place += gap + size
    arena = bytearray(place)
    ranges_of(rows).copy(FILES, memoryview(arena))
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
def test_rows_of_a_matrix_land(size: int, rows: list[int], first: int, gaps: set[int], is_straight: bool) -> None:
    """Of one size, at multiples of it from anywhere on or not, in places that follow each other but for some gaps."""
    starts = [first + (0 if is_straight else row % 2) + row * size for row in rows]
    targets = [index * size + 8 * sum(gap <= index for gap in gaps) for index in range(len(rows))]
    arena, expected = bytearray(targets[-1] + size), bytearray(targets[-1] + size)
    columns = (np.array(column, np.int64) for column in ([1], starts, [size], targets))
    Ranges(*columns).copy(FILES, memoryview(arena))
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
    """A file that is open, and bytes of it."""

    key: int
    descriptor: int


@pytest.fixture
def file(tmp_path: Path) -> Iterator[Served]:
    (tmp_path / "shard").write_bytes(FILE)
    descriptor = os.open(tmp_path / "shard", os.O_RDWR)
    yield Served(new_key(), descriptor)
    os.close(descriptor)


@pytest.fixture
def copiers() -> Iterator[Copiers]:
    with Copiers(2) as copiers:
        yield copiers


def shared_arena(copiers: Copiers) -> Arena:
    arena = Arena(ARENA_BYTES)
    copiers.map(arena.key, arena.descriptor, arena.num_bytes)
    arena.seal()
    return arena


def copies(copiers: Copiers, arena: Arena, file: Served, start: int = 0) -> bool:
    """Whether it was done; if so, the bytes are there."""
    if copiers.copy(arena.key, [file], ranges_of([(file.key, start, 500, 64)])) is None:
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
    """Pages that were mapped one by one, or a few at once around one that was read."""
    return sum(int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[7]) for pid in pids)


def test_pages_are_mapped_in_rows(copiers: Copiers) -> None:
    """Of an arena that has its memory, those that are written to, and once by each."""
    num_pages = 2048
    size = num_pages * mmap.PAGESIZE
    arena = Arena(2 * size)
    arena.allocate(0, 2 * size)
    copiers.map(arena.key, arena.descriptor, arena.num_bytes)
    file = Served(new_key(), os.memfd_create("file"))
    os.write(file.descriptor, bytes(size))
    before = num_faults(copiers.pids)
    for _ in range(4):
        assert copiers.copy(arena.key, [file], ranges_of([(file.key, 0, size, 0)])) == 0
    assert num_faults(copiers.pids) - before < num_pages // 2
    os.close(file.descriptor)


def test_without_any(file: Served) -> None:
    arena = shared_arena(NO_COPIERS)
    assert not copies(NO_COPIERS, arena, file)
    NO_COPIERS.unmap(arena.key)
    NO_COPIERS.forget(file.key)
    assert NO_COPIERS.pids == []


def test_an_arena_is_theirs_until_it_is_unmapped(copiers: Copiers, file: Served) -> None:
    arena = shared_arena(copiers)
    inode = f" {os.fstat(arena.descriptor).st_ino} "
    assert copies(copiers, arena, file)
    assert all(mapped(pid, inode) for pid in copiers.pids)
    copiers.unmap(arena.key)
    assert not any(mapped(pid, inode) for pid in copiers.pids)
    assert not copies(copiers, arena, file)


def test_an_arena_that_was_sealed_cannot_be_shared(copiers: Copiers, file: Served) -> None:
    """Nobody but those who had it before may write into it."""
    arena = Arena(ARENA_BYTES)
    arena.seal()
    copiers.map(arena.key, arena.descriptor, arena.num_bytes)
    assert not copies(copiers, arena, file)
    assert copies(copiers, shared_arena(copiers), file)


def test_files_are_unmapped_when_nobody_needs_them(copiers: Copiers, file: Served) -> None:
    arena = shared_arena(copiers)
    assert copies(copiers, arena, file)
    assert any(mapped(pid, "/shard") for pid in copiers.pids)
    copiers.forget(file.key)
    other = Served(new_key(), os.memfd_create("other"))
    os.write(other.descriptor, FILE)
    at_once = [threading.Thread(target=copies, args=(copiers, arena, other)) for _ in range(50)]
    for thread in at_once:
        thread.start()
    for thread in at_once:
        thread.join()
    assert eventually(lambda: copies(copiers, arena, other) and not any(mapped(pid, "/shard") for pid in copiers.pids))
    os.close(other.descriptor)


def test_one_that_dies_is_replaced_by_one_that_has_its_arenas(copiers: Copiers, file: Served) -> None:
    """The file shrinks after it was mapped: whoever reads what is gone gets SIGBUS."""
    arena, before = shared_arena(copiers), copiers.pids
    big = Served(new_key(), os.memfd_create("big"))
    os.posix_fallocate(big.descriptor, 0, 8 * mmap.PAGESIZE)
    assert copiers.copy(arena.key, [big], ranges_of([(big.key, 0, 8 * mmap.PAGESIZE, 0)])) == 0
    os.ftruncate(big.descriptor, mmap.PAGESIZE)
    assert copiers.copy(arena.key, [big], ranges_of([(big.key, 4 * mmap.PAGESIZE, 10, 0)])) is None
    after = copiers.pids
    assert len(after) == 2
    assert len(set(before) & set(after)) == 1
    assert eventually(lambda: all(ended(pid) for pid in set(before) - set(after)))
    (survivor,) = set(before) & set(after)
    os.kill(survivor, signal.SIGKILL)
    shared_arena(copiers)
    assert survivor not in copiers.pids
    assert copies(copiers, arena, file), "the new one has the arena, though it was sealed before"
    assert eventually(lambda: bool(shared_arena(copiers)) and len(copiers.pids) == 2)
    os.close(big.descriptor)


def parent_of(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


def test_without_their_keeper_those_that_are_left_go_on_until_it_is_replaced(copiers: Copiers, file: Served) -> None:
    arena = shared_arena(copiers)
    (keeper,) = {parent_of(pid) for pid in copiers.pids}
    os.kill(keeper, signal.SIGKILL)
    first, second = copiers.pids
    os.kill(first, signal.SIGKILL)
    assert copies(copiers, shared_arena(copiers), file)
    assert copies(copiers, arena, file)
    deadline_s = time.monotonic() + 60
    while len(copiers.pids) < 2 or first in copiers.pids:
        assert time.monotonic() < deadline_s
        copiers.look_after()
        time.sleep(0.01)
    (third,) = set(copiers.pids) - {second}
    new_keeper = parent_of(third)
    assert new_keeper != keeper
    assert parent_of(new_keeper) == os.getpid()
    assert b"gyre_daemon.copiers" in Path(f"/proc/{new_keeper}/cmdline").read_bytes()
    later = shared_arena(copiers)
    os.kill(second, signal.SIGKILL)
    assert eventually(lambda: ended(second))
    assert not any(copies(copiers, arena, file) for _ in range(3)), "it was sealed before the new keeper began"
    assert copies(copiers, later, file)
    copiers.close()
    assert eventually(lambda: ended(new_keeper) and ended(third))


def test_a_keeper_that_cannot_be_replaced_is_gone_for_good(
    copiers: Copiers, file: Served, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(sys, "executable", "/bin/false")
    (keeper,) = {parent_of(pid) for pid in copiers.pids}
    os.kill(keeper, signal.SIGKILL)

    def is_told() -> bool:
        copiers.look_after()
        return "copiers are not replaced any more" in caplog.text

    assert eventually(is_told)
    assert copies(copiers, shared_arena(copiers), file)
    for pid in copiers.pids:
        os.kill(pid, signal.SIGKILL)
    assert eventually(lambda: not copies(copiers, shared_arena(copiers), file) and copiers.pids == [])


def test_nothing_is_left(file: Served) -> None:
    with Copiers(3) as copiers:
        pids = copiers.pids
        assert len(pids) == 3
        arena = shared_arena(copiers)
        assert copies(copiers, arena, file)
    assert all(ended(pid) for pid in pids)
    assert not copies(copiers, arena, file)
