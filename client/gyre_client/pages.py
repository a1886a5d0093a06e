"""Which pages of a private file mapping this process has written to, as the kernel knows.

Dropping the pages of a batch makes the next one in its place pay a fault for each, although hardly anybody writes into batches.
"""

import contextlib
import ctypes
import os

_SCAN = 0xC0606610  # PAGEMAP_SCAN, of linux/fs.h, since Linux 6.7
_IS_FILE, _IS_PRESENT, _IS_SWAPPED = 1 << 2, 1 << 3, 1 << 4
_Argument = ctypes.c_uint64 * 12

_MADV_POPULATE_READ = 22  # since Linux 5.14; not named in the standard library
_madvise = ctypes.CDLL(None).madvise  # `mmap.madvise` keeps the interpreter's lock, and all pages of an arena take milliseconds
_madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
_ioctl = ctypes.PyDLL(None).ioctl  # a look takes microseconds; to get the interpreter's lock back may take longer
_ioctl.argtypes = [ctypes.c_int, ctypes.c_ulong, ctypes.c_void_p]


class PrivatePages:
    """Looks at one mapping."""

    def __init__(self, address: int, num_bytes: int) -> None:
        """Opens what the kernel says of this process's pages.

        Args:
            address: Of a private mapping of a file.
            num_bytes: Its length.
        """
        self._address = address
        self._num_bytes = num_bytes
        self._found = (ctypes.c_uint64 * 3)()
        self._pagemap = -1
        with contextlib.suppress(OSError):
            self._pagemap = os.open("/proc/self/pagemap", os.O_RDONLY | os.O_CLOEXEC)

    def close(self) -> None:
        """Asks the kernel nothing more."""
        descriptor, self._pagemap = self._pagemap, -1
        if descriptor >= 0:
            os.close(descriptor)

    def map_pages(self) -> None:
        """Every page is mapped, in one call; the caller keeps the mapping. An older kernel maps each when it is first read."""
        _madvise(self._address, self._num_bytes, _MADV_POPULATE_READ)

    def may_be_written(self, offset_bytes: int, num_bytes: int) -> bool:
        """Whether any page of a range is this process's own copy; True as well where the kernel does not tell."""
        if self._pagemap < 0:
            return True
        begin = self._address + offset_bytes
        found = ctypes.addressof(self._found)
        one_region, one_page = 1, 1
        wanted = (_IS_FILE, _IS_FILE, _IS_PRESENT | _IS_SWAPPED, 0)  # inverted, all, any, told: there, and not the file's
        size = ctypes.sizeof(_Argument)
        argument = _Argument(size, 0, begin, begin + num_bytes, 0, found, one_region, one_page, *wanted)
        num_regions: int = _ioctl(self._pagemap, _SCAN, ctypes.addressof(argument))
        return num_regions != 0  # an older kernel, or a sandbox, says -1
