import fcntl
import os
import sys
import threading
from collections.abc import Iterator

import pytest
from gyre_client.batches.arena import Arenas


class Files:
    """A side channel that hands over a memory file of a page, as often as it is asked."""

    def receive(self, session_id: str, number: int) -> int:
        descriptor = os.memfd_create(f"{session_id} {number}", os.MFD_ALLOW_SEALING)
        os.ftruncate(descriptor, 4096)
        fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK)
        return descriptor

    def close(self) -> None:
        pass


@pytest.fixture
def _eager_threads() -> Iterator[None]:
    interval_s = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(interval_s)


@pytest.mark.usefixtures("_eager_threads")
def test_lent_batches_are_counted_while_arenas_are_added() -> None:
    arenas = Arenas(Files(), "abc", 4096)  # type: ignore[arg-type]
    adding = threading.Thread(target=lambda: [arenas.get(number) for number in range(1, 2000)])
    adding.start()
    while adding.is_alive():
        assert arenas.num_lent() == 0
    adding.join()
    assert arenas.get(1999).num_lent == 0
    arenas.close()
