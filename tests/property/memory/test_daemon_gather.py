"""Gathering out of mapped files.

Every byte lands, and a file that shrinks is a failed range, never a crash.
"""

import mmap
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
from gyre_daemon.storage.reads import address_of, gather, is_allowed, memory_at
from hypothesis import given
from hypothesis import strategies as st

pytestmark = pytest.mark.skipif(
    not is_allowed(), reason="this sandbox forbids process_vm_readv and process_vm_writev"
)

PAGE = mmap.PAGESIZE


def addresses(array: npt.NDArray[np.uint8], offsets: list[int]) -> npt.NDArray[np.uint64]:
    return np.array([array.ctypes.data + offset for offset in offsets], np.uint64)


@given(st.lists(st.tuples(st.integers(0, 900), st.integers(0, 100)), max_size=40))
def test_every_range_lands(ranges: list[tuple[int, int]]) -> None:
    source = np.random.default_rng(0).integers(0, 256, 1000, np.uint8)
    sizes = [size for _, size in ranges]
    target = np.zeros(sum(sizes) + 32, np.uint8)
    places = [16 + sum(sizes[:index]) for index in range(len(sizes))]
    failed = gather(
        addresses(source, [start for start, _ in ranges]),
        np.array(sizes, np.int64),
        addresses(target, places),
    )
    assert failed is None
    expected = b"".join(source[start : start + size].tobytes() for start, size in ranges)
    assert target.tobytes() == bytes(16) + expected + bytes(16)


@pytest.mark.parametrize("num_ranges", [1, 1023, 1024, 1025, 5000])
def test_more_ranges_than_one_call_takes(num_ranges: int) -> None:
    source = np.random.default_rng(1).integers(0, 256, 10_000, np.uint8)
    starts = np.random.default_rng(2).integers(0, 9_900, num_ranges).tolist()
    target = np.zeros(num_ranges * 100, np.uint8)
    offsets = list(range(0, num_ranges * 100, 100))
    assert (
        gather(
            addresses(source, starts),
            np.full(num_ranges, 100, np.int64),
            addresses(target, offsets),
        )
        is None
    )
    assert target.tobytes() == b"".join(source[start : start + 100].tobytes() for start in starts)


@given(st.integers(0, 40), st.sets(st.integers(1, 39)), st.sampled_from([100, 20_000]))
def test_adjacent_and_separate_targets(num_ranges: int, gaps: set[int], size: int) -> None:
    """Small ranges are written and large ones are read, by different system calls."""
    source = np.random.default_rng(3).integers(0, 256, size + 40, np.uint8)
    places = [size * index + 8 * sum(gap <= index for gap in gaps) for index in range(num_ranges)]
    target = np.zeros(40 * (size + 8), np.uint8)
    sizes = np.full(num_ranges, size, np.int64)
    assert (
        gather(addresses(source, list(range(num_ranges))), sizes, addresses(target, places)) is None
    )
    expected = np.zeros_like(target)
    for index, place in enumerate(places):
        expected[place : place + size] = source[index : index + size]
    assert target.tobytes() == expected.tobytes()


@pytest.mark.parametrize("size", [20, 3 * PAGE])
@pytest.mark.parametrize("broken", [0, 1, 500, 1023, 1024, 1500, 2999])
def test_a_missing_page_fails_its_range(tmp_path: Path, broken: int, size: int) -> None:
    """The first failed range is returned; a plain copy would end the process with SIGBUS."""
    path = tmp_path / "shard"
    path.write_bytes(bytes(range(251)) * 8 * PAGE)
    with path.open("r+b") as file, mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ) as mapping:
        source = np.frombuffer(mapping, np.uint8)
        file.truncate(4 * PAGE)
        starts = [10] * 3000
        starts[broken] = 6 * PAGE
        starts[2999] = 6 * PAGE
        target = np.zeros(3000 * size, np.uint8)
        sizes = np.full(3000, size, np.int64)
        failed = gather(
            addresses(source, starts), sizes, addresses(target, list(range(0, 3000 * size, size)))
        )
        assert failed == broken
        assert target[: broken * size].tobytes() == source[10 : 10 + size].tobytes() * broken
        straddling = gather(
            addresses(source, [10, 4 * PAGE - 10]), sizes[:2], addresses(target, [0, size])
        )
        assert straddling == 1
        del source


def test_empty_ranges_and_none() -> None:
    nothing = np.zeros(0, np.int64)
    assert gather(nothing.astype(np.uint64), nothing, nothing.astype(np.uint64)) is None
    one = np.ones(1, np.uint8)
    assert gather(address_of(one), np.zeros(1, np.int64), address_of(one)) is None


def test_memory_at_an_address() -> None:
    array = np.zeros(10, np.uint8)
    memory_at(array.ctypes.data + 2, 3)[:] = b"abc"
    assert array.tobytes() == b"\0\0abc\0\0\0\0\0"
