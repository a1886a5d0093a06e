"""Asks the kernel which pages of a private file mapping this process has written to.

Pages that were written to must be dropped before the next batch uses their slot. To drop all pages
of every batch would cost the next batch a page fault for each, although few trainers write into
batches.
"""

import contextlib
import ctypes
import os

_SCAN = 0xC0606610  # PAGEMAP_SCAN, of linux/fs.h, since Linux 6.7
_IS_FILE, _IS_PRESENT, _IS_SWAPPED = 1 << 2, 1 << 3, 1 << 4
_Argument = ctypes.c_uint64 * 12

_MADV_POPULATE_READ = 22  # since Linux 5.14; not named in the standard library
# CDLL gives up the interpreter's lock: to map all pages of an arena takes milliseconds.
_madvise = ctypes.CDLL(None).madvise
_madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
# PyDLL keeps the lock: a scan takes microseconds, and to get the lock back may take longer.
_ioctl = ctypes.PyDLL(None).ioctl
_ioctl.argtypes = [ctypes.c_int, ctypes.c_ulong, ctypes.c_void_p]


class PrivatePages:
    """The pages of one private mapping of a file."""

    def __init__(self, address: int, num_bytes: int) -> None:
        """Opens this process's page map.

        Args:
            address: The address of the mapping.
            num_bytes: Its length.
        """
        self._address = address
        self._num_bytes = num_bytes
        self._found = (ctypes.c_uint64 * 3)()
        self._pagemap = -1
        with contextlib.suppress(OSError):
            self._pagemap = os.open("/proc/self/pagemap", os.O_RDONLY | os.O_CLOEXEC)

    def close(self) -> None:
        """Closes the page map."""
        descriptor, self._pagemap = self._pagemap, -1
        if descriptor >= 0:
            os.close(descriptor)

    def map_pages(self) -> None:
        """Maps every page in one call. The caller keeps the mapping alive.

        A kernel without this call maps each page when it is first read.
        """
        _madvise(self._address, self._num_bytes, _MADV_POPULATE_READ)

    def may_be_written(self, offset_bytes: int, num_bytes: int) -> bool:
        """Whether any page of a range is this process's own copy.

        True as well if the kernel cannot tell.
        """
        if self._pagemap < 0:
            return True
        begin = self._address + offset_bytes
        found = ctypes.addressof(self._found)
        one_region, one_page = 1, 1
        # masks (inverted, all of, any of, returned): present or swapped, and not the file's
        wanted = (_IS_FILE, _IS_FILE, _IS_PRESENT | _IS_SWAPPED, 0)
        size = ctypes.sizeof(_Argument)
        argument = _Argument(
            size, 0, begin, begin + num_bytes, 0, found, one_region, one_page, *wanted
        )
        num_regions: int = _ioctl(self._pagemap, _SCAN, ctypes.addressof(argument))
        return num_regions != 0  # an older kernel, or a sandbox, says -1
