"""Pages: the unit in which memory is allocated, mapped and dropped."""

_PAGE_BYTES = 4096


def whole_pages(num_bytes: int) -> int:
    """The bytes of the pages that so many bytes need."""
    return -(-num_bytes // _PAGE_BYTES) * _PAGE_BYTES
