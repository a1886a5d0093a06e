"""What the kernel says of the pages that this process wrote to, of a private mapping."""

import mmap
import os
import resource
from collections.abc import Iterator

import pytest
from gyre_client.batches.arena import ArenaMapping

PAGE = mmap.PAGESIZE
NUM_PAGES = 40


def mapping_of_pages() -> ArenaMapping:
    descriptor = os.memfd_create("test-pages", os.MFD_CLOEXEC)
    try:
        os.posix_fallocate(descriptor, 0, NUM_PAGES * PAGE)
        return ArenaMapping(descriptor)
    finally:
        os.close(descriptor)


@pytest.fixture
def mapping() -> Iterator[ArenaMapping]:
    mapping = mapping_of_pages()
    yield mapping
    mapping.close_pagemap()
    mapping.unmap(0, NUM_PAGES * PAGE)


@pytest.fixture
def telling(mapping: ArenaMapping) -> ArenaMapping:
    if mapping.may_be_written(0, PAGE):
        pytest.skip("this kernel does not tell which pages were written (Linux 6.7 and later do)")
    return mapping


def test_reading_writes_nothing(telling: ArenaMapping) -> None:
    assert not telling.view(0, NUM_PAGES * PAGE).any()
    assert not telling.may_be_written(0, NUM_PAGES * PAGE)


@pytest.mark.parametrize("place", [0, 7 * PAGE + 5, NUM_PAGES * PAGE - 1])
def test_one_byte_is_noticed_in_its_page_alone_until_it_is_dropped(
    telling: ArenaMapping, place: int
) -> None:
    telling.view(0, NUM_PAGES * PAGE)[place] = 0  # the same byte as before
    page = place // PAGE
    assert [
        telling.may_be_written(index * PAGE, (index + 1) * PAGE) for index in range(NUM_PAGES)
    ] == [index == page for index in range(NUM_PAGES)]
    assert telling.may_be_written(0, NUM_PAGES * PAGE)
    telling.drop_private(page * PAGE, (page + 1) * PAGE)
    assert not telling.may_be_written(0, NUM_PAGES * PAGE)


def test_a_range_that_ends_within_a_page_has_all_of_it(telling: ArenaMapping) -> None:
    telling.view(0, NUM_PAGES * PAGE)[3 * PAGE - 1] = 1
    assert telling.may_be_written(0, 2 * PAGE + 1)
    assert not telling.may_be_written(0, 2 * PAGE)


def test_where_the_kernel_does_not_tell_everything_may_be_written(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refuse(*_: object) -> int:
        raise PermissionError

    monkeypatch.setattr(os, "open", refuse)
    mapping = mapping_of_pages()
    assert mapping.may_be_written(0, PAGE)
    mapping.unmap(0, NUM_PAGES * PAGE)


def test_pages_that_were_mapped_are_read_without_faults(mapping: ArenaMapping) -> None:
    """But for those of the interpreter itself.

    What was only allocated is mapped page by page otherwise.
    """
    mapping.map_pages()
    data = mapping.view(0, NUM_PAGES * PAGE)
    before = resource.getrusage(resource.RUSAGE_THREAD).ru_minflt
    for page in range(NUM_PAGES):
        data[page * PAGE]
    assert resource.getrusage(resource.RUSAGE_THREAD).ru_minflt - before < NUM_PAGES // 2
