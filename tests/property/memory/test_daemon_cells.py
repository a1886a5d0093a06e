"""Memory of cached blocks: few mappings, whole pages, and nothing kept of what was evicted."""

import ctypes
import gc
import mmap
from pathlib import Path

import numpy as np
import numpy.typing as npt
from gyre_daemon.storage.cache.blocks import BlockMemory, Cell, whole_pages
from hypothesis import given, settings
from hypothesis import strategies as st

PAGE = mmap.PAGESIZE


def mappings() -> list[tuple[int, int]]:
    """The ranges of addresses that this process maps."""
    lines = Path("/proc/self/maps").read_text().splitlines()
    return [
        (int(begin, 16), int(end, 16)) for begin, end in (x.split()[0].split("-") for x in lines)
    ]


def resident_bytes(memory: BlockMemory, cells: list[Cell]) -> int:
    """Of all slabs, those of these cells and of the free ones, to the page.

    Not of the mappings in /proc/self/maps, because the kernel merges neighbours, also of others.
    """
    slabs = {cell._slab for cell in cells}
    for free in memory._free.values():
        slabs |= {slab for slab, _ in free}
    num_pages = 0
    with Path("/proc/self/pagemap").open("rb", buffering=0) as pages:
        for slab in slabs:
            pages.seek(slab.address // PAGE * 8)
            entries = np.frombuffer(pages.read(len(slab.memory) // PAGE * 8), np.uint64)
            num_pages += int((entries >> np.uint64(63)).sum())  # the bit says "present"
    return num_pages * PAGE


def filled(memory: BlockMemory, num_bytes: int, value: int = 1) -> Cell:
    cell = memory.take(num_bytes)
    cell.array()[:] = value
    return cell


def test_scattered_evictions_need_few_mappings_and_give_all_pages_back() -> None:
    generator = np.random.default_rng(0)
    sizes = generator.integers(1, 5 * PAGE, 12_000)
    pages = whole_pages(sizes)
    before = len(mappings())
    memory = BlockMemory(int(pages.sum()))
    cells = dict(enumerate(filled(memory, size) for size in sizes.tolist()))
    assert resident_bytes(memory, [*cells.values()]) == pages.sum()
    for share in (2, 16):
        for block in list(cells):
            if block % share:
                del cells[block]
        held = list(cells)
        assert resident_bytes(memory, [*cells.values()]) == pages[held].sum()
        assert len(mappings()) < before + 100
    # free cells are taken first, in any order
    for block in generator.permutation(12_000).tolist():
        cells[block] = filled(memory, int(sizes[block]))
    assert resident_bytes(memory, [*cells.values()]) == pages.sum()
    assert len(mappings()) < before + 100


def test_a_huge_page_is_no_memory_of_a_block() -> None:
    cell = filled(BlockMemory(1 << 30), 1)
    flags = ""
    for line in Path("/proc/self/smaps").read_text().splitlines():
        begin, _, end = line.split()[0].partition("-")
        if end:
            is_its = int(begin, 16) <= cell.address < int(end, 16)
        elif line.startswith("VmFlags:") and is_its:
            flags = line
    assert "nh" in flags.split()


def test_memory_that_somebody_refers_to_is_no_other_blocks() -> None:
    memory = BlockMemory(1 << 20)
    cell = filled(memory, 5000, 7)
    array, address = cell.array()[10:20], cell.address
    del cell
    gc.collect()
    other = filled(memory, 5000, 9)
    assert other.address != address
    assert set(array.tolist()) == {7}
    del array
    assert memory.take(5000).address == address


steps = st.lists(
    st.tuples(st.integers(0, 9), st.sampled_from([1, 100, PAGE, PAGE + 1, 70_000, 5 << 20]))
)


@given(steps=steps)
@settings(max_examples=50, deadline=None)
def test_blocks_never_share_memory(steps: list[tuple[int, int]]) -> None:
    """Ten blocks are replaced at random by others; each keeps its bytes, from first to last."""
    memory = BlockMemory(1 << 20)
    blocks: dict[int, tuple[int, npt.NDArray[np.uint8]]] = {}
    for number, (place, num_bytes) in enumerate(steps):
        blocks.pop(place, None)
        array = memory.take(num_bytes).array()
        assert array.nbytes == num_bytes
        array[[0, -1]] = number % 251
        blocks[place] = number % 251, array
        for value, its in blocks.values():
            assert its[0] == its[-1] == value


def test_a_smaller_block_gives_back_what_the_one_before_it_could_not() -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    memory = BlockMemory(1 << 20)
    first = filled(memory, 4 * PAGE)
    address = first.address
    assert not libc.mlock(ctypes.c_void_p(address), ctypes.c_size_t(PAGE))
    del first
    libc.munlock(ctypes.c_void_p(address), ctypes.c_size_t(PAGE))
    second = filled(memory, 2 * PAGE + 1)
    assert second.address == address
    del second
    cell = memory.take(2 * PAGE + 1)
    assert cell.address == address
    assert resident_bytes(memory, [cell]) == 0
