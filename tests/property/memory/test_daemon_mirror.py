"""Mirrors: blocks that were written whole are found again, and no others.

Whatever happened to the files meanwhile.
"""

import errno
import gc
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from gyre_daemon.storage.cache import blocks as mirrors
from gyre_daemon.storage.cache.blocks import (
    BLOCKS_SUFFIX,
    DIGESTS_SUFFIX,
    BlockMap,
    Mirror,
    open_disk_cache,
)
from gyre_daemon.storage.reads import Reads
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

Bytes = npt.NDArray[np.uint8]

SIZES = [5000, 4096, 1, 12_000, 8192, 300]
BLOCKS = BlockMap(np.zeros(6, np.int64), np.cumsum([0, *SIZES[:-1]]), np.cumsum(SIZES))

on_disk = settings(max_examples=30, suppress_health_check=[HealthCheck.function_scoped_fixture])


def content(block: int, seed: int = 0) -> Bytes:
    return np.random.default_rng((block, seed)).integers(0, 256, SIZES[block], np.uint8)


def open_mirror(folder: Path) -> Mirror:
    return Mirror(folder / "set", BLOCKS.sizes(), BLOCKS.offsets())


def read(mirror: Mirror, blocks: Iterable[int]) -> dict[int, bytes | None]:
    """The bytes of each block; None for a damaged one."""
    wanted = np.array(list(blocks), np.int64)
    memory = [np.zeros(SIZES[block], np.uint8) for block in wanted.tolist()]
    targets = np.array([each.ctypes.data for each in memory], np.uint64)
    nothing = np.zeros(len(wanted), np.int64)
    damaged = mirror.copy(
        wanted,
        nothing,
        Reads(nothing, nothing, BLOCKS.sizes()[wanted], targets, nothing, tuple(memory)),
    )
    return {
        block: None if block in damaged else each.tobytes()
        for block, each in zip(wanted.tolist(), memory, strict=True)
    }


def check(mirror: Mirror, seeds: dict[int, int]) -> None:
    """Check that the mirror has these blocks and no other, or knows that they are damaged."""
    assert set(mirror.blocks().tolist()) == set(seeds)
    for block, data in read(mirror, seeds).items():
        assert data == content(block, seeds[block]).tobytes()


