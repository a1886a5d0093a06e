"""Whether a descriptor that a daemon passed is memory that can be mapped without danger.

A process that reads beyond the end of a mapped file is killed (SIGBUS). So a file is mapped only if
the kernel guarantees that it cannot be made shorter.
"""

import fcntl
import mmap
import os

from gyre_client.errors import DaemonFault


def check_memory(descriptor: int, num_bytes: int | None) -> None:
    """Checks a memory file before it is mapped.

    Args:
        descriptor: The file's descriptor; it may be open for reading only.
        num_bytes: The size that was announced; None for any size of whole pages.

    Raises:
        DaemonFault: It is no memory file, is not sealed against shrinking, or has another size.
    """
    try:
        seals = fcntl.fcntl(descriptor, fcntl.F_GET_SEALS)
    except OSError as error:
        raise DaemonFault(
            f"the daemon passed another kind of file as shared memory: {error.strerror}"
        ) from None
    if not seals & fcntl.F_SEAL_SHRINK:
        raise DaemonFault(
            "the daemon passed shared memory without a seal against shrinking: it could end "
            "this process at any time"
        )
    found_bytes = os.fstat(descriptor).st_size
    if found_bytes == 0 or found_bytes % mmap.PAGESIZE:
        raise DaemonFault(
            f"the daemon passed shared memory of {found_bytes} bytes, which are not whole pages"
        )
    if num_bytes is not None and found_bytes != num_bytes:
        raise DaemonFault(
            f"the daemon passed shared memory of {found_bytes} bytes and announced {num_bytes}"
        )
