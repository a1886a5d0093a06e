"""Reads below a folder that take long, where no file system of FUSE can be mounted.

A preloaded library delays the calls of one process and of those that it starts, and counts them.
It needs a C compiler.
"""

import mmap
import os
import shutil
import struct
import subprocess
from pathlib import Path

_SOURCE = r"""
#define _GNU_SOURCE
#include <dlfcn.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/types.h>
#include <sys/uio.h>
#include <unistd.h>

struct page { volatile double delay_s, tail_s, tail_share; volatile long reads, now, most; };
static struct page *page;

static void __attribute__((constructor)) begin(void) {
  int file = getenv("SLOW_PAGE") ? open(getenv("SLOW_PAGE"), O_RDWR) : -1;
  void *memory = file < 0 ? MAP_FAILED : mmap(0, 4096, 3, MAP_SHARED, file, 0);
  if (memory != MAP_FAILED) page = memory;
  if (file >= 0) close(file);
}

static int is_slow(int file) {
  char link[64], path[4096];
  const char *folder = getenv("SLOW_FOLDER");
  if (!page || !folder || page->delay_s <= 0) return 0;
  snprintf(link, sizeof link, "/proc/self/fd/%d", file);
  ssize_t size = readlink(link, path, sizeof path - 1);
  return size > 0 && (size_t)size > strlen(folder) && !strncmp(path, folder, strlen(folder));
}

static void wait_here(void) {
  static __thread unsigned seed;
  if (!seed) seed = (unsigned)(size_t)&seed;
  int is_late = rand_r(&seed) < page->tail_share * RAND_MAX;
  long now = __sync_add_and_fetch(&page->now, 1), most = page->most;
  while (now > most && !__sync_bool_compare_and_swap(&page->most, most, now)) most = page->most;
  __sync_add_and_fetch(&page->reads, 1);
  double left = is_late ? page->tail_s : page->delay_s;
  do {  // in naps, so that no read outlasts its delay for long
    double nap = left < 0.2 ? left : 0.2;
    usleep((useconds_t)(nap * 1e6));
    left -= nap;
  } while (left > 0 && page->delay_s > 0);
  __sync_sub_and_fetch(&page->now, 1);
}

#define SLOWED(name, parameters, arguments)                  \
  ssize_t name parameters {                                  \
    static ssize_t (*real) parameters;                       \
    if (!real) *(void **)&real = dlsym(RTLD_NEXT, #name);    \
    if (is_slow(file)) wait_here();                          \
    return real arguments;                                   \
  }

SLOWED(read, (int file, void *to, size_t size), (file, to, size))
SLOWED(pread, (int file, void *to, size_t size, off_t at), (file, to, size, at))
SLOWED(pread64, (int file, void *to, size_t size, off64_t at), (file, to, size, at))
SLOWED(preadv, (int file, const struct iovec *to, int n, off_t at), (file, to, n, at))
SLOWED(preadv64, (int file, const struct iovec *to, int n, off64_t at), (file, to, n, at))
"""
_PAGE = struct.Struct("3d3q")
_MOST_AT = _PAGE.size - 8


class SlowShim:
    """A folder whose reads can be slow in processes that are started with `environment`.

    Attributes:
        path: of the folder.
        environment: what these processes need.
    """

    def __init__(self, folder: Path, scratch: Path) -> None:
        """Compiles the library.

        Args:
            folder: What is slow.
            scratch: An empty folder.

        Raises:
            RuntimeError: There is no C compiler.
        """
        compiler = shutil.which("cc") or shutil.which("gcc")
        if compiler is None:
            raise RuntimeError("no C compiler: install one, or mount a file system of FUSE as root")
        source, library, page = (scratch / name for name in ("slow.c", "slow.so", "page"))
        source.write_text(_SOURCE)
        options = ["-O2", "-shared", "-fPIC", "-o", str(library), str(source), "-ldl"]
        subprocess.run([compiler, *options], check=True)
        page.write_bytes(bytes(mmap.PAGESIZE))
        with page.open("r+b") as file:
            self._page = mmap.mmap(file.fileno(), mmap.PAGESIZE)
        self.path = folder
        self.environment = {
            "LD_PRELOAD": str(library),
            "SLOW_FOLDER": os.path.realpath(folder),
            "SLOW_PAGE": str(page),
        }
        self._behaviour = {"delay_s": 0.0, "tail_s": 0.0, "tail_share": 0.0}

    def behave(self, **behaviour: float) -> dict[str, int]:
        """Changes the behaviour; see `FuseFolder.behave`."""
        self._behaviour |= behaviour
        *_, reads, _, most = _PAGE.unpack_from(self._page)
        if behaviour:
            struct.pack_into("3d", self._page, 0, *self._behaviour.values())
            struct.pack_into("q", self._page, _MOST_AT, 0)
        return {"read": reads, "most_reads": most}