@pytest.fixture(params=["gather", "one by one"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    if request.param == "one by one":
        monkeypatch.setattr(mirrors, "is_allowed", lambda: False)
    return str(request.param)


@given(st.lists(st.tuples(st.integers(0, 5), st.booleans(), st.booleans()), max_size=25))
@on_disk
def test_a_written_block_is_stored_until_it_is_dropped(
    tmp_path_factory: pytest.TempPathFactory, steps: list[tuple[int, bool, bool]]
) -> None:
    folder = tmp_path_factory.mktemp("mirror")
    mirror, there = open_mirror(folder), dict[int, int]()
    for number, (block, drops, reopens) in enumerate(steps):
        if drops:
            mirror.drop([block])
            there.pop(block, None)
        elif block not in there:
            mirror.write(block, content(block, number))
            there[block] = number
        if reopens:
            mirror = open_mirror(folder)
        check(mirror, there)


def test_parts_of_blocks(tmp_path: Path, way: str) -> None:
    mirror = open_mirror(tmp_path)
    for block in (0, 3):
        mirror.write(block, content(block))
    blocks, starts, sizes = (
        np.array([3, 0, 3, 0]),
        np.array([11_999, 10, 0, 4999]),
        np.array([1, 300, 20, 1]),
    )
    memory = np.zeros(322, np.uint8)
    targets = (memory.ctypes.data + np.array([0, 1, 301, 321])).astype(np.uint64)
    assert (
        mirror.copy(blocks, starts, Reads(blocks, starts, sizes, targets, blocks, (memory,)))
        == set()
    )
    assert memory.tobytes() == b"".join(
        content(block)[start : start + size].tobytes()
        for block, start, size in zip(blocks, starts, sizes, strict=True)
    )


def test_dropped_blocks_free_their_space(tmp_path: Path) -> None:
    mirror = open_mirror(tmp_path)
    path = tmp_path / ("set" + BLOCKS_SUFFIX)
    for block in range(6):
        mirror.write(block, content(block))
    os.sync()
    full = path.stat().st_blocks
    mirror.drop([0, 3])
    assert path.stat().st_blocks <= full - (8192 + 12_288) // 512
    check(mirror, {1: 0, 2: 0, 4: 0, 5: 0})


def damage_every_byte_of(path: Path, step: int) -> Iterable[int]:
    whole = path.read_bytes()
    for position in range(0, len(whole), step):
        damaged = bytearray(whole)
        damaged[position] ^= 1 << position % 8
        path.write_bytes(damaged)
        yield position
    path.write_bytes(whole)


def test_no_flipped_byte_of_a_block_is_served(tmp_path: Path, way: str) -> None:
    mirror = open_mirror(tmp_path)
    for block in range(6):
        mirror.write(block, content(block))
    digests = (tmp_path / ("set" + DIGESTS_SUFFIX)).read_bytes()
    for position in damage_every_byte_of(tmp_path / ("set" + BLOCKS_SUFFIX), 997):
        (tmp_path / ("set" + DIGESTS_SUFFIX)).write_bytes(digests)
        found = read(open_mirror(tmp_path), range(6))
        for block, data in found.items():
            begin = BLOCKS.offsets()[block]
            if begin <= position < begin + SIZES[block]:
                assert data is None
            else:
                assert data == content(block).tobytes()


def test_no_flipped_byte_of_the_digests_invents_a_block(tmp_path: Path) -> None:
    mirror = open_mirror(tmp_path)
    for block in range(6):
        mirror.write(block, content(block))
    mirror.drop([1])
    for _ in damage_every_byte_of(tmp_path / ("set" + DIGESTS_SUFFIX), 1):
        again = open_mirror(tmp_path)
        for block, data in read(again, again.blocks().tolist()).items():
            assert data in (None, content(block).tobytes())
        del again
        # damaged blocks are dropped: start again from the original
        fresh = open_mirror(tmp_path)
        for block in set(range(6)) - set(fresh.blocks().tolist()):
            fresh.write(block, content(block))


@pytest.mark.parametrize("num_bytes", [0, 1, 15, 16, 17, 31, 32, 48])
def test_torn_digests_keep_their_whole_ones(tmp_path: Path, num_bytes: int) -> None:
    mirror = open_mirror(tmp_path)
    for block in range(3):
        mirror.write(block, content(block))
    os.truncate(tmp_path / ("set" + DIGESTS_SUFFIX), num_bytes)
    mirror = open_mirror(tmp_path)
    whole = {block: content(block).tobytes() for block in range(num_bytes // 16)}
    found = read(mirror, range(3))
    assert {block: data for block, data in found.items() if data is not None} == whole
    mirror.write(5, content(5))
    check(open_mirror(tmp_path), {**dict.fromkeys(whole, 0), 5: 0})


def test_data_that_never_reached_the_disk_is_not_served(tmp_path: Path) -> None:
    """After a crash of the machine, a record may exist without its block."""
    mirror = open_mirror(tmp_path)
    mirror.write(0, content(0))
    mirror.write(4, content(4))
    with (tmp_path / ("set" + BLOCKS_SUFFIX)).open("r+b") as file:
        file.write(bytes(4096))
    mirror = open_mirror(tmp_path)
    assert read(mirror, [0, 4]) == {0: None, 4: content(4).tobytes()}
    assert mirror.blocks().tolist() == [4]
    mirror.write(0, content(0, 7))
    check(open_mirror(tmp_path), {0: 7, 4: 0})


@pytest.mark.parametrize("num_bytes", [0, 4096, 12_288])
def test_a_truncated_file_is_damage_and_no_crash(tmp_path: Path, way: str, num_bytes: int) -> None:
    mirror = open_mirror(tmp_path)
    for block in range(6):
        mirror.write(block, content(block))
    os.truncate(tmp_path / ("set" + BLOCKS_SUFFIX), num_bytes)
    found = read(mirror, range(6))
    for block, data in found.items():
        assert data in (None, content(block).tobytes())
    assert found[5] is None
    for block in [block for block, data in found.items() if data is None]:
        mirror.write(block, content(block, 1))
    assert None not in read(mirror, range(6)).values()


def test_a_mirror_that_cannot_be_opened_closes_each_file_once(tmp_path: Path) -> None:
    (tmp_path / ("set" + DIGESTS_SUFFIX)).mkdir()
    try:
        open_mirror(tmp_path)
    except IsADirectoryError as error:
        kept = error  # and with it the mirror, while others open files
    others = [os.open(os.devnull, os.O_RDONLY) for _ in range(8)]
    del kept
    gc.collect()
    for descriptor in others:
        os.close(descriptor)


def fail_once(number: int) -> Callable[..., int]:
    def fail(*_: object) -> int:
        raise OSError(number, os.strerror(number))

    return fail


def test_a_full_disk_leaves_nothing_of_the_block(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mirror = open_mirror(tmp_path)
    mirror.write(0, content(0))
    monkeypatch.setattr(os, "pwrite", fail_once(errno.ENOSPC))
    with pytest.raises(OSError, match="No space left"):
        mirror.write(3, content(3))
    monkeypatch.undo()
    check(mirror, {0: 0})
    mirror.write(3, content(3))
    check(open_mirror(tmp_path), {0: 0, 3: 0})


def test_a_digest_that_does_not_fit_is_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mirror = open_mirror(tmp_path)
    mirror.write(0, content(0))
    pwrite = os.pwrite

    def cut(descriptor: int, data: Any, offset: int) -> int:
        return pwrite(descriptor, data[:5] if len(data) == 16 else data, offset)

    monkeypatch.setattr(os, "pwrite", cut)
    with pytest.raises(OSError, match="No space left"):
        mirror.write(3, content(3))
    monkeypatch.undo()
    check(mirror, {0: 0})
    mirror.write(5, content(5))
    assert read(open_mirror(tmp_path), [0, 3, 5])[3] is None


WRITER = """
import sys
from pathlib import Path
sys.path.insert(0, sys.argv[2])
from tests.property.memory.test_daemon_mirror import content, open_mirror
mirror = open_mirror(Path(sys.argv[1]))
print("begins", flush=True)
for number in range(10_000):
    for block in range(6):
        mirror.drop([block])
        mirror.write(block, content(block, number % 3))
"""


def test_a_killed_writer_leaves_only_whole_blocks(tmp_path: Path) -> None:
    root = str(Path(__file__).parents[3])
    for round_ in range(3):
        process = subprocess.Popen(
            [sys.executable, "-c", WRITER, str(tmp_path), root], stdout=subprocess.PIPE
        )
        assert process.stdout
        assert process.stdout.readline() == b"begins\n"
        threading.Event().wait(0.01 * round_)
        process.kill()
        process.wait()
        process.stdout.close()
        mirror = open_mirror(tmp_path)
        for block, data in read(mirror, mirror.blocks().tolist()).items():
            assert data in (None, *(content(block, seed).tobytes() for seed in range(3)))


def test_only_one_daemon_has_a_folder(tmp_path: Path) -> None:
    first = open_disk_cache(tmp_path / "cache", 1 << 20)
    assert first
    assert open_disk_cache(tmp_path / "cache", 1 << 20) is None
    first.close()
    assert open_disk_cache(tmp_path / "cache", 1 << 20)


def test_a_folder_that_cannot_be_used(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    assert open_disk_cache(tmp_path / "file", 1 << 20) is None
    assert open_disk_cache(tmp_path / "file" / "cache", 1 << 20) is None


def test_unopened_mirrors_count_and_the_oldest_goes_first(tmp_path: Path) -> None:
    disk = open_disk_cache(tmp_path, 1 << 20)
    assert disk
    for number, identity in enumerate(("old", "new")):
        mirror = disk.open_mirror(identity, BLOCKS)
        mirror.write(3, content(3))
        mirror.write(0, content(0))
        os.utime(mirror._file, (1000 + number, 1000 + number))
        del mirror
    os.sync()
    disk.close()
    disk = open_disk_cache(tmp_path, 1 << 20)
    assert disk
    assert list(disk.unopened.values()) == [20_480, 20_480]
    assert disk.free_bytes == (1 << 20) - 2 * 20_480
    disk.remove_oldest()
    assert disk.free_bytes == (1 << 20) - 20_480
    mirror = disk.open_mirror("new", BLOCKS)
    assert (disk.free_bytes, disk.unopened) == (1 << 20, {})
    check(mirror, {0: 0, 3: 0})
    assert disk.open_mirror("old", BLOCKS).blocks().tolist() == []
    disk.remove_oldest()  # there is none
    assert len(list(tmp_path.glob("*" + BLOCKS_SUFFIX))) == 2


def test_other_blocks_or_other_shards_have_another_mirror(tmp_path: Path) -> None:
    disk = open_disk_cache(tmp_path, 1 << 20)
    assert disk
    mirror = disk.open_mirror("set", BLOCKS)
    mirror.write(0, content(0))
    moved = BlockMap(BLOCKS.shard, BLOCKS.start + 1, BLOCKS.stop + 1)
    assert disk.open_mirror("set", moved).blocks().tolist() == []
    assert disk.open_mirror("set2", BLOCKS).blocks().tolist() == []


def test_a_mirror_is_opened_once_for_as_long_as_somebody_has_it(tmp_path: Path) -> None:
    disk = open_disk_cache(tmp_path, 1 << 20)
    assert disk
    with ThreadPoolExecutor(4) as threads:
        opened = list(threads.map(lambda _: disk.open_mirror("set", BLOCKS), range(8)))
    mirror = opened[0]
    assert all(each is mirror for each in opened)
    for block in (0, 3):
        mirror.write(block, content(block))
    assert None not in read(mirror, [0, 3]).values()
    opened.pop().drop([3])
    mirror.write(5, content(5))
    assert read(mirror, [0, 3, 5])[3] is None
    check(mirror, {0: 0, 5: 0})
    opened.clear()
    del mirror
    check(disk.open_mirror("set", BLOCKS), {0: 0, 5: 0})


@pytest.mark.parametrize("drops", [True, False])
def test_readers_beside_one_that_finds_damage_get_no_hole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, way: str, *, drops: bool
) -> None:
    """The damage makes a hole, and the block may be there again when the other reader looks."""
    mirror = open_mirror(tmp_path)
    mirror.write(3, content(3))
    name = "gather" if way == "gather" else "read_each"
    copy_ranges = getattr(mirrors, name)

    def late(*args: Any) -> Any:
        mirror.drop([3])
        failed = copy_ranges(*args)
        if not drops:
            mirror.write(3, content(3))
        return failed

    monkeypatch.setattr(mirrors, name, late)
    assert read(mirror, [3]) == {3: None}
    monkeypatch.undo()
    check(mirror, {} if drops else {3: 0})
