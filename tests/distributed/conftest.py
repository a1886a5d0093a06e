"""Ranks that the tests of one file share."""

from collections.abc import Callable, Iterator

import pytest
import torch

from tests.distributed.gloo_ranks import Ranks

StartRanks = Callable[[int], Ranks]


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    """Keep the process that ranks are compared with to one thread, so that ranks have the cores."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[StartRanks]:
    """`ranks(3)` gives three ranks in a group of their own.

    They are started at most once and end with the file's tests.
    """
    started: dict[int, Ranks] = {}

    def start(num_ranks: int) -> Ranks:
        if num_ranks not in started or started[num_ranks].ended:
            started[num_ranks] = Ranks(num_ranks, tmp_path_factory.mktemp(f"ranks-{num_ranks}"))
        return started[num_ranks]

    yield start
    for each in started.values():
        each.end()
