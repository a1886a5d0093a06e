"""Pages: the unit in which memory is allocated and mapped."""

_PAGE_BYTES = 4096


def whole_pages(num_bytes: int) -> int:
    """The number of bytes, rounded up to whole pages."""
    return -(-num_bytes // _PAGE_BYTES) * _PAGE_BYTES
