"""What the kernel says of the pages that this process wrote to, of a private mapping."""

import mmap
import os
import resource
from collections.abc import Iterator

import numpy as np
import pytest
from gyre_client.batches.arena import PrivatePages

PAGE = mmap.PAGESIZE
NUM_PAGES = 40


@pytest.fixture
def mapping() -> Iterator[mmap.mmap]:
    descriptor = os.memfd_create("test-pages", os.MFD_CLOEXEC)
    try:
        os.posix_fallocate(descriptor, 0, NUM_PAGES * PAGE)
        yield mmap.mmap(
            descriptor,
            NUM_PAGES * PAGE,
            flags=mmap.MAP_PRIVATE,
            prot=mmap.PROT_READ | mmap.PROT_WRITE,
        )
    finally:
        os.close(descriptor)


def pages_of(mapping: mmap.mmap) -> PrivatePages:
    return PrivatePages(np.frombuffer(mapping, np.uint8).ctypes.data, len(mapping))


@pytest.fixture
def pages(mapping: mmap.mmap) -> Iterator[PrivatePages]:
    pages = pages_of(mapping)
    if pages.may_be_written(0, PAGE):
        pytest.skip("this kernel does not tell which pages were written (Linux 6.7 and later do)")
    yield pages
    pages.close()


def test_reading_writes_nothing(mapping: mmap.mmap, pages: PrivatePages) -> None:
    assert mapping[:] == bytes(NUM_PAGES * PAGE)
    assert not pages.may_be_written(0, NUM_PAGES * PAGE)


@pytest.mark.parametrize("place", [0, 7 * PAGE + 5, NUM_PAGES * PAGE - 1])
def test_one_byte_is_noticed_in_its_page_alone_until_it_is_dropped(
    mapping: mmap.mmap, pages: PrivatePages, place: int
) -> None:
    mapping[place] = 0  # the same byte as before
    page = place // PAGE
    assert [pages.may_be_written(index * PAGE, PAGE) for index in range(NUM_PAGES)] == [
        index == page for index in range(NUM_PAGES)
    ]
    assert pages.may_be_written(0, NUM_PAGES * PAGE)
    mapping.madvise(mmap.MADV_DONTNEED, page * PAGE, PAGE)
    assert not pages.may_be_written(0, NUM_PAGES * PAGE)


def test_a_range_that_ends_within_a_page_has_all_of_it(
    mapping: mmap.mmap, pages: PrivatePages
) -> None:
    mapping[3 * PAGE - 1] = 1
    assert pages.may_be_written(0, 2 * PAGE + 1)
    assert not pages.may_be_written(0, 2 * PAGE)


def test_where_the_kernel_does_not_tell_everything_may_be_written(
    mapping: mmap.mmap, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> int:
        raise PermissionError

    monkeypatch.setattr(os, "open", refuse)
    assert pages_of(mapping).may_be_written(0, PAGE)


def test_pages_that_were_mapped_are_read_without_faults(mapping: mmap.mmap) -> None:
    """But for those of the interpreter itself.

    What was only allocated is mapped page by page otherwise.
    """
    pages = pages_of(mapping)
    pages.map_pages()
    pages.close()
    before = resource.getrusage(resource.RUSAGE_THREAD).ru_minflt
    for page in range(NUM_PAGES):
        mapping[page * PAGE]
    assert resource.getrusage(resource.RUSAGE_THREAD).ru_minflt - before < NUM_PAGES // 2
